"""HLO modules that tests read: compiled from functions, and as their text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxprtool.execute.running.backends import compiled_afresh
from jaxprtool.formats.hlo import StoredModule
from jaxprtool.ir.hlo.buffers import buffer_assignment
from jaxprtool.ir.hlo.module import compiled_module


def stored(function: Callable, *args: Any, **jit: Any) -> StoredModule:
    """Return the module that XLA compiles a function to, with XLA's assignment of buffers."""
    with compiled_afresh():
        compiled = jax.jit(function, **jit).lower(*args).compile()
    module = compiled_module(compiled)
    return StoredModule(module, buffer_assignment(compiled, module))


def dumped(folder: Path, function: Callable, *args: Any, number: int = 0) -> None:
    """Write the modules of a function, before and after optimizations, as XLA names its dumps."""
    with compiled_afresh():
        lowered = jax.jit(function).lower(*args)
        (after,) = lowered.compile().runtime_executable().hlo_modules()
    stem = folder / f"module_{number:04}.jit_{function.__name__}"
    before = lowered.compiler_ir("hlo").get_hlo_module()
    stem.with_suffix(f".jit_{function.__name__}.before_optimizations.txt").write_text(
        before.to_string()
    )
    stem.with_suffix(f".jit_{function.__name__}.cpu_after_optimizations.txt").write_text(
        after.to_string()
    )


#: A module of an old release of JAX: lines instead of call stacks.
OLD = """\
HloModule jit_step, is_scheduled=true

ENTRY main {
  x = f32[8,4]{1,0} parameter(0), metadata={op_name="x"}
  w = f32[4,4]{1,0} parameter(1), metadata={op_name="w"}
  dot.1 = f32[8,4]{1,0} dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0},
    metadata={op_name="jit(step)/dot_general" source_file="/home/me/step.py" source_line=7}
  ROOT tanh.1 = f32[8,4]{1,0} tanh(dot.1), metadata={op_name="jit(step)/tanh"
    source_file="/home/me/step.py" source_line=8}
}
"""

#: A module for a TPU: tiles of 8 x 128 elements, and a value in the memory on the chip.
TILED = """\
HloModule jit_tiled, is_scheduled=true

ENTRY main {
  x = f32[5,3]{1,0:T(8,128)} parameter(0)
  near = f32[5,3]{1,0:T(8,128)S(1)} negate(x)
  y = f32[5,3]{1,0:T(8,128)} exponential(near)
  z = f32[3,5]{1,0:T(8,128)} transpose(y), dimensions={1,0}
  ROOT both = (f32[3,5]{1,0:T(8,128)}) tuple(z)
}
"""

#: A fusion and a branch in a loop of ten iterations; `%s` is the path of the user's file.
LOOP = """\
HloModule jit_step, is_scheduled=true

fused {
  p = f32[4]{0} parameter(0)
  q = f32[4]{0} parameter(1)
  m = f32[4]{0} multiply(p, q)
  ROOT t = f32[4]{0} tanh(m), metadata={op_name="jit(step)/block/tanh" source_file="%s" source_line=2}
}

positive {
  a = f32[4]{0} parameter(0)
  ROOT negated = f32[4]{0} negate(a)
}

other {
  b = f32[4]{0} parameter(0)
  ROOT copied = f32[4]{0} copy(b)
}

body {
  carry = (s32[], f32[4]{0}) parameter(0)
  i = s32[] get-tuple-element(carry), index=0
  h = f32[4]{0} get-tuple-element(carry), index=1
  one = s32[] constant(1)
  next = s32[] add(i, one)
  fusion.1 = f32[4]{0} fusion(h, h), kind=kLoop, calls=fused
  ROOT pair = (s32[], f32[4]{0}) tuple(next, fusion.1)
}

condition {
  carry.1 = (s32[], f32[4]{0}) parameter(0)
  j = s32[] get-tuple-element(carry.1), index=0
  end = s32[] constant(10)
  ROOT goes = pred[] compare(j, end), direction=LT
}

ENTRY main {
  x.1 = f32[4]{0} parameter(0), metadata={op_name="params['x']"}
  zero = s32[] constant(0)
  init = (s32[], f32[4]{0}) tuple(zero, x.1)
  while.1 = (s32[], f32[4]{0}) while(init), condition=condition, body=body, backend_config={"known_trip_count":{"n":"10"}}
  done = f32[4]{0} get-tuple-element(while.1), index=1
  which = s32[] custom-call(while.1), custom_call_target="choose"
  ROOT branch = f32[4]{0} conditional(which, done, x.1), branch_computations={positive, other}, metadata={op_name="jit(step)/cond" source_file="%s" source_line=3}
}
"""  # noqa: E501
