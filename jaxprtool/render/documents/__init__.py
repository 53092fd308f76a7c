"""The documents that commands print with `--json`; some are assembled here, as NamedTuples.

Most commands print their findings directly: `ir.documents` converts any dataclass to JSON.
The document of a program, which may have many equations, consists of dicts, described by the
TypedDicts here.
"""

from __future__ import annotations

import json
from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from typing import Any

from jaxprtool.errors import ArgumentsError
from jaxprtool.ir.documents import as_json

#: The version of the documents: another number if a key of before has gone or has changed.
SCHEMA = 2


def document_text(document: Any, most: int | None = None) -> str:
    """Return the JSON of a command's result, which has its version as `schema`.

    Args:
        document: A dataclass or a NamedTuple.
        most: The most bytes that the text and a line break may take, without spaces. If they do not
            suffice, every list of objects keeps as many of its first entries as fit, the same
            number for all, and `omitted` has the number of the others by the path of the list.

    Raises:
        ArgumentsError: If the document is longer even without any of these entries.
    """
    whole = {"schema": SCHEMA, **as_json(document)}
    if most is None:
        return json.dumps(whole, indent=2, allow_nan=False)
    text = json.dumps(whole, separators=(",", ":"), allow_nan=False)
    if len(text) < most:
        return text
    longest = max(_lengths(whole), default=0)
    fits = bisect(range(longest), most, key=lambda count: len(_cut_text(whole, count)) + 1)
    if not fits:
        least = len(_cut_text(whole, 0)) + 1
        raise ArgumentsError(
            f"--max-bytes {most} is too small: without any entry of its lists, the document takes "
            f"{least:,} bytes"
        )
    return _cut_text(whole, fits - 1)


def _lengths(value: Any) -> Iterator[int]:
    """Yield the length of each list of objects."""
    if isinstance(value, dict):
        for item in value.values():
            yield from _lengths(item)
    elif _is_list_of_objects(value):
        yield len(value)
        for item in value:
            yield from _lengths(item)


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _cut_text(whole: dict[str, Any], count: int) -> str:
    """Return the text of a document whose lists of objects keep `count` entries."""
    omitted: Counter[str] = Counter()

    def cut(value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return {key: cut(item, f"{path}.{key}") for key, item in value.items()}
        if not _is_list_of_objects(value):
            return value
        if len(value) > count:
            omitted[path[1:]] += len(value) - count
        return [cut(item, path) for item in value[:count]]

    return json.dumps(
        {**cut(whole, ""), "omitted": omitted}, separators=(",", ":"), allow_nan=False
    )
