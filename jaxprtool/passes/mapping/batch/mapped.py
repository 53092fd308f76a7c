"""Which arguments of a program are mapped, for messages to the user."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from jaxprtool.ir.programs.program import Program
from jaxprtool.passes.mapping.batch import Batch
from jaxprtool.passes.mapping.batch.axes import program_axes


def mapped_arguments(batch: Batch, program: Program) -> list[tuple[str, int | None]]:
    """Return each flat argument with the axis along which it is mapped; None if it is unmapped."""
    dims, _ = program_axes(program, batch.in_axes, batch.axis_size)
    return list(zip(program.arg_names, dims, strict=True))


def names_by_axis(mapped: Iterable[tuple[str, int | None]]) -> dict[int | None, list[str]]:
    """Return the names of arguments by their axis, the unmapped ones last.

    An argument whose leaves are all mapped alike is named once: `params` for `params['w']`.
    """
    mapped = list(mapped)
    dims: defaultdict[str, set[int | None]] = defaultdict(set)
    for name, dim in mapped:
        dims[_root(name)].add(dim)
    names: defaultdict[int | None, dict[str, None]] = defaultdict(dict)
    for name, dim in mapped:
        root = _root(name)
        names[dim][root if len(dims[root]) == 1 else name] = None
    order = sorted(names, key=lambda dim: (dim is None, dim))
    return {dim: list(names[dim]) for dim in order}


def _root(name: str) -> str:
    """Return the argument at the root of a leaf's path: `params` of `params['w']`."""
    return re.split(r"[.\[]", name)[0]
