"""The pass `mixed_precision`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from jaxprtool.errors import PipelineError, did_you_mean
from jaxprtool.ir.programs.program import Program
from jaxprtool.jaxcompat import DType
from jaxprtool.passes.framework.base import Pass
from jaxprtool.passes.precision.narrowing import Narrowing
from jaxprtool.passes.precision.places import KeptPlaces

#: The dtypes to compute in.
COMPUTE_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class MixedPrecision(Pass):
    """Compute in a narrower dtype, except at chosen lines and scopes.

    Products, elementwise functions, and equations that move values take and return the narrower
    dtype. Sums and other accumulations, linear algebra, and random numbers stay in the program's
    dtype, as do arguments, results and carried values of loops. A value is cast once, and not for
    each use. The rules of custom_jvp and custom_vjp calls stay as they are: apply `grad` first.

    Args:
        compute_dtype: `bfloat16`, `float16`, or `float32` for programs in double precision.
        keep: Lines (`'model.py:30'`) and scopes (`'Block_0/LayerNorm_0'`) that stay in the
            program's dtype.

    Raises:
        PipelineError: If there is no such dtype, or a place to keep computes no floats.

    Example:
        def f(x, w):
            return jnp.tanh(x @ w)

        $ jaxprtool opt f.py:f --args "f32[8,3], f32[3,4]" -p mixed_precision
        { lambda ; a:f32[8,3] b:f32[3,4]. let
            c:bf16[8,3] = convert_element_type[new_dtype=bfloat16 weak_type=False] a
            d:bf16[3,4] = convert_element_type[new_dtype=bfloat16 weak_type=False] b
            e:bf16[8,4] = dot_general[
              dimension_numbers=(([1], [0]), ([], []))
              preferred_element_type=bfloat16
            ] c d
            f:bf16[8,4] = tanh e
            g:f32[8,4] = convert_element_type[new_dtype=float32 weak_type=False] f
          in (g,) }
    """

    name: ClassVar[str] = "mixed_precision"
    group: ClassVar[str] = "transform"
    preserves: ClassVar[bool] = False

    compute_dtype: str = "bfloat16"
    keep: list[str] | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.compute_dtype not in COMPUTE_DTYPES:
            raise PipelineError(
                f"{self.name}: '{self.compute_dtype}' is not a compute_dtype",
                did_you_mean(self.compute_dtype, COMPUTE_DTYPES)
                or f"available: {', '.join(COMPUTE_DTYPES)}",
            )

    @property
    def jax_dtype(self) -> DType:
        """The dtype to compute in."""
        return jnp.dtype(self.compute_dtype)

    def __call__(self, program: Program) -> Program:
        kept = KeptPlaces(program, self.keep)
        jaxpr = Narrowing(self.jax_dtype, kept).of(program.jaxpr)
        kept.require_matches()
        return program.replace(jaxpr=jaxpr)
