"""specialize: replace the symbols in the types of a program's arguments by sizes.

program.apply("specialize(n=512)")
program.apply("specialize(n=512, m='2*k')")
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxprtool import Pass, Program
from jaxprtool.errors import PipelineError
from jaxprtool.extend.sizes import chosen_sizes, symbols_of


@dataclass(frozen=True)
class Specialize(Pass):
    """Replace symbolic sizes by numbers, as if the function were traced at these sizes.

    Symbols without a size stay symbolic, and so do those in an expression. A size must satisfy the
    constraints of the symbols (`jax.export.symbolic_shape`).

    Args:
        sizes: The size of each symbol, by its name: a number, n=512, or an expression of other
            symbols, m='2*n'.

    Raises:
        ArgumentsError: If a name is not a symbol of the program, or a size violates a constraint.
        UnsupportedError: If an equation would have a negative size.

    Note:
        JAX traces some functions to other equations if it knows a size (the number of iterations of
        a fori_loop, the gradient of a slice). The result keeps the equations of the symbolic trace,
        which compute the same.

    Example:
        def f(x):
            return x.mean()

        $ jaxprtool opt f.py:f --args "f32[n]" -p "specialize(n=4)"
        { lambda ; a:f32[4]. let
            b:f32[] = reduce_sum[axes=(0,) out_sharding=None] a
            c:f32[] = div b 4.0:f32[]
          in (c,) }
    """

    name: ClassVar[str] = "specialize"
    group: ClassVar[str] = "transform"
    symbolic: ClassVar[bool] = True
    more_options: ClassVar[str] = "sizes"

    sizes: dict[str, int | str]

    def __post_init__(self) -> None:
        if not self.sizes:
            raise PipelineError(
                "pass 'specialize' needs the size of a symbol", "specialize(n=512) sets n to 512"
            )

    def __call__(self, program: Program) -> Program:
        what = f"specialize: {program.name}"
        return program.specialized(chosen_sizes(what, symbols_of(program.jaxpr), self.sizes))
