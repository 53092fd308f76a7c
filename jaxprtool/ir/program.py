"""The value that all of jaxprtool takes and returns: a closed jaxpr with its names and trees.

JAX's own jaxpr objects are the intermediate language; a `Program` adds the parts that a jaxpr
lacks: its name, the pytrees of its flat arguments and results, and a readable path for each of
them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import jax
import numpy as np
from jax import numpy as jnp
from jax.core import ShapedArray
from jax.sharding import AbstractMesh, Mesh
from jax.tree_util import PyTreeDef

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError, CheckError, StructureError
from jaxprtool.ir.arguments import MatchedArguments, Mismatch, matched
from jaxprtool.ir.documents import METHODS, in_bytes, plural
from jaxprtool.ir.dtypes import as_array, needs_x64, x64_enabled
from jaxprtool.ir.equations import holders, reachable, size_of, type_of
from jaxprtool.ir.evaluation import FiniteCheck, checks_disabled
from jaxprtool.ir.frames import Root
from jaxprtool.ir.regions import ShardMap, view
from jaxprtool.ir.rewrite import as_constants
from jaxprtool.ir.symbols import (
    Bound,
    LengthsBound,
    SizeBound,
    Sizes,
    found_sizes,
    range_of_lengths,
    sizes_by_symbol,
    symbols_of,
)
from jaxprtool.ir.trees import filled, is_no_array, structure, unique
from jaxprtool.jaxcompat import (
    AnyJaxpr,
    Atom,
    Aval,
    ClosedJaxpr,
    DType,
    Jaxpr,
    JaxprEqn,
    TracedOptions,
)

#: The number of specializations to different sizes that a program caches.
MOST_SIZES = 128


@dataclass(frozen=True, eq=False, repr=False)
class Program:
    """A traced function, callable like the function itself.

    Attributes:
        name: The name of the function.
        jaxpr: The closed jaxpr, with its constants. Array literals are turned into constants.
        in_tree: The tree structure of `(args, kwargs)`, without static arguments.
        out_tree: The tree structure of the result.
        arg_names: The path of each flat argument: `params['w']`.
        out_names: The path of each flat result: `result[0]`.
        axis_env: The named axes, with their sizes, that the function was traced under and does not
            bind itself.
        jit: The options of `jax.jit` if the function is jitted, otherwise None.
        bounds: The bounds of arguments that are sizes, or lengths of examples, by name.
        roots: The folders of the TARGET that it was loaded from. Their files are the user's own.
        sharded: The names of arguments that were given with a sharding over several devices.
        after_call: What the recorded caller did with arguments, by name: "dropped" in the line of
            its call, as `state` of `state = step(state)`, or "kept" until another line.
    """

    name: str
    jaxpr: AnyJaxpr
    in_tree: PyTreeDef
    out_tree: PyTreeDef
    arg_names: tuple[str, ...]
    out_names: tuple[str, ...]
    axis_env: tuple[tuple[Hashable, int], ...] = ()
    jit: JitOptions | None = None
    bounds: tuple[tuple[str, Bound], ...] = ()
    roots: tuple[Root, ...] = ()
    sharded: tuple[str, ...] = ()
    after_call: tuple[tuple[str, Literal["dropped", "kept"]], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "jaxpr", as_constants(self.jaxpr))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the program on arguments of the same structure as the traced ones.

        Static arguments are left out, as in a call of `jax.jit(...).lower(...).compile()`. For a
        node whose class a file could not store, any container of the same children is accepted.
        The symbols of symbolic dimensions get the sizes of the arguments. Flax NNX objects among
        the arguments that the function changes are updated. A Python scalar or a NumPy array has
        the type that `jax.jit` gives it.

        Raises:
            StructureError: If the structure, a shape or a dtype differs. It is a TypeError, and
                names the first path that differs.
            ArgumentsError: If arguments imply different sizes of a symbol, a size is beyond its
                bound, lengths do not add up to the rows, or no argument determines a symbol of the
                program.
            FloatingPointError: If `jax_debug_nans` or `jax_debug_infs` forbids a result.
        """
        match = self.matched(args, kwargs)
        if not self.symbols:
            return self._called(match)
        return self.at([jnp.shape(leaf) for leaf in match.leaves])._called(match)

    def _called(self, match: MatchedArguments) -> Any:
        leaves = self.checked(match.leaves)
        if not (jax.config.jax_debug_nans or jax.config.jax_debug_infs):
            return match.result(self.out_tree, self._evaluated(leaves))
        with checks_disabled():
            values = [x[...] if isinstance(x, jax.Ref) else x for x in leaves]
            outs = self._evaluated(leaves, donate=False)  # needed again, as in JAX
        self.require_finite(FiniteCheck.from_config(), values, outs)
        return match.result(self.out_tree, outs)

    def checked(self, flat: Sequence[Any]) -> list[Any]:
        """Convert flat arguments to the types that the program takes.

        Raises:
            StructureError: If one has another shape or dtype.
            ArgumentsError: If one that is a size, or lengths, is beyond its bound.
        """
        values = list(flat)
        if self.bounds:
            sizes = self._given_sizes(flat)
            values = [self.bounded(i, value, sizes) for i, value in enumerate(flat)]
        try:
            return of_types(values, self._types)
        except TypeMismatch as mismatch:
            name, aval = self.arguments[mismatch.position]
            raise StructureError(
                f"argument '{name}' {mismatch.fault}, but {self.name} takes {type_of(aval)}"
            ) from None

    def _given_sizes(self, flat: Sequence[Any]) -> dict[str, int]:
        """Return the values of arguments that are sizes, if they are known."""
        bounds = dict(self.bounds)
        return {
            name: int(value)
            for name, value in zip(self.arg_names, flat, strict=True)
            if isinstance(bounds.get(name), SizeBound)
            and not isinstance(value, jax.core.Tracer)
            and np.ndim(value) == 0
        }

    def bounded(self, position: int, value: Any, sizes: Sizes = MappingProxyType({})) -> Any:
        """Return the value of a flat argument, converted to its dtype if it is a size, or lengths.

        `sizes` are those of symbols that are arguments. Raises ArgumentsError for a value beyond
        its bound. Traced values are not checked.
        """
        name, aval = self.arguments[position]
        bound = dict(self.bounds).get(name)
        if bound is None or jnp.shape(value) != aval.shape:
            return value
        traced = isinstance(value, jax.core.Tracer)
        with jax.transfer_guard("allow"):
            array = value if traced else np.asarray(value)
        if not jnp.issubdtype(array.dtype, np.integer):
            shown = "" if np.ndim(value) else f"{value} "
            fault: str | None = f"is {shown}of dtype {array.dtype}, but must be {bound}"
        else:
            fault = None if traced else bound.fault(array, sizes)
        if fault:
            raise ArgumentsError(f"argument '{name}' of {self.name} {fault}")
        return value if array.dtype == aval.dtype else array.astype(aval.dtype)

    def require_finite(
        self, check: FiniteCheck, arguments: Sequence[Any], results: Sequence[Any]
    ) -> None:
        """Raise FloatingPointError for flat results that a check of JAX's configuration forbids.

        The error names the first such result and the equation to blame. `arguments` are the flat
        arguments of the run, with the former contents of Refs.
        """
        for position, (name, result) in enumerate(zip(self.out_names, results, strict=True)):
            if fault := check.fault(result):
                origin = METHODS["origin_of"](self, arguments, position, check)
                raise FloatingPointError(f"{name} of {self.name} has {fault}, from {origin}")

    def _evaluated(self, flat: Sequence[Any], donate: bool = True) -> list[Any]:
        """Return the flat results for flat arguments, under `jax.jit` if the function was."""
        fun = self._jitted if self.jit is not None and donate else self.flat_function(donate)
        try:
            outs = fun(*flat)
        except Exception as error:
            symbols = jaxcompat.lacks_a_size(error) and symbols_of(self.jaxpr)
            if not symbols:
                raise
            closed_over = next(iter(symbols))
            raise ArgumentsError(
                f"{self.name} cannot be run: no argument has the symbol '{closed_over}'",
                f"give it a size with specialize({closed_over}=…)",
            ) from None
        with jax.transfer_guard("allow"):  # the guard is for the user's transfers
            return list(map(_as_result, outs, self.out_avals))

    def matched(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> MatchedArguments:
        """Match the arguments of a call. Raises StructureError, a TypeError; see `__call__`."""
        flat, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
        if tree == self.in_tree and not any(map(is_no_array, flat)):
            return MatchedArguments(args, kwargs, flat)
        try:
            return matched(self.in_tree, self.arg_names, args, kwargs)
        except Mismatch as mismatch:
            raise StructureError(f"the arguments do not fit {self.name}: {mismatch}") from None

    def flat_function(self, donate: bool = True) -> Callable[..., list[Any]]:
        """Return the function from flat arguments to flat results, jitted if `jit` is set."""
        fun = jaxcompat.jaxpr_as_fun(self.jaxpr)
        if self.jit is None:
            return fun

        def flat(*args: Any) -> list[Any]:
            return fun(*args)

        flat.__name__ = self.name
        keywords = self.jit_keywords
        return jax.jit(flat, **keywords if donate else {**keywords, "donate_argnums": ()})

    @property
    def jit_keywords(self) -> dict[str, Any]:
        """The keyword arguments for `jax.jit` of the flat function; none if it had no jit."""
        return {} if self.jit is None else self.jit.keywords(self.arguments, self.results)

    @cached_property
    def _jitted(self) -> Callable[..., list[Any]]:
        """The flat function under `jax.jit`, compiled once for all calls."""
        return self.flat_function()

    @property
    def __name__(self) -> str:
        """The name of the program, which `jax.jit(program)` reads as a function's name."""
        return self.name

    @property
    def in_avals(self) -> list[Aval]:
        """The abstract value (shape, dtype, weak type) of each flat argument."""
        return [v.aval for v in self.jaxpr.invars]

    @cached_property
    def _types(self) -> tuple[Aval, ...]:
        return tuple(self.in_avals)

    @property
    def out_avals(self) -> list[Aval]:
        """The abstract value of each flat result."""
        return [v.aval for v in self.jaxpr.outvars]

    @property
    def arguments(self) -> list[tuple[str, Aval]]:
        """The name and the abstract value of each flat argument."""
        return list(zip(self.arg_names, self.in_avals, strict=True))

    @property
    def results(self) -> list[tuple[str, Aval]]:
        """The name and the abstract value of each flat result."""
        return list(zip(self.out_names, self.out_avals, strict=True))

    @cached_property
    def symbols(self) -> dict[str, Any]:
        """The symbolic dimension of each symbol in the types of the arguments."""
        return sizes_by_symbol(self.in_avals)

    def specialized(self, sizes: Sizes) -> Program:
        """Return the program with symbols replaced by sizes, the same object for the same sizes.

        Args:
            sizes: The size of each symbol to replace: a number, or a symbolic dimension.

        Raises:
            UnsupportedError: If an equation cannot have these sizes.
        """
        key = tuple(sizes.items())
        result = self._specialized.pop(key, None)
        if result is None:
            bounds = tuple((name, bound.at(sizes)) for name, bound in self.bounds)
            result = self.replace(jaxpr=METHODS["specialized"](self.jaxpr, sizes), bounds=bounds)
            if len(self._specialized) == MOST_SIZES:
                del self._specialized[next(iter(self._specialized))]
        self._specialized[key] = result  # last, so that the first is the least recently used
        return result

    @cached_property
    def _specialized(self) -> dict[Hashable, Program]:
        return {}

    def at(self, shapes: Sequence[Sequence[Any]]) -> Program:
        """Return the program for flat arguments of these shapes: itself, unless it has symbols.

        Args:
            shapes: The shape of each flat argument.

        Raises:
            ArgumentsError: If no sizes of the symbols yield these shapes.
        """
        if not self.symbols:
            return self
        return self.specialized(found_sizes(self.name, self.arguments, shapes))

    @cached_property
    def meshes(self) -> list[Mesh | AbstractMesh]:
        """The meshes that the program mentions, without those in rules of custom derivatives."""
        return METHODS["meshes_in"](self.jaxpr, self.jit)  # type: ignore[no-any-return]

    def on_mesh(self, mesh: Mesh | AbstractMesh) -> Program:
        """Return the program for a mesh that has the same axes with other sizes.

        The result is that of tracing the function on this mesh, unless the function itself reads
        the sizes of its mesh, or the number of devices. Axes stay explicit, or left to XLA's
        partitioner, as they are in the program.

        Args:
            mesh: The mesh, in any order of its axes. Without devices (`AbstractMesh`), the program
                runs on the mesh that is set, or on the first devices.

        Raises:
            ArgumentsError: If the program has no mesh, or one with other axes, or the mesh does not
                divide an argument or a result.
            UnsupportedError: If it does not divide a value, or a `shard_map` has the shapes of
                shards of other sizes. Names the equation and its line.
            CheckError: If a rule of JAX for types depends on the sizes otherwise.
        """
        return METHODS["on_mesh"](self, mesh)  # type: ignore[no-any-return]

    def replace(self, **changes: Any) -> Program:
        """Return a copy with some fields changed. Bounds of removed arguments are dropped."""
        if "jaxpr" in changes:
            changes["jaxpr"] = as_constants(changes["jaxpr"], self.jaxpr)
        result = replace(self, **changes)
        left = tuple(bound for bound in result.bounds if bound[0] in result.arg_names)
        return result if left == result.bounds else replace(result, bounds=left)

    def apply(self, passes: str | Callable[[Program], Program | Programs]) -> Program | Programs:
        """Return the program rewritten by a pass, or by a pipeline as text.

        Args:
            passes: A pass, or a pipeline such as `"dce, cse"`.
        """
        return METHODS["apply"](self, passes)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return str(METHODS["program_text"](self))

    def __repr__(self) -> str:
        return str(METHODS["program_summary"](self))

    def _repr_html_(self) -> str:
        return str(METHODS["program_html"](self))


def _as_result(value: object, aval: Aval) -> Any:
    """Return JAX's array of a result; literals and constants may be Python scalars or NumPy arrays.

    A value that JAX cannot represent as an array is returned as it is.
    """
    if isinstance(value, jax.Array):
        return value
    dtype = getattr(aval, "dtype", None)
    no_array = dtype == jax.dtypes.float0 or needs_x64(dtype)
    return value if no_array and hasattr(value, "shape") else as_array(value)


class Programs(Mapping[str, Program]):
    """Named programs in order, for a pass that returns several (`unzip`: init and apply)."""

    def __init__(self, programs: Mapping[str, Program]):
        self._programs = dict(programs)

    def __getitem__(self, name: str) -> Program:
        return self._programs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._programs)

    def __len__(self) -> int:
        return len(self._programs)

    def _repr_html_(self) -> str:
        return str(METHODS["program_html"](self))

    def __repr__(self) -> str:
        return f"Programs({', '.join(self._programs)})"


def type_check(program: Program, before: Program | None = None, *, preserves: bool = False) -> None:
    """Check every equation of a program, at every depth, with JAX's own type checker.

    Also checks that trees and names fit the jaxpr.

    Args:
        program: The program.
        before: A well-typed program. Its equations are not checked again, and of several other
            equations that are alike, only one is checked.
        preserves: Whether the program computes the same as `before`. Then arguments and results
            must have the same weak types as there, and equations those that they compute.

    Raises:
        CheckError: With the first fault.
    """
    jaxpr = program.jaxpr
    sizes = {
        "arguments": (len(jaxpr.invars), program.in_tree.num_leaves, len(program.arg_names)),
        "results": (len(jaxpr.outvars), program.out_tree.num_leaves, len(program.out_names)),
        "constants": (len(jaxpr.constvars), len(jaxpr.consts)),
    }
    for what, counts in sizes.items():
        if len(set(counts)) != 1:
            raise CheckError(f"{program.name}: the numbers of {what} differ: {counts}")
    try:
        with jaxcompat.axes_bound(program.axis_env):
            checked = None
            if before is not None:
                same_axes = before.axis_env == program.axis_env
                checked = frozenset(_equations(before.jaxpr) if same_axes else ())
            jaxcompat.check_jaxpr(jaxcompat.open_jaxpr(jaxpr), checked, weak_types=preserves)
    except Exception as error:  # JAX's checker raises several exception types
        raise CheckError(f"{program.name} is not well typed: {_fault(error)}") from error
    if before is not None and preserves:
        _require_weak_types(program, before)


def check_results(program: Program, before: Program) -> None:
    """Check that results have the types that they have in another program, weak types included.

    No equation is visited, so this takes microseconds.

    Raises:
        CheckError: With the first result that has another type.
    """
    pairs = zip(before.jaxpr.outvars, program.jaxpr.outvars, strict=False)
    if all(old.aval is new.aval or old.aval == new.aval for old, new in pairs) and len(
        before.jaxpr.outvars
    ) == len(program.jaxpr.outvars):
        return
    old, new = ([type_of(aval, weak=True) for aval in p.out_avals] for p in (before, program))
    if len(old) != len(new):
        raise CheckError(f"{program.name} had {len(old)} results before, but has {len(new)} now")
    for name, was, now in zip(before.out_names, old, new, strict=True):
        if was != now:
            raise CheckError(
                f"result '{name}' of {program.name} was {was} before, but is {now} now"
            )


def _require_weak_types(program: Program, before: Program) -> None:
    """Raise CheckError if an argument or result is weakly typed in only one of the programs."""
    for what in ("arguments", "results"):
        old_avals = dict(getattr(before, what))
        for name, aval in getattr(program, what):
            was = old_avals.get(name, aval)
            if was is aval:
                continue
            old, new = type_of(was, weak=True), type_of(aval, weak=True)
            if old.startswith("~") != new.startswith("~"):
                raise CheckError(
                    f"{what[:-1]} '{name}' of {program.name} was {old} before, but is {new} now"
                )


def _equations(jaxpr: AnyJaxpr) -> list[JaxprEqn]:
    """Return the equations of a jaxpr at every depth, except for bodies that bind axes."""

    def inside(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
        for eqn, inner in holders(jaxpr):
            if not isinstance(view(eqn), ShardMap | None):
                yield from (body for _, body in inner)

    bodies = reachable((jaxcompat.open_jaxpr(jaxpr),), inside)
    return [eqn for body in bodies for eqn in body.eqns]


def _fault(error: Exception) -> str:
    """Return the error of JAX's checker, with the equation and its line, without the jaxpr."""
    text = str(error).partition("\n\nwhile checking jaxpr:")[0]
    parts = [" ".join(part.split()) for part in text.split("\n\n")]
    shown = [part if len(part) <= 200 else part[:197] + "..." for part in parts if part]
    return " ".join(shown) or type(error).__name__


# --- program signature ----------------------------------------------------------------------------
# The signature of a program: its name, and the names and types of its arguments and results.
#
# A `Program` has these names; for a bare jaxpr they are those in JAX's debug info.


@dataclass(frozen=True)
class NamedValue:
    """An argument, result or constant of a program.

    Attributes:
        name: Its name, which is a path: `params['w']`.
        type: Its type in JAX's short form: `f32[3,4]`.
        bytes: Its size in bytes; None if unknown.
    """

    name: str
    type: str
    bytes: int | None

    @property
    def described(self) -> str:
        """The type, with the bounds of the value if it has any."""
        return self.type


@dataclass(frozen=True)
class NamedSize(NamedValue):
    """An argument that is a size, with bounds: `i32[] at most 512`, `i32[] from 2 to 512`.

    Attributes:
        at_most: For a size, its largest value.
        at_least: For a size, its least value.
    """

    at_most: int
    at_least: int

    @property
    def described(self) -> str:
        if self.at_least:
            return f"{self.type} from {self.at_least} to {self.at_most}"
        return f"{self.type} at most {self.at_most}"


@dataclass(frozen=True)
class NamedLengths(NamedValue):
    """An argument with the lengths of examples: `i32[4] of N rows, each at most 512`.

    Attributes:
        rows: For lengths of examples, the number of rows of all examples.
        at_most: For lengths of examples, the largest; None if unknown.
        at_least: For lengths of examples, the least.
    """

    rows: str
    at_most: int | None
    at_least: int

    @property
    def described(self) -> str:
        lengths = range_of_lengths(self.at_least, self.at_most)
        return f"{self.type} of {self.rows} rows{lengths}"


def size_of_values(noun: str, values: Sequence[NamedValue]) -> str:
    """Describe the number of values, and their bytes if known: `215 arguments, 2.7 MiB`."""
    size = bytes_of_values(values)
    return plural(len(values), noun) + ("" if size is None else f", {in_bytes(size)}")


def bytes_of_values(values: Sequence[NamedValue]) -> int | None:
    """Return the total bytes of values, or None if the size of one is unknown."""
    sizes = [value.bytes for value in values if value.bytes is not None]
    return sum(sizes) if len(sizes) == len(values) else None


@dataclass(frozen=True)
class ValueGroup:
    """Arguments or results that are leaves of one pytree.

    Attributes:
        name: The path of the pytree: `params`.
        values: The number of leaves.
        bytes: Their total bytes; None if unknown.
        type: The type and bounds of the value, if there is only one; otherwise None.
    """

    name: str
    values: int
    bytes: int | None
    type: str | None


@dataclass(frozen=True)
class ProgramSignature:
    """A program's name, its open jaxpr, and its arguments, results and constants in order.

    Attributes:
        name: The name of the program.
        jaxpr: Its open jaxpr.
        arguments: The arguments.
        outputs: The results.
        constants: The constants.
        roots: The folders of the user's files, as a `Program` has them.
    """

    name: str
    jaxpr: Jaxpr
    arguments: tuple[NamedValue, ...]
    outputs: tuple[NamedValue, ...]
    constants: tuple[NamedValue, ...]
    roots: tuple[Root, ...] = ()


def program_signature(program: Program | AnyJaxpr) -> ProgramSignature:
    """Return the signature of a `Program`, or of a jaxpr, closed or open."""
    jaxpr = top_jaxpr(program)
    debug = jaxpr.debug_info
    if isinstance(program, Program):
        name, inputs, results = program.name, program.arg_names, program.out_names
        bounds = dict(program.bounds)
    else:
        name = debug.func_name
        inputs, results = debug.arg_names or (), debug.result_paths or ()
        bounds = {}
    return ProgramSignature(
        name,
        jaxpr,
        _named(inputs, "argument", jaxpr.invars, bounds),
        _named(results, "result", jaxpr.outvars),
        _named((), "constant", jaxpr.constvars),
        program.roots if isinstance(program, Program) else (),
    )


def _named(
    names: Sequence[str | None],
    otherwise: str,
    atoms: Sequence[Atom],
    bounds: Mapping[str, Bound] = MappingProxyType({}),
) -> tuple[NamedValue, ...]:
    if len(names) != len(atoms):
        names = [None] * len(atoms)
    values = (
        NamedValue(str(name or f"{otherwise}[{i}]"), type_of(atom.aval), size_of(atom.aval))
        for i, (name, atom) in enumerate(zip(names, atoms, strict=True))
    )
    return tuple(_bounded(value, bounds.get(value.name)) for value in values)


def _bounded(value: NamedValue, bound: Bound | None) -> NamedValue:
    common = value.name, value.type, value.bytes
    if isinstance(bound, SizeBound):
        return NamedSize(*common, bound.at_most, bound.at_least)
    if isinstance(bound, LengthsBound):
        return NamedLengths(*common, str(bound.rows), bound.longest, bound.shortest)
    return value


def require_program(program: object) -> None:
    """Raise ArgumentsError unless this is a `Program`, for instance for an untraced function."""
    if not isinstance(program, Program):
        name = getattr(program, "__name__", None) or type(program).__name__
        hint = "create one with jaxprtool.trace(function, *arguments)"
        raise ArgumentsError(f"{name} is not a Program", hint)


def top_jaxpr(program: Program | AnyJaxpr) -> Jaxpr:
    """Return the open jaxpr of a `Program`, or of a jaxpr, closed or open.

    Raises ArgumentsError for anything else, as all functions that take either.
    """
    if not isinstance(program, jaxcompat.Jaxpr | jaxcompat.ClosedJaxpr):
        require_program(program)
    jaxpr = program.jaxpr if isinstance(program, Program) else as_constants(program)
    return jaxcompat.open_jaxpr(jaxpr)


#: The name that a path begins with, or one step of it.
_STEPS = re.compile(r"\[[^\]]*\]|\.?[^.\[]+")


def path_parts(name: str) -> tuple[str, ...]:
    """Split a path into its steps, which joined give the path: `params`, `['w']`."""
    return tuple(_STEPS.findall(name))


def grouped_values(values: Sequence[NamedValue], most: int = 6) -> tuple[ValueGroup, ...]:
    """Group values by the pytrees that they belong to, in order.

    Values are grouped by the first step of their paths. If that yields only one group, more steps
    are used until there are several groups, unless these would be more than `most`.

    Args:
        values: The arguments or results of a program.
        most: The maximum number of groups to split a single one into.
    """
    paths = [path_parts(value.name) for value in values]
    steps, longest = 1, max(map(len, paths), default=0)
    while steps < longest and len({path[:steps] for path in paths}) == 1:
        steps += 1
    if len({path[:steps] for path in paths}) > most:
        steps = max(steps - 1, 1)
    groups: dict[str, list[NamedValue]] = {}
    for path, value in zip(paths, values, strict=True):
        groups.setdefault("".join(path[:steps]), []).append(value)
    return tuple(
        ValueGroup(
            name,
            len(group),
            bytes_of_values(group),
            group[0].described if len(group) == 1 else None,
        )
        for name, group in groups.items()
    )


def covering(names: Sequence[str], chosen: Sequence[bool]) -> dict[str, list[int]]:
    """Return the shortest paths that cover the chosen names and no others.

    A pytree whose leaves are all chosen is one path.

    Args:
        names: The paths of all leaves.
        chosen: For each name, whether it is chosen.

    Returns:
        The positions of the names that each path covers, by path.
    """
    total, wanted = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    paths = list(map(path_parts, names))
    for path, flag in zip(paths, chosen, strict=True):
        for end in range(1, len(path) + 1):
            total[path[:end]] += 1
            wanted[path[:end]] += flag
    positions: dict[str, list[int]] = {}
    for i, (path, flag) in enumerate(zip(paths, chosen, strict=True)):
        if flag:
            whole = (path[:end] for end in range(1, len(path) + 1))
            begins = "".join(next((p for p in whole if total[p] == wanted[p]), path))
            positions.setdefault(begins, []).append(i)
    return positions


# --- argument types -------------------------------------------------------------------------------
# Check the values that a program is called with against the types of its arguments.
#
# The rules are those of a compiled function in JAX: shapes and dtypes must be equal, and weak types
# may differ. A Python scalar or a NumPy array has the type that `jax.jit` gives it.

#: The NumPy dtypes that JAX may narrow to 32 bits.
_WIDE = "lqLQdDgG"


#: The types of Python scalars without and with 64-bit types. Some integers are too large for them.
_SCALARS = [
    {
        float: ShapedArray((), np.dtype(f"float{bits}"), weak_type=True),
        complex: ShapedArray((), np.dtype(f"complex{2 * bits}"), weak_type=True),
        bool: ShapedArray((), np.dtype(bool)),
    }
    for bits in (32, 64)
]


class TypeMismatch(Exception):
    """A value of another type than its argument: the argument's position, and the fault."""

    def __init__(self, position: int, fault: str):
        super().__init__(fault)
        self.position, self.fault = position, fault


def of_types(values: Sequence[Any], types: Sequence[Aval]) -> list[Any]:
    """Convert values to these types.

    A value that differs only in its weak type is converted, so that results have the types that the
    program states. Raises TypeMismatch for the first value of another shape or dtype.
    """
    converted = list(values)
    scalars = _SCALARS[x64_enabled()]
    for i, (value, wanted) in enumerate(zip(values, types, strict=True)):
        # Recognize the most common types here, in less than a microsecond each.
        aval = value if type(value) is np.ndarray else getattr(value, "aval", None)
        if aval is None:
            aval = scalars.get(type(value))
        if (
            aval is not None
            and type(wanted) is ShapedArray
            and aval.shape == wanted.shape
            and aval.dtype == wanted.dtype
            and getattr(aval, "weak_type", False) == wanted.weak_type
            and (aval is not value or aval.dtype.char not in _WIDE)
            and not isinstance(aval, jaxcompat.AbstractRef)
        ):
            continue
        try:
            converted[i] = _of_type(value, wanted)
        except _Fault as fault:
            raise TypeMismatch(i, str(fault)) from None
    return converted


class _Fault(Exception):
    """The fault of a value."""


def _of_type(value: Any, wanted: Aval) -> Any:
    if (aval := getattr(value, "aval", None)) is None:
        if hasattr(value, "__jax_array__"):
            value = value.__jax_array__()
        aval = _type_of_value(value)
    if _without_weak_type(aval) != _without_weak_type(wanted):
        raise _Fault(f"is {type_of(aval)}")
    weak = getattr(wanted, "weak_type", False)
    if weak == getattr(aval, "weak_type", False):
        return value
    with jax.transfer_guard("allow"):  # the guard is for the user's transfers
        return jaxcompat.with_weak_type(value, aval.dtype, weak)


def _type_of_value(value: Any) -> Aval:
    """Return the type that `jax.jit` gives a value that is neither JAX's array nor a tracer."""
    if isinstance(value, jax.ShapeDtypeStruct | jax.core.AbstractValue):
        raise _Fault("is a type, not an array")
    try:
        return jax.api_util.shaped_abstractify(value)
    except OverflowError:
        raise _Fault(f"is {value}, too large for its type") from None
    except TypeError:
        dtype = getattr(value, "dtype", None)
        shown = type(value).__name__ if dtype is None else f"an array of dtype {dtype}"
        raise _Fault(f"is {shown}, which is not a JAX array") from None


def _without_weak_type(aval: Aval) -> Any:
    """Return a key that two types share if a value of one is accepted for the other."""
    if isinstance(aval, ShapedArray | jaxcompat.AbstractRef):
        return type(aval), aval.shape, aval.dtype
    return aval


# --- jit options ----------------------------------------------------------------------------------
# The options of `jax.jit` for the function that a program was traced from.
#
# They are stored by the names and types of arguments and results: an option of the argument
# `x:f32[8]` holds as long as the program has an argument of this name and type. Options of the
# whole function hold for every program that passes derive from it.

#: The name and the abstract value of each argument, or result, in order.
Values = Sequence[tuple[str, Aval]]


@dataclass(frozen=True)
class ValueOptions:
    """The options of one argument or result.

    `placement` is a sharding, a `jax.experimental.layout.Format`, or None.
    """

    name: str
    shape: tuple[Any, ...]
    dtype: DType
    placement: Any = None
    donated: bool = False


@dataclass(frozen=True)
class JitOptions:
    """The options of a function under `jax.jit`; values without options are left out."""

    arguments: tuple[ValueOptions, ...] = ()
    results: tuple[ValueOptions, ...] = ()
    compiler_options: tuple[tuple[str, Any], ...] = ()
    keep_unused: bool = False
    inline: Any = False

    @classmethod
    def from_traced(cls, arguments: Values, results: Values, options: TracedOptions) -> JitOptions:
        """Return the options of a program from JAX's record of them, value by value."""
        taken = zip(arguments, options.in_placements, options.donated, strict=True)
        returned = zip(results, options.out_placements, strict=True)
        return cls(
            tuple(filter(_has_options, (_options(*value, *asked) for value, *asked in taken))),
            tuple(filter(_has_options, (_options(*value, *asked) for value, *asked in returned))),
            options.compiler_options,
            options.keep_unused,
            options.inline,
        )

    def placing(self, arguments: Values, placements: Sequence[Any]) -> JitOptions:
        """Return these options with placements of arguments that have none; None adds none."""
        pairs = zip(self.of_arguments(arguments), placements, strict=True)
        options = (
            replace(option, placement=option.placement if placement is None else placement)
            for option, placement in pairs
        )
        return replace(self, arguments=tuple(filter(_has_options, options)))

    def donating(self, arguments: Values, positions: Collection[int]) -> JitOptions:
        """Return these options with the arguments at some positions also donated."""
        asked = enumerate(self.of_arguments(arguments))
        options = (replace(option, donated=option.donated or i in positions) for i, option in asked)
        return replace(self, arguments=tuple(filter(_has_options, options)))

    def placed_by(self, change: Callable[[Any], Any]) -> JitOptions:
        """Return these options with a change of each sharding or layout."""
        arguments, results = (
            tuple(replace(option, placement=change(option.placement)) for option in values)
            for values in (self.arguments, self.results)
        )
        return replace(self, arguments=arguments, results=results)

    def of_arguments(self, arguments: Values) -> list[ValueOptions]:
        """Return the options of each of these arguments."""
        return _matched(self.arguments, arguments)

    def of_results(self, results: Values) -> list[ValueOptions]:
        """Return the options of each of these results."""
        return _matched(self.results, results)

    def keywords(self, arguments: Values, results: Values) -> dict[str, Any]:
        """Return the keyword arguments of `jax.jit` for a function of flat arguments."""
        taken, returned = self.of_arguments(arguments), self.of_results(results)
        keywords: dict[str, Any] = {"keep_unused": self.keep_unused, "inline": self.inline}
        keywords["donate_argnums"] = tuple(i for i, o in enumerate(taken) if o.donated)
        if any(o.placement is not None for o in taken):
            keywords["in_shardings"] = tuple(o.placement for o in taken)
        if any(o.placement is not None for o in returned):
            keywords["out_shardings"] = [o.placement for o in returned]
        if self.compiler_options:
            keywords["compiler_options"] = dict(self.compiler_options)
        return keywords


def _options(name: str, aval: Aval, placement: Any = None, donated: bool = False) -> ValueOptions:
    return ValueOptions(name, *_type(aval), placement, donated)


def _type(aval: Aval) -> tuple[tuple[Any, ...], Any]:
    return tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", None)


def _has_options(value: ValueOptions) -> bool:
    return value.donated or value.placement is not None


def _matched(options: Sequence[ValueOptions], values: Values) -> list[ValueOptions]:
    by_value = {(value.name, value.shape, value.dtype): value for value in options}
    plain = [_options(*value) for value in values]
    return [by_value.get((value.name, value.shape, value.dtype), value) for value in plain]


# --- lifted ---------------------------------------------------------------------------------------
# Programs that take the traced values that their function closes over as their last argument.

#: The keyword argument for these values, so that positions keep their meaning for the user. It
#: sorts after all others.
CLOSED_OVER = "\U0010ffff closed over"


def with_lifted(program: Program, jaxpr: ClosedJaxpr, count: int) -> Program:
    """Return a program with a jaxpr that takes `count` more values, after its arguments."""
    args, kwargs = filled(program.in_tree, range(program.in_tree.num_leaves))
    in_tree = structure((args, {**kwargs, CLOSED_OVER: [0] * count}))
    names = (*program.arg_names, *(f"closed_over[{i}]" for i in range(count)))
    return program.replace(jaxpr=jaxpr, in_tree=in_tree, arg_names=unique(names))
