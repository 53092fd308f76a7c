"""`vmap` over `Ragged` arguments: the function is traced once, for an example of any length.

The trace has a symbol for the length. The pass `ragged` rewrites its jaxpr to one for the whole
batch, which is evaluated on the rows of all examples.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef

from jaxprtool import Ragged
from jaxprtool.extend import Aval, type_of
from jaxprtool.extend.mapping import (
    Axis,
    Batched,
    BatchError,
    Kind,
    Names,
    Packed,
    RaggedContext,
    Shared,
    Sizes,
    TracedElement,
    axis_size_of,
    check_unmapped,
    flat_out_axes,
    match_axis,
    ragged_jaxpr,
    result_type,
)
from jaxprtool.extend.programs import evaluated, filled, paths
from jaxprtool.extend.sizes import (
    LengthsBound,
    is_symbolic_dimension,
    known_array,
    symbolic_sizes,
    unchecked,
)

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
