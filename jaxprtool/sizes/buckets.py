"""Varying sizes under `jit(shapes=…)`: arguments are padded to a bucket, and results cut.

Sizes are known outside of the compiled program, so padding and cutting is done in host memory
without compiling. Tracers and values on several devices are padded and cut by JAX, which compiles
this for each size.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import PyTreeDef

from jaxprtool import Program
from jaxprtool.errors import ArgumentsError, did_you_mean
from jaxprtool.extend import as_weak_as, is_extended, is_weak, strongly_typed, weakly_typed
from jaxprtool.extend.padding import Bounds, masked
from jaxprtool.extend.sizes import (
    MOST,
    Sizes,
    chosen_sizes,
    found_sizes,
    sizes_by_symbol,
    symbolic_sizes,
    value_of,
)
from jaxprtool.extend.tracing import (
    ParameterTypes,
    TypedValue,
    at_once,
    evaluated,
    hide_from_tracebacks,
)

hide_from_tracebacks(__file__)

#: The keyword argument of the compiled function with the sizes. It is the last one when sorted.
SIZES = "\U0010ffff sizes"

#: The maximum number of entries of each cache, `Buckets.calls` and `Buckets.cuts`.
MOST_CALLS = 4096


@dataclass(frozen=True, eq=False)
class Buckets:
    """The sizes to which arguments are padded, for some or all symbols in their types."""

    types: ParameterTypes
    sizes: Mapping[str, tuple[int, ...]]
    #: Equal for Buckets read from equal `shapes` and `types`. It may be unhashable.
    key: tuple[Any, ...]
    #: The padding of a call, by the types of its arguments.
    calls: dict[Hashable, Call] = field(default_factory=dict)
    #: The cuts of results, by their structure and the sizes of the call.
    cuts: dict[Hashable, Unpadding] = field(default_factory=dict)

    @classmethod
    def read(cls, fun: Callable, shapes: Mapping[str, int | Sequence[int]], types: Any) -> Buckets:
        """Return the buckets given to `jit`. Raises ArgumentsError for invalid ones."""
        if not isinstance(shapes, Mapping) or not shapes:
            raise ArgumentsError(
                f"shapes must be buckets by symbol, {{'n': (64, 128)}}, not {shapes!r}"
            )
        read = ParameterTypes.read(fun, types)
        known = sizes_by_symbol(read.leaves)
        name = read.name
        for symbol in shapes:
            if symbol not in known:
                say = (
                    f'declare the axes of size {symbol} with types="x=f32[{symbol},d]", or '
                    "annotate x with that type"
                )
                raise ArgumentsError(
                    f"no parameter of {name} has a type with the symbol '{symbol}'",
                    did_you_mean(symbol, known) or say,
                )
        sizes = {symbol: _buckets(symbol, shapes[symbol]) for symbol in shapes}
        return cls(read, sizes, (tuple(sizes.items()), types))

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.types.name

    def padded(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Call]:
        """Return the padded arguments of a call, and the `Call` for these argument types.

        Raises:
            ArgumentsError: If an argument does not have its type, or a size is beyond the buckets.
        """
        given = self.types.given(args, kwargs)
        leaves, tree = jax.tree.flatten(given)
        key = tree, tuple(map(_type_key, leaves))
        call = self.calls.get(key)
        if call is None:
            call = self._call(self.types.values(given))
            _keep(self.calls, key, call)
        if call.pads:
            for i, shape in call.pads:
                leaves[i] = _padded(leaves[i], shape)
            args, kwargs = self.types.put(args, kwargs, jax.tree.unflatten(tree, leaves))
        return tuple(args), dict(kwargs), call

    def _call(self, leaves: Sequence[TypedValue | None]) -> Call:
        """Return the padding of a call with these arguments."""
        values = [each for each in leaves if each is not None]
        sizes = self._sizes(values)
        bounds = {k: self._bucket(k, sizes[k], values) for k in sorted(self.sizes)}
        others = tuple((k, n) for k, n in sizes.items() if k not in bounds)
        known = CallSizes({k: np.int32(sizes[k]) for k in bounds}, tuple(bounds.items()), others)
        pads = [
            (i, shape)
            for i, each in enumerate(leaves)
            if each is not None and np.shape(each.value) != (shape := known.padded(each.type))
        ]
        return Call({k: sizes[k] for k in bounds}, known, pads)

    def cut(self, results: Any, call: Call) -> Any:
        """Return results without their padding."""
        leaves, tree = jax.tree.flatten(results)
        key = tree, tuple(call.sizes.values())
        cuts = self.cuts.get(key)
        if cuts is None:
            cuts = Unpadding.read(results, call.sizes)
            _keep(self.cuts, key, cuts)
        if not cuts.shapes:
            return results
        for i, shape in cuts.shapes:
            leaves[i] = _cut(leaves[i], shape)
        return jax.tree.unflatten(cuts.tree, leaves)

    def _sizes(self, values: Sequence[TypedValue]) -> Sizes:
        for each in values:
            each.check_dtype(self.name)
        avals = [each.aval for each in values]
        missing = sorted(self.sizes.keys() - sizes_by_symbol(avals).keys())
        if missing:
            raise ArgumentsError(
                f"no argument of the call of {self.name} has the symbol '{missing[0]}' in its type"
            )
        names, shapes = [v.path for v in values], [np.shape(v.value) for v in values]
        try:
            return found_sizes(self.name, list(zip(names, avals, strict=True)), shapes)
        except ArgumentsError as error:
            # For JAX a symbol is at least 1: solve for the size plus 1, so that the size may be 0.
            less = chosen_sizes(
                self.name, sizes_by_symbol(avals), {k: f"{k} - 1" for k in self.sizes}
            )
            moved = [a.update(shape=tuple(value_of(n, less) for n in a.shape)) for a in avals]
            try:
                sizes = found_sizes(self.name, list(zip(names, moved, strict=True)), shapes)
            except ArgumentsError:
                raise error from None
            return {k: n - 1 if k in self.sizes else n for k, n in sizes.items()}

    def _bucket(self, symbol: str, size: int, values: Sequence[TypedValue]) -> int:
        for bucket in self.sizes[symbol]:
            if size <= bucket:
                return bucket
        path = next(v.path for v in values if symbol in sizes_by_symbol([v.aval]))
        raise ArgumentsError(
            f"argument '{path}' of {self.name} has {symbol}={size}, but the largest bucket of "
            f"{symbol} is {self.sizes[symbol][-1]}"
        )

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PaddedCall:
        """Return the typed arguments of a padded call; the sizes are removed from `kwargs`."""
        sizes: CallSizes = kwargs.pop(SIZES)

        def types(values: list[TypedValue]) -> list[jax.ShapeDtypeStruct]:
            weak = [is_weak(jax.typeof(each.value)) for each in values]
            symbolic = [sizes.symbolic(each.type) for each in values]
            return [x.update(weak_type=flag) for x, flag in zip(symbolic, weak, strict=True)]

        return PaddedCall(*self.types.replaced(args, kwargs, types), sizes)

    def around(self, fun: Callable, jitted: Any) -> BucketedFunction:
        """Return the function that pads, calls `jitted` (the jitted `fun`), and cuts."""
        return BucketedFunction(fun, jitted, self)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["sizes"], meta_fields=["bounds", "others"]
)
@dataclass(frozen=True)
class CallSizes:
    """The sizes of a call, an argument of the function compiled for its buckets.

    Attributes:
        sizes: The size of each symbol with buckets.
        bounds: The bucket of each symbol, sorted by name.
        others: The sizes of other symbols.
    """

    sizes: Mapping[str, Any]
    bounds: tuple[tuple[str, int], ...]
    others: tuple[tuple[str, int], ...]

    def padded(self, given: jax.ShapeDtypeStruct) -> tuple[int, ...]:
        """Return the padded shape of an argument of this type."""
        shape = self.symbolic(given).shape
        return Bounds(dict(self.bounds)).shape(shape)

    def symbolic(self, given: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Return a type with symbols without buckets replaced by sizes."""
        shape = tuple(value_of(size, dict(self.others)) for size in given.shape)
        return jax.ShapeDtypeStruct(shape, given.dtype)


@dataclass(frozen=True)
class Call:
    """The sizes of a call, and the arguments that it pads.

    Attributes:
        sizes: The size of each symbol with buckets.
        known: The sizes as an argument of the compiled function.
        pads: For each padded argument, its position among the leaves of typed arguments, and the
            padded shape.
    """

    sizes: Mapping[str, int]
    known: CallSizes
    pads: Sequence[tuple[int, tuple[int, ...]]]


@dataclass(frozen=True)
class Unpadding:
    """The cuts of results: the positions and shapes of the leaves to cut, and the tree."""

    shapes: Sequence[tuple[int, tuple[int, ...]]]
    tree: PyTreeDef

    @classmethod
    def read(cls, results: Any, sizes: Mapping[str, int]) -> Unpadding:
        """Return the cuts of results for these sizes of symbols."""
        parts, tree = jax.tree.flatten(results, is_leaf=lambda each: isinstance(each, ToCut))
        shapes = [
            (i, tuple(value_of(n, sizes) for n in part.shape))
            for i, part in enumerate(parts)
            if isinstance(part, ToCut)
        ]
        return cls(shapes, tree)


@dataclass(frozen=True)
class PaddedCall:
    """A call of the compiled function during tracing.

    Attributes:
        args: The positional arguments, with typed ones replaced by their symbolic types.
        kwargs: The keyword arguments, likewise.
        sizes: The traced sizes.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sizes: CallSizes

    def results(self, program: Program, operands: Sequence[Any]) -> Any:
        """Return the results of a program for padded operands, with those to cut as `ToCut`."""
        with at_once():
            result = masked(program, dict(self.sizes.bounds))
        args, kwargs = jax.tree.unflatten(program.in_tree, operands)
        sizes = [self.sizes.sizes[symbol] for symbol, _ in self.sizes.bounds]
        leaves = jax.tree.leaves(((*args, *sizes), kwargs))
        outs = evaluated(result.jaxpr, leaves)[: len(program.out_avals)]
        results = [
            ToCut(out, tuple(aval.shape)) if symbolic_sizes([aval]) else out
            for out, aval in zip(outs, program.out_avals, strict=True)
        ]
        return jax.tree.unflatten(program.out_tree, results)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["shape"])
@dataclass(frozen=True)
class ToCut:
    """A padded result, and its shape as a function of sizes."""

    value: Any
    shape: tuple[Any, ...]


class BucketedFunction:
    """The result of `jit(shapes=…)`: pads, calls the function compiled for the bucket, and cuts."""

    def __init__(self, fun: Callable, jitted: Any, buckets: Buckets):
        self._jitted, self._buckets = jitted, buckets
        functools.update_wrapper(self, fun, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if jax.config.jax_disable_jit:
            return self._jitted(*args, **kwargs)
        args, kwargs, call = self._buckets.padded(args, kwargs)
        known = call.known
        if _is_guarded():
            with jax.transfer_guard_host_to_device("allow"):
                known = jax.device_put(known)
        results = self._jitted(*args, **kwargs, **{SIZES: known})
        return self._buckets.cut(results, call)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Return the result of `jax.jit(...).lower` for the program of the bucket."""
        args, kwargs, call = self._buckets.padded(args, kwargs)
        return self._jitted.lower(*args, **kwargs, **{SIZES: call.known})

    def __get__(self, instance: object, owner: object = None) -> Callable:
        return self if instance is None else functools.partial(self, instance)


# --- reading --------------------------------------------------------------------------------------


def _buckets(symbol: str, given: int | Sequence[int]) -> tuple[int, ...]:
    try:
        found = sorted(map(operator.index, (given,) if isinstance(given, int) else given))
    except TypeError:
        found = []
    if not found or found[0] < 1 or found[-1] > MOST:
        raise ArgumentsError(
            f"the buckets of {symbol} must be sizes from 1 to {MOST}, not {given!r}"
        )
    return tuple(found)


def _type_key(value: Any) -> Hashable:
    """Return a key for the type of an argument."""
    try:
        return value.shape, value.dtype
    except AttributeError:  # a Python scalar
        return np.shape(value), type(value)


def _keep(known: dict[Hashable, Any], key: Hashable, value: Any) -> None:
    """Add a value to a cache, which is cleared when it has `MOST_CALLS` entries."""
    if len(known) >= MOST_CALLS:
        known.clear()
    known[key] = value


# --- padding and cutting --------------------------------------------------------------------------


def _padded(value: Any, shape: tuple[int, ...]) -> Any:
    """Return an array padded with zeros at the end, or its type."""
    old = np.shape(value)
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, value.dtype, weak_type=is_weak(value))
    if not _is_on_host(value):
        return _padded_by_jax(value, shape)
    new = np.zeros(shape, value.dtype)
    rows = tuple(map(slice, old))
    if isinstance(value, np.ndarray):
        new[rows] = value
        return new
    # JAX places uncommitted arrays like NumPy arrays, unless a transfer guard forbids it.
    moved = value.committed or is_weak(value.aval) or _is_guarded()
    with jax.transfer_guard_device_to_host("allow"), jax.transfer_guard_host_to_device("allow"):
        new[rows] = value
        return _placed_like(value, new) if moved else new


def _padded_by_jax(value: Any, shape: tuple[int, ...]) -> Any:
    if is_extended(value.dtype):
        data = jax.random.key_data(value)
        padded = _padded_by_jax(data, (*shape, *data.shape[len(shape) :]))
        return jax.random.wrap_key_data(padded, impl=value.dtype)
    widths = [(0, new - old, 0) for old, new in zip(value.shape, shape, strict=True)]
    # JAX's transpose of a pad or a slice would return a strongly typed gradient.
    padded = lax.pad(strongly_typed(value), jnp.zeros((), value.dtype), widths)
    return as_weak_as(padded, jax.typeof(value))


def _cut(value: Any, shape: tuple[int, ...]) -> Any:
    if value.shape == shape:
        return value
    if not _is_on_host(value):
        cut = lax.slice(strongly_typed(value), (0,) * len(shape), shape)
        return as_weak_as(cut, jax.typeof(value))
    with jax.transfer_guard_device_to_host("allow"), jax.transfer_guard_host_to_device("allow"):
        return _placed_like(value, np.asarray(value)[tuple(map(slice, shape))])


def _is_on_host(value: Any) -> bool:
    """Return True if an array's elements can be read without a compiled program."""
    if isinstance(value, np.ndarray):
        return True
    traced = isinstance(value, jax.core.Tracer) or is_extended(value.dtype)
    return not traced and len(value.devices()) == 1


def _is_guarded() -> bool:
    """Return True if the transfer guard forbids NumPy arrays as arguments."""
    return jax.config.jax_transfer_guard_host_to_device not in (None, "allow")


def _placed_like(value: Any, array: np.ndarray) -> Any:
    """Return an array with the placement, weak type and kind (JAX or NumPy) of another one."""
    if isinstance(value, np.ndarray):
        return array
    placed = jax.device_put(array, value.sharding if value.committed else None)
    return weakly_typed(placed) if is_weak(value.aval) else placed
