"""A jaxprtool plug-in: low-rank adapters, whose factors `unzip` makes variables.

    def net(key, w, x):
        return x @ adapt(w, key, rank=4, name="out")

    init, apply = jaxprtool.unzip(net)(key, w, x)
    adapters = init(key)                    # {"out": {"down": f32[64,4], "up": f32[4,256]}}
    y = apply(adapters, w, x)               # x @ (w + down @ up)

`adapt` is one equation in a jaxpr, and the identity unless a pass interprets it: an untrained
adapter adds nothing. The rule for `unzip` below is all that a primitive needs to declare variables.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Primitive, Var
from jax.interpreters import ad, batching, mlir

from jaxprtool.errors import UnsupportedError
from jaxprtool.extend import VARIABLE, call, hide_frames, named, rule
from jaxprtool.extend.rules import BindingTime, Context, Outcome, Variable, whole

__all__ = ["adapt"]

hide_frames(__file__)


def adapt(w: Any, key: Any, *, rank: int, name: str, alpha: float | None = None) -> Any:
    """Return a matrix with a low-rank adapter.

    If `key` is a key for `unzip`, the adapter is a variable: `down`, f[m,rank], normally
    distributed with variance 1/m, and `up`, f[rank,n], initially zero. The weight is then `w +
    alpha / rank * down @ up`.

    Args:
        w: The matrix, f[m,n].
        key: A random key.
        rank: The rank of the adapter, at least 1.
        name: The name of the variable.
        alpha: The scale of the adapter; by default `rank`.

    Returns:
        The weight, f[m,n]: `w` itself, unless a pass interprets the adapter.

    Raises:
        ValueError: If `w` is not a matrix, or `rank` is below 1.
    """
    if jnp.ndim(w) != 2:
        raise ValueError(f"adapt takes a matrix, not an array of shape {jnp.shape(w)}")
    if rank < 1:
        raise ValueError(f"the rank of an adapter must be at least 1, not {rank}")
    scale = 1.0 if alpha is None else alpha / rank
    return lora_p.bind(w, key, rank=rank, scale=scale, name=name)


# --- the primitive: the identity on its first operand -------------------------------------------

lora_p = Primitive("lora")
lora_p.def_impl(lambda w, key, **_: w)
lora_p.def_abstract_eval(lambda w, key, **_: w)
mlir.register_lowering(lora_p, lambda ctx, w, key, **_: [w])
ad.primitive_jvps[lora_p] = lambda primals, tangents, **params: (
    lora_p.bind(*primals, **params),
    tangents[0],
)
batching.primitive_batchers[lora_p] = lambda operands, axes, **params: (
    lora_p.bind(*operands, **params),
    axes[0],
)


# --- rule for unzip ---------------------------------------------------------------------------


@rule("unzip", "lora")
def _unzip(eqn: JaxprEqn, times: Sequence[BindingTime], context: Context) -> Outcome:
    """Declare the adapter a variable if init has its key: init computes it, apply adds it."""
    w, key = eqn.invars
    of_w, of_key = times
    if context.tag != VARIABLE or not of_key.early or not of_w.ready:
        return whole(eqn, times, context)
    if w.aval.ndim != 2 or key.aval.ndim:
        raise UnsupportedError(f"{named(eqn)} is mapped over its weight or its key by a vmap")
    rank, scale, dtype = eqn.params["rank"], eqn.params["scale"], w.aval.dtype
    is_weak = w.aval.weak_type
    (m, n) = w.aval.shape

    def lora_init(key: Any) -> dict[str, Any]:
        down = jax.random.normal(key, (m, rank), dtype) * m**-0.5
        return {"down": down, "up": jnp.zeros((rank, n), dtype)}

    def lora_apply(down: Any, up: Any, w: Any) -> Any:
        # Keep the weak type of the weight, which its gradient then has too.
        return _cast(_cast(w, False) + scale * down @ up, is_weak)

    make, shape = jax.make_jaxpr(lora_init, return_shape=True)(_typed(key))
    values, arguments = ([Var(aval) for aval in make.out_avals] for _ in range(2))
    add = jax.make_jaxpr(lora_apply)(*map(_typed, arguments), _typed(w))
    return Outcome(
        times=(BindingTime(early=False, ready=True),),
        init=(call(make, [key], values, eqn),),
        apply=(call(add, [*arguments, w], eqn.outvars, eqn),),
        variables=(Variable.of(eqn, jax.tree.structure(shape), make.out_avals),),
        values=tuple(values),
        arguments=tuple(arguments),
    )


def _typed(atom: Any) -> jax.ShapeDtypeStruct:
    aval = atom.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _cast(array: Any, weak_type: bool) -> Any:
    if jax.typeof(array).weak_type == weak_type:
        return array
    params = {"new_dtype": array.dtype, "weak_type": weak_type, "sharding": None}
    return jax.lax.convert_element_type_p.bind(array, **params)
