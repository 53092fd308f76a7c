"""A jaxprtool plug-in: matrix products and convolutions in a narrower dtype.

This module has the name, help, options and checks of the pass. It does not import JAX, so that
`jaxprtool passes` lists it quickly; the rewriting is in `casting`.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from jaxprtool import Pass
from jaxprtool.errors import PipelineError, did_you_mean

if TYPE_CHECKING:
    from jaxprtool import Program

__all__ = ["NarrowProducts"]

COMPUTE_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class NarrowProducts(Pass):
    """Multiply matrices and convolve in a narrower dtype, accumulating in the original one.

    Operands of a wider dtype are cast before each product or convolution; the dtype of the result
    does not change. A product that requests an algorithm (`jax.lax.DotAlgorithm`) is unchanged.

    Args:
        compute_dtype: `bfloat16`, `float16` or `float32`.

    Raises:
        PipelineError: If there is no such dtype.

    Example:
        def f(x, w):
            return x @ w

        $ jaxprtool opt f.py:f --args "f32[8,3], f32[3,4]" -p narrow_products
        { lambda ; a:f32[8,3] b:f32[3,4]. let
            c:bf16[8,3] = convert_element_type[new_dtype=bfloat16 weak_type=False] a
            d:bf16[3,4] = convert_element_type[new_dtype=bfloat16 weak_type=False] b
            e:f32[8,4] = dot_general[
              dimension_numbers=(([1], [0]), ([], []))
              preferred_element_type=float32
            ] c d
          in (e,) }
    """

    name: ClassVar[str] = "narrow_products"
    preserves: ClassVar[bool] = False
    compute_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.compute_dtype not in COMPUTE_DTYPES:
            name = str(self.compute_dtype)
            raise PipelineError(
                f"{self.name}: '{name}' is not a compute_dtype",
                hint=did_you_mean(name, COMPUTE_DTYPES)
                or f"available: {', '.join(COMPUTE_DTYPES)}",
            )

    def __call__(self, program: "Program") -> "Program":
        from jaxprtool.extend import map_equations
        from jaxprtool_mixed_precision.casting import cast_operands

        rule = partial(cast_operands, compute_dtype=self.compute_dtype)
        return program.replace(jaxpr=map_equations(program.jaxpr, rule))
