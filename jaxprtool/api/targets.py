"""What a TARGET gives: a function to trace, or a program that was written down.

    package.module:function, path/file.py:function    a function, with arguments for it
    path/file.jaxpr, -                                a program from a file, or from stdin
    path/file                                         an artifact of `jax.export`, which is called

Finding functions and reading files are wings of their own; this is where they meet.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef

from jaxprtool.errors import ArgumentsError, StructureError, TargetError
from jaxprtool.files import is_device, opened_plain
from jaxprtool.ir.dtypes import is_extended
from jaxprtool.ir.equations import has_64_bit_types, type_of
from jaxprtool.ir.held import Held
from jaxprtool.ir.matching import Mismatch, matched_leaves
from jaxprtool.ir.program import Program
from jaxprtool.ir.trees import leaf_paths
from jaxprtool.jaxcompat import Aval
from jaxprtool.loading import argspec
from jaxprtool.loading import load as functions
from jaxprtool.loading.example import Static
from jaxprtool.loading.load import Entry, StaticArguments
from jaxprtool.loading.trace import BoundCall

STDIN = "-"

_FUNCTION = "a function is written package.module:function or path/file.py:function"


@dataclass(frozen=True)
class ProgramEntry:
    """A program that was read, with flat arguments to run it on; like a function's `Entry`."""

    program: Program
    values: tuple[object, ...]

    #: Nothing was made that could have been left.
    needless_work: ClassVar[None] = None

    @property
    def name(self) -> str:
        """The name of the program."""
        return self.program.name

    def trace(self, axes: Sequence[tuple[Hashable, int]] = ()) -> Program:
        """The program as it was read; the named axes that are free in it are."""
        return self.program

    def arguments(self) -> list[object]:
        """The flat arguments in the program's order: arrays, scalars or `ShapeDtypeStruct`s."""
        return list(self.values)

    def position(self, number: int) -> int:
        """The position of a positional argument, for which ArgumentsError is raised if none is."""
        args, _ = jax.tree.unflatten(self.program.in_tree, self.values)
        return BoundCall(args, {}, {}, {}).position(number)


def find(
    target: str, args: str | None = None, factory: bool = False, **static: Unpack[StaticArguments]
) -> Entry | ProgramEntry:
    """What TARGET names, with the arguments of `--args`.

    Raises TargetError, ProgramFileError, ArgumentsError, or UserFunctionError if the user's code
    raises.
    """
    if not is_file(target):
        return functions.find(target, args, factory, **static)
    if factory or any(places != () for places in static.values()):
        raise TargetError(
            f"{_shown(target)} is a program, which has neither a factory nor static arguments",
            _FUNCTION,
        )
    program = _program(target, _data(target))
    if not jax.config.jax_enable_x64 and has_64_bit_types(program.jaxpr):
        raise TargetError(
            f"{_shown(target)} has 64-bit types, which are not enabled",
            "add --x64, or set jax_enable_x64",
        )
    if args is None:
        types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in program.in_avals]
        return ProgramEntry(program, tuple(types))
    values = fitted(program, *argspec.read_args(args))
    return ProgramEntry(program.at([getattr(value, "shape", ()) for value in values]), values)


def is_file(target: str) -> bool:
    """Whether a TARGET is a file or stdin, and not a function in a module."""
    if target == STDIN or target.endswith(".jaxpr"):
        return True
    return not target.endswith(".py") and os.path.isfile(target)


def _data(target: str) -> bytes:
    if target == STDIN:
        if is_device(sys.stdin.buffer):
            raise TargetError("cannot read stdin: it is a device, which holds no program")
        return sys.stdin.buffer.read()
    try:
        with opened_plain(target) as file:
            return file.read()
    except (OSError, ValueError) as error:  # ValueError for a path that is none
        hint = None
        if isinstance(error, FileNotFoundError):
            hint = "write one with `jaxprtool opt TARGET -o FILE`"
        raise TargetError(
            f"cannot read '{target}': {getattr(error, 'strerror', None) or error}", hint
        ) from None


def _program(target: str, data: bytes) -> Program:
    # Functions are what most targets are; only a file needs what reads files.
    from jaxprtool.formats.exported import is_exported, read_exported
    from jaxprtool.formats.jaxpr.read import is_program, parse, read

    if is_exported(data):
        return read_exported(data, _shown(target))
    if not is_program(data) and not target.endswith(".jaxpr"):
        raise TargetError(
            f"{_shown(target)} holds neither a program that jaxprtool wrote nor one of jax.export",
            _FUNCTION,
        )
    return parse(data, "<stdin>") if target == STDIN else read(target)


def _shown(target: str) -> str:
    return "stdin" if target == STDIN else f"'{target}'"


# --- arguments --------------------------------------------------------------------------------


def fitted(
    program: Program, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[object, ...]:
    """The flat arguments of a call of `program`, each of the type that it takes.

    Symbols in these types have the sizes that the arguments give them. A Python scalar stands for
    an array of that type, and a flat dict of arrays, as from a file, for an argument whose leaves
    its names lead to: `first/w`. Raises ArgumentsError for a call of another structure, and for a
    value of another type.
    """
    has_static = any(isinstance(arg, Static) for arg in (*args, *kwargs.values()))
    args, kwargs = jax.tree.map(_as_held, _nested(program, args, kwargs))
    try:
        leaves = program.matched(args, kwargs).leaves
    except StructureError as error:
        hint = "a program has no static arguments left" if has_static else None
        raise StructureError(error.message, hint) from None
    avals = program.in_avals
    if program.symbols:
        avals = program.at([getattr(leaf, "shape", ()) for leaf in leaves]).in_avals
    triples = zip(program.arg_names, leaves, avals, strict=True)
    return tuple(_fitted_leaf(*triple) for triple in triples)


def _as_held(leaf: object) -> object:
    return Held(leaf.value) if isinstance(leaf, Static) else leaf


def _nested(
    program: Program, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The arguments, with dicts whose names are paths made the structures that are wanted."""
    wanted, by_name = jax.tree.unflatten(program.in_tree, range(len(program.in_avals)))
    pairs = itertools.zip_longest(args, wanted[: len(args)])
    return (
        tuple(_from_paths(program, arg, want) for arg, want in pairs),
        {name: _from_paths(program, arg, by_name.get(name)) for name, arg in kwargs.items()},
    )


def _from_paths(program: Program, arg: Any, wanted: Any) -> Any:
    """An argument; `wanted` has the flat position of each of its leaves.

    Raises ArgumentsError for a flat dict whose names are not the paths of what is wanted.
    """
    tree, positions = jax.tree.structure(wanted), jax.tree.leaves(wanted)
    if not _is_flat(arg) or tree.num_nodes == 1:
        return arg
    paths = leaf_paths(tree)
    if set(paths) != arg.keys() and _fits(tree, arg):
        return arg
    missing = [path for path in paths if path not in arg]
    left = [name for name in arg if name not in paths]
    if missing or left:
        root = re.split(r"[.\[]", program.arg_names[positions[0]])[0]
        faults = [f"lacks {_some(missing)}"] if missing else []
        faults += [f"has {_some(left)}, which {program.name} does not take"] if left else []
        raise ArgumentsError(
            f"argument '{root}' {', and '.join(faults)}", f"it takes {_some(paths)}"
        )
    values = [_as_saved(arg[p], program.in_avals[i]) for p, i in zip(paths, positions, strict=True)]
    return jax.tree.unflatten(tree, values)


def _is_flat(arg: object) -> bool:
    """Whether an argument is a dict of arrays by name."""
    return isinstance(arg, dict) and all(
        isinstance(name, str) and hasattr(value, "shape") for name, value in arg.items()
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:6])) + (f" and {len(names) - 6} more" * (len(names) > 6))


def _as_saved(value: Any, aval: Aval) -> Any:
    """A value in the type that is wanted, if it is that value in the type it was saved in.

    NumPy's files know no types but NumPy's: bfloat16 is saved as float32, a key as its words.
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


#: Kinds of numbers; a Python scalar stands for a value of its own kind and of those after it.
_KINDS = {bool: jnp.bool_, int: jnp.integer, float: jnp.floating, complex: jnp.complexfloating}


def _fitted_leaf(name: str, value: Any, aval: Aval) -> Any:
    kinds = list(_KINDS)
    if aval.shape == () and type(value) in _KINDS:
        allowed = kinds[kinds.index(type(value)) :]
        if any(jnp.issubdtype(aval.dtype, _KINDS[kind]) for kind in allowed):
            return _scalar(name, value, aval.dtype)
    if isinstance(value, np.ndarray):
        value = _as_saved(value, aval)
    given = value
    if not isinstance(value, jax.ShapeDtypeStruct):
        try:
            given = jax.api_util.shaped_abstractify(value)
        except (TypeError, OverflowError):  # texts, objects, dates; integers of more than 64 bits
            shown = f"an array of {value.dtype}" if hasattr(value, "dtype") else value
            message = f"argument '{name}' is {shown}, and the program takes {type_of(aval)}"
            raise ArgumentsError(message) from None
    if (given.shape, given.dtype) != (aval.shape, aval.dtype):
        shown = type_of(jax.core.ShapedArray(given.shape, given.dtype))
        nothing = f"its one value is {type_of(aval)}" if aval.dtype == jax.dtypes.float0 else None
        message = f"argument '{name}' is {shown}, and the program takes {type_of(aval)}"
        raise ArgumentsError(message, nothing)
    return value


def _scalar(name: str, value: Any, dtype: np.dtype) -> Any:
    # NumPy wraps what is too large for the integers of ml_dtypes.
    bounds = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else None
    try:
        if bounds is None or bounds.min <= value <= bounds.max:
            return np.asarray(value, dtype)
    except (OverflowError, TypeError):  # ml_dtypes takes no integers of more than 64 bits
        pass
    raise ArgumentsError(f"argument '{name}' is {value}, which does not fit {dtype}")
