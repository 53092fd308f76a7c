"""`vmap`, a drop-in for `jax.vmap` that maps a function by rewriting its jaxpr.

The function is traced once, for one batch element, with its mapped arguments; values that do not
depend on these stay concrete, so that Python code can inspect them. The pass builds the mapped
jaxpr of the trace, which is then evaluated on the arguments, under JAX's outer transformations or
eagerly.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial, update_wrapper
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef

from jaxprtool import Ragged, jaxcompat
from jaxprtool.extend import type_of
from jaxprtool.extend.mapping import (
    Batched,
    Kind,
    Names,
    Packed,
    RaggedContext,
    Shared,
    Sizes,
    TracedElement,
    match_axis,
    ragged_jaxpr,
)
from jaxprtool.extend.programs import evaluated, filled, paths
from jaxprtool.extend.sizes import (
    LengthsBound,
    is_symbolic_dimension,
    known_array,
    symbolic_sizes,
    unchecked,
)
from jaxprtool.jaxcompat import Aval, ClosedJaxpr, mapping
from jaxprtool.passes.mapping.batch.axes import (
    Axis,
    BatchError,
    BatchTypeError,
    Dim,
    axis_size_of,
    check_axes,
    check_unmapped,
    flat_in_axes,
    flat_out_axes,
    result_dims,
    result_type,
)
from jaxprtool.passes.mapping.batch.body import batch_body


def vmap(
    fun: Callable,
    in_axes: object = 0,
    out_axes: object = 0,
    axis_name: Hashable | None = None,
    axis_size: Any = None,
    spmd_axis_name: Any = None,
    sum_match: bool = False,
) -> Callable:
    """Return `fun` mapped over an axis of its arguments, as `jax.vmap` does.

    The mapping is a pass over the jaxpr of `fun`. Keyword arguments are mapped along their first
    axis.

    An argument may be `Ragged`: `fun` is then written for one example, and each example has its own
    number of rows. Results with a row for each row of the example are also Ragged, and others have
    a leading batch axis.

    Args:
        fun: The function.
        in_axes: The mapped axis of each positional argument: an int, None (not mapped), or a pytree
            of these that is a prefix of the arguments.
        out_axes: The mapped axis of the results, in the same form.
        axis_name: The name of the axis, for collectives in `fun`.
        axis_size: The size of the axis; required if no argument is mapped.
        spmd_axis_name: The mesh axes over which the batch is sharded.
        sum_match: Whether to sum a mapped result over the batch if its `out_axes` is None. By
            default it is an error.

    Raises:
        BatchError: A ValueError, from the returned function, if axes and sizes do not fit.
        BatchTypeError: A TypeError, for an invalid axis.
        BatchUnsupported: From the returned function, for an equation that cannot be mapped.
        TypeError: If `fun` is not a valid function for `jax.vmap`.
    """
    jaxcompat.check_callable(fun)
    check_axes(in_axes, out_axes, mapping.vmappable_specs())

    def mapped(*args: object, **kwargs: object) -> object:
        values, in_tree = jax.tree.flatten((args, kwargs), is_leaf=_is_leaf)
        axes = flat_in_axes(in_tree, in_axes)
        debug = jax.api_util.debug_info("vmap", fun, args, kwargs)

        def apply_to_element(elements: Sequence[object]) -> tuple[list[object], PyTreeDef]:
            args, kwargs = jax.tree.unflatten(in_tree, elements)
            with _sizes_explained():
                return jax.tree.flatten(fun(*args, **kwargs), is_leaf=mapping.is_vmappable)

        if any(map(is_ragged, values)):
            options = {
                "axis_name": axis_name,
                "spmd_axis_name": spmd_axis_name,
                "sum_match": sum_match,
            }
            _require_none(options)
            names = partial(_names, fun, args, kwargs)
            return ragged_vmap(apply_to_element, values, axes, out_axes, axis_size, debug, names)
        mapping.check_refs(debug, values, axes)
        avals = [_mapped_type(value, axis) for value, axis in zip(values, axes, strict=True)]
        size = axis_size_of(axis_size, axes, avals, lambda: _names(fun, args, kwargs))
        mesh_axes = mapping.mapped_mesh_axes(values, axes)
        spmd = mapping.spmd_axis_names(spmd_axis_name, mesh_axes)
        axis = Axis(axis_name, size, spmd, mesh_axes)
        traced = mapping.TracedElement(axis.data, debug)
        outs, out_tree = _results(
            traced, apply_to_element, axis, (values, axes), out_axes, sum_match
        )
        traced.close()
        return jax.tree.unflatten(out_tree, outs)

    update_wrapper(mapped, fun)
    name = _function_name(fun)
    mapped.__name__, mapped.__doc__ = name, _documentation(fun, name)
    return mapped


#: What JAX says where the size of an array is not a number.
_NO_SIZE = re.compile(
    r"in the jnp\.\w+ argument|Shapes must be 1D sequences|must have static start/stop/step"
    r"|Slice entries must be static integers"
)


@contextmanager
def _sizes_explained() -> Iterator[None]:
    """Add a note to JAX's error for an array whose size depends on a mapped value."""
    try:
        yield
    except (TypeError, IndexError) as error:
        if _NO_SIZE.search(str(error)):
            error.add_note(
                "jaxprtool.vmap: the size of an array cannot depend on a mapped value. To map over "
                "examples of different lengths, pass a Ragged, and take x.shape[0]"
            )
        raise


def _results(
    traced: mapping.TracedElement,
    apply_to_element: Callable,
    axis: Axis,
    batched: tuple[Sequence[object], Sequence[object]],
    out_axes: object,
    sum_match: bool,
) -> tuple[list[object], PyTreeDef]:
    """Return the flat results and their tree.

    A result of a registered type is first split into its parts, and assembled when they are mapped:
    its `from_elt` is called twice.
    """
    parts: list[_ResultArray] = []
    with traced.inside():
        results, out_tree = apply_to_element(traced.elements(*batched))
        specs = flat_out_axes(out_tree, out_axes)
        for place, (result, spec) in enumerate(zip(results, specs, strict=True)):
            registered = mapping.is_element(result)
            note = partial(_noted, parts, place, axis if registered else None)
            mapping.assembled(axis.data, result, spec, note)
        closed = traced.jaxpr([part.element for part in parts if traced.holds(part.element)])
    outs = _evaluated(traced, closed, axis, parts, out_tree, sum_match)
    if any(map(mapping.is_element, results)):
        remaining = iter(outs)
        with traced.inside():
            outs = [
                mapping.assembled(axis.data, result, spec, lambda *_: next(remaining))
                for result, spec in zip(results, specs, strict=True)
            ]
    return outs, out_tree


class _ResultArray(NamedTuple):
    """An array in a result: its place, its value for one batch element, and its mapped axis."""

    place: int
    element: Any
    axis: Any


def _noted(
    parts: list[_ResultArray], place: int, axis: Axis | None, value: object, spec: Any
) -> object:
    """Record a part of a result; if there is an `axis`, return an array of its mapped type.

    The array is a placeholder for a registered type, without values.
    """
    aval = result_type(value)
    if not (spec is None or type(spec) is int):
        raise BatchError(f"at vmap out_axes, got axis spec {spec} but output has type {aval}")
    parts.append(_ResultArray(place, value, spec))
    if axis is None or spec is None or jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return value
    aval = axis.aval(aval, spec % (aval.ndim + 1))
    return np.broadcast_to(np.zeros((), aval.dtype), aval.shape)


def _evaluated(
    traced: mapping.TracedElement,
    closed: ClosedJaxpr,
    axis: Axis,
    parts: Sequence[_ResultArray],
    out_tree: PyTreeDef,
    sum_match: bool,
) -> list[object]:
    """Return the parts of the results for the whole batch, mapped along the requested axes.

    With `sum_match`, a mapped part whose requested axis is None is summed over the batch.
    """
    dims = result_dims(
        [part.axis for part in parts],
        [getattr(jax.typeof(part.element), "ndim", 0) for part in parts],
        lambda: [f"result {part.place}" for part in parts],
    )
    staged = [traced.holds(part.element) for part in parts]
    outs = list(compress(dims, staged))
    body, out_dims = batch_body(closed, traced.dims, axis, outs, outermost=True)
    if not sum_match:
        leaf_dims: list[Dim] = [None] * out_tree.num_leaves
        for part, dim in zip(compress(parts, staged), out_dims, strict=True):
            if part.axis is None:
                leaf_dims[part.place] = dim
        check_unmapped([None] * len(leaf_dims), leaf_dims, out_tree, axis.name)
    mapped = zip(mapping.evaluated(body, traced.operands), out_dims, strict=True)
    values = [
        next(mapped) if flag else (part.element, None)
        for part, flag in zip(parts, staged, strict=True)
    ]
    return [
        _moved(value, source, target, axis)
        for (value, source), target in zip(values, dims, strict=True)
    ]


def _moved(value: Any, source: Dim, target: Dim, axis: Axis) -> Any:
    """Return a value mapped along `source` moved to `target`, or summed if that is None.

    A value for which neither is a dimension is returned unchanged.
    """
    if source == target:
        return value
    if target is None:
        return value.sum(source)  # by a method, as in JAX: it may be a NumPy array
    return jaxcompat.match_axis(axis.data, source, target, value)


# --- arguments ----------------------------------------------------------------------------------


def _is_leaf(value: object) -> bool:
    return mapping.is_vmappable(value) or is_ragged(value)


def _require_none(options: dict[str, Any]) -> None:
    """Raise an error for options that do not support Ragged arguments."""
    for name, value in options.items():
        if value not in (None, False):
            raise BatchError(f"vmap {name}={value!r} cannot be combined with a Ragged argument")


def _mapped_type(value: Any, axis: object) -> Aval | None:
    """Return the type of a mapped argument; None if not mapped or of a registered type."""
    if type(axis) is not int:
        return None
    if mapping.is_vmappable(value):
        likely = hasattr(value, "shape") and hasattr(value, "dtype")
        return jax.core.ShapedArray(value.shape, value.dtype) if likely else None
    try:
        aval = jax.typeof(value)
    except TypeError:
        raise BatchTypeError(
            f"Argument {value!r} of type {type(value)} is not a valid JAX type"
        ) from None
    if not hasattr(aval, "shape"):
        raise BatchError(
            f"vmap was requested to map a value of non-array type {aval} along axis {axis}, but "
            "non-array types can't be mapped along an integer axis"
        )
    return aval


def _names(fun: Callable, args: Sequence[object], kwargs: dict[str, object]) -> list[str]:
    """Return the name of each flat argument in errors: `argument params['w']`."""
    try:
        parameters = list(inspect.signature(fun).bind(*args, **kwargs).signature.parameters)
    except (TypeError, ValueError):
        parameters = []

    def name(path: Sequence[Any]) -> str:
        first = path[0].idx
        if first < len(parameters):
            return f"argument {parameters[first]}{jax.tree_util.keystr(path[1:])}"
        return f"args{jax.tree_util.keystr(path)}"

    flat = partial(jax.tree.leaves_with_path, is_leaf=_is_leaf)
    return [
        *(name(path) for path, _ in flat(args)),
        *(f"kwargs{jax.tree_util.keystr(path)}" for path, _ in flat(kwargs)),
    ]


# --- metadata -----------------------------------------------------------------------------------


def _function_name(fun: Callable) -> str:
    """Return the name of a function, or of the function in a partial."""
    while not hasattr(fun, "__name__") and isinstance(fun, partial):
        fun = fun.func
    return getattr(fun, "__name__", "<unnamed function>")


def _documentation(fun: Callable, name: str) -> str:
    text = f"`{name}` mapped over an additional axis of its mapped arguments."
    return f"{text}\n\nOriginal documentation:\n\n{fun.__doc__}" if fun.__doc__ else text


# --- ragged arguments -----------------------------------------------------------------------------
# `vmap` over `Ragged` arguments: the function is traced once, for an example of any length.
#
# The trace has a symbol for the length. The pass `ragged` rewrites its jaxpr to one for the whole
# batch, which is evaluated on the rows of all examples.


#: Whether an example of a Ragged is being traced.
_inside: ContextVar[bool] = ContextVar("inside", default=False)


@contextmanager
def _no_nesting() -> Iterator[None]:
    """Raise an error for a nested `vmap` over another Ragged."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def is_ragged(value: object) -> bool:
    """Return True if a value is a Ragged."""
    return isinstance(value, Ragged)


def ragged_vmap(
    call: Callable[[Sequence[Any]], tuple[list[Any], PyTreeDef]],
    values: Sequence[Any],
    axes: Sequence[Any],
    out_axes: object,
    axis_size: Any,
    debug: Any,
    names: Names,
) -> object:
    """Apply a function of one example to all examples.

    Args:
        call: Calls the function with the flat arguments of one example, and returns its flat
            results and their tree.
        values: The flat arguments, some of which are `Ragged`.
        axes: The mapped axis of each, or None.
        out_axes: The `out_axes` of `vmap`.
        axis_size: The number of examples, or None.
        debug: JAX's debug info of the function.
        names: Returns the name of each flat argument, for errors.

    Returns:
        The tree of results. One with a row for each row of an example is a `Ragged`.

    Raises:
        BatchError: If arguments, axes or lengths do not fit.
        UnsupportedError: If an equation cannot be computed for examples of different lengths.
    """
    if _inside.get():
        place = next(i for i, value in enumerate(values) if isinstance(value, Ragged))
        raise BatchError(
            f"{names()[place]} is a Ragged inside an example of another Ragged, which is not "
            "supported"
        )
    batches = _batches(values, axes, names)
    count = _number_of_examples(values, axes, axis_size, names)
    symbols = _symbols(values, batches)
    sizes = _sizes(batches, symbols, count)
    axis = Axis(None, count)
    traced = TracedElement(axis.data, debug)
    with traced.inside(), _no_nesting():
        elements, kinds = _elements(traced, axis, values, axes, symbols)
        try:
            results, out_tree = call(elements)
        except jax.errors.InconclusiveDimensionOperation as error:
            error.add_note(
                "declare the range with Ragged(values, lengths, shortest=2) or longest=64"
            )
            raise
        results = list(map(_checked, results))
        staged = list(map(traced.holds, results))
        closed = traced.jaxpr([x for x, flag in zip(results, staged, strict=True) if flag])
    specs = flat_out_axes(out_tree, out_axes)
    names_out = _paths(out_tree)
    staged_paths = [path for path, flag in zip(names_out, staged, strict=True) if flag]
    batched = ragged_jaxpr(closed, kinds, sizes, lambda: staged_paths)
    lengths = [jnp.asarray(batch.lengths, jnp.int32) for batch in batches.values()]
    outs = zip(
        evaluated(batched.jaxpr, [*traced.operands, *lengths]),
        batched.kinds,
        [v.aval for v in closed.outvars],
        strict=True,
    )
    traced.close()
    assembled = _BatchResults(sizes, batches, symbols, axis)
    flat = [
        assembled.result(*next(outs), spec, path)
        if flag
        else assembled.result(value, Shared(), None, spec, path)
        for value, flag, spec, path in zip(results, staged, specs, names_out, strict=True)
    ]
    check_unmapped([None] * len(flat), assembled.mapped, out_tree, None)
    result = jax.tree.unflatten(out_tree, flat)
    for node in jax.tree.leaves(result, is_leaf=is_ragged):
        if is_ragged(node) and any(map(is_ragged, (node.values, node.lengths))):
            raise BatchError("the result is a Ragged made of the rows of one example of a Ragged")
    return result


# --- arguments ----------------------------------------------------------------------------------


def _elements(
    traced: TracedElement,
    axis: Axis,
    values: Sequence[Any],
    axes: Sequence[Any],
    symbols: Mapping[str, Any],
) -> tuple[list[Any], list[Kind]]:
    """Return the arguments of one example, and the layouts of the mapped ones."""
    elements: list[Any] = list(values)
    kinds: list[Kind] = []
    for i, (value, dim) in enumerate(zip(values, axes, strict=True)):
        if isinstance(value, Ragged):
            aval = jax.typeof(value.values)
            symbol = symbols[value.axis]
            kinds.append(Packed(0, symbol))
            elements[i] = traced.element(
                _with_a_row(value.values), aval.update(shape=(symbol, *aval.shape[1:]))
            )
        elif dim is not None:
            array = match_axis(axis.data, dim % jnp.ndim(value), 0, value)
            aval = jax.typeof(array)
            kinds.append(Batched())
            elements[i] = traced.element(array, aval.update(shape=aval.shape[1:]))
    return elements, kinds


def _batches(values: Sequence[Any], axes: Sequence[Any], names: Names) -> dict[str, Ragged]:
    """Return the first Ragged of each axis, by name, and check that the others have its lengths.

    Equal lengths get the bounds of all their arguments.
    """
    batches: dict[str, Ragged] = {}
    first_places: dict[str, int] = {}
    for place, (value, axis) in enumerate(zip(values, axes, strict=True)):
        if not isinstance(value, Ragged):
            continue
        if type(axis) is not int or axis != 0:
            raise BatchError(
                f"{names()[place]} is a Ragged, whose examples are mapped: its in_axes must be "
                f"0, not {axis}"
            )
        if jnp.ndim(value.lengths) != 1 or jnp.ndim(value.values) == 0:
            raise BatchError(
                f"{names()[place]} is {value!r}: its values and lengths have leading axes, which "
                "must be mapped over first"
            )
        _check_lengths(value, names()[place])
        first = batches.setdefault(value.axis, value)
        first_place = first_places.setdefault(value.axis, place)
        if not _same_lengths(first, value):
            raise BatchError(
                f"{names()[place]} and {names()[first_place]} have examples of different lengths, "
                f"but both have axis '{value.axis}'",
                "give one of them another axis name: Ragged(values, lengths, axis='m')",
            )
        longest = [ragged.longest for ragged in (first, value) if ragged.longest is not None]
        bounds = min(longest, default=None), first.full, max(first.shortest, value.shortest)
        batches[value.axis] = unchecked(first.values, first.lengths, value.axis, *bounds)
    return batches


def _same_lengths(first: Ragged, second: Ragged) -> bool:
    """Return False if two batches are known to have different lengths."""
    if jnp.shape(first.lengths) != jnp.shape(second.lengths) or _rows(first) != _rows(second):
        return False
    one, other = known_array(first.lengths), known_array(second.lengths)
    return one is None or other is None or np.array_equal(one, other)


def _rows(ragged: Ragged) -> int:
    """Return the number of rows of all examples, including unused ones."""
    return jnp.shape(ragged.values)[0]  # type: ignore[no-any-return]


def _check_lengths(ragged: Ragged, name: str) -> None:
    """Check the lengths of a Ragged again: its parts may have been set, or mapped by JAX."""
    dtype = jnp.result_type(ragged.lengths)
    fault = None if jnp.issubdtype(dtype, jnp.integer) else f"are of dtype {dtype}"
    if not fault and (lengths := known_array(ragged.lengths)) is not None:
        bound = LengthsBound(_rows(ragged), ragged.longest, not ragged.full, ragged.shortest)
        fault = bound.fault(lengths, {})
    if fault:
        raise BatchError(f"{name}.lengths {fault}")


def _number_of_examples(
    values: Sequence[Any], axes: Sequence[Any], axis_size: Any, names: Names
) -> Any:
    """Return the number of examples, and check that all mapped arguments have that many."""
    avals: list[Aval | None] = []
    for value, axis in zip(values, axes, strict=True):
        if isinstance(value, Ragged):
            avals.append(jax.typeof(value.lengths))
        else:
            avals.append(None if axis is None else jax.typeof(value))
    return axis_size_of(axis_size, axes, avals, names)


@cache
def _own_symbols(ranges: tuple[tuple[str, int, int | None], ...]) -> dict[str, Any]:
    """Return symbols with these ranges of sizes, each a name, a least and a largest size.

    They are cached, since types with new symbols would miss JAX's caches.
    """
    names = [name for name, _, _ in ranges]
    bounds = [f"{name} >= {least}" for name, least, _ in ranges if least > 1]
    bounds += [f"{name} <= {most}" for name, _, most in ranges if most is not None]
    symbols = jax.export.symbolic_shape(",".join(names), constraints=bounds)
    return dict(zip(names, symbols, strict=True))


def _symbols(values: Sequence[Any], batches: Mapping[str, Ragged]) -> dict[str, Any]:
    """Return symbols for the lengths, in the scope of the symbols in the arguments, if any."""
    there = symbolic_sizes(map(jax.typeof, jax.tree.leaves(list(values))))
    if not there:
        return _own_symbols(
            tuple((name, batch.shortest, batch.longest) for name, batch in batches.items())
        )
    new = ",".join(f"{name}_of_one" for name in batches)
    return dict(zip(batches, jax.export.symbolic_shape(new, scope=there[0].scope), strict=True))


def _sizes(batches: dict[str, Ragged], symbols: dict[str, Any], batch_size: Any) -> Sizes:
    """Return the sizes of the program: batch size, total rows, and the longest example."""
    rows, longest, full = {}, {}, set()
    for name, batch in batches.items():
        symbol = str(symbols[name])
        rows[symbol] = _rows(batch) if _rows(batch) != 0 else 1
        if batch.longest is not None:
            longest[symbol] = batch.longest
        elif (lengths := known_array(batch.lengths)) is not None:
            longest[symbol] = max(int(lengths.max(initial=0)), 1)
        else:
            longest[symbol] = rows[symbol]
        if batch.full and _rows(batch) != 0:
            full.add(symbol)
    return Sizes(batch_size, rows, longest, frozenset(full))


def _with_a_row(values: Any) -> Any:
    """Return rows, or one row of zeros if there are none, since rules read the first row."""
    if jnp.shape(values)[0] != 0:
        return values
    return jnp.zeros((1, *jnp.shape(values)[1:]), jnp.asarray(values).dtype)


# --- results ------------------------------------------------------------------------------------


@dataclass
class _BatchResults:
    """Converts arrays of the whole batch to the results of `vmap`.

    Attributes:
        sizes: The sizes of the program.
        known: The first Ragged of each axis.
        symbols: The symbol of each axis.
        axis: The mapped axis.
        mapped: For each result so far, its mapped axis if `out_axes` is None, to be checked.
    """

    sizes: Sizes
    known: dict[str, Ragged]
    symbols: dict[str, Any]
    axis: Axis
    mapped: list[int | None] = field(default_factory=list)

    def result(self, value: Any, kind: Kind, aval: Aval | None, spec: Any, path: str) -> Any:
        """Return one result of `vmap`.

        Args:
            value: The array of the whole batch.
            kind: Its layout.
            aval: The type of the result for one example; None if it was not traced.
            spec: The axis of `out_axes`, or None.
            path: The name of the result, for errors.
        """
        self.mapped.append(None)
        if isinstance(kind, Packed):
            assert aval is not None
            if spec != 0:
                raise BatchError(
                    f"{path} has a row for each row of an example: its out_axes must be 0, not "
                    f"{spec}"
                )
            if kind.axis != 0:
                raise BatchError(
                    f"{path} is {type_of(aval)} for each example, but its rows must be along axis 0"
                )
            return self._ragged(value, kind.size)
        source = None if isinstance(kind, Shared) else 0
        if spec is None:
            self.mapped[-1] = source
            return value
        return match_axis(
            self.axis.data, source, spec % (jnp.ndim(value) + (source is None)), value
        )

    def _ragged(self, values: Any, size: Any) -> Ragged:
        for name, symbol in self.symbols.items():
            if size == symbol:
                batch = self.known[name]
                bounds = batch.longest, batch.full, batch.shortest
                return unchecked(values[: _rows(batch)], batch.lengths, name, *bounds)
        is_known = all(known_array(batch.lengths) is not None for batch in self.known.values())
        with jax.ensure_compile_time_eval() if is_known else nullcontext():
            symbols = {
                str(self.symbols[name]): jnp.asarray(batch.lengths)
                for name, batch in self.known.items()
            }
            lengths = RaggedContext(self.sizes, symbols, {}).lengths(size)
        full = self.sizes.is_exact(size)
        if (numbers := known_array(lengths)) is not None:
            values, full = values[: int(numbers.sum())], True
        return unchecked(values, lengths, _axis_name(size), None, full)


def _axis_name(size: Any) -> str:
    """Return an axis name for a size, such as `n_minus_1` for `n - 1`."""
    text = str(size)
    for sign, word in (("+", "plus"), ("-", "minus"), ("*", "times"), ("//", "over")):
        text = text.replace(sign, f" {word} ")
    name = "_".join(re.findall(r"\w+", text))
    return name if name.isidentifier() else f"size_{name}"


def _checked(value: Any) -> Any:
    """Return a result of the function, with a symbolic size converted to an array.

    Raises:
        BatchTypeError: If it has no JAX type.
    """
    if is_symbolic_dimension(value):
        return jnp.asarray(value)
    result_type(value)
    return value


def _paths(tree: PyTreeDef) -> tuple[str, ...]:
    """Return the path of each result."""
    return paths("result", filled(tree, range(tree.num_leaves)))
