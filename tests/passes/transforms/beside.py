"""Compare each transformation of a program with JAX's of the traced function.

`prove_transform(case, name)` makes both and raises AssertionError unless they are equivalent, or
both refused. JAX's `vjp` and `linearize` return a closure, not a program. So their two halves are
run, one equation at a time, and compared with JAX's result traced as a whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.errors import JaxprToolError, UnsupportedError
from jaxprtool.ir.equations import equations
from jaxprtool.ir.equivalence import structural_difference
from jaxprtool.ir.program import Program, type_check
from jaxprtool.loading.trace import bind_arguments, trace
from jaxprtool.passes import Pipeline
from jaxprtool.passes.retrace import function_of
from tests.programs import interpreter, values
from tests.programs.case import Case
from tests.programs.gradients import NO_DERIVATIVE, NO_DERIVATIVE_OF_REFS
from tests.programs.recorder import recording
from tests.programs.samples import Sample

#: JAX's errors for a function it cannot transform; `trace` converts them into ours.
REFUSED = (*NO_DERIVATIVE, *NO_DERIVATIVE_OF_REFS, JaxprToolError)

#: The maximum number of elements, since a jacobian has a row for each.
MOST_ROWS = 200


class NotRefused(AssertionError):
    """JAX refuses to transform a function, and the pass transforms its trace."""


def prove_transform(case: Case | Sample, name: str) -> str:
    """Try one pass on a case. Return "same", "refused", or why it was not tried."""
    with case.setting(), recording():
        fun, args = flat_function(case)
        traced = trace(fun, *args)
        if counts_consts(traced):
            fun = function_of(traced)
        try:
            return PROOFS[name](fun, args)
        except (UnsupportedError, NotRefused):
            # JAX differentiates some functions with refs but not their traces or the halves of
            # `linearize`, and the other way round.
            if not jaxcompat.allocates_refs(traced.jaxpr):
                raise
            return "refused in one way, with refs"
        except AttributeError as error:
            if "committed" not in str(error):
                raise
            return "not run: JAX 0.12 makes no ref of zeros of float0, one operation at a time"


def counts_consts(program: Program) -> bool:
    """Return True if a function with custom derivatives captured values.

    JAX makes them arguments of the function when it evaluates the trace, so both sides must start
    from the trace.
    """
    return any(
        eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call") and eqn.params["num_consts"]
        for eqn in equations(jaxcompat.open_jaxpr(program.jaxpr))
    )


def flat_function(case: Case | Sample) -> tuple[Callable[..., Any], list[Any]]:
    """Return the function of a case, with flat arguments."""
    if isinstance(case, Case):
        fun, statics, args = case.fun, {}, case.arguments()
        tree = jax.tree.structure((case.args, case.kwargs))
    else:
        e = case.entry
        call = bind_arguments(e.fun, e.args, e.kwargs, **e.static)
        fun, statics, args = e.fun, call.static_args, case.arguments()
        tree = jax.tree.structure((call.args, call.kwargs))

    def flat(*leaves: Any) -> Any:
        given, kwargs = jax.tree.unflatten(tree, leaves)
        positions = list(given)
        for position, value in sorted(statics.items()):
            positions.insert(position, value)
        return fun(*positions, **kwargs)

    return flat, args


def applied(pipeline: str, program: Program) -> Any:
    """Return the result of a pipeline."""
    return Pipeline.parse(pipeline)(program)


def inexact(x: Any) -> bool:
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def total_of(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return the sum of all inexact results of a function."""

    def total(*args: Any) -> Any:
        outs = [x for x in jax.tree.leaves(fun(*args)) if inexact(x)]
        return sum((jnp.real(x).astype(jnp.float32).sum() for x in outs), jnp.float32(0))

    return total


def direction(aval: Any, seed: int) -> Any:
    """Return a fixed random value of a tangent's type."""
    if aval.dtype == jax.dtypes.float0:
        return np.zeros(aval.shape, aval.dtype)
    rng = np.random.RandomState(seed)
    return jnp.asarray(rng.uniform(0.5, 1.5, aval.shape), aval.dtype)


# --- passes that return one program ---------------------------------------------------------------


def compared(ours: Callable[[], Program], theirs: Callable[[], Program]) -> str:
    """Compare two programs. Return "same", or "refused" if both are."""
    try:
        expected = theirs()
    except REFUSED as error:
        return _refused(ours, error)
    if runs_no_more(expected):
        return _refused(ours, TypeError("custom_vjp has no forward mode"))
    made = ours()
    type_check(made)
    found = structural_difference(made, expected)
    if found is not None and "shard_map" in found:
        # JAX traces its body again when it is evaluated, and not always to the same equations.
        args = [direction(aval, i) for i, aval in enumerate(made.in_avals)]
        outs = [jaxcompat.jaxpr_as_fun(p.jaxpr)(*args) for p in (expected, made)]
        found = values.first_value_difference(*outs, values.values_agree)
    assert found is None, found
    return "same"


def runs_no_more(program: Program) -> bool:
    """Return True for forward mode of a custom_vjp function, which JAX cannot run."""
    eqns = equations(jaxcompat.open_jaxpr(program.jaxpr))
    return any(eqn.primitive.name == "custom_lin" for eqn in eqns)


def _refused(ours: Callable[[], Any], error: Exception) -> str:
    try:
        ours()
    except JaxprToolError:
        return "refused"
    raise NotRefused(f"JAX raised {type(error).__name__}: {error}") from error


def _wrapped(name: str, function: Callable[..., Any]) -> Callable[..., str]:
    def prove(fun: Callable[..., Any], args: list[Any]) -> str:
        @functools.wraps(fun)
        def called(*leaves: Any) -> Any:
            # if it is traced itself, the result of `jax.jit` is its body
            return function(fun)(*leaves)

        return compared(lambda: applied(name, trace(fun, *args)), lambda: trace(called, *args))

    return prove


def _derivative(name: str, function: Callable[..., Any], rows: int) -> Callable[..., str]:
    """Return the derivative of the sum of the results, by all inexact arguments."""

    def prove(fun: Callable[..., Any], args: list[Any]) -> str:
        at = tuple(i for i, x in enumerate(args) if inexact(x))
        if not at:
            return "no inexact argument"
        if sum(np.size(args[i]) for i in at) > rows:
            return "too large"
        total = total_of(fun)
        return compared(
            lambda: applied(f"{name}(argnums={at!r})", trace(total, *args)),
            lambda: trace(function(total, argnums=at), *args),
        )

    return prove


def _jvp(fun: Callable[..., Any], args: list[Any]) -> str:
    tangents = [jax.typeof(x).to_tangent_aval() for x in args]
    shapes = [jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type) for t in tangents]
    return compared(
        lambda: applied("jvp", trace(fun, *args)),
        lambda: trace(lambda p, t: jax.jvp(fun, p, t), tuple(args), tuple(shapes)),
    )


# --- passes that return two programs --------------------------------------------------------------


def _vjp(fun: Callable[..., Any], args: list[Any]) -> str:
    def whole(args: Any, cotangents: Any) -> Any:
        out, pull = jax.vjp(fun, *args)
        return out, pull(cotangents)

    program = trace(fun, *args)
    avals = [aval.to_ct_aval() for aval in program.out_avals]
    return _halves("vjp", program, whole, args, avals, program.out_tree)


def _linearize(fun: Callable[..., Any], args: list[Any]) -> str:
    def whole(args: Any, tangents: Any) -> Any:
        out, push = jax.linearize(fun, *args)
        return out, push(*tangents)

    program = trace(fun, *args)
    avals = [aval.to_tangent_aval() for aval in program.in_avals]
    return _halves("linearize", program, whole, args, avals, jax.tree.structure(tuple(args)))


def _halves(
    name: str,
    program: Program,
    whole: Callable[..., Any],
    args: list[Any],
    avals: Sequence[Any],
    tree: Any,
) -> str:
    """Compare with `whole(args, given)`, JAX's result of both halves at once."""
    given = [direction(aval, i) for i, aval in enumerate(avals)]
    try:
        expected = trace(whole, tuple(args), jax.tree.unflatten(tree, given))
    except REFUSED as error:
        return _refused(lambda: applied(name, program), error)
    if runs_no_more(expected):
        return _refused(lambda: applied(name, program), TypeError("custom_vjp, forwards"))
    parts = applied(name, program)
    forward, backward = parts["forward"], parts["backward"]
    count = program.out_tree.num_leaves
    outs = interpreter.evaluate(forward.jaxpr, args)
    late = interpreter.evaluate(backward.jaxpr, [*outs[count:], *given])
    theirs = interpreter.evaluate(expected.jaxpr, [*args, *given])
    found = values.first_value_difference(theirs, [*outs[:count], *late], values.bits_agree)
    assert found is None, found
    return "same"


def _linear_transpose(fun: Callable[..., Any], args: list[Any]) -> str:
    """Compare the transpose of the result of `linearize` with `vjp`."""

    def whole(args: Any, cotangents: Any) -> Any:
        _, push = jax.linearize(fun, *args)
        tangents = [direction(jax.typeof(x).to_tangent_aval(), i) for i, x in enumerate(args)]
        push(*tangents)
        return jax.vjp(fun, *args)[1](cotangents)

    program = trace(fun, *args)
    given = [direction(aval.to_ct_aval(), i) for i, aval in enumerate(program.out_avals)]
    pipeline = "linearize, backward.linear_transpose(argnums=1)"
    try:
        expected = trace(whole, tuple(args), jax.tree.unflatten(program.out_tree, given))
    except REFUSED as error:
        return _refused(lambda: applied(pipeline, program), error)
    if runs_no_more(expected):
        return _refused(lambda: applied(pipeline, program), TypeError("custom_vjp, forwards"))
    parts = applied(pipeline, program)
    outs = interpreter.evaluate(parts["forward"].jaxpr, args)[program.out_tree.num_leaves :]
    ours = interpreter.evaluate(parts["backward"].jaxpr, [*outs, *given])
    theirs = interpreter.evaluate(expected.jaxpr, [*args, *given])
    found = values.first_value_difference(theirs, ours, values.values_agree)
    assert found is None, found
    return "same"


PROOFS: dict[str, Callable[[Callable[..., Any], list[Any]], str]] = {
    "grad": _derivative("grad", jax.grad, 10**9),
    "value_and_grad": _derivative("value_and_grad", jax.value_and_grad, 10**9),
    "jacfwd": _derivative("jacfwd", jax.jacfwd, MOST_ROWS),
    "jacrev": _derivative("jacrev", jax.jacrev, MOST_ROWS),
    "hessian": _derivative("hessian", jax.hessian, MOST_ROWS),
    "jvp": _jvp,
    "vjp": _vjp,
    "linearize": _linearize,
    "linear_transpose": _linear_transpose,
    "checkpoint": _wrapped("checkpoint", jax.checkpoint),
    "jit": _wrapped("jit", jax.jit),
    "named_call": _wrapped("named_call", jax.named_call),
}
