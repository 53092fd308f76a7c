"""Where equations come from, as the comments of a `.jaxpr` file say it.

    # model.py:12:8 (loss) in layer/dense

Each part may be missing. The file is one of the header's table, which has its whole path; a
comment that names none of them, or that is not of this form, is just a comment.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxprtool import jaxcompat

Place = tuple[tuple[str, int, int, str] | None, str]

_PLACE = re.compile(
    r"(?:(?P<file>\S.*?):(?P<line>\d{1,8})(?::(?P<column>\d{1,8}))?(?: \((?P<function>[^()]*)\))?)?"
    r"(?:(?:^| )in (?P<scope>\S+))?"
)


def read_places(comments: Iterable[str], files: Mapping[str, str]) -> dict[str | None, Any]:
    """What an equation with each of the comments, or with none, bears as its `source_info`."""
    texts = list(dict.fromkeys(comments))
    places = [(None, ""), *(_place(text, files) for text in texts)]
    return dict(zip((None, *texts), jaxcompat.source_infos(places), strict=True))


def _place(comment: str, files: Mapping[str, str]) -> Place:
    found = _PLACE.fullmatch(comment)
    if not comment.isprintable() or not found or found["file"] not in (None, *files):
        return None, ""
    scope = found["scope"] or ""
    if not found["file"]:
        return None, scope
    line, column = int(found["line"]), int(found["column"] or 1) - 1
    return (files[found["file"]], line, column, found["function"] or "<unknown>"), scope
