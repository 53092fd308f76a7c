"""Fitting of call arguments to a program's structure, types and symbols."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef

from jaxprtool import Program, Ragged
from jaxprtool.errors import ArgumentsError, StructureError
from jaxprtool.extend import AbstractRef, Aval, contents, is_extended, is_ref, type_of
from jaxprtool.extend.sizes import LengthsBound, SizeBound, ragged_parts, written_lengths
from jaxprtool.extend.tracing import Static
from jaxprtool.extend.trees import (
    Mismatch,
    StaticLeaf,
    filled,
    leaf_paths,
    matched_leaves,
    structure,
)


def fitted(
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
    by_name = {_root(program, each): each for each in wanted if jax.tree.leaves(each)} | keywords
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
        takes = [each for each, bound in self._lengths.items() if (bound.rows,) == aval.shape[:1]]
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
        placed, given = list(args), dict(kwargs)
        for i, each in enumerate(wanted):
            name = self._program.arg_names[each] if isinstance(each, int) else None
            if name not in self.found:
                continue
            lengths = self.found.pop(name)
            if name in given:
                raise ArgumentsError(
                    f"argument '{name}' is given twice: by itself, and in a Ragged"
                )
            if i <= len(placed):
                placed.insert(i, lengths)
            else:
                given[name] = lengths
        if self.found:
            raise ArgumentsError(
                f"the lengths of a Ragged, {next(iter(self.found))}, are part of another "
                f"argument of {self._program.name}",
                "pass both as arrays: load('batch.npz')['values']",
            )
        return tuple(placed), given


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
    known = is_extended(aval.dtype) or aval.dtype.isbuiltin == 1 or aval.dtype == jax.dtypes.float0
    if not known and isinstance(value, np.ndarray) and jnp.issubdtype(value.dtype, np.number):
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
    given = value
    if not isinstance(value, jax.ShapeDtypeStruct):
        try:
            given = jax.api_util.shaped_abstractify(value)
        except (TypeError, OverflowError):  # texts, objects, dates; integers of more than 64 bits
            shown = f"an array of {value.dtype}" if hasattr(value, "dtype") else value
            message = f"argument '{name}' is {shown}, but the program takes {type_of(aval)}"
            raise ArgumentsError(message) from None
    if (given.shape, given.dtype) != (aval.shape, aval.dtype):
        shown = type_of(jax.core.ShapedArray(given.shape, given.dtype))
        message = f"argument '{name}' is {shown}, but the program takes {type_of(aval)}"
        raise ArgumentsError(message, _misfit_hint(program, given, aval))
    return value


def _misfit_hint(program: Program, given: Any, aval: Aval) -> str | None:
    if aval.dtype == jax.dtypes.float0:
        return f"the only value has type {type_of(aval)}"
    sizes = [name for name, bound in program.bounds if isinstance(bound, SizeBound)]
    fewer = len(given.shape) == len(aval.shape) and all(
        isinstance(size, int) and size <= most
        for size, most in zip(given.shape, aval.shape, strict=True)
    )
    if sizes and fewer and given.dtype == aval.dtype:
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
