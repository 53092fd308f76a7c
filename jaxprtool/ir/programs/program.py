"""The value that all of jaxprtool takes and returns: a closed jaxpr with its names and trees.

JAX's own jaxpr objects are the intermediate language; a `Program` adds the parts that a jaxpr
lacks: its name, the pytrees of its flat arguments and results, and a readable path for each of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.tree_util import PyTreeDef

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError, CheckError, StructureError
from jaxprtool.ir.basics.dtypes import as_array, needs_x64
from jaxprtool.ir.basics.printed import METHODS
from jaxprtool.ir.basics.reachability import reachable
from jaxprtool.ir.core.equations import holders, type_of
from jaxprtool.ir.core.structured import ShardMap, view
from jaxprtool.ir.evaluation.nonfinite import FiniteCheck, unchecked
from jaxprtool.ir.programs.argument_types import TypeMismatch, of_types
from jaxprtool.ir.programs.jit_options import JitOptions
from jaxprtool.ir.programs.matching import MatchedArguments, Mismatch, matched
from jaxprtool.ir.programs.static_leaf import is_no_array
from jaxprtool.ir.rewriting.array_literals import as_constants
from jaxprtool.ir.shapes.bounds import Bound, SizeBound
from jaxprtool.ir.shapes.mesh_sizes import Indivisible, MeshChange, mesh_change, meshes_in
from jaxprtool.ir.shapes.specialization import specialized
from jaxprtool.ir.shapes.symbols import Sizes, found_sizes, sizes_by_symbol, symbols_of
from jaxprtool.ir.source.frames import Root
from jaxprtool.jaxcompat import AnyJaxpr, Aval, Jaxpr, JaxprEqn

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
        with unchecked():
            given = [x[...] if isinstance(x, jax.Ref) else x for x in leaves]
            outs = self._evaluated(leaves, donate=False)  # needed again, as in JAX
        self.require_finite(FiniteCheck.from_config(), given, outs)
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
        made = self._specialized.pop(key, None)
        if made is None:
            bounds = tuple((name, bound.at(sizes)) for name, bound in self.bounds)
            made = self.replace(jaxpr=specialized(self.jaxpr, sizes), bounds=bounds)
            if len(self._specialized) == MOST_SIZES:
                del self._specialized[next(iter(self._specialized))]
        self._specialized[key] = made  # last, so that the first is the least recently used
        return made

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
        return meshes_in(self.jaxpr, self.jit)

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
        found = self.meshes or meshes_in(self.jaxpr, rules=True)
        change = mesh_change(self.name, found, mesh)
        self._check_division(change)
        jit = self.jit and self.jit.placed_by(change.placement)
        made = self.replace(jaxpr=change.jaxpr(self.jaxpr), jit=jit)
        type_check(made)
        return made

    def _check_division(self, change: MeshChange) -> None:
        """Raise ArgumentsError for an argument or result that a new mesh does not divide."""
        options = self.jit or JitOptions()
        for what, values, asked in (
            ("argument", self.arguments, options.of_arguments(self.arguments)),
            ("result", self.results, options.of_results(self.results)),
        ):
            for (name, aval), option in zip(values, asked, strict=True):
                try:
                    change.aval(aval)
                    change.require_division(aval, option.placement)
                except Indivisible as fault:
                    raise ArgumentsError(f"{what} '{name}' of {self.name}: {fault}") from None

    def replace(self, **changes: Any) -> Program:
        """Return a copy with some fields changed. Bounds of removed arguments are dropped."""
        made = replace(self, **changes)
        left = tuple(bound for bound in made.bounds if bound[0] in made.arg_names)
        return made if left == made.bounds else replace(made, bounds=left)

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
            known = None
            if before is not None:
                same_axes = before.axis_env == program.axis_env
                known = frozenset(map(id, _equations(before.jaxpr) if same_axes else ()))
            jaxcompat.check_jaxpr(jaxcompat.open_jaxpr(jaxpr), known, weak_types=preserves)
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
        known = dict(getattr(before, what))
        for name, aval in getattr(program, what):
            old, new = (type_of(each, weak=True) for each in (known.get(name, aval), aval))
            if old.startswith("~") != new.startswith("~"):
                raise CheckError(
                    f"{what[:-1]} '{name}' of {program.name} was {old} before, but is {new} now"
                )


def _equations(jaxpr: AnyJaxpr) -> list[JaxprEqn]:
    """Return the equations of a jaxpr at every depth, except for bodies that bind axes."""

    def inside(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
        for eqn, held in holders(jaxpr):
            if not isinstance(view(eqn), ShardMap | None):
                yield from (body for _, body in held)

    bodies = reachable((jaxcompat.open_jaxpr(jaxpr),), inside)
    return [eqn for body in bodies for eqn in body.eqns]


def _fault(error: Exception) -> str:
    """Return the error of JAX's checker, with the equation and its line, without the jaxpr."""
    text = str(error).partition("\n\nwhile checking jaxpr:")[0]
    parts = [" ".join(part.split()) for part in text.split("\n\n")]
    shown = [part if len(part) <= 200 else part[:197] + "..." for part in parts if part]
    return " ".join(shown) or type(error).__name__
