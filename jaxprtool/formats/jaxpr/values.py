"""How the values of parameters are spelled in a `.jaxpr` file, both ways.

A spelling is a Python expression of displays, names and calls, and means what a fixed table says
it means: nothing is imported or evaluated. `encode` and `decode` are each other's inverse:

    encode((1, None, np.dtype("float32")))       (1, None, float32)
    encode(GatherScatterMode.CLIP)               GatherScatterMode.CLIP
    encode("relu"), encode(("i",))               relu, ('i',)

A text is a bare word only where it is the whole of a parameter, as JAX's listing has it, and only
if no name of the table looks like it; `decode` takes a bare word that it does not know as a text.

The table is open: a plug-in whose primitives hold values of its own classes adds them with
`add_name`, `add_enum`, `add_record`, or `add_kind`, which the others are made of. JAX's classes
are added by `kinds` and `policies`.
"""

from __future__ import annotations

import ast
import dataclasses
import keyword
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias


class Unwritable(Exception):
    """A value that no spelling covers; the message says which, as in `a Python function (f)`."""


class Unreadable(ValueError):
    """An expression that spells no value; `node` is the part of it that is at fault."""

    def __init__(self, node: ast.expr, message: str):
        super().__init__(message)
        self.node = node


#: Encodes what is inside a value.
Encode: TypeAlias = Callable[[Any], str]

#: For each class the function that spells its values. A class serves its subclasses too, except
#: the builtin ones: a tuple of a class that is not here has no spelling.
SPELLINGS: dict[type, Callable[[Any, Encode], str]] = {}

#: What `Name(...)` makes, of arguments that are decoded already. Fed by whoever edits a file, it
#: must raise an exception if they do not fit, and do nothing that is not in its arguments.
MAKERS: dict[str, Callable[..., Any]] = {}

#: What a name, or a dotted name, stands for.
NAMES: dict[str, Any] = {}


# --- adding to the table ------------------------------------------------------------------------


def add_kind(cls: type, spell: Callable[[Any, Encode], str], **makers: Callable[..., Any]) -> None:
    """Have values of `cls` written by `spell(value, encode)`, as calls of what `makers` name.

    `spell` raises `Unwritable` for a value that it cannot write.
    """
    SPELLINGS[cls] = spell
    MAKERS.update(makers)


def add_name(name: str, value: Any) -> None:
    """Have `name` stand for `value`, which is written so if it has no class of its own here."""
    NAMES[name] = value


def add_maker(name: str, make: Callable[..., Any]) -> None:
    """Have `name(...)` read as what `make` makes of the arguments."""
    MAKERS[name] = make


def add_enum(cls: Any) -> None:
    """Have the members of an enumeration written `Class.MEMBER`."""
    for member in cls:
        NAMES[f"{cls.__name__}.{member.name}"] = member
    SPELLINGS[cls] = lambda member, encode: f"{cls.__name__}.{member.name}"


def add_record(cls: Any, fields: Sequence[str] | None = None) -> None:
    """Have values of `cls` written `Class(field=value, ...)`.

    The fields are those of a named tuple or a dataclass, unless given; the class is called with
    them by name.
    """
    if fields is None:
        fields = getattr(cls, "_fields", None) or [f.name for f in dataclasses.fields(cls)]
    names = tuple(fields)

    def spell(value: Any, encode: Encode) -> str:
        pairs = [f"{name}={encode(getattr(value, name))}" for name in names]
        return f"{cls.__name__}({', '.join(pairs)})"

    add_kind(cls, spell, **{cls.__name__: cls})


# --- writing ------------------------------------------------------------------------------------


def encode(value: Any, special: Mapping[type, Callable[[Any], str]] | None = None) -> str:
    """The spelling of a parameter's value. Raises Unwritable.

    `special` spells values of some classes in the file's own way (jaxprs, types), wherever in
    the value they are.
    """
    if type(value) is str:
        return value if is_bare(value) else repr(value)
    return _encoder(special or {})(value)


def is_bare(text: str) -> bool:
    """Whether a text may be written without quotes, where it is the whole of a parameter."""
    known = text in NAMES or keyword.iskeyword(text)
    return text.isidentifier() and text.isascii() and not known


def _encoder(special: Mapping[type, Callable[[Any], str]]) -> Encode:
    def inside(value: Any) -> str:
        cls = type(value)
        if cls in special:
            return special[cls](value)
        spell = SPELLINGS.get(cls) or _inherited(cls)
        if spell is None:
            raise Unwritable(f"a value of {cls.__module__}.{cls.__qualname__}")
        return spell(value, inside)

    return inside


def _inherited(cls: type) -> Callable[[Any, Encode], str] | None:
    bases = (base for base in cls.__mro__[1:] if base in SPELLINGS and base not in _BUILTINS)
    return next((SPELLINGS[base] for base in bases), None)


def _sequence(opening: str, closing: str, items: Iterable[str], comma: str = "") -> str:
    listed = ", ".join(items)
    return f"{opening}{listed}{comma}{closing}"


def _tuple(value: tuple, encode: Encode) -> str:
    return _sequence("(", ")", map(encode, value), "," if len(value) == 1 else "")


def _list(value: list, encode: Encode) -> str:
    return _sequence("[", "]", map(encode, value))


def _dict(value: dict, encode: Encode) -> str:
    return _sequence("{", "}", (f"{encode(k)}: {encode(v)}" for k, v in value.items()))


def _frozenset(value: frozenset, encode: Encode) -> str:
    # In order of their text, so that two runs write alike.
    items = sorted(map(encode, value))
    return _sequence("frozenset({", "})", items) if items else "frozenset()"


def _complex(value: complex, encode: Encode) -> str:
    return f"complex({encode(value.real)}, {encode(value.imag)})"


def _slice(value: slice, encode: Encode) -> str:
    return f"slice({encode(value.start)}, {encode(value.stop)}, {encode(value.step)})"


def _repr(value: Any, encode: Encode) -> str:
    return repr(value)


def _as_frozenset(*items: Any) -> frozenset:
    if len(items) > 1 or (items and not isinstance(items[0], set)):
        raise TypeError("frozenset takes a set in braces")
    return frozenset(*items)


for _cls in (type(None), bool, int, float, str, bytes, type(Ellipsis)):
    add_kind(_cls, _repr)
add_kind(tuple, _tuple)
add_kind(list, _list)
add_kind(dict, _dict)
add_kind(complex, _complex, complex=complex)
add_kind(frozenset, _frozenset, frozenset=_as_frozenset)
add_kind(slice, _slice, slice=slice)
add_name("inf", float("inf"))
add_name("nan", float("nan"))
add_name("Ellipsis", Ellipsis)

_BUILTINS = frozenset({*SPELLINGS, object})


# --- reading ------------------------------------------------------------------------------------


def decode(node: ast.expr, names: Mapping[str, Any] | None = None) -> Any:
    """The value that an expression spells. Raises Unreadable, with the node that is at fault.

    `names` are the names of this file, looked up before the table's: shared jaxprs, whatever
    stands in for a jaxpr written in place, and, as what is called with decoded arguments,
    `aval` (the text of a type) and `dim` (the text of a symbolic dimension). A parameter that is
    called `name` is always a text and is to be read without them: `name=relu jaxpr=relu`.
    """
    if isinstance(node, ast.Name) and node.id not in NAMES and node.id not in (names or {}):
        return node.id
    return _decoded(node, names or {})


def _decoded(node: ast.expr, names: Mapping[str, Any]) -> Any:
    read = _READERS.get(type(node))
    if read is None:
        raise Unreadable(node, f"{type(node).__name__} is no part of a value")
    return read(node, names)


def _constant(node: Any, names: Mapping[str, Any]) -> Any:
    return node.value


def _negative(node: Any, names: Mapping[str, Any]) -> Any:
    value = _decoded(node.operand, names)
    if not isinstance(node.op, ast.USub) or type(value) not in (int, float, complex):
        raise Unreadable(node, "only a number can have a sign, and only a minus")
    return -value


def _items(node: Any, names: Mapping[str, Any]) -> list[Any]:
    return [_decoded(item, names) for item in node.elts]


def _read_set(node: Any, names: Mapping[str, Any]) -> set[Any]:
    try:
        return set(_items(node, names))
    except TypeError as error:
        raise Unreadable(node, str(error)) from None


def _read_dict(node: Any, names: Mapping[str, Any]) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        if key is None:
            raise Unreadable(value, "a dictionary cannot be unpacked here")
        decoded = _decoded(key, names)
        try:
            result[decoded] = _decoded(value, names)
        except TypeError as error:
            raise Unreadable(key, str(error)) from None
    return result


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise Unreadable(node, "a dotted name begins with a name")
    return ".".join([node.id, *reversed(parts)])


def _read_name(node: Any, names: Mapping[str, Any]) -> Any:
    name = _dotted(node)
    table = names if name in names else NAMES
    if name not in table:
        raise Unreadable(node, f"'{name}' stands for nothing here")
    return table[name]


def _read_call(node: Any, names: Mapping[str, Any]) -> Any:
    name = _dotted(node.func)
    make = names.get(name) or MAKERS.get(name)
    if not callable(make):
        raise Unreadable(node, f"there is no '{name}(...)'")
    args = [_decoded(arg, names) for arg in node.args]
    kwargs: dict[str, Any] = {}
    for word in node.keywords:
        if word.arg is None or word.arg in kwargs:
            raise Unreadable(word.value, "a parameter is given twice, or without a name")
        kwargs[word.arg] = _decoded(word.value, names)
    try:
        return make(*args, **kwargs)
    except Unreadable:
        raise
    except Exception as error:  # of any class: JAX's own constructors check what they are given
        raise Unreadable(node, f"{name}(...) cannot be made: {error}") from error


_READERS: dict[type, Callable[[Any, Mapping[str, Any]], Any]] = {
    ast.Constant: _constant,
    ast.UnaryOp: _negative,
    ast.Tuple: lambda node, names: tuple(_items(node, names)),
    ast.List: _items,
    ast.Set: _read_set,
    ast.Dict: _read_dict,
    ast.Name: _read_name,
    ast.Attribute: _read_name,
    ast.Call: _read_call,
}
