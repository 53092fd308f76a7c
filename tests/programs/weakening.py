"""Compare the weak types of results and gradients before and after a pass.

JAX is the oracle: the results of a program in JAX's evaluator, traced at the same types, and the
gradients by its transposition, must have the same weak types before and after.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.ir.program import Program
from jaxprtool.passes import Pipeline
from tests.programs.case import Case
from tests.programs.gradients import NO_DERIVATIVE, NO_DERIVATIVE_OF_REFS

PIPELINES = (
    *("inline", "forward", "fold", "simplify", "simplify(fast=True)", "cse", "dce", "hoist"),
    *("unroll(max_length=4)", "roll", "outline", "sink", "schedule", "drop_checks"),
    *("disable_jit", "jit", "checkpoint", 'named_call("name")', "-O1", "-O2", "-O3"),
)

#: Passes that cast arguments: the cotangent of a cast is as weakly typed as its operand.
CASTING = frozenset(["mixed_precision"])

_PYTHON_DTYPES = {"float32", "int32", "complex64", "float64", "int64", "complex128"}


def weakened(case: Any, rng: random.Random | None = None) -> Any:
    """Return a case whose arguments are weakly typed where the dtype is that of a Python number.

    With `rng`, only some of them are.
    """
    if not isinstance(case, Case):  # a sample is already traced with its own types
        return case

    def made(x: Any) -> Any:
        return x if rng is not None and rng.random() < 0.4 else _weak(x)

    with case.setting():
        args, kwargs = jax.tree.map(made, (case.args, case.kwargs))
    return Case(f"weak {case.name}", case.fun, args, kwargs, case.x64)


def _weak(x: Any) -> Any:
    aval = jax.typeof(x)
    if not isinstance(aval, jax.core.ShapedArray) or str(aval.dtype) not in _PYTHON_DTYPES:
        return x
    bind = lax.convert_element_type_p.bind
    return bind(jnp.asarray(x), new_dtype=aval.dtype, weak_type=True, sharding=None)


def prove_weak_types(case: Any, pipelines: Iterable[str] = PIPELINES) -> Counter[str]:
    """Compare the weak types of a program before and after each pipeline.

    Returns the number of comparisons by kind. Raises AssertionError with the pipeline.
    """
    outcomes: Counter[str] = Counter({"programs": 1})
    with case.setting():
        program = case.program()
        results, gradients = weak_results(program), weak_gradients(program)
        outcomes["weakly typed"] += any(aval.weak_type for aval in program.in_avals)
        for text in pipelines:
            after = Pipeline.parse(text)(program)
            assert isinstance(after, Program)
            if after.jaxpr is program.jaxpr:
                continue
            outcomes["rewritten"] += 1
            declared = [is_weak(aval) for aval in after.out_avals]
            assert declared == results == weak_results(after), f"results by {text}"
            if gradients is not None and (found := weak_gradients(after)) is not None:
                outcomes["gradients"] += 1
                own = [is_weak(aval) for aval in program.in_avals if inexact(aval)]
                for new, old, of_argument in zip(found, gradients, own, strict=True):
                    kept = new == old or (text in CASTING and new == of_argument)
                    assert kept, f"gradients by {text}"
    return outcomes


def weak_results(program: Program) -> list[bool]:
    """Return whether each result is weakly typed in JAX's evaluator."""
    evaluate = jaxcompat.jaxpr_as_fun(program.jaxpr)
    return _weak_types_of(lambda *flat: evaluate(*flat), program)


def weak_gradients(program: Program) -> list[bool] | None:
    """Return whether each inexact argument's cotangent is weakly typed. None without a gradient."""
    at = [i for i, aval in enumerate(program.in_avals) if inexact(aval)]
    if not at or not any(map(inexact, program.out_avals)):
        return None

    def gradients(*flat: Any) -> Sequence[Any]:
        def function(*xs: Any) -> list[Any]:
            full = list(flat)
            for i, x in zip(at, xs, strict=True):
                full[i] = x
            outs = jaxcompat.jaxpr_as_fun(program.jaxpr)(*full)
            return [out for out in outs if inexact(jax.typeof(out))]

        outs, pull = jax.vjp(function, *(flat[i] for i in at))
        return pull([lax.full_like(out, 1) for out in outs])

    try:
        return _weak_types_of(gradients, program)
    except (*NO_DERIVATIVE, *NO_DERIVATIVE_OF_REFS):
        return None


def _weak_types_of(function: Any, program: Program) -> list[bool]:
    types = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=is_weak(aval))
        for aval in program.in_avals
    ]
    return [is_weak(aval) for aval in jax.make_jaxpr(function)(*types).out_avals]


def is_weak(aval: Any) -> bool:
    return bool(getattr(aval, "weak_type", False))


def inexact(aval: Any) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", np.bool_), jnp.inexact)
