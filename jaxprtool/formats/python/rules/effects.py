"""Rules for equations with effects: refs, printing, callbacks, and sown values."""

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
)
from jaxprtool.formats.python.naming import identifier
from jaxprtool.formats.python.rules.calls import local_call
from jaxprtool.formats.python.rules.table import options, python_rules, unsupported
from jaxprtool.formats.python.values import dtype_name
from jaxprtool.ir.basics.rules import rule
from jaxprtool.ir.programs.trees import Tree, describe
from jaxprtool.ir.rewriting.callbacks import BATCHING_HINT, HINT, Stub, batching_rule, callback_name
from jaxprtool.jaxcompat import DropVar, JaxprEqn
from jaxprtool.primitives import VARIABLE


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
    more = options(p, ordered=False, partitioned=False)
    yield call("jax.debug.print", p["fmt"], *args, **more, **kwargs)


# --- callbacks --------------------------------------------------------------------------------

# Missing Python functions are replaced by functions that raise.


@rule(python_rules, "pure_callback")
def _pure_callback(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    more = options(eqn.params, sharding=None, vmap_method=None)
    yield _with_results("jax.pure_callback", eqn, operands, more)


@rule(python_rules, "io_callback")
def _io_callback(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    more = options(eqn.params, sharding=None, ordered=False)
    yield _with_results("io_callback", eqn, operands, more)


@rule(python_rules, "debug_callback")
def _debug_callback(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    more = options(eqn.params, partitioned=False)
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
