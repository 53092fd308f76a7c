"""The JSON documents that commands print with `--json`, as types.

`schema` makes a TypedDict of a dataclass, with the docstring's descriptions of its fields. The page
`docs/json.md` is generated from these types, and every document in the tests of the commands is
checked against them.
"""

import ast
import inspect
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict, Union, get_args, get_origin

from jaxprtool.commands.explain.explanation import documentation
from jaxprtool.ir import documents
from jaxprtool.registry import commands, imported

#: The documents of each of our commands that has `--json`.
DOCUMENTS = {
    name: tuple(map(imported, command.documents))
    for name, command in commands().items()
    if command.documents and command.run.startswith("jaxprtool.")
}


def schemas(command: str) -> tuple[type, ...]:
    """Return the types of a command's documents."""
    return tuple(map(schema, DOCUMENTS[command]))


@cache
def schema(cls: Any) -> Any:
    """Return the type of the JSON of a dataclass, a NamedTuple or a TypedDict."""
    made = TypedDict(cls.__name__, {})  # noqa: UP013  (filled below: it may hold its own kind)
    _made[cls] = made
    keys = _declared(cls)
    made.__annotations__ = keys
    made.__required_keys__ = frozenset(k for k, hint in keys.items() if not _is_optional(hint))
    made.__optional_keys__ = frozenset(keys) - made.__required_keys__
    made.__doc__ = documentation(cls).text
    return made


_made: dict[Any, Any] = {}


def _is_optional(hint: Any) -> bool:
    return get_origin(hint) is NotRequired


def _declared(cls: Any) -> dict[str, Any]:
    """Return the keys of a document, each with its type and description."""
    hints = typing.get_type_hints(cls, None, _names(cls), include_extras=True)
    if typing.is_typeddict(cls):
        return {key: _json(hint) for key, hint in hints.items()}
    message, declared = documentation(cls).parameters, {}
    for key in documents.keys(cls):
        attribute = getattr(cls, key.attribute, None)
        hint, text = hints.get(key.attribute), message.get(key.attribute)
        if hint is None:  # a property
            hint = typing.get_type_hints(attribute.fget, _names(cls), include_extras=True)["return"]
            text = inspect.getdoc(attribute)
        if key.is_flat:
            declared |= {k: v for k, v in schema(hint).__annotations__.items() if k not in declared}
            continue
        if get_origin(hint) is Annotated and isinstance(hint.__metadata__[0], str):
            hint, text = get_args(hint)
        assert text, f"{cls.__name__} says nothing of {key.attribute}"
        text = text.replace("None", "missing" if key.is_optional else "null").replace("\n", " ")
        if key.is_optional and types.NoneType in get_args(hint):
            (hint,) = set(get_args(hint)) - {types.NoneType}
        annotated = Annotated[_json(hint), text]
        declared[key.name] = NotRequired[annotated] if key.is_optional else annotated
    of_some: dict[str, Any] = {}
    for subclass in cls.__subclasses__():
        for key, hint in schema(subclass).__annotations__.items():
            if key in of_some:
                one, text = get_args(of_some[key])
                other, more = get_args(hint)
                hint = Annotated[one | other, text if text == more else f"{text} {more}"]
            of_some[key] = hint
    return declared | {k: NotRequired[hint] for k, hint in of_some.items() if k not in declared}


def _json(hint: Any) -> Any:
    """Return the JSON type of a type."""
    origin, inner = get_origin(hint), get_args(hint)
    if is_dataclass(hint) or hasattr(hint, "_fields") or typing.is_typeddict(hint):
        return _made.get(hint) or schema(hint)
    if origin is NotRequired:
        return NotRequired[_json(inner[0])]
    if origin is Annotated:
        text = hint.__metadata__[0]
        return Annotated[_json(inner[0]), text] if isinstance(text, str) else text
    if origin is typing.ClassVar:
        return _json(inner[0])
    if origin in (list, tuple, Sequence):
        return list[_json(inner[0])]
    if origin in (dict, Mapping):
        return dict[str, _json(inner[1])]
    if origin in (Union, types.UnionType):
        return Union[tuple(map(_json, inner))]  # noqa: UP007  (as many as there are)
    return hint


@cache
def _names(cls: type) -> dict[str, Any]:
    """Return the namespace of a class's module, including names imported for type checking only."""
    module = sys.modules[cls.__module__]
    names = dict(vars(module))
    for node in ast.parse(Path(module.__file__).read_text()).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            exec(ast.unparse(node.body), names)
    return names
