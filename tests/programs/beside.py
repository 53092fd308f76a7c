"""Compare our vmap of a function with `jax.vmap`, derivatives included.

The tests of structured equations use `prove`. It traces a function, compares the batched program
with JAX's (see `tests.programs.mapped`), asserts that it costs no more, and compares first and
higher derivatives in forward and reverse mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxprtool import jaxcompat
from jaxprtool.ir.program import Program
from jaxprtool.loading.trace import trace
from tests.programs.gradients import Gradients, gradients_of
from tests.programs.mapped import Mapping, Outcome, flat, ours, prove_mapped, theirs
from tests.programs.values import first_value_difference, values_agree


def prove(
    fun: Callable[..., Any],
    *args: Any,
    in_axes: Any = 0,
    out_axes: int = 0,
    size: int = 3,
    axis_name: Any = None,
    derivatives: int = 1,
) -> Outcome:
    """Map `fun` over the given example arguments, and compare with `jax.vmap`.

    `in_axes` is an int for all arguments or one entry for each flat one. Derivatives are compared
    up to order `derivatives`, in forward and in reverse mode.
    """
    program = flat(trace(fun, *args))
    arguments = jax.tree.leaves(args)
    axes = in_axes if isinstance(in_axes, Sequence) else [in_axes] * len(arguments)
    outs = (out_axes,) * len(program.out_avals)
    mapping = Mapping(tuple(axes), outs, size, axis_name)
    outcome = prove_mapped(program, mapping, arguments)
    assert not outcome.is_worse, f"ours costs {outcome.ours}, JAX's {outcome.theirs}"
    if outcome.program is not None and derivatives:
        reference, _ = theirs(program, mapping)
        same_derivatives(outcome.program, reference, mapping.stack(arguments), derivatives)
    return outcome


def batched(fun: Callable[..., Any], *args: Any, in_axes: Any = 0, size: int = 3) -> Program:
    """Return the batched program of a function, for the given example arguments."""
    program = flat(trace(fun, *args))
    count = len(program.in_avals)
    axes = tuple(in_axes) if isinstance(in_axes, Sequence) else (in_axes,) * count
    return ours(program, Mapping(axes, (0,) * len(program.out_avals), size))


def same_derivatives(ours: Program, theirs: Program, args: Sequence[Any], order: int) -> None:
    """Raise AssertionError unless both programs have the same derivatives, in both modes."""
    for mode in ("reverse", "forward"):
        expected = gradients_of(theirs.jaxpr, args, mode)
        got = gradients_of(ours.jaxpr, args, mode)
        if not isinstance(expected, Gradients):
            continue  # ours may support one where JAX does not
        assert isinstance(got, Gradients), f"{mode} derivative: lost: {got}"
        fault = first_value_difference(expected.values, got.values, values_agree)
        assert fault is None, f"{mode} derivative, JAX's before and ours after: {fault}"
    if order > 1:
        twice = [_derivative(p, args) for p in (ours, theirs)]
        same_derivatives(*twice, args, order - 1)


def _derivative(program: Program, args: Sequence[Any]) -> Program:
    """Return the derivative of a program's results along a vector of ones, as a program."""
    at = [i for i, x in enumerate(args) if jax.dtypes.issubdtype(x.dtype, jax.numpy.inexact)]

    def forwards(*xs: Any) -> list[Any]:
        def function(*ys: Any) -> list[Any]:
            full = list(xs)
            for i, y in zip(at, ys, strict=True):
                full[i] = y
            return jaxcompat.jaxpr_as_fun(program.jaxpr)(*full)

        primals = [xs[i] for i in at]
        ones = [jax.numpy.ones_like(x) for x in primals]
        _, tangents = jax.jvp(function, primals, ones)
        return [t for t in tangents if t.dtype != jax.dtypes.float0]

    return program.replace(jaxpr=jax.make_jaxpr(forwards)(*args))
