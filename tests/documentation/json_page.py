"""Write the page of JSON documents, `docs/json.md`: `python -m tests.documentation.json_page`."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxprtool.cli.errors import ErrorDocument
from jaxprtool.ir import documents
from tests.documentation.documents import DOCUMENTS, schema, schemas

PATH = Path(__file__).parents[2] / "docs" / "json.md"

_HEAD = """# JSON documents

`--json` makes every command print one JSON document on stdout, which is of the type given here.
{about}

<!-- Made from the dataclasses and types that tests/documentation/documents.py lists, by
`python -m tests.documentation.json_page`. -->

| command | documents |
| --- | --- |
{commands}
"""


def page() -> str:
    """Return the text of the page."""
    commands = "\n".join(
        f"| `{command}` | {', '.join(map(_link, schemas(command)))} |" for command in DOCUMENTS
    )
    commands += f"\n| any, if it fails | {_link(schema(ErrorDocument))} |"
    about = documents.__doc__.rpartition("unless `document` says otherwise. ")[2].strip()
    parts = [_HEAD.format(about=about, commands=commands)]
    parts += map(_section, _all())
    return "\n".join(parts)


def typed_dicts(hint: Any) -> Iterator[type]:
    """Yield the documents that a type contains, outermost first."""
    if typing.is_typeddict(hint):
        yield hint
    for inner in typing.get_args(hint):
        yield from typed_dicts(inner)


def _description(hint: Any) -> str:
    """Return the description of a document's key, from the type of the key."""
    if typing.get_origin(hint) is typing.NotRequired:
        return _description(typing.get_args(hint)[0])
    (text,) = hint.__metadata__
    return text


def _all() -> Iterator[type]:
    seen: set[type] = set()
    queue = [kind for command in DOCUMENTS for kind in schemas(command)]
    queue.append(schema(ErrorDocument))
    while queue:
        cls = queue.pop(0)
        if cls not in seen:
            seen.add(cls)
            yield cls
            inner = [d for hint in cls.__annotations__.values() for d in typed_dicts(hint)]
            queue = [*inner, *queue]


def _section(cls: type) -> str:
    rows = [
        f"| `{key}` | {_shown(hint)} | {_description(hint)} |"
        for key, hint in cls.__annotations__.items()
    ]
    return (
        "\n".join(
            (
                f"## {cls.__name__}\n\n{cls.__doc__}\n",
                "| key | type | what it is |\n| --- | --- | --- |",
                *rows,
            )
        )
        + "\n"
    )


_NAMES = {str: "text", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def _shown(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if typing.is_typeddict(hint):
        return _link(hint)
    if origin is typing.NotRequired:
        return f"{_shown(inner[0])}; may be missing"
    if origin is typing.Annotated:
        return _shown(inner[0])
    if origin is list:
        return f"list of {_shown(inner[0])}"
    if origin is dict:
        return f"object of {_shown(inner[1])}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_shown, inner))
    if origin is typing.Literal:
        return " or ".join(f"`{value!r}`".replace("'", '"') for value in inner)
    return "any" if hint is object else _NAMES[hint]


def _link(cls: type) -> str:
    return f"[{cls.__name__}](#{cls.__name__.lower()})"


if __name__ == "__main__":
    PATH.write_text(page())
