"""Refs, and printing: equations that do something."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from jaxprtool import jaxcompat
from jaxprtool.formats.python.expressions import Assignment, Expression, Slot, Subscript, call
from jaxprtool.formats.python.rules.table import python_rules
from jaxprtool.ir.rules import rule
from jaxprtool.jaxcompat import DropVar, JaxprEqn


@rule(python_rules, "new_ref")
def _new_ref(eqn: JaxprEqn, value: Slot) -> Iterator[Expression]:
    yield call("jax.new_ref", value)
    options = {k: v for k, v in eqn.params.items() if v is not None}
    yield call("jax.new_ref", value, **options)


@rule(python_rules, "empty_ref")
def _empty_ref(eqn: JaxprEqn) -> Iterator[Expression]:
    yield call("jax.ref.empty_ref", eqn.params["ty"])


@rule(python_rules, "freeze", "free_ref")
def _freeze(eqn: JaxprEqn, ref: Slot) -> Iterator[Expression]:
    yield call(f"jax.ref.{eqn.primitive.name}", ref)


@rule(python_rules, "get")
def _get(eqn: JaxprEqn, ref: Slot, *rest: Slot) -> Iterator[Expression]:
    for key in _keys(eqn, rest):
        yield Subscript(ref, key)


@rule(python_rules, "swap")
def _swap(eqn: JaxprEqn, ref: Slot, value: Slot, *rest: Slot) -> Iterator[Expression]:
    for key in _keys(eqn, rest):
        if isinstance(eqn.outvars[0], DropVar):
            yield Assignment(Subscript(ref, key), value)
        yield call("jax.ref.swap", ref, _index(key), value)


@rule(python_rules, "addupdate")
def _addupdate(eqn: JaxprEqn, ref: Slot, value: Slot, *rest: Slot) -> Iterator[Expression]:
    for key in _keys(eqn, rest):
        yield call("jax.ref.addupdate", ref, _index(key), value)


def _keys(eqn: JaxprEqn, rest: tuple[Slot, ...]) -> Iterator[tuple[Any, ...]]:
    """What an equation reads or writes of a ref, as subscripts."""
    transforms = jax.tree.unflatten(eqn.params["tree"], rest)
    if not transforms:
        yield (...,)
    elif len(transforms) == 1 and isinstance(transforms[0], jaxcompat.NDIndexer):
        yield tuple(map(_subscript, transforms[0].indices))


def _subscript(index: Any) -> Any:
    """One dimension's subscript: a slice of fixed size from a fixed start, or what it is."""
    if not isinstance(index, jaxcompat.IndexSlice):
        return index
    if not isinstance(index.start, int):
        return call("jax.ds", index.start, index.size)
    stop = index.start + (index.size - 1) * index.stride + 1
    return slice(index.start, stop, None if index.stride == 1 else index.stride)


def _index(key: tuple[Any, ...]) -> Any:
    """A key as an argument."""
    if key == (...,):
        return ...
    return tuple(call("slice", k.start, k.stop, k.step) if isinstance(k, slice) else k for k in key)


# --- printing ---------------------------------------------------------------------------------


@rule(python_rules, "debug_print")
def _print(eqn: JaxprEqn, *values: Slot) -> Iterator[Expression]:
    p = eqn.params
    args, kwargs = jax.tree.unflatten(p["in_tree"], values)
    ordered = {"ordered": True} if p["ordered"] else {}
    yield call("jax.debug.print", p["fmt"], *args, **ordered, **kwargs)
    options = {k: p[k] for k in ("partitioned",) if p[k]}
    yield call("jax.debug.print", p["fmt"], *args, **ordered, **options, **kwargs)
