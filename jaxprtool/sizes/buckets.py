"""Varying sizes under `jit(shapes=…)`: arguments are fitted and padded to a bucket, results cut.

Sizes are known outside of the compiled program, so padding and cutting is done in host memory
without compiling. Tracers and values on several devices are padded and cut by JAX, which compiles
this for each size.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.tree_util import PyTreeDef

from jaxprtool import Program, Ragged
from jaxprtool.errors import ArgumentsError, StructureError, did_you_mean
from jaxprtool.extend import (
    AbstractRef,
    Aval,
    as_weak_as,
    contents,
    is_extended,
    is_ref,
    is_weak,
    strongly_typed,
    type_of,
    weakly_typed,
)
from jaxprtool.extend.programs import (
    Mismatch,
    ParameterTypes,
    Static,
    StaticLeaf,
    TypedValue,
    at_once,
    evaluated,
    filled,
    hide_from_tracebacks,
    leaf_paths,
    matched_leaves,
    structure,
)
from jaxprtool.extend.sizes import (
    MOST,
    Bounds,
    LengthsBound,
    SizeBound,
    Sizes,
    chosen_sizes,
    found_sizes,
    masked,
    ragged_parts,
    sizes_by_symbol,
    symbolic_sizes,
    value_of,
    written_lengths,
)

# --- buckets --------------------------------------------------------------------------------------
# Varying sizes under `jit(shapes=…)`: arguments are padded to a bucket, and results cut.

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
    calls: dict[Hashable, CallPadding] = field(default_factory=dict)
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
        symbols = sizes_by_symbol(read.leaves)
        name = read.name
        for symbol in shapes:
            if symbol not in symbols:
                say = (
                    f'declare the axes of size {symbol} with types="x=f32[{symbol},d]", or '
                    "annotate x with that type"
                )
                raise ArgumentsError(
                    f"no parameter of {name} has a type with the symbol '{symbol}'",
                    did_you_mean(symbol, symbols) or say,
                )
        sizes = {symbol: _buckets(symbol, shapes[symbol]) for symbol in shapes}
        return cls(read, sizes, (tuple(sizes.items()), types))

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.types.name

    def padded(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], CallPadding]:
        """Return the padded arguments of a call, and the `CallPadding` for these argument types.

        Raises:
            ArgumentsError: If an argument does not have its type, or a size is beyond the buckets.
        """
        by_name = self.types.given(args, kwargs)
        leaves, tree = jax.tree.flatten(by_name)
        key = tree, tuple(map(_type_key, leaves))
        call = self.calls.get(key)
        if call is None:
            call = self._call(self.types.values(by_name))
            _keep(self.calls, key, call)
        if call.pads:
            for i, shape in call.pads:
                leaves[i] = _padded(leaves[i], shape)
            args, kwargs = self.types.put(args, kwargs, jax.tree.unflatten(tree, leaves))
        return tuple(args), dict(kwargs), call

    def _call(self, leaves: Sequence[TypedValue | None]) -> CallPadding:
        """Return the padding of a call with these arguments."""
        values = [leaf for leaf in leaves if leaf is not None]
        sizes = self._sizes(values)
        bounds = {k: self._bucket(k, sizes[k], values) for k in sorted(self.sizes)}
        others = tuple((k, n) for k, n in sizes.items() if k not in bounds)
        call_sizes = CallSizes(
            {k: np.int32(sizes[k]) for k in bounds}, tuple(bounds.items()), others
        )
        pads = [
            (i, shape)
            for i, leaf in enumerate(leaves)
            if leaf is not None and np.shape(leaf.value) != (shape := call_sizes.padded(leaf.type))
        ]
        return CallPadding({k: sizes[k] for k in bounds}, call_sizes, pads)

    def cut(self, results: Any, call: CallPadding) -> Any:
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
        for value in values:
            value.check_dtype(self.name)
        avals = [v.aval for v in values]
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
            weak = [is_weak(jax.typeof(v.value)) for v in values]
            symbolic = [sizes.symbolic(v.type) for v in values]
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

    def padded(self, arg_type: jax.ShapeDtypeStruct) -> tuple[int, ...]:
        """Return the padded shape of an argument of this type."""
        shape = self.symbolic(arg_type).shape
        return Bounds(dict(self.bounds)).shape(shape)

    def symbolic(self, arg_type: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Return a type with symbols without buckets replaced by sizes."""
        shape = tuple(value_of(size, dict(self.others)) for size in arg_type.shape)
        return jax.ShapeDtypeStruct(shape, arg_type.dtype)


@dataclass(frozen=True)
class CallPadding:
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
        parts, tree = jax.tree.flatten(results, is_leaf=lambda leaf: isinstance(leaf, ToCut))
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
        call_sizes = call.known
        if _is_guarded():
            with jax.transfer_guard_host_to_device("allow"):
                call_sizes = jax.device_put(call_sizes)
        results = self._jitted(*args, **kwargs, **{SIZES: call_sizes})
        return self._buckets.cut(results, call)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Return the result of `jax.jit(...).lower` for the program of the bucket."""
        args, kwargs, call = self._buckets.padded(args, kwargs)
        return self._jitted.lower(*args, **kwargs, **{SIZES: call.known})

    def __get__(self, instance: object, owner: object = None) -> Callable:
        return self if instance is None else functools.partial(self, instance)


# --- reading --------------------------------------------------------------------------------------


def _buckets(symbol: str, sizes: int | Sequence[int]) -> tuple[int, ...]:
    try:
        buckets = sorted(map(operator.index, (sizes,) if isinstance(sizes, int) else sizes))
    except TypeError:
        buckets = []
    if not buckets or buckets[0] < 1 or buckets[-1] > MOST:
        raise ArgumentsError(
            f"the buckets of {symbol} must be sizes from 1 to {MOST}, not {sizes!r}"
        )
    return tuple(buckets)


def _type_key(value: Any) -> Hashable:
    """Return a key for the type of an argument."""
    try:
        return value.shape, value.dtype
    except AttributeError:  # a Python scalar
        return np.shape(value), type(value)


def _keep(cache: dict[Hashable, Any], key: Hashable, value: Any) -> None:
    """Add a value to a cache, which is cleared when it has `MOST_CALLS` entries."""
    if len(cache) >= MOST_CALLS:
        cache.clear()
    cache[key] = value


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


# --- fitting --------------------------------------------------------------------------------------
# Fitting of call arguments to a program's structure, types and symbols.


def converted_arguments(
    program: Program, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[object, ...]:
    """Return the flat arguments of a call, each converted to the program's type.

    A Python scalar is converted to an array of that type. A flat dict of arrays, as read from a
    file, becomes the pytree whose paths are its names, such as `first/w`. If the program takes the
    rows of all examples as one array, a `Ragged` is split, and so is a dict of `values` and
    `lengths`. The lengths, which may be a list of numbers, are passed to their own argument.

    Args:
        program: The program. Its symbols get their sizes from the arguments.
        args: The positional arguments.
        kwargs: The keyword arguments.

    Raises:
        ArgumentsError: If the arguments have another structure, or one has another type.
    """
    has_static = any(isinstance(arg, Static) for arg in (*args, *kwargs.values()))
    args, kwargs = jax.tree.map(_as_held, _nested(program, args, kwargs))
    try:
        leaves = program.matched(args, kwargs).leaves
    except StructureError as error:
        hint = "a traced program has no static arguments" if has_static else None
        raise StructureError(error.message, hint) from None
    avals = program.in_avals
    if program.symbols:
        avals = program.at([getattr(leaf, "shape", ()) for leaf in leaves]).in_avals
    triples = zip(program.arg_names, leaves, avals, strict=True)
    return tuple(_fitted_leaf(program, *triple) for triple in triples)


def _as_held(leaf: object) -> object:
    return StaticLeaf(leaf.value) if isinstance(leaf, Static) else leaf


def _nested(
    program: Program, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the arguments, with each Ragged split and flat dicts converted to pytrees."""
    wanted, keywords = filled(program.in_tree, range(len(program.in_avals)))
    by_name = {_root(program, want): want for want in wanted if jax.tree.leaves(want)} | keywords
    ragged = _RaggedArguments(program)
    args = tuple(map(ragged.rows, args, wanted)) + args[len(wanted) :]
    kwargs = {name: ragged.rows(arg, by_name.get(name)) for name, arg in kwargs.items()}
    args, kwargs = ragged.with_lengths(args, kwargs, wanted)
    pairs = itertools.zip_longest(args, wanted[: len(args)])
    return (
        tuple(_from_paths(program, arg, want) for arg, want in pairs),
        {name: _from_paths(program, arg, by_name.get(name)) for name, arg in kwargs.items()},
    )


def _root(program: Program, wanted: Any) -> str:
    """Return the name of the argument whose leaves have these flat positions."""
    return re.split(r"[.\[]", program.arg_names[jax.tree.leaves(wanted)[0]])[0]


class _RaggedArguments:
    """Splits each Ragged in the arguments into rows and lengths.

    Attributes:
        found: The lengths found so far, by the name of their argument.
    """

    def __init__(self, program: Program):
        self._program = program
        self._lengths = {
            name: bound for name, bound in program.bounds if isinstance(bound, LengthsBound)
        }
        self.found: dict[str, Any] = {}

    def rows(self, arg: Any, wanted: Any) -> Any:
        """Return an argument with each Ragged replaced by its rows.

        Args:
            arg: The argument.
            wanted: The pytree that the program takes, with the flat position of each leaf.

        Raises:
            ArgumentsError: If no argument takes the lengths, or another Ragged with the same
                lengths argument has different lengths.
        """
        if isinstance(wanted, int) and (parts := ragged_parts(arg)):
            values = self._rows(*parts, wanted)
            left_over = isinstance(arg, Ragged) and not arg.full
            return values[: int(np.asarray(arg.lengths).sum())] if left_over else values
        if isinstance(wanted, int) and self._program.arg_names[wanted] in self._lengths:
            return written_lengths(arg)
        if type(arg) is dict and type(wanted) is dict:
            return {name: self.rows(part, wanted.get(name)) for name, part in arg.items()}
        if type(arg) in (list, tuple) and type(wanted) is type(arg) and len(wanted) == len(arg):
            return type(arg)(map(self.rows, arg, wanted))
        return arg

    def _rows(self, values: Any, lengths: Any, position: int) -> Any:
        name, aval = self._program.arguments[position]
        takes = [
            argument for argument, bound in self._lengths.items() if (bound.rows,) == aval.shape[:1]
        ]
        if len(takes) != 1:
            which = (
                f"{' and '.join(takes)} may be its lengths" if takes else "has no lengths for it"
            )
            raise ArgumentsError(
                f"argument '{name}' has values and lengths, but {self._program.name} takes "
                f"{type_of(aval)}, and {which}",
                "pass both: load('batch.npz')['values']"
                if takes
                else "the pass ragged(axis='n', lanes=…) makes a program that takes lengths",
            )
        if not np.array_equal(self.found.setdefault(takes[0], lengths), lengths):
            raise ArgumentsError(
                f"the lengths of argument '{name}' differ from those of earlier arguments, but "
                f"{self._program.name} takes '{takes[0]}' for all of them"
            )
        return values

    def with_lengths(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: Sequence[Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with the lengths inserted where the program takes them.

        Raises:
            ArgumentsError: If the lengths are also given as an argument, or are part of another
                argument.
        """
        placed, named = list(args), dict(kwargs)
        for i, want in enumerate(wanted):
            name = self._program.arg_names[want] if isinstance(want, int) else None
            if name not in self.found:
                continue
            lengths = self.found.pop(name)
            if name in named:
                raise ArgumentsError(
                    f"argument '{name}' is given twice: by itself, and in a Ragged"
                )
            if i <= len(placed):
                placed.insert(i, lengths)
            else:
                named[name] = lengths
        if self.found:
            raise ArgumentsError(
                f"the lengths of a Ragged, {next(iter(self.found))}, are part of another "
                f"argument of {self._program.name}",
                "pass both as arrays: load('batch.npz')['values']",
            )
        return tuple(placed), named


def _from_paths(program: Program, arg: Any, wanted: Any) -> Any:
    """Return an argument, converted to a pytree if it is a flat dict of the pytree's paths.

    `wanted` is the pytree that the program takes, with the flat position of each leaf. Raises
    ArgumentsError for a flat dict with other names.
    """
    tree, positions = structure(wanted), jax.tree.leaves(wanted)
    if not _is_flat(arg) or tree.num_nodes == 1:
        return arg
    paths = leaf_paths(tree)
    if set(paths) != arg.keys() and _fits(tree, arg):
        return arg
    missing = [path for path in paths if path not in arg]
    left = [name for name in arg if name not in paths]
    if missing or left:
        root = _root(program, wanted)
        faults = [f"lacks {_names_text(missing)}"] if missing else []
        faults += [f"has {_names_text(left)}, which {program.name} does not take"] if left else []
        raise ArgumentsError(
            f"argument '{root}' {', and '.join(faults)}", f"it takes {_names_text(paths)}"
        )
    values = [_as_saved(arg[p], program.in_avals[i]) for p, i in zip(paths, positions, strict=True)]
    return jax.tree.unflatten(tree, values)


def _is_flat(arg: object) -> bool:
    """Return True if this is a dict of arrays by name."""
    return isinstance(arg, dict) and all(
        isinstance(name, str) and hasattr(value, "shape") for name, value in arg.items()
    )


def _names_text(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:6])) + (f" and {len(names) - 6} more" * (len(names) > 6))


def _as_saved(value: Any, aval: Aval) -> Any:
    """Return a value converted back to the type of an argument, if it was saved in another type.

    NumPy's files support only NumPy's types: bfloat16 is saved as float32, a key as its key data. A
    value that cannot be converted without loss is returned unchanged.
    """
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        words = jax.eval_shape(jax.random.key_data, aval)
        saved = (value.shape, value.dtype) == (words.shape, words.dtype)
        return jax.random.wrap_key_data(value, impl=aval.dtype) if saved else value
    keeps_dtype = (
        is_extended(aval.dtype) or aval.dtype.isbuiltin == 1 or aval.dtype == jax.dtypes.float0
    )
    if not keeps_dtype and isinstance(value, np.ndarray) and jnp.issubdtype(value.dtype, np.number):
        narrow = value.astype(aval.dtype)
        if np.array_equal(narrow.astype(value.dtype), value, equal_nan=True):
            return narrow
    return value


def _fits(tree: PyTreeDef, arg: Any) -> bool:
    try:
        return bool(matched_leaves(tree, arg, ""))
    except Mismatch:
        return False


#: Kinds of numbers; a Python scalar may be a value of its own kind or of later ones.
_KINDS = {bool: jnp.bool_, int: jnp.integer, float: jnp.floating, complex: jnp.complexfloating}


def _fitted_leaf(program: Program, name: str, value: Any, aval: Aval) -> Any:
    if isinstance(aval, AbstractRef):  # its contents do too
        value, aval = contents(value), aval.inner_aval
    kinds = list(_KINDS)
    if aval.shape == () and type(value) in _KINDS:
        allowed = kinds[kinds.index(type(value)) :]
        if any(jnp.issubdtype(aval.dtype, _KINDS[kind]) for kind in allowed):
            return _scalar(name, value, aval.dtype)
    if isinstance(value, np.ndarray):
        value = _as_saved(value, aval)
    if is_ref(value):
        message = f"argument '{name}' is a Ref, but the program takes {type_of(aval)}"
        raise ArgumentsError(message)
    value_aval = value
    if not isinstance(value, jax.ShapeDtypeStruct):
        try:
            value_aval = jax.api_util.shaped_abstractify(value)
        except (TypeError, OverflowError):  # texts, objects, dates; integers of more than 64 bits
            shown = f"an array of {value.dtype}" if hasattr(value, "dtype") else value
            message = f"argument '{name}' is {shown}, but the program takes {type_of(aval)}"
            raise ArgumentsError(message) from None
    if (value_aval.shape, value_aval.dtype) != (aval.shape, aval.dtype):
        shown = type_of(jax.core.ShapedArray(value_aval.shape, value_aval.dtype))
        message = f"argument '{name}' is {shown}, but the program takes {type_of(aval)}"
        raise ArgumentsError(message, _misfit_hint(program, value_aval, aval))
    return value


def _misfit_hint(program: Program, value_aval: Any, aval: Aval) -> str | None:
    if aval.dtype == jax.dtypes.float0:
        return f"the only value has type {type_of(aval)}"
    sizes = [name for name, bound in program.bounds if isinstance(bound, SizeBound)]
    fewer = len(value_aval.shape) == len(aval.shape) and all(
        isinstance(size, int) and size <= most
        for size, most in zip(value_aval.shape, aval.shape, strict=True)
    )
    if sizes and fewer and value_aval.dtype == aval.dtype:
        return (
            f"pad it, and pass its size as {' or '.join(sizes)}; jaxprtool.jit(shapes=…) pads "
            "automatically"
        )
    return None


def _scalar(name: str, value: Any, dtype: np.dtype) -> Any:
    # NumPy wraps values that are too large for the integers of ml_dtypes.
    bounds = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else None
    try:
        if bounds is None or bounds.min <= value <= bounds.max:
            return np.asarray(value, dtype)
    except (OverflowError, TypeError):  # ml_dtypes does not support integers of more than 64 bits
        pass
    raise ArgumentsError(f"argument '{name}' is {value}, which does not fit {dtype}")
