"""`repeat`: a loop as another package would define it, with rules for JAX and one view for us.

It has a carry, constants, and stacked inputs and outputs, like `scan`. But its operands, its
results and the arguments of its body are in orders of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jaxprtool.extend import Edges, View, rule

repeat_p = Primitive("repeat")
repeat_p.multiple_results = True


def repeat(
    body: Callable[..., Any], carry: Sequence[Any], consts: Sequence[Any], xs: Sequence[Any]
) -> list[Any]:
    """Run `body(xs, carry, consts) -> (carry, ys)`, lists of arrays, over rows of xs.

    Returns:
        The stacked ys, then the last carry.
    """
    groups = list(carry), list(consts), [x[0] for x in xs]

    def flat(*args: Any) -> list[Any]:
        rows, carried = args[: len(xs)], args[len(xs) : len(xs) + len(carry)]
        carried, ys = body(list(rows), list(carried), list(args[len(xs) + len(carry) :]))
        return [*carried, *ys]

    jaxpr = jax.make_jaxpr(flat)(*groups[2], *groups[0], *groups[1])
    sizes = len(carry), len(consts), len(xs)
    return repeat_p.bind(*carry, *consts, *xs, body=jaxpr, sizes=sizes, times=len(xs[0]))


# --- JAX's rules: the same as those of a scan -----------------------------------------------------


def _as_scan(*operands: Any, body: Any, sizes: tuple[int, int, int], times: int) -> list[Any]:
    k, n, _ = sizes
    carry, consts, xs = operands[:k], operands[k : k + n], operands[k + n :]

    def step(carry: Any, rows: Any) -> Any:
        outs = jaxpr_as_fun(body)(*rows, *carry, *consts)
        return tuple(outs[:k]), tuple(outs[k:])

    carry, ys = jax.lax.scan(step, tuple(carry), tuple(xs), length=times)
    return [*ys, *carry]


def _types(*avals: Any, body: Any, sizes: tuple[int, int, int], times: int) -> Any:
    outs = body.out_avals
    rows = [jax.core.ShapedArray((times, *aval.shape), aval.dtype) for aval in outs[sizes[0] :]]
    return [*rows, *outs[: sizes[0]]], body.effects


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    tangents = [ad.instantiate_zeros(t) for t in tangents]
    return jax.jvp(lambda *xs: _as_scan(*xs, **params), tuple(primals), tuple(tangents))


def _batch(operands: Any, dims: Any, **params: Any) -> Any:
    outs = jax.vmap(partial(_as_scan, **params), in_axes=tuple(dims))(*operands)
    return outs, [0] * len(outs)


repeat_p.def_impl(_as_scan)
repeat_p.def_effectful_abstract_eval(_types)
ad.primitive_jvps[repeat_p] = _jvp
batching.primitive_batchers[repeat_p] = _batch
mlir.register_lowering(repeat_p, mlir.lower_fun(_as_scan, multiple_results=True))


# --- the registration with jaxprtool --------------------------------------------------------------


@rule("view", "repeat")
@dataclass(frozen=True, eq=False)
class Repeat(View):
    """`repeat`: body(*xs, *carry, *consts) -> (*carry, *ys)."""

    carry: tuple[Any, ...]
    consts: tuple[Any, ...]
    xs: tuple[Any, ...]
    ys: tuple[Any, ...]
    carry_outs: tuple[Any, ...]
    body: Any
    times: int

    edges: ClassVar[Edges | None] = Edges(
        operands=("carry", "consts", "xs"),
        results=("ys", "carry_outs"),
        bodies=(("body", ("xs", "carry", "consts"), ("carry_outs", "ys")),),
        carried=(("carry", "carry_outs"),),
        sliced=("xs",),
        stacked=("ys",),
    )

    @classmethod
    def of(cls, eqn: Any) -> Repeat:
        k, n, _ = eqn.params["sizes"]
        ins, outs = tuple(eqn.invars), tuple(eqn.outvars)
        ys = len(outs) - k
        groups = ins[:k], ins[k : k + n], ins[k + n :], outs[:ys], outs[ys:]
        return cls(eqn, *groups, eqn.params["body"], eqn.params["times"])

    @property
    def trips(self) -> int:
        return self.times

    def params(self) -> dict[str, Any]:
        sizes = len(self.carry), len(self.consts), len(self.xs)
        return {"body": self.body, "sizes": sizes, "times": self.times}
