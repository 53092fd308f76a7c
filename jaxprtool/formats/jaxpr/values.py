"""Writing and reading of parameter values in a `.jaxpr` file.

A text is a Python expression of displays, names and calls. A fixed table defines its value: nothing
is imported or evaluated. `encode` and `decode` are inverses:

    encode((1, None, np.dtype("float32")))       (1, None, float32)
    encode(GatherScatterMode.CLIP)               GatherScatterMode.CLIP
    encode("relu"), encode(("i",))               relu, ('i',)

A string is a bare word only if it is the whole parameter, as in JAX's listing, and no name of the
table equals it; `decode` reads an unknown bare word as a string.

The table is open: a plug-in whose primitives have parameters of new classes adds them with
`add_name`, `add_enum`, `add_record`, or the more general `add_class`. JAX's classes are added by
`jax_values`.
"""

from __future__ import annotations

import ast
import dataclasses
import keyword
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from importlib import import_module
from typing import Any, TypeAlias

from jaxprtool.ir.notation.whitelist import WhitelistReader


class Unwritable(Exception):
    """A value that cannot be written; the message describes it, as in `a Python function (f)`."""


class Unreadable(ValueError):
    """An invalid expression; `node` is the invalid part."""

    def __init__(self, node: ast.expr, message: str):
        super().__init__(message)
        self.node = node


#: Encodes a value inside another one.
Encode: TypeAlias = Callable[[Any], str]
#: Encodes a value of one class, given the encoder of inner values.
Encoder: TypeAlias = Callable[[Any, Encode], str]

#: The encoder of each class. It applies to subclasses too, except for builtin classes: a subclass
#: of tuple that is not in the table cannot be written.
ENCODERS: dict[type, Encoder] = {}

#: Encoders of classes that may not be imported, by module and name.
_LATE: dict[tuple[str, str], Encoder] = {}

#: The functions behind `Name(...)`, called with decoded arguments. Since a file may be edited by
#: anyone, they must raise an exception for invalid arguments and have no side effects.
CONSTRUCTORS: dict[str, Callable[..., Any]] = {}

#: The values of names and dotted names.
NAMES: dict[str, Any] = {}


# --- adding to the table ------------------------------------------------------------------------


def add_class(cls: type, encode: Encoder, **constructors: Callable[..., Any]) -> None:
    """Write values of `cls` by `encode(value, encode_inner)`, as calls of `constructors`.

    Args:
        cls: The class. Unless it is a builtin class, its subclasses are written the same way.
        encode: Returns the text of a value, given a function that returns the text of an inner
            value. It raises `Unwritable` for a value that it cannot write.
        **constructors: The functions that read the text, by the name that is called in it. They
            must raise an exception for invalid arguments, and have no side effects.
    """
    ENCODERS[cls] = encode
    CONSTRUCTORS.update(constructors)


def add_name(name: str, value: Any) -> None:
    """Read `name` as `value`, and write `value` as `name` unless its class has an encoder."""
    NAMES[name] = value


def add_constructor(name: str, make: Callable[..., Any]) -> None:
    """Read `name(...)` as the result of `make` on the arguments."""
    CONSTRUCTORS[name] = make


def add_singleton(name: str, value: Any) -> None:
    """Read `name` as `value`, the only one of its class, and write it so."""
    NAMES[name] = value
    ENCODERS[type(value)] = lambda value, encode: name


def add_enum(cls: type[Enum]) -> None:
    """Write and read the members of an enumeration as `Class.MEMBER`."""
    NAMES.update((f"{cls.__name__}.{member.name}", member) for member in cls)
    ENCODERS[cls] = lambda member, encode: f"{cls.__name__}.{member.name}"


def add_record(cls: Any, fields: Sequence[str] | None = None) -> None:
    """Write and read values of `cls` as `Class(field=value, ...)`.

    Args:
        cls: The class, which is called with the fields by name.
        fields: The names of the fields; by default those of a named tuple or a dataclass.
    """
    if fields is None:
        fields = getattr(cls, "_fields", None) or [f.name for f in dataclasses.fields(cls)]
    names = tuple(fields)

    def encode_record(value: Any, encode: Encode) -> str:
        return call(cls.__name__, **{name: encode(getattr(value, name)) for name in names})

    add_class(cls, encode_record, **{cls.__name__: cls})


def add_late_record(module: str, name: str) -> None:
    """Add a named tuple as `add_record` does, without importing its module.

    The module is imported when a file has such a value, since importing it is slow.
    """

    def encode_record(value: Any, encode: Encode) -> str:
        return call(name, **{word: encode(each) for word, each in value._asdict().items()})

    def made(**fields: Any) -> Any:
        return getattr(import_module(module), name)(**fields)

    _LATE[module, name] = encode_record
    CONSTRUCTORS[name] = made


# --- writing ------------------------------------------------------------------------------------


def encode(
    value: Any,
    special: Mapping[type, Callable[[Any], str]] | None = None,
    opaque: Encoder | None = None,
) -> str:
    """Return the text of a parameter's value.

    Args:
        value: The value.
        special: The encoder of classes with the file's own notation (jaxprs, types), anywhere in
            the value.
        opaque: The encoder of a value, anywhere in the value, that cannot be written otherwise.

    Raises:
        Unwritable: If the value contains a class that is not in the table, and `opaque` is None.
    """
    if type(value) is str:
        return value if is_bare(value) else repr(value)
    special = special or {}

    def inside(value: Any) -> str:
        try:
            return known(value)
        except Unwritable:
            if opaque is None:
                raise
            return opaque(value, inside)

    def known(value: Any) -> str:
        cls = type(value)
        if cls in special:
            return special[cls](value)
        exact = ENCODERS.get(cls) or _LATE.get((cls.__module__, cls.__qualname__))
        encoder = exact or _inherited(cls)
        if encoder is None:
            raise Unwritable(f"a value of {cls.__module__}.{cls.__qualname__}")
        return encoder(value, inside)

    return inside(value)


def is_bare(text: str) -> bool:
    """Return True if a text may be written without quotes as a whole parameter."""
    known = text in NAMES or keyword.iskeyword(text)
    return text.isidentifier() and text.isascii() and not known


def call(name: str, *args: str, **keywords: str | None) -> str:
    """Return the text of a call from the texts of its arguments, without those that are None."""
    named = (f"{word}={text}" for word, text in keywords.items() if text is not None)
    return f"{name}({', '.join((*args, *named))})"


def _inherited(cls: type) -> Encoder | None:
    bases = (base for base in cls.__mro__[1:] if base in ENCODERS and base not in _BUILTINS)
    return next((ENCODERS[base] for base in bases), None)


def _tuple(value: tuple, encode: Encode) -> str:
    return f"({encode(value[0])},)" if len(value) == 1 else call("", *map(encode, value))


def _dict(value: dict, encode: Encode) -> str:
    return f"{{{', '.join(f'{encode(k)}: {encode(v)}' for k, v in value.items())}}}"


def _frozenset(value: frozenset, encode: Encode) -> str:
    # Sorted by text, so that output is deterministic.
    items = ", ".join(sorted(map(encode, value)))
    return f"frozenset({{{items}}})" if items else "frozenset()"


def _as_frozenset(*items: Any) -> frozenset:
    if len(items) > 1 or (items and not isinstance(items[0], set)):
        raise TypeError("frozenset takes a set in braces")
    return frozenset(*items)


for _cls in (type(None), bool, int, float, str, bytes, type(Ellipsis)):
    add_class(_cls, lambda value, encode: repr(value))
add_class(tuple, _tuple)
add_class(list, lambda value, encode: f"[{', '.join(map(encode, value))}]")
add_class(dict, _dict)
add_class(
    complex, lambda v, encode: call("complex", *map(encode, (v.real, v.imag))), complex=complex
)
add_class(frozenset, _frozenset, frozenset=_as_frozenset)
add_class(
    slice, lambda v, encode: call("slice", *map(encode, (v.start, v.stop, v.step))), slice=slice
)
add_name("inf", float("inf"))
add_name("nan", float("nan"))
add_name("Ellipsis", Ellipsis)

_BUILTINS = frozenset({*ENCODERS, object})


# --- reading ------------------------------------------------------------------------------------


def decode(node: ast.expr, names: Mapping[str, Any] | None = None) -> Any:
    """Return the value of an expression.

    Args:
        node: The expression.
        names: The names of this file, looked up before the table's: shared jaxprs, placeholders of
            inline jaxprs, and the functions `aval` (of a type's text) and `dim` (of a symbolic
            dimension's text). A parameter called `name` is always a text and is read without them:
            `name=relu jaxpr=relu`.

    Raises:
        Unreadable: With the invalid node.
    """
    names = names or {}
    if isinstance(node, ast.Name) and node.id not in NAMES and node.id not in names:
        return node.id
    return _Reader(names).visit(node)


class _Reader(WhitelistReader):
    """Reads the values of a file with these names in addition to the table's."""

    what = "a value"

    def __init__(self, names: Mapping[str, Any]):
        self._names = names

    def fail(self, node: ast.expr, message: str, hint: str | None = None) -> Unreadable:
        return Unreadable(node, message)

    def visit_Set(self, node: ast.Set) -> set[Any]:
        try:
            return set(map(self.visit, node.elts))
        except TypeError as error:
            raise self.fail(node, str(error)) from None

    def visit_Name(self, node: ast.Name) -> Any:
        return self._named(node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        return self._named(node)

    def _named(self, node: ast.expr) -> Any:
        name = self._dotted(node)
        table = self._names if name in self._names else NAMES
        if name not in table:
            raise self.fail(node, f"unknown name '{name}'")
        return table[name]

    def visit_Call(self, node: ast.Call) -> Any:
        name = self._dotted(node.func)
        make = self._names.get(name) or CONSTRUCTORS.get(name)
        if not callable(make):
            raise self.fail(node, f"unknown constructor '{name}(...)'")
        args = [self.visit(arg) for arg in node.args]
        kwargs: dict[str, Any] = {}
        for word in node.keywords:
            if word.arg is None or word.arg in kwargs:
                raise self.fail(word.value, "a parameter is given twice, or without a name")
            kwargs[word.arg] = self.visit(word.value)
        try:
            return make(*args, **kwargs)
        except Unreadable:
            raise
        except Exception as error:  # of any class: JAX's constructors check their arguments
            raise self.fail(node, f"{name}(...) cannot be created: {error}") from error

    def _dotted(self, node: ast.expr) -> str:
        if isinstance(node, ast.Attribute):
            return f"{self._dotted(node.value)}.{node.attr}"
        if isinstance(node, ast.Name):
            return node.id
        raise self.fail(node, "a dotted name must begin with a name")
