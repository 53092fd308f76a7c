"""The derivative of a jaxpr along one fixed direction, in a mode that it supports."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprtool import jaxcompat
from tests.programs.interpreter import bodies, evaluate
from tests.programs.recorder import recording
from tests.programs.stepwise import bind
from tests.programs.values import on_device

#: The errors of JAX if a program has no derivative in a mode: reverse mode of a while loop or a
#: forward-only rule, forward mode of a reverse-only rule, effects in either.
NO_DERIVATIVE = (ValueError, TypeError, NotImplementedError)

#: Its errors for some programs with refs in loops and branches, whose differentiation is not
#: implemented.
NO_DERIVATIVE_OF_REFS = (AttributeError, KeyError, AssertionError)

#: A part of XLA's error for a conditional without results if some branch uses a key array: it drops
#: the operand but not its sharding. JAX's own dead-code elimination triggers it too.
XLA_FAULT = "Invalid sharding for instruction"


def is_xla_fault(error: Exception) -> bool:
    """Return True if the program is valid and XLA fails to compile it because of the known bug."""
    return isinstance(error, jax.errors.JaxRuntimeError) and XLA_FAULT in str(error)


@dataclass(frozen=True)
class Gradients:
    """The values of the derivative. `mode` is "reverse" or "forward"."""

    mode: str
    values: list[Any]


def gradients_of(closed: Any, args: Sequence[Any], mode: str | None = None) -> Gradients | str:
    """Return the derivative of all inexact results by all inexact arguments, or why there is none.

    Reverse mode is tried first, then forward mode, unless `mode` selects one. The (co)tangents are
    random numbers that depend on the types only.
    """
    function, primals = _of_inexact(closed, args)
    if not primals:
        return "no inexact argument"
    if not any(_inexact(v.aval) for v in closed.outvars):
        return "no inexact result"
    expected = NO_DERIVATIVE + (NO_DERIVATIVE_OF_REFS if has_refs(closed) else ())
    # Compiled as a whole, unless XLA's CSE could change the order of effects.
    return derivative_of(function, primals, mode, expected, compiled=not closed.effects)


def stepwise_gradients(
    closed: Any,
    args: Sequence[Any],
    mode: str,
    apply: Callable[[Any, Sequence[Any]], Sequence[Any]] = bind,
) -> list[Any]:
    """Return the values of a derivative that exists, computed one equation at a time by `apply`."""
    function, primals = _of_inexact(closed, args)
    derivative = reverse if mode == "reverse" else _forward
    traced = jax.make_jaxpr(lambda *xs: derivative(function, list(xs)))(*primals)
    with recording():
        return evaluate(traced, primals, apply)


def _of_inexact(closed: Any, args: Sequence[Any]) -> tuple[Callable[..., list[Any]], list[Any]]:
    """Return a program as a function of its inexact arguments to its inexact results, and both."""
    at = [i for i, x in enumerate(args) if _inexact(x)]
    outs = [i for i, v in enumerate(closed.outvars) if _inexact(v.aval)]

    def function(*xs: Any) -> list[Any]:
        full = list(args)
        for i, x in zip(at, xs, strict=True):
            full[i] = x
        results = jaxcompat.jaxpr_as_fun(closed)(*full)
        return [jnp.asarray(results[i]) for i in outs]  # one may be a literal

    return function, [on_device(args[i]) for i in at]


def derivative_of(
    function: Callable[..., list[Any]],
    primals: list[Any],
    mode: str | None = None,
    expected: tuple[type[Exception], ...] = NO_DERIVATIVE,
    *,
    compiled: bool = False,
) -> Gradients | str:
    """Return the derivative of a function of inexact arrays to a list of them, as `gradients_of`.

    `expected` has the errors that JAX may raise if there is none. If `compiled`, the derivative is
    one program: the function and its pullback on their own would be two.
    """
    failure: Exception | None = None
    for name, derivative in (("reverse", reverse), ("forward", _forward)):
        if mode not in (None, name):
            continue
        run = partial(derivative, function)
        try:
            with recording():
                values = (jax.jit(run) if compiled else run)(primals)
                return Gradients(name, jax.block_until_ready(values))
        except expected as error:
            failure = failure or error
        except jax.errors.JaxRuntimeError as error:
            if not is_xla_fault(error):
                raise
            return XLA_FAULT
    reason = str(failure).splitlines() or [""]
    return f"not differentiable: {type(failure).__name__}: {reason[0][:100]}"


def has_refs(jaxpr: Any) -> bool:
    """Return True if a program creates a ref at any depth."""
    return any(
        eqn.primitive.name == "new_ref" or any(map(has_refs, bodies(eqn))) for eqn in jaxpr.eqns
    )


def reverse(function: Any, primals: list[Any]) -> list[Any]:
    """Return the derivatives by all arguments, along a fixed direction of the results."""
    return reverse_with_aux(lambda *xs: (function(*xs), None), primals)[0]


def reverse_with_aux(function: Any, primals: list[Any]) -> tuple[list[Any], Any]:
    """Return `reverse` of the first of two results, and the other result."""
    results, pullback, aux = jax.vjp(function, *primals, has_aux=True)
    return list(pullback([_direction(r) for r in results])), aux


def _forward(function: Any, primals: list[Any]) -> list[Any]:
    return list(jax.jvp(function, primals, [_direction(x) for x in primals])[1])


def _direction(x: Any) -> Any:
    """Return a fixed random value of the type of `x`."""
    rng = np.random.RandomState(zlib.crc32(f"{x.dtype}{x.shape}".encode()))
    value = rng.uniform(0.5, 1.5, x.shape)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        value = value + 1j * rng.uniform(0.5, 1.5, x.shape)
    return jnp.asarray(value, x.dtype)


def _inexact(x: Any) -> bool:
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    return jnp.issubdtype(dtype, jnp.inexact)
