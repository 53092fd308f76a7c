"""Write the list of `docs/json.md` and the schemas: `python -m tests.documentation.json_page`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxprtool.cli.app import ErrorDocument
from tests.documentation.documents import (
    DESCRIPTIONS,
    DOCUMENTS,
    FOLDER,
    Reference,
    closure,
    descriptions_file,
    schema,
    schema_file,
)

PATH = Path(__file__).parents[2] / "docs" / "json.md"

_TABLE = "| command | documents |\n| --- | --- |\n"


def page(before: str) -> str:
    """Return the text of the page, in which all from the table of commands on is replaced."""
    tops = [cls for classes in DOCUMENTS.values() for cls in classes] + [ErrorDocument]
    rows = [f"| `{name}` | {', '.join(map(_link, of))} |" for name, of in DOCUMENTS.items()]
    rows.append(f"| any, if it fails | {_link(ErrorDocument)} |\n")
    head = before.partition(_TABLE)[0]
    return "\n".join((head + _TABLE + "\n".join(rows), *map(_section, closure(tops))))


def _section(cls: Any) -> str:
    document = schema(cls)
    rows = [
        f"| `{key}` | {_shown(kind)}{'' if key in document['required'] else '; may be missing'} | "
        f"{kind['description']} |"
        for key, kind in document["properties"].items()
    ]
    head = "| key | type | what it is |\n| --- | --- | --- |"
    return "\n".join((f"## {cls.__name__}\n\n{document['description']}\n", head, *rows, ""))


_NAMES = {"string": "text"}


def _shown(kind: dict[str, Any]) -> str:
    if "anyOf" in kind:
        return " or ".join(map(_shown, kind["anyOf"]))
    if "enum" in kind:
        return " or ".join(f"`{json.dumps(value)}`" for value in kind["enum"])
    if isinstance(reference := kind.get("$ref"), Reference):
        return _link(reference.cls)
    if kind.get("type") == "array":
        return f"list of {_shown(kind['items'])}"
    if "additionalProperties" in kind:
        return f"object of {_shown(kind['additionalProperties'])}"
    return _NAMES.get(kind.get("type", "any"), kind.get("type", "any"))


def _link(cls: Any) -> str:
    return f"[{cls.__name__}](#{cls.__name__.lower()})"


if __name__ == "__main__":
    PATH.write_text(page(PATH.read_text()))
    FOLDER.mkdir(exist_ok=True)
    for command in DOCUMENTS:
        (FOLDER / f"{command}.json").write_text(schema_file(command))
    DESCRIPTIONS.write_text(descriptions_file())
