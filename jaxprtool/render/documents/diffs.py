"""The document of a diff: in what two programs differ."""

from __future__ import annotations

from typing import Annotated, TypedDict


class DiffLine(TypedDict):
    """An equation that only one program has, or that differs from its counterpart."""

    hunk: Annotated[int, "The number of the hunk that it is in, from 0."]
    primitive: Annotated[str, "The primitive; empty if a body's results or constants differ."]
    text: Annotated[str, "The equation, with what it was before what it is."]
    source: Annotated[str, "The user's line, with the library's behind; empty if not known."]
    path: Annotated[list[str], "The equations around it, the outermost first."]
    differs_in: Annotated[
        list[str],
        "`constant`, `dtype`, `shape`, `parameter`, `operand`, `primitive`, `call`; of what was "
        "changed.",
    ]


class BorderChange(TypedDict):
    """An argument, a result or a named axis that only one program has, or of another type."""

    what: Annotated[str, "`argument`, `result` or `axis`."]
    name: Annotated[str, "What it is called."]
    before: Annotated[str, "Its type in the first program; empty if it was added."]
    after: Annotated[str, "Its type in the second; empty if it was removed."]


class DiffSize(TypedDict):
    """The size of a program. Numbers are texts where sizes are symbolic."""

    name: Annotated[str, "Its name."]
    equations: Annotated[int, "Its equations, at every depth."]
    flops: Annotated[float | str, "Its FLOPs."]
    bytes: Annotated[float | str, "The bytes that it reads and writes."]


class DiffDocument(TypedDict):
    """`diff`: in what two programs differ."""

    verdict: Annotated[
        str, "`equivalent`, `same up to constants`, `same up to dtypes` or `different`."
    ]
    removed: Annotated[list[DiffLine], "The equations that only the first program has."]
    added: Annotated[list[DiffLine], "The equations that only the second program has."]
    changed: Annotated[list[DiffLine], "The equations that differ from their counterparts."]
    retyped: Annotated[int, "How many more have other types because their operands do."]
    border: Annotated[list[BorderChange], "The arguments, results and axes that differ."]
    before: Annotated[DiffSize, "The size of the first program."]
    after: Annotated[DiffSize, "The size of the second program."]
