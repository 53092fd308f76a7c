"""Resolution of a TARGET to a function to trace or a stored program.

    package.module:function, path/file.py:function    a function, with arguments for it
    path/file.jaxpr, -                                a program from a file, or from stdin
    path/file                                         an artifact of `jax.export`, or StableHLO
    run/step, run/step@2                              a program of a run that `record` recorded
    run/step:loss, path/file.jaxpr:loss#2             a function inside such a program

`loading` finds functions, `formats` reads files, and `recording` reads recorded runs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import jax

from jaxprtool.errors import ArgumentsError, StructureError, TargetError
from jaxprtool.files import NOTEBOOK, NOTEBOOK_HINT, is_device, opened_plain
from jaxprtool.ir import source_text
from jaxprtool.ir.conversions import with_contents
from jaxprtool.ir.equations import has_64_bit_types
from jaxprtool.ir.meshes import NO_SPECS, Specs, on_axes
from jaxprtool.ir.program import Program, grouped_values, program_signature
from jaxprtool.ir.symbols import Sizes, found_sizes, symbolic_sizes
from jaxprtool.ir.trees import filled
from jaxprtool.loading import argspec
from jaxprtool.loading import load as functions
from jaxprtool.loading.load import Arguments, Entry
from jaxprtool.loading.trace import BoundCall, StaticArguments
from jaxprtool.recording.folder import missing_run, run_and_program, run_of_file

if TYPE_CHECKING:
    from jaxprtool.loading.remote_target import RemoteTarget

STDIN = "-"

_MODULE = "the text of an HLO module begins with HloModule"
_FUNCTION = "write a function as package.module:function or path/file.py:function"


@dataclass(frozen=True)
class ProgramEntry:
    """A program read from a file, with flat arguments to run it on; has `Entry`'s interface."""

    program: Program
    values: tuple[object, ...]

    #: The arguments of `--args` if they are for the program after the passes.
    after: Arguments | None = None

    #: What to know of the program, or "".
    note: str = ""

    #: Always None: no argument values were computed needlessly.
    needless_work: ClassVar[None] = None

    #: A program states its own shardings.
    specs: ClassVar[Specs] = NO_SPECS

    @property
    def name(self) -> str:
        """The name of the program."""
        return self.program.name

    def trace(self, axes: Sequence[tuple[Hashable, int]] = ()) -> Program:
        """Return the program as read; its own free named axes are kept."""
        return self.program

    def arguments(self) -> list[object]:
        """Return the flat arguments in the program's order: arrays, scalars or types."""
        return list(self.values)

    def position(self, number: int) -> int:
        """Return the position of a positional argument. Raises ArgumentsError if there is none."""
        args, _ = filled(self.program.in_tree, self.values)
        return BoundCall(args, {}, {}, {}).position(number)


def find_entry(
    target: str,
    args: str | None = None,
    factory: bool = False,
    types: str | None = None,
    symbolic: bool = False,
    *,
    in_specs: str | None = None,
    out_specs: str | None = None,
    mesh: Mapping[str, int] | None = None,
    may_lack_mesh: bool = False,
    opaque: bool = False,
    **static: Unpack[StaticArguments],
) -> Entry | ProgramEntry:
    """Return the entry that TARGET names, with the arguments of `--args`; see `load.find_function`.

    A program is put on a mesh whose axes have the sizes `mesh`. A program without a mesh is then an
    error, unless `may_lack_mesh` is True. Functions are traced on the mesh that is set. With
    `opaque`, operations of a module that cannot be read are kept as equations.

    Raises TargetError, ProgramFileError, ArgumentsError, or UserFunctionError if the user's code
    raises.
    """
    _require_program(target)
    if not is_file(target):
        _require_run(target)
        specs = Specs(in_specs, out_specs)
        return functions.find_function(target, args, factory, types, symbolic, specs, **static)
    if in_specs is not None or out_specs is not None:
        raise TargetError(
            f"{_shown(target)} is a program, so --in-specs and --out-specs do not apply",
            _FUNCTION,
        )
    if types is not None:
        raise TargetError(
            f"{_shown(target)} is a program, which already has types: --types applies to functions",
            "change its sizes with specialize(n=…)",
        )
    if factory or any(places != () for places in static.values()):
        raise TargetError(
            f"{_shown(target)} is a program, so --factory and static arguments do not apply",
            _FUNCTION,
        )
    program, kept, note = _stored(target, args, opaque)
    if not jax.config.jax_enable_x64 and has_64_bit_types(program.jaxpr):
        raise TargetError(
            f"{_shown(target)} has 64-bit types, which are not enabled",
            "add --x64, or set jax_enable_x64",
        )
    if mesh is not None and (program.meshes or not may_lack_mesh):
        program = on_axes(program, mesh)
    own_types = tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in program.in_avals)
    if args is None:
        values = own_types if kept is None else tuple(kept)
        return ProgramEntry(program, values, note=note)
    from jaxprtool.sizes.buckets import converted_arguments

    arguments = argspec.read_args(args)
    if symbolic and program.symbols and not symbolic_sizes(jax.tree.leaves(arguments)):
        return ProgramEntry(program, own_types, arguments, note)
    values = converted_arguments(program, *arguments)
    program = program.at([getattr(value, "shape", ()) for value in values])
    return ProgramEntry(program, values, note=note)


def import_module(target: str) -> None:
    """Import the module of the function that TARGET names, unless it is a program file.

    Raises TargetError, or UserFunctionError if the module raises.
    """
    _require_program(target)
    if not is_file(target):
        _require_run(target)
        functions.resolve(target)


def _require_program(target: str) -> None:
    """Raise TargetError if a TARGET is an HLO module, which most commands do not read."""
    from jaxprtool.formats.hlo import is_hlo

    if is_hlo(target):
        raise TargetError(
            f"{_shown(target)} is an HLO module", "cost, diff, memory, report and show read it"
        )


def _require_run(target: str) -> None:
    """Raise TargetError if a TARGET names a run that does not exist."""
    if (error := missing_run(target)) is not None:
        raise error


def find_elsewhere(place: RemoteTarget, options: Sequence[str]) -> ProgramEntry:
    """Return the program of a TARGET at a git revision, or traced by another Python.

    `options` are those of `jaxprtool opt`. Raises the errors of `written_elsewhere`.
    """
    from jaxprtool.loading.remote_target import written_elsewhere

    with written_elsewhere(place, options) as file:
        # The other JAX may have primitives that this one lacks.
        return find_entry(file, opaque=True)  # type: ignore[return-value]


#: The suffixes of programs in files; other files are recognized by what is in them.
_SUFFIXES = (".jaxpr", ".mlir", ".mlirbc", ".exported")


def is_file(target: str) -> bool:
    """Return True if a TARGET is a program in a file, stdin or a run, or inside one."""
    if target == STDIN or target.endswith(_SUFFIXES):
        return True
    if target.endswith(".py"):
        return False
    place, colon, _ = target.rpartition(":")
    if colon:
        return not place.endswith(".py") and is_file(place)
    return os.path.isfile(target) or run_and_program(target) is not None


def _stored(
    target: str, args: str | None = None, opaque: bool = False
) -> tuple[Program, Sequence[object] | None, str]:
    """Return a program, the arguments that its run keeps, and a note on it, or ""."""
    place, colon, name = target.rpartition(":")
    if colon and not os.path.exists(target) and is_file(place):
        from jaxprtool.loading.inner_functions import inner_function

        program, note = inner_function(_stored(place, args, opaque)[0], name)
        return program, None, note
    recorded = run_and_program(target)
    if recorded is None:
        return _program(target, _data(target), args, opaque), None, ""
    from jaxprtool.recording.read import replayed

    return *replayed(*recorded), ""


def _data(target: str) -> bytes:
    if target == STDIN:
        if is_device(sys.stdin.buffer):
            raise TargetError("cannot read stdin: it is a device, not a program")
        return sys.stdin.buffer.read()
    try:
        with opened_plain(target) as file:
            return file.read()
    except (OSError, ValueError) as error:  # ValueError for an invalid path
        hint = None
        if isinstance(error, FileNotFoundError):
            command = "opt" if target.endswith(".jaxpr") else "emit"
            hint = f"write one with `jaxprtool {command} TARGET -o FILE`"
        raise TargetError(
            f"cannot read '{target}': {getattr(error, 'strerror', None) or error}", hint
        ) from None


def _program(target: str, data: bytes, args: str | None, opaque: bool) -> Program:
    # Most targets are functions; import the readers only for a file.
    from jaxprtool.formats.jaxpr.read import is_program, parse_program, read
    from jaxprtool.formats.lowering import is_exported, read_exported
    from jaxprtool.formats.stablehlo import is_stablehlo, read_module_program

    if target.endswith(NOTEBOOK):
        raise TargetError(f"{_shown(target)} is a notebook, not a program", NOTEBOOK_HINT)
    if is_exported(data):
        return read_exported(data, _shown(target))
    if is_stablehlo(data):
        shapes = None
        if args is not None:  # a module may leave sizes open
            shapes = [jax.numpy.shape(leaf) for leaf in jax.tree.leaves(argspec.read_args(args))]
        path = "<stdin>" if target == STDIN else target
        return read_module_program(data, path, shapes, opaque)
    if not is_program(data) and not target.endswith(".jaxpr"):
        neither = "neither a program that jaxprtool wrote nor StableHLO, HLO, or an artifact"
        raise TargetError(
            f"{_shown(target)} is {f'{neither} of jax.export' if data.strip() else 'empty'}",
            _MODULE if target.endswith(".hlo") else _FUNCTION,
        )
    if target == STDIN:
        return parse_program(data, "<stdin>")
    if run := run_of_file(target):
        source_text.use_kept(run)
    return read(target, opaque=opaque)


def _shown(target: str) -> str:
    return "stdin" if target == STDIN else f"'{target}'"


# --- arguments after passes -----------------------------------------------------------------------


@dataclass(frozen=True)
class RunInputs:
    """A program and the arguments to run it on.

    Attributes:
        program: The program, at the sizes of its arguments.
        values: The arguments by name: arrays, scalars or `ShapeDtypeStruct`s.
        dropped: The names of given arguments that do not fit after the passes.
        sizes: The sizes of its symbols, if the arguments are for the program before the passes.
    """

    program: Program
    values: dict[str, Any]
    dropped: tuple[str, ...] = ()
    sizes: Sizes = field(default_factory=dict)


@dataclass(frozen=True)
class TracedTarget:
    """A program as traced, and its arguments.

    Attributes:
        program: The program.
        values: The arguments by name: arrays, scalars or `ShapeDtypeStruct`s.
        position: Returns the position in the program of a positional argument of the function.
        seconds: The time of tracing.
        after: The arguments of `--args` if they are for the program after the passes.
        mesh_set: Sets the mesh of `--mesh` in a `with` block, as for tracing, for the programs that
            passes derive from this one.
    """

    program: Program
    values: dict[str, Any]
    position: Callable[[int], int]
    seconds: float
    after: Arguments | None = None
    mesh_set: Callable[[], AbstractContextManager[object]] = nullcontext

    def given_to(self, program: Program) -> RunInputs:
        """Return the arguments to run a program that passes derived from this one.

        Refs are replaced by their values. Raises ArgumentsError for arguments that do not fit this
        program.
        """
        from jaxprtool.execute.running.arrays import refitted  # most commands run nothing

        program = with_contents(program)
        if self.after is None:
            return RunInputs(program, *refitted(program, self.values))
        from jaxprtool.sizes.buckets import converted_arguments

        try:
            values = converted_arguments(program, *self.after)
        except (ArgumentsError, StructureError) as error:
            takes = [
                f"{argument.name}: {argument.type}" if argument.type else argument.name
                for argument in grouped_values(program_signature(program).arguments)
            ]
            error.hint = error.hint or f"the arguments after the passes are {', '.join(takes)}"
            raise
        by_name = dict(zip(program.arg_names, values, strict=True))
        if not program.symbols:
            return RunInputs(program, by_name)
        shapes = [getattr(value, "shape", ()) for value in values]
        sizes = found_sizes(program.name, program.arguments, shapes)
        return RunInputs(program.specialized(sizes), by_name, (), sizes)


def axes_under(
    target: str, axis_env: Mapping[str, int], bound: Sequence[tuple[Hashable, int]]
) -> Sequence[tuple[Hashable, int]]:
    """Return the named axes to trace TARGET under: those given, and those that passes bind.

    Raises TargetError for axes of a program, which has its own, and ArgumentsError for an axis that
    a pass binds with another size.
    """
    if axis_env and is_file(target):
        raise TargetError(
            f"{_shown(target)} is a program, which keeps the named axes that it was traced under: "
            "--axis-env applies to functions",
            _FUNCTION,
        )
    for name, size in bound:
        if axis_env.get(str(name), size) != size:
            raise ArgumentsError(
                f"--axis-env has axis '{name}' of size {axis_env[str(name)]}, but a pass binds it "
                f"with size {size}"
            )
    return (*axis_env.items(), *(axis for axis in bound if axis[0] not in axis_env))


def trace_entry(
    entry: Entry | ProgramEntry, axes: Sequence[tuple[Hashable, int]] = ()
) -> TracedTarget:
    """Trace an entry, with these named axes free in its program."""
    start = time.perf_counter()
    program = entry.trace(axes)
    seconds = time.perf_counter() - start
    arguments = entry.specs.placed(program, entry.arguments())
    values = dict(zip(program.arg_names, arguments, strict=True))
    return TracedTarget(program, values, entry.position, seconds, entry.after)
