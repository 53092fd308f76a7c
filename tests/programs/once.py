"""Proves each distinct program once, since many cases have the same programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxprtool.errors import UnsupportedError
from jaxprtool.execute.running.arrays import as_numpy
from jaxprtool.ir.equivalence import equivalent
from jaxprtool.ir.program import Program
from tests.programs.symbolic import SymbolicProgram

#: The outcome for a program that is equivalent to an earlier one with the same arguments.
SAME = "proven before"


@dataclass
class Once:
    """A proof, and the programs that it was done for, by their text and arguments."""

    prove: Callable[[SymbolicProgram, int], Counter[str]]
    proven: dict[Any, list[Program]] = field(default_factory=dict)

    def __call__(self, programs: Iterable[SymbolicProgram], number: int) -> Counter[str]:
        """Return the outcomes for the programs of a case. Raises all failures together."""
        outcomes, failures = Counter({"cases": 1}), []
        for i, found in enumerate(programs):
            try:
                outcomes += self._once(found, number + i)
            except Exception as error:
                error.add_note(f"in {found.name}:\n{found.program}")
                failures.append(error)
        if failures:
            raise ExceptionGroup(f"{len(failures)} programs are wrong", failures)
        return outcomes

    def _once(self, found: SymbolicProgram, number: int) -> Counter[str]:
        with found.setting():
            key = _key(found)
            if any(_same(found.program, other) for other in self.proven.get(key, ())):
                return Counter({"programs": 1, SAME: 1})
        outcomes = self.prove(found, number)
        self.proven.setdefault(key, []).append(found.program)
        return outcomes


def _key(found: SymbolicProgram) -> Any:
    args = [as_numpy(x) for x in found.arguments(found.choices[0])]
    values = tuple((str(x.dtype), x.shape, x.tobytes()) for x in args)
    return str(found.program), bool(jax.config.jax_enable_x64), str(found.choices), hash(values)


def _same(program: Program, other: Program) -> bool:
    try:
        return equivalent(program, other)
    except UnsupportedError:  # a rule that JAX cannot trace with symbols
        return False
