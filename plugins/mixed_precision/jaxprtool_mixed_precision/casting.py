"""The rule of `narrow_products`, from an equation to the equations that replace it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxprtool.extend import Atom, JaxprEqn, Var, new_jaxpr_eqn

#: The primitives dominated by multiplication, whose `preferred_element_type` sets the dtype in
#: which they accumulate, and that of the result.
PRODUCTS = ("dot_general", "conv_general_dilated")


def cast_operands(eqn: JaxprEqn, compute_dtype: str) -> list[JaxprEqn] | None:
    """Return a product on narrower operands with the result type of `eqn`; None to keep `eqn`.

    This is a rule for `jaxprtool.extend.map_equations`. The casts have the product's source line.
    """
    if eqn.primitive.name not in PRODUCTS or _is_exact_algorithm(eqn.params["precision"]):
        return None
    dtype = jnp.dtype(compute_dtype)
    casts = {id(x): _cast(eqn, x, dtype) for x in eqn.invars if _is_wider(x, dtype)}
    if not casts:
        return None
    operands = [casts[id(x)].outvars[0] if id(x) in casts else x for x in eqn.invars]
    params = {**eqn.params, "preferred_element_type": eqn.outvars[0].aval.dtype}
    return [*casts.values(), eqn.replace(invars=operands, params=params)]


def _is_exact_algorithm(precision: object) -> bool:
    """Return True if the program requests an algorithm, which fixes the dtype of the operands."""
    return isinstance(precision, jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset)


def _is_wider(x: Atom, dtype: jnp.dtype) -> bool:
    given = x.aval.dtype
    return jnp.issubdtype(given, jnp.floating) and given.itemsize > dtype.itemsize


def _cast(eqn: JaxprEqn, x: Atom, dtype: jnp.dtype) -> JaxprEqn:
    # Only the dtype changes: the type keeps its sharding, and in a shard_map the mesh axes over
    # which it varies.
    narrow = Var(x.aval.update(dtype=dtype))
    params = {"new_dtype": dtype, "weak_type": x.aval.weak_type, "sharding": None}
    return new_jaxpr_eqn(
        [x],
        [narrow],
        jax.lax.convert_element_type_p,
        params,
        set(),
        eqn.source_info,
        eqn.ctx,
    )
