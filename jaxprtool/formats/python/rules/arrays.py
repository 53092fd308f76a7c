"""Rules for array creation, shapes, slices and indexing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.formats.python.expressions import (
    Attribute,
    CallExpression,
    Proposal,
    Slot,
    Subscript,
    call,
    method,
)
from jaxprtool.formats.python.rules.table import options, python_rules
from jaxprtool.formats.python.values import dtype_name
from jaxprtool.ir.basics.rules import rule
from jaxprtool.jaxcompat import JaxprEqn

_ALL = slice(None)


def ints(values: Any) -> tuple[Any, ...]:
    """Return a parameter's numbers as Python ints, since some are NumPy's; symbols stay."""
    return tuple(n if jaxcompat.is_symbolic_dimension(n) else int(n) for n in values)


def one_or_all(values: Sequence[Any]) -> Any:
    """Return several axes or operands as JAX takes them: a single one without a tuple."""
    return values[0] if len(values) == 1 else values


def placed(
    made: CallExpression, params: Mapping[str, Any], name: str = "sharding"
) -> Iterator[CallExpression]:
    """Yield a call as it is, and with the equation's `out_sharding`, if any.

    The sharding may be only the spec if the rest follows from the current mesh.
    """
    yield made
    sharding = params.get(name)
    for out in (getattr(sharding, "spec", None), sharding):
        if out is not None:
            yield replace(made, kwargs={**made.kwargs, "out_sharding": out})


@rule(python_rules, "broadcast_in_dim")
def _broadcast_in_dim(eqn: JaxprEqn, x: Slot, *sizes: Slot) -> Iterator[Proposal]:
    shape, dims = eqn.params["shape"], ints(eqn.params["broadcast_dimensions"])
    old = eqn.invars[0].aval.shape
    if not old:
        dtype = dtype_name(eqn.outvars[0].aval.dtype)
        for name in ("zeros", "ones"):
            yield call(f"jnp.{name}", shape)
            yield call(f"jnp.{name}", shape, dtype)
        yield call("jnp.full", shape, x)
        yield call("jnp.full", shape, x, dtype)
    if len(dims) == len(old) and all(shape[d] == size for d, size in zip(dims, old, strict=True)):
        new = [d for d in range(len(shape)) if d not in dims]
        if dims and new and all(shape[d] == 1 for d in new):
            key = tuple(None if d in new else _ALL for d in range(len(shape)))
            if len(shape) <= 4:
                yield Subscript(x, _with_dots(key))
            yield call("jnp.expand_dims", x, one_or_all(tuple(new)))
    yield call("jnp.broadcast_to", x, shape)
    yield call("lax.broadcast", x, shape[: len(shape) - len(old)])
    yield from placed(call("lax.broadcast_in_dim", x, shape, dims), eqn.params)


def _with_dots(key: tuple[object, ...]) -> tuple[object, ...]:
    """Return `[:, :, None]` unchanged, and `[None, :, :]` without the redundant slices."""
    while len(key) > 1 and key[-1] == _ALL:
        key = key[:-1]
    return key


@rule(python_rules, "reshape")
def _reshape(eqn: JaxprEqn, x: Slot, *sizes: Slot) -> Iterator[Proposal]:
    shape = eqn.params["new_sizes"]
    if eqn.invars[0].aval.shape:  # a scalar may be a Python number
        yield method(x, "reshape", *shape) if shape else method(x, "reshape", ())
    yield call("jnp.reshape", x, shape)
    yield from placed(call("lax.reshape", x, shape), eqn.params)
    yield call("lax.reshape", x, shape, eqn.params["dimensions"])


@rule(python_rules, "transpose")
def _transpose(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    order = ints(eqn.params["permutation"])
    rank = len(order)
    if order == tuple(reversed(range(rank))):
        yield Attribute(x, "T")
    moved = [i for i, axis in enumerate(order) if axis != i]
    if moved == [rank - 2, rank - 1]:
        yield Attribute(x, "mT")
    if len(moved) == 2:
        yield method(x, "swapaxes", *moved)
    yield method(x, "transpose", *order)
    yield call("lax.transpose", x, order)


@rule(python_rules, "squeeze")
def _squeeze(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    axes = ints(eqn.params["dimensions"])
    yield method(x, "squeeze", one_or_all(axes))
    yield call("lax.squeeze", x, axes)


@rule(python_rules, "slice")
def _slice(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    starts, limits = ints(eqn.params["start_indices"]), ints(eqn.params["limit_indices"])
    steps = eqn.params["strides"]
    key = []
    for i, size in enumerate(eqn.invars[0].aval.shape):
        start = starts[i] or None
        stop = None if limits[i] == size else limits[i]
        key.append(slice(start, stop, None if steps is None or steps[i] == 1 else int(steps[i])))
    if key:
        yield Subscript(x, _with_dots(tuple(key)))
    yield call("lax.slice", x, starts, limits, *([] if steps is None else [ints(steps)]))


@rule(python_rules, "rev")
def _rev(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    axes = ints(eqn.params["dimensions"])
    key = tuple(
        slice(None, None, -1) if i in axes else _ALL for i in range(len(eqn.invars[0].aval.shape))
    )
    if key:
        yield Subscript(x, _with_dots(key))
    yield call("lax.rev", x, axes)


@rule(python_rules, "concatenate")
def _concatenate(eqn: JaxprEqn, *parts: Slot) -> Iterator[Proposal]:
    axis = eqn.params["dimension"]
    yield call("jnp.concatenate", list(parts), **({"axis": axis} if axis else {}))
    yield call("lax.concatenate", list(parts), axis)


@rule(python_rules, "stack", "unstack")
def _stack(eqn: JaxprEqn, *parts: Slot) -> Iterator[Proposal]:
    name, axis = eqn.primitive.name, eqn.params["axis"]
    what = list(parts) if name == "stack" else parts[0]
    yield call(f"jnp.{name}", what, axis=axis)
    yield call(f"lax.{name}", what, axis)


@rule(python_rules, "split")
def _split(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    sizes, axis = ints(eqn.params["sizes"]), eqn.params["axis"]
    if len(set(sizes)) == 1:
        yield call("jnp.split", x, len(sizes), **({"axis": axis} if axis else {}))
    yield call("lax.split", x, sizes, axis)


@rule(python_rules, "tile")
def _tile(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    yield call("jnp.tile", x, ints(eqn.params["reps"]))
    yield call("lax.tile", x, ints(eqn.params["reps"]))


@rule(python_rules, "pad")
def _pad(eqn: JaxprEqn, x: Slot, value: Slot) -> Iterator[Proposal]:
    yield call("lax.pad", x, value, tuple(map(ints, eqn.params["padding_config"])))


@rule(python_rules, "iota")
def _iota(eqn: JaxprEqn, *sizes: Slot) -> Iterator[Proposal]:
    shape, dtype = eqn.params["shape"], dtype_name(eqn.params["dtype"])
    dimension = eqn.params["dimension"]
    if len(shape) == 1:
        yield call("jnp.arange", shape[0])
        yield call("jnp.arange", shape[0], dtype=dtype)
        yield call("lax.iota", dtype, shape[0])
    yield from placed(call("lax.broadcasted_iota", dtype, shape, dimension), eqn.params)


@rule(python_rules, "dim_as_value")
def _dim_as_value(eqn: JaxprEqn) -> Iterator[Proposal]:
    yield call("jnp.asarray", eqn.params["dim"])


@rule(python_rules, "empty", "empty2")
def _empty(eqn: JaxprEqn) -> Iterator[Proposal]:
    shape, dtype = eqn.outvars[0].aval.shape, dtype_name(eqn.params["dtype"])
    # The parameter has the user's form: a class, a dtype or a name.
    given = eqn.params["dtype"]
    exact = given if isinstance(given, str) else call("jnp.dtype", jnp.dtype(given).name)
    for each in (dtype, exact):
        yield from placed(call("jnp.empty", shape, each), eqn.params, "out_sharding")
        yield from placed(call("lax.empty", shape, each), eqn.params, "out_sharding")


@rule(python_rules, "device_put")
def _device_put(eqn: JaxprEqn, *xs: Slot) -> Iterator[Proposal]:
    if len(xs) == 1:
        yield call("jax.device_put", xs[0], *[d for d in eqn.params["devices"] if d is not None])
        yield call("jnp.array", xs[0])
    yield call("jax.device_put", list(xs), list(eqn.params["devices"]))


# --- dynamic slices and indices ---------------------------------------------------------------


@rule(python_rules, "dynamic_slice", "dynamic_update_slice")
def _dynamic_slice(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    if eqn.primitive.name == "dynamic_slice":
        sizes = ints(eqn.params["slice_sizes"])
        made = call("lax.dynamic_slice", operands[0], operands[1:], sizes)
    else:
        made = call("lax.dynamic_update_slice", *operands[:2], operands[2:])
    yield made
    # Negative starts are not normalized by further equations.
    yield replace(made, kwargs={"allow_negative_indices": False})


#: The lax names of the modes for out-of-bounds indices.
_MODES = {"FILL_OR_DROP": "fill", "CLIP": "clip", "PROMISE_IN_BOUNDS": "promise_in_bounds"}


def _index_options(eqn: JaxprEqn) -> dict[str, object]:
    """Return the keyword arguments common to gather and scatter."""
    mode = eqn.params["mode"]
    known = {"mode": _MODES.get(getattr(mode, "name", ""), mode)}
    return known | options(eqn.params, indices_are_sorted=False, unique_indices=False)


@rule(python_rules, "gather")
def _gather(eqn: JaxprEqn, x: Slot, indices: Slot) -> Iterator[Proposal]:
    p, more = eqn.params, _index_options(eqn)
    sizes = ints(p["slice_sizes"])
    yield call("lax.gather", x, indices, p["dimension_numbers"], sizes, **more)
    more["fill_value"] = p["fill_value"]
    yield call("lax.gather", x, indices, p["dimension_numbers"], sizes, **more)


@rule(
    python_rules,
    "scatter",
    "scatter-add",
    "scatter-mul",
    "scatter-min",
    "scatter-max",
    "scatter-sub",
)
def _scatter(eqn: JaxprEqn, x: Slot, indices: Slot, updates: Slot) -> Iterator[Proposal]:
    name = eqn.primitive.name.replace("-", "_")
    numbers = eqn.params["dimension_numbers"]
    yield call(f"lax.{name}", x, indices, updates, numbers, **_index_options(eqn))
