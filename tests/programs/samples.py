"""The samples, and the gradients of those that return a scalar, as cases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from runpy import run_path
from typing import Any

import jax
import jax.numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.execute.running.arrays import fill_arguments
from jaxprtool.ir.program import Program
from jaxprtool.loading.load import Entry, find_function
from tests.programs.case import Case
from tests.programs.gradients import NO_DERIVATIVE

SAMPLES = Path(__file__).parents[2] / "samples"


@dataclass(frozen=True)
class Sample:
    """A function of a sample with its example arguments, abstract ones filled: a `Case`."""

    name: str
    entry: Entry = field(repr=False)

    def setting(self) -> AbstractContextManager[Any]:
        """Return the JAX configuration to trace and run the case in."""
        return nullcontext()

    def program(self) -> Program:
        """The traced function, cached for all tests of this program."""
        return self._program

    @cached_property
    def _program(self) -> Program:
        return self.trace()

    def trace(self) -> Program:
        """Trace the function anew."""
        return self.entry.trace()

    def arguments(self) -> list[Any]:
        """Return the flat concrete arguments, in the program's order."""
        program = self.program()
        given = dict(zip(program.arg_names, self.entry.arguments(), strict=True))
        return list(fill_arguments(program, given, seed=0).arguments)


def sample_files() -> list[str]:
    """Return the samples' file names, without scripts."""
    return sorted(p.name for p in SAMPLES.glob("*.py") if "__main__" not in p.read_text())


@cache
def sample_programs(file: str) -> list[Sample | Case]:
    """Return the functions of one sample that have example arguments, and their gradients.

    A function that returns one float has a gradient by its inexact arguments, unless JAX cannot
    differentiate it in reverse mode.
    """
    cases: list[Sample | Case] = []
    for sample in _samples(file):
        cases.append(sample)
        gradient = _gradient(sample)
        if gradient is not None:
            cases.append(gradient)
    return cases


def _samples(file: str) -> Iterator[Sample]:
    path = SAMPLES / file
    for name, value in run_path(str(path)).items():
        if not name.startswith("_") and hasattr(value, "example_args"):
            yield Sample(f"{path.stem}.{name}", find_function(f"{path}:{name}"))


def _gradient(sample: Sample) -> Case | None:
    program, args = sample.program(), tuple(sample.arguments())
    outs = program.out_avals
    if len(outs) != 1 or outs[0].shape != () or not _inexact(outs[0]):
        return None
    at = tuple(i for i, aval in enumerate(program.in_avals) if _inexact(aval))
    function = jax.value_and_grad(lambda *xs: jaxcompat.jaxpr_as_fun(program.jaxpr)(*xs)[0], at)
    case = Case(f"{sample.name} gradient", function, args)
    try:
        jax.make_jaxpr(function)(*args)
    except NO_DERIVATIVE:
        return None
    return case if at else None


def _inexact(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)
