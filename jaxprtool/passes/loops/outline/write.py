"""The shared body of a segment, and the calls that replace its copies.

Operands from outside become arguments of the body; operands that are the same atom in each copy
share one argument. A literal that is the same in all copies stays in the body. A value that is read
outside of some copy is a result of the body, which the calls of the other copies drop.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from jaxprtool.ir.equality.value_keys import atom_key
from jaxprtool.jaxcompat import Atom, DropVar, Literal, Var
from jaxprtool.passes.loops.outline.bodies import (
    Item,
    OutlineBody,
    Repeated,
    copied,
    first_equation,
)
from jaxprtool.passes.loops.outline.choice import Segment
from jaxprtool.passes.loops.outline.names import Names
from jaxprtool.passes.loops.outline.text import Text


def outlined(text: Text, segment: Segment, names: Names) -> tuple[OutlineBody, list[Repeated]]:
    """Return the shared body of a segment, and the call of each copy."""
    copies = [text.copy(start, segment.length) for start in segment.starts]
    links = text.links(segment.starts[:1], segment.length)[0]
    columns, argument = _arguments(copies, links)
    used = text.results(segment.starts, segment.length)
    kept = np.flatnonzero(used.any(0))
    sources = names.sources(copies)
    body = _body(copies[0], sources[0], links, argument, columns, kept)
    body.name = names.name(copies)
    calls = []
    for i, copy in enumerate(copies):
        values = [v for item in copy for v in item.outvars]
        outs = [values[k] if used[i][k] else DropVar(values[k].aval) for k in kept]
        operands = [column[i] for column in columns]
        calls.append(Repeated(body, operands, outs, first_equation(copy), sources[1][i]))
    return body, calls


def _arguments(
    copies: Sequence[Sequence[Item]], links: np.ndarray
) -> tuple[list[list[Atom]], dict[int, int]]:
    """Return the atom of each argument in each copy, and the argument for each operand."""
    operands = [[v for item in copy for v in item.invars] for copy in copies]
    columns: dict[Hashable, int] = {}
    atoms: list[list[Atom]] = []
    argument: dict[int, int] = {}
    for slot in np.flatnonzero(links < 0).tolist():
        column = [copy[slot] for copy in operands]
        keys = tuple(map(atom_key, column))
        if type(column[0]) is Literal and all(key == keys[0] for key in keys):
            continue
        if keys not in columns:
            columns[keys] = len(atoms)
            atoms.append(column)
        argument[slot] = columns[keys]
    return atoms, argument


def _body(
    items: Sequence[Item],
    sources: Sequence[Any],
    links: np.ndarray,
    argument: dict[int, int],
    columns: Sequence[Sequence[Atom]],
    kept: np.ndarray,
) -> OutlineBody:
    """Return the body, on fresh variables."""
    firsts = [next((v for v in column if type(v) is not Literal), column[0]) for column in columns]
    invars = [Var(first.aval) for first in firsts]
    read = {*links.tolist(), *kept.tolist()}
    values: list[Var] = []
    new: list[Item] = []
    slot = 0
    for item, source in zip(items, sources, strict=True):
        operands = []
        for atom in item.invars:
            if links[slot] >= 0:
                operands.append(values[links[slot]])
            else:
                operands.append(invars[argument[slot]] if slot in argument else atom)
            slot += 1
        outs = []
        for var in item.outvars:
            outs.append(Var(var.aval) if len(values) in read else DropVar(var.aval))
            values.append(outs[-1])
        new.append(copied(item, operands, outs, source))
    return OutlineBody(new, invars, [values[k] for k in kept])
