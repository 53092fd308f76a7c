"""specialize: give the symbols in the types of a program's arguments a size.

    program.apply("specialize(n=512)")
    program.apply("specialize(n=512, m='2*k')")

The result is what tracing at these sizes gives. Where JAX writes other equations if it knows a
size (the number of rounds of a `fori_loop`, the gradient of a slice), it is what JAX wrote without,
and computes the same. Symbols that are not given stay symbolic, and so do those in the expression
that a size may be. Sizes must fit the constraints of the symbols (`jax.export.symbolic_shape`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxprtool.errors import PipelineError
from jaxprtool.ir.program import Program
from jaxprtool.ir.symbols import chosen_sizes
from jaxprtool.passes.base import Pass


@dataclass(frozen=True)
class Specialize(Pass):
    """Replace symbolic sizes by numbers, as tracing at that size does: specialize(n=512)."""

    name: ClassVar[str] = "specialize"
    group: ClassVar[str] = "transform"
    more_options: ClassVar[str] = "sizes"

    #: The size of each symbol: a number, or an expression of symbols such as '2*n'.
    sizes: dict[str, int | str]

    def __post_init__(self) -> None:
        if not self.sizes:
            raise PipelineError(
                "pass 'specialize' needs the size of a symbol", "specialize(n=512) says what n is"
            )

    def __call__(self, program: Program) -> Program:
        """Raises ArgumentsError for a name that is no symbol, or a size that does not fit."""
        what = f"specialize: {program.name}"
        return program.specialized(chosen_sizes(what, program.in_avals, self.sizes))
