"""The JSON documents that commands print with `--json`, as JSON Schemas.

They are made from the dataclasses, with the docstrings' descriptions of their fields. The page
`docs/json.md` and the files that `jaxprtool explain --schema` prints are written from them, by
`python -m tests.documentation.json_page`; every document in the tests of the commands is checked
against them.
"""

import ast
import inspect
import json
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NotRequired, Union, get_args, get_origin

from jaxprtool.cli.app import ErrorDocument
from jaxprtool.commands.explain import command as explain
from jaxprtool.commands.explain.command import documentation
from jaxprtool.ir import documents
from jaxprtool.ir.source_text import Place
from jaxprtool.registry import commands, imported
from jaxprtool.render.documents import SCHEMA

#: The documents of each of our commands that has `--json`.
DOCUMENTS = {
    name: tuple(map(imported, command.documents))
    for name, command in commands().items()
    if command.documents and command.run.startswith("jaxprtool.")
}

#: The folder of the schemas.
FOLDER = Path(explain.__file__).parent / "schemas"

#: The file of the descriptions of passes.
DESCRIPTIONS = Path(explain.__file__).parent / "passes.json"

#: The keys that every document has.
_EVERY = {
    "schema": {"const": SCHEMA, "description": "The version of the documents."},
    "omitted": {
        "type": "object",
        "additionalProperties": {"type": "integer"},
        "description": "With `--max-bytes`: the number of entries left out, by the path of the "
        "list: `programs.equations`.",
    },
}


def command_schema(command: str) -> dict[str, Any]:
    """Return the JSON Schema of the documents of a command."""
    tops = (*DOCUMENTS[command], ErrorDocument)
    inner = {inside for cls in closure(tops) for inside in _classes_in(schema(cls))}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"jaxprtool {command} --json",
        "anyOf": [_document(top) for top in tops],
        "$defs": {cls.__name__: schema(cls) for cls in closure(tops) if cls in inner},
    }


def schema_file(command: str) -> str:
    """Return the text of the file with a command's schema."""
    return _text(command_schema(command)) + "\n"


def descriptions_file() -> str:
    """Return the text of the file with the descriptions of our passes and pipelines."""
    return _text([_plain(document) for document in explain.described_afresh()]) + "\n"


def _plain(value: Any) -> Any:
    """Return a NamedTuple, and those in it, as dictionaries."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {key: _plain(part) for key, part in value._asdict().items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _text(value: Any, indent: str = "") -> str:
    """Return JSON with each value on one line that fits on it."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(indent + line) <= 100:
        return line
    deeper = indent + " "
    if isinstance(value, list):
        parts, ends = [_text(part, deeper) for part in value], "[]"
    else:
        parts, ends = [f"{json.dumps(key)}: {_text(value[key], deeper)}" for key in value], "{}"
    return (
        f",\n{deeper}".join([f"{ends[0]}\n{deeper}{parts[0]}", *parts[1:]]) + f"\n{indent}{ends[1]}"
    )


def _document(cls: Any) -> dict[str, Any]:
    whole = schema(cls)
    assert not _EVERY.keys() & whole["properties"].keys(), cls
    return {
        **whole,
        "properties": {**whole["properties"], **_EVERY},
        "required": ["schema", *whole["required"]],
    }


def closure(classes: Sequence[Any]) -> list[Any]:
    """Return classes and those that they contain, each after the first that contains it."""
    ordered: dict[Any, None] = {}
    todo = list(classes)
    while todo:
        cls = todo.pop(0)
        if cls not in ordered:
            ordered[cls] = None
            todo = [*_classes_in(schema(cls)), *todo]
    return list(ordered)


def _classes_in(part: Any) -> list[Any]:
    if isinstance(part, Reference):
        return [part.cls]
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return [cls for item in inner for cls in _classes_in(item)]


class Reference(str):
    """The reference to the schema of a class."""

    def __new__(cls, to: Any) -> "Reference":
        reference = super().__new__(cls, f"#/$defs/{to.__name__}")
        reference.cls = to
        return reference


@cache
def schema(cls: Any) -> dict[str, Any]:
    """Return the JSON Schema of a dataclass, a NamedTuple or a TypedDict."""
    properties = _properties(cls)
    required = [key for key, (_, is_required) in properties.items() if is_required]
    return {
        "title": cls.__name__,
        "description": documentation(cls).text,
        "type": "object",
        "properties": {key: value for key, (value, _) in properties.items()},
        "required": required,
        "additionalProperties": False,
    }


#: The schema of a key, and whether it is required.
_Property = tuple[dict[str, Any], bool]


def _properties(cls: Any) -> dict[str, _Property]:
    hints = typing.get_type_hints(cls, None, _names(cls), include_extras=True)
    if typing.is_typeddict(cls):
        return {key: _described(hint) for key, hint in hints.items()}
    message, declared = documentation(cls).parameters, dict[str, _Property]()
    for key in documents.keys(cls):
        attribute = getattr(cls, key.attribute, None)
        hint, about = hints.get(key.attribute), message.get(key.attribute)
        if hint is None:  # a property
            hint = typing.get_type_hints(attribute.fget, _names(cls), include_extras=True)["return"]
            about = inspect.getdoc(attribute)
        if key.is_flat:
            declared |= {k: v for k, v in _properties(hint).items() if k not in declared}
            continue
        if get_origin(hint) is Annotated and isinstance(hint.__metadata__[0], str):
            hint, about = get_args(hint)
        assert about, f"{cls.__name__} says nothing of {key.attribute}"
        assert key.name not in declared, f"{cls.__name__} has two keys {key.name}"
        about = about.replace("None", "missing" if key.is_optional else "null").replace("\n", " ")
        if key.is_optional and types.NoneType in get_args(hint):
            hint = Union[tuple(set(get_args(hint)) - {types.NoneType})]  # noqa: UP007
        if hint is Place and not key.is_optional:
            about, hint = about.replace('""', "null"), Place | None
        declared[key.name] = {**_json(hint), "description": about}, not key.is_optional
    of_some: dict[str, _Property] = {}
    for subclass in cls.__subclasses__():
        for name, (value, _) in _properties(subclass).items():
            if name in of_some:
                value = _either(of_some[name][0], value)
            of_some[name] = value, False
    return declared | {name: value for name, value in of_some.items() if name not in declared}


def _either(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    if one == other:
        return one
    abouts = dict.fromkeys((one["description"], other["description"]))
    distinct: list[dict[str, Any]] = []
    for bare in ({k: v for k, v in kind.items() if k != "description"} for kind in (one, other)):
        distinct += [kind for kind in bare.get("anyOf", [bare]) if kind not in distinct]
    kind = distinct[0] if len(distinct) == 1 else {"anyOf": distinct}
    return {**kind, "description": " ".join(abouts)}


def _described(hint: Any) -> _Property:
    """Return a key of a TypedDict."""
    is_required = get_origin(hint) is not NotRequired
    hint, about = get_args(hint if is_required else get_args(hint)[0])
    return {**_json(hint), "description": about}, is_required


_KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}


def _json(hint: Any) -> dict[str, Any]:
    """Return the schema of a type."""
    origin, inner = get_origin(hint), get_args(hint)
    if is_dataclass(hint) or hasattr(hint, "_fields") or typing.is_typeddict(hint):
        return {"$ref": Reference(hint)}
    if origin is Annotated:
        about = hint.__metadata__[0]
        return _json(inner[0] if isinstance(about, str) else about)
    if origin is typing.ClassVar:
        return _json(inner[0])
    if origin in (list, tuple, Sequence):
        return {"type": "array", "items": _json(inner[0])}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _json(inner[1])}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_json(item) for item in inner]}
    if origin is typing.Literal:
        return {"enum": list(inner)}
    return {} if hint in (object, Any) else {"type": _KINDS[hint]}


@cache
def _names(cls: type) -> dict[str, Any]:
    """Return the namespace of a class's module, including names imported for type checking only."""
    module = sys.modules[cls.__module__]
    names = dict(vars(module))
    for node in ast.parse(Path(module.__file__).read_text()).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            exec(ast.unparse(node.body), names)
    return names
