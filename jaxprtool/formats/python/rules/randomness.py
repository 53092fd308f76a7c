"""Random keys and bits, and what shards say to each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxprtool.formats.python.expressions import Proposal, Slot, call
from jaxprtool.formats.python.rules.arrays import ints
from jaxprtool.formats.python.rules.table import python_rules
from jaxprtool.formats.python.values import dtype_name
from jaxprtool.ir.rules import rule
from jaxprtool.jaxcompat import JaxprEqn


@rule(python_rules, "random_seed")
def _seed(eqn: JaxprEqn, seed: Slot) -> Iterator[Proposal]:
    yield call("jax.random.key", seed)
    yield call("jax.random.key", seed, impl=eqn.params["impl"].name)


@rule(python_rules, "random_bits")
def _bits(eqn: JaxprEqn, key: Slot) -> Iterator[Proposal]:
    shape, dtype = eqn.params["shape"], eqn.outvars[0].aval.dtype
    yield call("jax.random.bits", key, shape)
    yield call("jax.random.bits", key, shape, dtype_name(dtype))


@rule(python_rules, "random_split")
def _split(eqn: JaxprEqn, key: Slot) -> Iterator[Proposal]:
    shape = eqn.params["shape"]
    if shape == (2,):
        yield call("jax.random.split", key)
    yield call("jax.random.split", key, shape[0] if len(shape) == 1 else shape)


@rule(python_rules, "random_fold_in")
def _fold_in(eqn: JaxprEqn, key: Slot, data: Slot) -> Iterator[Proposal]:
    yield call("jax.random.fold_in", key, data)


@rule(python_rules, "random_wrap")
def _wrap(eqn: JaxprEqn, data: Slot) -> Iterator[Proposal]:
    yield call("jax.random.wrap_key_data", data)
    yield call("jax.random.wrap_key_data", data, impl=eqn.params["impl"].name)


@rule(python_rules, "random_unwrap")
def _unwrap(eqn: JaxprEqn, key: Slot) -> Iterator[Proposal]:
    yield call("jax.random.key_data", key)


@rule(python_rules, "random_clone")
def _clone(eqn: JaxprEqn, key: Slot) -> Iterator[Proposal]:
    yield call("jax.random.clone", key)


@rule(python_rules, "threefry2x32")
def _threefry(eqn: JaxprEqn, *words: Slot) -> Iterator[Proposal]:
    yield call("rng.threefry2x32_p.bind", *words)


@rule(python_rules, "rng_bit_generator")
def _bit_generator(eqn: JaxprEqn, key: Slot) -> Iterator[Proposal]:
    p = eqn.params
    shape, dtype = p["shape"], dtype_name(p["dtype"])
    yield call("lax.rng_bit_generator", key, shape, dtype)
    yield call("lax.rng_bit_generator", key, shape, dtype, p["algorithm"])


@rule(python_rules, "rng_uniform")
def _uniform(eqn: JaxprEqn, low: Slot, high: Slot) -> Iterator[Proposal]:
    yield call("lax.rng_uniform", low, high, eqn.params["shape"])


# --- collectives ------------------------------------------------------------------------------


@rule(python_rules, "psum", "psum_invariant", "pmax", "pmin")
def _all_reduce(eqn: JaxprEqn, *xs: Slot) -> Iterator[Proposal]:
    axes = _axes(eqn.params["axes"])
    name = eqn.primitive.name.removesuffix("_invariant")
    groups = eqn.params.get("axis_index_groups")
    more = {} if groups is None else {"axis_index_groups": groups}
    yield call(f"lax.{name}", xs[0] if len(xs) == 1 else xs, axes, **more)


@rule(python_rules, "pvary")
def _vary(eqn: JaxprEqn, *xs: Slot) -> Iterator[Proposal]:
    axes = _axes(eqn.params["axes"])
    yield call("lax.pcast", xs[0] if len(xs) == 1 else xs, axes, to="varying")


@rule(python_rules, "reshard", "sharding_constraint")
def _reshard(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    to = eqn.params.get("dst_sharding") or eqn.params.get("sharding")
    if eqn.primitive.name == "reshard":
        yield call("jax.sharding.reshard", x, to)
    yield call("lax.with_sharding_constraint", x, to)


@rule(python_rules, "ppermute")
def _permute(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    pairs = [ints(pair) for pair in eqn.params["perm"]]
    yield call("lax.ppermute", x, _axes(eqn.params["axis_name"]), pairs)


@rule(python_rules, "all_gather")
def _all_gather(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    p = eqn.params
    more: dict[str, Any] = {}
    if p["axis_index_groups"] is not None:
        more["axis_index_groups"] = p["axis_index_groups"]
    if p["all_gather_dimension"]:
        more["axis"] = p["all_gather_dimension"]
    if p["tiled"]:
        more["tiled"] = True
    yield call("lax.all_gather", x, _axes(p["axis_name"]), **more)


@rule(python_rules, "reduce_scatter")
def _reduce_scatter(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    p = eqn.params
    yield call(
        "lax.psum_scatter",
        x,
        _axes(p["axis_name"]),
        scatter_dimension=p["scatter_dimension"],
        axis_index_groups=p["axis_index_groups"],
        tiled=p["tiled"],
    )


@rule(python_rules, "all_to_all")
def _all_to_all(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    p = eqn.params
    more = {"tiled": True} if p["tiled"] else {}
    yield call(
        "lax.all_to_all", x, _axes(p["axis_name"]), p["split_axis"], p["concat_axis"], **more
    )


@rule(python_rules, "axis_index")
def _axis_index(eqn: JaxprEqn) -> Iterator[Proposal]:
    yield call("lax.axis_index", _axes(eqn.params["axis_name"]))


def _axes(names: Any) -> Any:
    """An axis name by itself, where a tuple holds only one."""
    return names[0] if isinstance(names, tuple | list) and len(names) == 1 else names
