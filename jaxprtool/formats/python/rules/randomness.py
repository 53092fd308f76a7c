"""Rules for random keys and bits, and for collectives."""

from __future__ import annotations

from collections.abc import Iterator

from jaxprtool.formats.python.expressions import Proposal, Slot, call
from jaxprtool.formats.python.rules.arrays import ints, one_or_all
from jaxprtool.formats.python.rules.table import options, python_rules
from jaxprtool.formats.python.values import dtype_name
from jaxprtool.ir.basics.rules import rule
from jaxprtool.jaxcompat import JaxprEqn

_KEY_FUNCTIONS = {"random_seed": "jax.random.key", "random_wrap": "jax.random.wrap_key_data"}


@rule(python_rules, *_KEY_FUNCTIONS)
def _key(eqn: JaxprEqn, data: Slot) -> Iterator[Proposal]:
    yield call(_KEY_FUNCTIONS[eqn.primitive.name], data)
    yield call(_KEY_FUNCTIONS[eqn.primitive.name], data, impl=eqn.params["impl"].name)


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
    yield call("jax.random.split", key, one_or_all(shape))


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
    name = eqn.primitive.name.removesuffix("_invariant")
    more = options(eqn.params, axis_index_groups=None)
    yield call(f"lax.{name}", one_or_all(xs), _axes(eqn.params["axes"]), **more)


@rule(python_rules, "pvary")
def _vary(eqn: JaxprEqn, *xs: Slot) -> Iterator[Proposal]:
    yield call("lax.pcast", one_or_all(xs), _axes(eqn.params["axes"]), to="varying")


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
    more = options(p, axis_index_groups=None)
    if p["all_gather_dimension"]:
        more["axis"] = p["all_gather_dimension"]
    more |= options(p, tiled=False)
    yield call("lax.all_gather", x, _axes(p["axis_name"]), **more)


@rule(python_rules, "reduce_scatter")
def _reduce_scatter(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    more = {k: eqn.params[k] for k in ("scatter_dimension", "axis_index_groups", "tiled")}
    yield call("lax.psum_scatter", x, _axes(eqn.params["axis_name"]), **more)


@rule(python_rules, "all_to_all")
def _all_to_all(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    p = eqn.params
    axes = _axes(p["axis_name"]), p["split_axis"], p["concat_axis"]
    yield call("lax.all_to_all", x, *axes, **options(p, tiled=False))


@rule(python_rules, "axis_index")
def _axis_index(eqn: JaxprEqn) -> Iterator[Proposal]:
    yield call("lax.axis_index", _axes(eqn.params["axis_name"]))


def _axes(names: object) -> object:
    """Return an axis name without its tuple if it is the only one."""
    return one_or_all(names) if isinstance(names, tuple | list) else names
