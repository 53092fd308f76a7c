"""Rules for equations with effects, for random keys and bits, and for collectives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from jaxprtool import jaxcompat
from jaxprtool.formats.python.expressions import (
    Assignment,
    MultiResult,
    Name,
    Proposal,
    PythonFunction,
    Slot,
    Subscript,
    call,
    dtype_name,
)
from jaxprtool.formats.python.layout import identifier
from jaxprtool.formats.python.rules.arrays import ints, one_or_all
from jaxprtool.formats.python.rules.calls import local_call
from jaxprtool.formats.python.rules.table import nondefault_params, python_rules, unsupported
from jaxprtool.ir.custom_rules import BATCHING_HINT, HINT, Stub, batching_rule, callback_name
from jaxprtool.ir.rules import rule
from jaxprtool.ir.trees import Tree, describe
from jaxprtool.jaxcompat import DropVar, JaxprEqn
from jaxprtool.primitives import VARIABLE

# --- effects --------------------------------------------------------------------------------------
# Rules for equations with effects: refs, printing, callbacks, and sown values.


@rule(python_rules, "empty_ref")
def _empty_ref(eqn: JaxprEqn) -> Iterator[Proposal]:
    yield call("jax.ref.empty_ref", eqn.params["ty"])


@rule(python_rules, "get")
def _get(eqn: JaxprEqn, ref: Slot, *rest: Slot) -> Iterator[Proposal]:
    for key in _keys(eqn, rest):
        yield Subscript(ref, key)


@rule(python_rules, "swap")
def _swap(eqn: JaxprEqn, ref: Slot, value: Slot, *rest: Slot) -> Iterator[Proposal]:
    for key in _keys(eqn, rest):
        if isinstance(eqn.outvars[0], DropVar):
            yield Assignment(Subscript(ref, key), value)
        yield call("jax.ref.swap", ref, _index(key), value)


@rule(python_rules, "addupdate")
def _addupdate(eqn: JaxprEqn, ref: Slot, value: Slot, *rest: Slot) -> Iterator[Proposal]:
    for key in _keys(eqn, rest):
        yield call("jax.ref.addupdate", ref, _index(key), value)


def _keys(eqn: JaxprEqn, rest: tuple[Slot, ...]) -> Iterator[tuple[object, ...]]:
    """Yield the subscripts of a ref that an equation reads or writes."""
    transforms = jax.tree.unflatten(eqn.params["tree"], rest)
    if not transforms:
        yield (...,)
    elif len(transforms) == 1 and isinstance(transforms[0], jaxcompat.NDIndexer):
        yield tuple(map(_subscript, transforms[0].indices))


def _subscript(index: Any) -> object:
    """Return one dimension's subscript: a slice if its start and size are static, else as it is."""
    if not isinstance(index, jaxcompat.IndexSlice):
        return index
    if not isinstance(index.start, int):
        return call("jax.ds", index.start, index.size)
    stop = index.start + (index.size - 1) * index.stride + 1
    return slice(index.start, stop, None if index.stride == 1 else index.stride)


def _index(key: tuple[object, ...]) -> object:
    """Return a key as an argument."""
    return ... if key == (...,) else key


# --- printing ---------------------------------------------------------------------------------


@rule(python_rules, "debug_print")
def _print(eqn: JaxprEqn, *values: Slot) -> Iterator[Proposal]:
    p = eqn.params
    args, kwargs = jax.tree.unflatten(p["in_tree"], values)
    more = nondefault_params(p, ordered=False, partitioned=False)
    yield call("jax.debug.print", p["fmt"], *args, **more, **kwargs)


# --- callbacks --------------------------------------------------------------------------------

# Missing Python functions are replaced by functions that raise.


@rule(python_rules, "pure_callback")
def _pure_callback(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    more = nondefault_params(eqn.params, sharding=None, vmap_method=None)
    yield _with_results("jax.pure_callback", eqn, operands, more)


@rule(python_rules, "io_callback")
def _io_callback(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    more = nondefault_params(eqn.params, sharding=None, ordered=False)
    yield _with_results("io_callback", eqn, operands, more)


@rule(python_rules, "debug_callback")
def _debug_callback(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    more = nondefault_params(eqn.params, partitioned=False)
    if eqn.params["effect"] == jaxcompat.DEBUG_EFFECTS["OrderedDebugEffect"]:
        more["ordered"] = True
    yield MultiResult(call("jax.debug.callback", _stub(eqn), *operands, **more), None)


def _with_results(
    path: str, eqn: JaxprEqn, operands: tuple[Slot, ...], more: dict[str, object]
) -> MultiResult:
    types = tuple(
        call("jax.ShapeDtypeStruct", v.aval.shape, dtype_name(v.aval.dtype)) for v in eqn.outvars
    )
    return MultiResult(call(path, _stub(eqn), types, *operands, **more), tuple(range(len(types))))


@rule(python_rules, "custom_vmap_call")
def _custom_vmap(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    stub, body = eqn.params["rule"], eqn.params["call"]
    if not isinstance(stub, Stub):
        error = unsupported(eqn, f"it holds {batching_rule(eqn)}")
        error.hint = BATCHING_HINT
        raise error
    yield local_call(
        eqn,
        body,
        operands,
        decorators=(Name("jax.custom_batching.custom_vmap"),),
        rules=(("def_vmap", (_raising(stub),), {}),),
        kept=True,
        key=(jaxcompat.open_jaxpr(body), stub),
    )


def _stub(eqn: JaxprEqn) -> PythonFunction:
    """Return the stub for an equation's callback. Raises UnsupportedError."""
    stub = eqn.params["callback"]
    if not isinstance(stub, Stub):
        error = unsupported(eqn, f"it calls a Python function ({callback_name(stub)})")
        error.hint = HINT
        raise error
    return _raising(stub)


def _raising(stub: Stub) -> PythonFunction:
    return PythonFunction(
        None,
        identifier(stub.name.rpartition(".")[2]),
        (),
        None,
        ("*operands",),
        kept=True,
        renamed=False,
        key=("stub", stub.name),
        raises=call("RuntimeError", stub.message),
    )


# --- sown values ------------------------------------------------------------------------------


@rule(python_rules, "sow")
def _sow(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    p = eqn.params
    if unknown := _unknown(describe(p["tree"])):
        raise unsupported(eqn, f"its value has a node of type {unknown}")
    count = p["tree"].num_leaves
    value, key = jax.tree.unflatten(p["tree"], operands[:count]), operands[count:]
    if (p["tag"], p["mode"], key) == (VARIABLE, "strict", ()):
        sown = call("jaxprtool.variable", value, name=p["name"])
    else:
        more: dict[str, object] = {} if p["mode"] == "strict" else {"mode": p["mode"]}
        more |= {"key": key[0] if len(key) == 1 else key} if key else {}
        sown = call("jaxprtool.sow", value, tag=p["tag"], name=p["name"], **more)
    yield sown
    yield call("jax.tree.leaves", sown)


def _unknown(tree: Tree) -> str | None:
    """Return the type of a node in a structure that is not a Python container, or None."""
    if tree.kind in ("custom", "OrderedDict"):
        return tree.type_name or tree.kind
    return next(filter(None, map(_unknown, tree.children)), None)


# --- randomness -----------------------------------------------------------------------------------
# Rules for random keys and bits, and for collectives.

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
    more = nondefault_params(eqn.params, axis_index_groups=None)
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
    more = nondefault_params(p, axis_index_groups=None)
    if p["all_gather_dimension"]:
        more["axis"] = p["all_gather_dimension"]
    more |= nondefault_params(p, tiled=False)
    yield call("lax.all_gather", x, _axes(p["axis_name"]), **more)


@rule(python_rules, "reduce_scatter")
def _reduce_scatter(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    more = {k: eqn.params[k] for k in ("scatter_dimension", "axis_index_groups", "tiled")}
    yield call("lax.psum_scatter", x, _axes(eqn.params["axis_name"]), **more)


@rule(python_rules, "all_to_all")
def _all_to_all(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    p = eqn.params
    axes = _axes(p["axis_name"]), p["split_axis"], p["concat_axis"]
    yield call("lax.all_to_all", x, *axes, **nondefault_params(p, tiled=False))


@rule(python_rules, "axis_index")
def _axis_index(eqn: JaxprEqn) -> Iterator[Proposal]:
    yield call("lax.axis_index", _axes(eqn.params["axis_name"]))


def _axes(names: object) -> object:
    """Return an axis name without its tuple if it is the only one."""
    return one_or_all(names) if isinstance(names, tuple | list) else names
