"""The subject of a command: a TARGET, traced once, and its programs after passes.

A command is a function under `@command`: its options, one call that returns programs and their
arguments, a call of the API, and its output. A parameter annotated with a group of options
represents all of them. A group is a dataclass, whose fields are options or other groups: a
`Session` has a `FunctionOptions`, which has the options of `Tracing` and `SourceLines`. Options
that few commands have, such as `--types`, are parameters of these commands. `--traceback` is an
option of every command. `on_progress` is not an option but the receiver of progress messages
(`cli.output`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import shlex
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal

import typer
from typer.main import get_command

from jaxprtool.cli import options, output
from jaxprtool.cli.completion import require_package
from jaxprtool.cli.launch import start_jax, use_cache, use_host_devices, use_virtual_devices
from jaxprtool.cli.options import FUNCTION, OUTPUT
from jaxprtool.cli.output import OnProgress, silent
from jaxprtool.errors import (
    ArgumentsError,
    MeshConflictError,
    OutputError,
    PipelineError,
    TargetError,
    TooFewDevicesError,
)
from jaxprtool.files import is_stream
from jaxprtool.ir import source_text

if TYPE_CHECKING:
    import jax

    from jaxprtool.api.targets import ProgramEntry, RunInputs, TracedTarget
    from jaxprtool.cli.options import Reproducer
    from jaxprtool.execute.running.arrays import FilledArguments
    from jaxprtool.formats.hlo import StoredModule
    from jaxprtool.ir.program import Program
    from jaxprtool.loading.load import Entry
    from jaxprtool.passes import Observer, Pipeline

#: Programs by name.
Named = Sequence[tuple[str, "Program"]]

#: Which frames of an equation to show.
FrameChoice = Literal["mine", "library", "all"]

#: Sets a mesh in a `with` block.
MeshSet = Callable[[], contextlib.AbstractContextManager[object]]

#: The number of virtual devices for a module that needs several, if no mesh is given.
_VIRTUAL_DEVICES = 8


class KeptTargets:
    """The targets that the commands of a process have traced, for those that follow.

    A command takes each of them once: if it traces a target again, that is on purpose.

    Attributes:
        earlier: Those of earlier commands, by all that their programs depend on.
        now: Those of the running command.
    """

    def __init__(self) -> None:
        self.earlier: dict[str, tuple[Entry | ProgramEntry, TracedTarget]] = {}
        self.now: dict[str, tuple[Entry | ProgramEntry, TracedTarget]] = {}


#: None in a process that runs one command. `jaxprtool serve` keeps targets.
kept_targets: ContextVar[KeptTargets | None] = ContextVar("kept_targets", default=None)


# --- groups of options ------------------------------------------------------------------------


@dataclass(frozen=True)
class Tracing:
    """A group of options: how functions are found and traced."""

    factory: Annotated[
        bool,
        FUNCTION.flag(
            "--factory",
            "Call TARGET() to get a function, (function, args) or (function, args, kwargs). "
            "Write arguments of the call in TARGET: \"train.py:make_train({'lr': 1e-3})\".",
        ),
    ] = False
    static_argnums: Annotated[
        Any,
        FUNCTION.option(
            "--static-argnums",
            "N,…",
            "Positions of arguments that are not traced.",
            parser=options.parsed_numbers,
        ),
    ] = None
    static_argnames: Annotated[
        Any,
        FUNCTION.option(
            "--static-argnames",
            "NAME,…",
            "Names of arguments that are not traced.",
            parser=options.names,
        ),
    ] = None
    x64: Annotated[bool, FUNCTION.flag("--x64", "Enable JAX's 64-bit types.")] = False
    mesh: Annotated[
        Any,
        FUNCTION.option(
            "--mesh",
            "AXIS=N,…",
            "Trace on a mesh with these axes; types may name them: f32[8@x]. A program file is put "
            "on a mesh of these sizes.",
            parser=options.mesh_axes,
        ),
    ] = None
    in_specs: Annotated[
        str | None,
        FUNCTION.option(
            "--in-specs",
            "SPECS",
            'Shardings of the arguments on the mesh, as in jax.jit(in_shardings=...): "(P(), '
            "P('data'))\". XLA then shards all other values (Auto axes).",
        ),
    ] = None
    out_specs: Annotated[
        str | None,
        FUNCTION.option(
            "--out-specs", "SPECS", "Shardings of the results, as for --in-specs: \"P('data')\"."
        ),
    ] = None
    host_devices: Annotated[
        int | None,
        FUNCTION.option(
            "--host-devices", "N", "Run on N virtual devices of this machine's CPU.", min=1
        ),
    ] = None

    opaque: Annotated[
        bool,
        FUNCTION.flag(
            "--opaque", "Keep operations of a module that cannot be read, as opaque equations."
        ),
    ] = False

    @property
    def has_specs(self) -> bool:
        """Whether specs shard values over the mesh, and not types."""
        return self.in_specs is not None or self.out_specs is not None

    @property
    def of_programs(self) -> Tracing:
        """The options that also apply to a program file."""
        return Tracing(
            x64=self.x64, mesh=self.mesh, host_devices=self.host_devices, opaque=self.opaque
        )

    @property
    def virtual_devices(self) -> int:
        """The number of virtual devices: enough for `--mesh`, and for a mesh in the function."""
        return max(prod((self.mesh or {}).values()), _VIRTUAL_DEVICES)

    def mesh_set(self, explicit: bool, virtual: bool) -> MeshSet:
        """Return what sets the mesh of `--mesh`: on devices, or an abstract one if they are few."""
        if not self.mesh:
            return contextlib.nullcontext
        from jaxprtool.ir.meshes import mesh_set

        return functools.partial(mesh_set, self.mesh, explicit, virtual)


@dataclass(frozen=True)
class SourceLines:
    """A group of options: which source lines of an equation to show."""

    frames: Annotated[
        FrameChoice | None,
        OUTPUT.choice(
            "--frames",
            FrameChoice,
            "The source lines of an equation: mine (default), the nearest line in your files and "
            "the library line that it calls; library, the innermost line; all, from yours inwards.",
        ),
    ] = None
    mine: Annotated[
        list[str] | None,
        OUTPUT.option(
            "--mine",
            "PACKAGE,…",
            "Installed packages whose lines count as your own. May be repeated.",
        ),
    ] = None


@dataclass(frozen=True)
class FunctionOptions:
    """A group of options: TARGET, its arguments, and how to trace and show it."""

    target: Annotated[
        str,
        options.target_argument(
            "TARGET",
            "The function: package.module:function or path/file.py:function; or a program: "
            "file.jaxpr, model.mlir, run/step of a recorded run, or - for stdin; run/step:loss is "
            "loss in it.",
        ),
    ]
    args: Annotated[
        str | None,
        FUNCTION.option(
            "--args",
            "EXPR",
            "Its arguments: \"{'w': f32[3,4]}, f32[8,3], training=static(False)\". With values: "
            "zeros(f32[3]), full(f32[3], 2), array([1, 2]), … Default: its example arguments.",
        ),
    ] = None
    tracing: Tracing = Tracing()
    lines: SourceLines = SourceLines()
    on_progress: OnProgress = silent  # not an option: set by `command`

    def start(self, cache: bool | None = None) -> None:
        """Import JAX, with 64-bit types if the recorded script of TARGET enabled them.

        For a command that compiles, `cache` is whether to use the user's cache.
        """
        from jaxprtool.recording.folder import was_compiled_with_x64

        start_jax(self.on_progress, self.tracing.x64 or was_compiled_with_x64(self.target))
        if self.tracing.host_devices is not None:
            use_host_devices(self.tracing.host_devices)
        if cache is not None:
            use_cache(cache)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Apply --frames and --mine in a `with` block.

        A TooFewDevicesError of a program file gets the hint to pass a smaller `--mesh`.
        """
        from jaxprtool.ir.frames import frames

        packages = [name for each in self.lines.mine or () for name in options.names(each)]
        for name in packages:
            require_package(name, self.target)
        with frames(self.lines.frames or "mine", packages):
            try:
                yield
            except TooFewDevicesError as error:
                if self._is_file:
                    axes = ",".join(f"{axis}=…" for axis in error.axes)
                    error.hint = f"--mesh {axes} puts it on a smaller mesh; {error.hint}"
                raise

    def listed(self, source: bool | None) -> dict[str, Any]:
        """Return the options of a listing; --frames implies source lines."""
        return {"source": bool(source) or self.lines.frames is not None}

    def each_of(self, targets: Sequence[str]) -> list[FunctionOptions]:
        """Return the options for each of several TARGETs.

        If some are functions, a factory, static arguments and specs apply to these only, not to
        program files.
        """
        from jaxprtool.api.targets import is_file

        files = list(map(is_file, targets))
        bare = self.tracing if all(files) else self.tracing.of_programs
        pairs = zip(targets, files, strict=True)
        return [
            replace(self, target=t, tracing=bare if file else self.tracing) for t, file in pairs
        ]

    def module(self) -> StoredModule | None:
        """Return the HLO module that TARGET names; None if it names a program.

        Raises:
            TargetError: If jaxlib cannot parse it, or an option is given that applies to programs.
        """
        from jaxprtool.formats.hlo import is_hlo, stored_module

        if not is_hlo(self.target):
            return None
        from jaxprtool.execute.calls import call_that_may_crash

        if options := self.arguments():
            raise TargetError(f"'{self.target}' is an HLO module: {options[0]} does not apply")
        self.on_progress(f"reading {self.target}")
        return stored_module(self.target, call_that_may_crash)

    def import_module(self) -> None:
        """Import the module of TARGET, once: it may set the number of devices.

        JAX starts no backend before this. Output of the module is not a result.
        """
        _ = self._imported

    @cached_property
    def _imported(self) -> None:
        from jaxprtool.api.targets import STDIN, import_module

        self.on_progress("reading stdin" if self.target == STDIN else f"loading {self.target}")
        with contextlib.redirect_stdout(sys.stderr):
            import_module(self.target)

    def start_virtual_devices(self) -> None:
        """Give a program that is compiled, and not run, virtual devices for its mesh.

        The module of TARGET is imported. No device is added if the machine, its environment, the
        module, or `--host-devices` sets their number.
        """
        if self.tracing.host_devices is None:
            use_virtual_devices(self.tracing.virtual_devices)
            self.import_module()
            use_virtual_devices(self.tracing.virtual_devices)  # the module may set their number

    def trace(
        self,
        pipeline: Pipeline,
        *,
        runs: bool = False,
        types: str | None = None,
        symbolic: bool = False,
        axis_env: Mapping[str, int] | None = None,
        auto: bool = False,
        virtual: bool = False,
    ) -> TracedTarget:
        """Return the program of TARGET and its arguments.

        Output of its module, and of the function during tracing, is not a result.

        Args:
            pipeline: The passes to run, which may bind named axes.
            runs: Whether the function is run on its arguments. If not, a note is printed if their
                values were slow to compute.
            types: The types to trace with. --args are then for the program after the passes.
            symbolic: Whether --args are for the program after the passes also if the passes need
                symbolic sizes.
            axis_env: Named axes of the function, and their sizes.
            auto: Whether the axes of `--mesh` are Auto, because other passes shard values over
                them. They are also Auto if these passes do, or if specs are given, and otherwise
                Explicit, since types name them. A function with a mesh of its own is traced with
                the axis types of that mesh.
            virtual: Whether the mesh may have virtual devices, because the program is not run.
        """
        self.import_module()

        def on_mesh(explicit: bool) -> TracedTarget:
            mesh_set = self.tracing.mesh_set(explicit, virtual)
            kept = None if self._reads_files else kept_targets.get()
            options = types, symbolic, axis_env, auto, explicit, virtual
            key = repr((self.target, self.args, self.tracing, options, _of_tracing(pipeline)))
            with self._for_functions(mesh_set), contextlib.redirect_stdout(sys.stderr):
                entry, traced = kept.earlier.pop(key, (None, None)) if kept else (None, None)
                entry = entry or self._entry(pipeline, types, symbolic)
                if not runs and (needless := entry.needless_work):
                    output.note(needless)
                if entry.note:
                    output.note(entry.note)
                traced = traced or self.trace_entry(entry, pipeline, axis_env)
            if kept is not None:
                kept.now.setdefault(key, (entry, traced))
            has_own = self._is_file and traced.program.meshes and not pipeline.partitions
            return traced if has_own else replace(traced, mesh_set=mesh_set)

        explicit = not (auto or pipeline.partitions or self.tracing.has_specs)
        try:
            return on_mesh(explicit)
        except MeshConflictError as conflict:
            if not (self.tracing.mesh and conflict.is_alike):
                raise
            try:
                return on_mesh(not explicit)
            except ArgumentsError:
                raise conflict from conflict.__cause__

    def _entry(
        self, pipeline: Pipeline, types: str | None = None, symbolic: bool = False
    ) -> Entry | ProgramEntry:
        """Return what TARGET names, with its arguments."""
        from jaxprtool.api.targets import find_entry

        return find_entry(
            self.target,
            self.args,
            self.tracing.factory,
            types,
            symbolic and any(each.symbolic for each in pipeline.passes()),
            static_argnums=self.tracing.static_argnums or (),
            static_argnames=self.tracing.static_argnames or (),
            in_specs=self.tracing.in_specs,
            out_specs=self.tracing.out_specs,
            mesh=self.tracing.mesh,
            may_lack_mesh=bool(pipeline.steps),  # passes may use the mesh
            opaque=self.tracing.opaque,
        )

    def trace_entry(
        self,
        entry: Entry | ProgramEntry,
        pipeline: Pipeline,
        axis_env: Mapping[str, int] | None = None,
    ) -> TracedTarget:
        """Return the program of an entry, with named axes: those given, and bound by the passes."""
        from jaxprtool.api.targets import axes_under, trace_entry

        self.on_progress(f"tracing {entry.name}")
        return trace_entry(entry, axes_under(self.target, axis_env or {}, pipeline.bound_axes))

    def caller(self) -> Callable[..., object]:
        """Return a function that calls TARGET with its arguments, which must be values.

        JAX then compiles what it would in a new process. The function takes the `mesh_set` of
        TARGET as traced, if it was.

        Raises:
            ArgumentsError: If an argument is given by its type, or TARGET is a program.
        """
        import jax

        from jaxprtool.loading.load import Entry
        from jaxprtool.passes import Pipeline

        self.import_module()
        mesh_set = self.tracing.mesh_set(not self.tracing.has_specs, virtual=True)
        with self._for_functions(mesh_set), contextlib.redirect_stdout(sys.stderr):
            entry = self._entry(Pipeline())
        if not isinstance(entry, Entry):
            raise ArgumentsError("compiles needs a function to call, not a program")
        entry.require_values()

        def call(mesh_set: MeshSet = mesh_set) -> object:
            jax.clear_caches()
            given, sys.argv = sys.argv, [self.target]  # a script that parses sys.argv gets none
            try:
                with mesh_set(), contextlib.redirect_stdout(sys.stderr):
                    return entry.run()
            finally:
                sys.argv = given

        return call

    def arguments(self) -> list[str]:
        """Return these options as command-line arguments, without TARGET."""
        tracing = self.tracing
        listed = {
            "--args": self.args,
            "--static-argnums": ",".join(map(str, tracing.static_argnums or ())),
            "--static-argnames": ",".join(tracing.static_argnames or ()),
            "--mesh": ",".join(f"{axis}={size}" for axis, size in (tracing.mesh or {}).items()),
            "--in-specs": tracing.in_specs,
            "--out-specs": tracing.out_specs,
            "--host-devices": str(tracing.host_devices or ""),
        }
        flags = {
            "--factory": tracing.factory,
            "--x64": tracing.x64,
            "--opaque": tracing.opaque,
        }
        given = [part for name, value in listed.items() if value for part in (name, value)]
        return [*given, *(name for name, flag in flags.items() if flag)]

    @property
    def _is_file(self) -> bool:
        """Whether TARGET is a program, not a function."""
        from jaxprtool.api.targets import is_file

        return is_file(self.target)

    @property
    def _reads_files(self) -> bool:
        """Whether the program or its arguments come from files, which may change."""
        return self._is_file or "load(" in f"{self.target} {self.args}".replace(" ", "")

    def _for_functions(self, mesh_set: MeshSet) -> contextlib.AbstractContextManager[object]:
        """Set a mesh if TARGET is a function. A program file is read without one."""
        return contextlib.nullcontext() if self._is_file else mesh_set()


@dataclass(frozen=True)
class Session:
    """A group of options: TARGET, and the passes to run on its program first."""

    function: FunctionOptions
    passes: options.Passes = None
    plugin: options.Plugin = None

    @property
    def target(self) -> str:
        """TARGET."""
        return self.function.target

    @property
    def on_progress(self) -> OnProgress:
        """The receiver of progress messages."""
        return self.function.on_progress

    @cached_property
    def pipeline(self) -> Pipeline:
        """The pipeline of -p."""
        return pipeline(self.passes, self.plugin)

    def applied(self) -> contextlib.AbstractContextManager[None]:
        """Apply --frames and --mine in a `with` block; see `FunctionOptions.applied`."""
        return self.function.applied()

    def start(self, cache: bool | None = None) -> None:
        """Import JAX, and read -p. `cache` is as for `FunctionOptions.start`."""
        self.function.start(cache)
        _ = self.pipeline  # report errors in -p before anything is loaded

    def module(self) -> StoredModule | None:
        """Return the HLO module that TARGET names, or None; see `FunctionOptions.module`."""
        stored = self.function.module()
        if stored is not None and self.passes:
            raise TargetError(f"'{self.target}' is an HLO module: -p does not apply")
        return stored

    def traced(self, runs: bool = False, **more: Any) -> TracedTarget:
        """Return the program of TARGET and its arguments; see `FunctionOptions.trace`."""
        return self.function.trace(self.pipeline, runs=runs, **more)

    def programs(
        self,
        traced: TracedTarget | None = None,
        observer: Observer | None = None,
        reproducer: Reproducer | None = None,
    ) -> list[tuple[str, Program]]:
        """Return the programs after the passes on the program of TARGET, traced unless given."""
        from jaxprtool.cli import pipeline_steps

        traced = traced or self.traced()
        with traced.mesh_set():
            return pipeline_steps.run_pipeline(
                self.pipeline, traced.program, self.on_progress, observer, reproducer=reproducer
            )

    def given(self, wanted: str, types: str | None) -> RunInputs:
        """Return the single program after the passes, to be run, and its arguments.

        `wanted` is the start of the error message for several programs, and `types` are those of
        `--types`.
        """
        traced = self.traced(runs=True, types=types, symbolic=True)
        return traced.given_to(only_program(wanted, self.programs(traced)))

    def command_line(self, command: str, passes: Sequence[str] | None = ()) -> str:
        """Return the command line of another command on the same programs.

        Args:
            command: The command with its options.
            passes: Passes after those of -p; None for the function as traced.
        """
        steps = [] if passes is None else [each for each in (self.passes, *passes) if each]
        plugins = [] if passes is None else self.plugin or []
        name, *more = command.split()
        words = ["jaxprtool", name, self.target, *self.function.arguments()]
        words += ["-p", ", ".join(map(str, steps))] if steps else []
        words += [word for each in plugins for word in ("--plugin", each)]
        return shlex.join([*words, *more])


# --- commands ---------------------------------------------------------------------------------


def command(body: Callable) -> Callable:
    """Return a function for Typer, with its groups of options expanded, and `--traceback`.

    Its progress messages are shown on the terminal.

    `cli.app` also checks for `--traceback`, before a command is known. A command with `--json` also
    has `--max-bytes`.
    """
    groups = [name for name, hint in _hints(body).items() if _is_group(hint)]

    @functools.wraps(body)
    def run(max_bytes: int | None = None, **given: Any) -> None:
        if max_bytes and not (given["json"] or given.get("format") == "json"):
            raise OutputError("--max-bytes limits the document of --json", "add --json")
        with contextlib.ExitStack() as stack:
            stack.enter_context(output.max_bytes_set(max_bytes))
            arguments = _arguments(body, given, stack.enter_context(output.progress_shown()))
            for name in groups:
                stack.enter_context(arguments[name].applied())
            stack.callback(_note_changed, stack.enter_context(source_text.citations()))
            body(**arguments)

    parameters = [*_parameters(body)]
    if any(parameter.name == "json" for parameter in parameters):
        parameters.append(_MAX_BYTES)
    run.__signature__ = inspect.Signature([*parameters, _TRACEBACK])  # type: ignore[attr-defined]
    return run


def _note_changed(files: Mapping[str, str]) -> None:
    """Say which source files have changed whose lines a command shows, by their `citations`."""
    if not files:
        return
    from jaxprtool.ir.source_text import changed_notes

    for text in changed_notes(files):
        output.note(text)


@functools.cache
def reader(group: type) -> Any:
    """Return the Click command that reads a group of options alone, and returns it."""

    def read(**given: Any) -> Any:
        return group(**_arguments(group, given, silent))

    read.__signature__ = inspect.Signature([*_parameters(group)])  # type: ignore[attr-defined]
    alone = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    alone.command()(read)
    return get_command(alone)


def _is_group(hint: Any) -> bool:
    return isinstance(hint, type) and is_dataclass(hint)


def _hints(what: Callable) -> dict[str, Any]:
    """Return the types of the parameters of a command, or of the fields of a group."""
    hints = typing.get_type_hints(what, include_extras=True)
    hints.pop("return", None)
    return hints


def _parameters(of: Callable) -> Iterator[inspect.Parameter]:
    """Yield a parameter for each option of a command or a group."""
    hints = _hints(of)
    for parameter in inspect.signature(of).parameters.values():
        hint = hints[parameter.name]
        if _is_group(hint):
            yield from _parameters(hint)
        elif parameter.name != "on_progress":
            yield parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY)


def _arguments(of: Callable, given: Mapping[str, Any], on_progress: OnProgress) -> dict[str, Any]:
    """Return the arguments of a command or a group, from the values of all options by name."""
    values = {**given, "on_progress": on_progress}
    return {
        name: hint(**_arguments(hint, given, on_progress)) if _is_group(hint) else values[name]
        for name, hint in _hints(of).items()
    }


_TRACEBACK = inspect.Parameter(
    "traceback", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=options.Traceback
)
_MAX_BYTES = inspect.Parameter(
    "max_bytes", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=options.MaxBytes
)


# --- values of options ------------------------------------------------------------------------


def load_plugins(plugins: list[str] | None) -> None:
    """Import plug-ins; warn about one that fails."""
    from jaxprtool.passes import load_plugin

    for plugin in plugins or []:
        load_plugin(plugin)


def _of_tracing(pipeline: Pipeline) -> tuple[object, ...]:
    """Return what the program of a TARGET, as traced, depends on in the passes that follow."""
    symbolic = any(each.symbolic for each in pipeline.passes())
    return pipeline.bound_axes, symbolic, bool(pipeline.steps), pipeline.partitions


def pipeline(text: str | None, plugins: list[str] | None) -> Pipeline:
    """Return the pipeline of -p, after loading the plug-ins of --plugin; empty without -p."""
    from jaxprtool.passes import Pipeline

    load_plugins(plugins)
    return Pipeline.parse(text) if text else Pipeline()


def only_program(wanted: str, programs: Sequence[tuple[str, Program]]) -> Program:
    """Return the only program after passes. Raises PipelineError if there are several."""
    if len(programs) != 1:
        names = ", ".join(name for name, _ in programs)
        hint = "run both with `jaxprtool unzip --run`" if names == "init, apply" else None
        raise PipelineError(
            f"{wanted} one program, but the passes returned {names or 'none'}", hint
        )
    return programs[0][1]


# --- running --------------------------------------------------------------------------------------
# Common parts of commands that run a program: its arguments, its device, and messages.


@dataclass(frozen=True)
class Ready:
    """A program ready to run; `seed` is the seed of its random arguments."""

    program: Program
    filled: FilledArguments
    device: jax.Device | None
    seed: int
    dropped: Sequence[str]

    def note_random(self, target: str = "") -> None:
        """Print which arguments have random values, and which given ones do not fit.

        Args:
            target: TARGET. For a recorded program, a note says how to keep the script's arguments.
        """
        from jaxprtool.recording.folder import run_and_program

        note_random(self.filled, self.seed, self.dropped)
        recorded = run_and_program(target) if self.filled.random else None
        if recorded is not None:
            name = recorded[1].rpartition("/")[2].partition("@")[0]
            output.note(f"`record --keep {name}` keeps the arguments that the script gives")


def ready(
    inputs: RunInputs, seed: int, backend: str | None = None, device: int | None = None
) -> Ready:
    """Return a program with its device, and random values for arguments given by type."""
    from jaxprtool.execute.running.arrays import fill_arguments
    from jaxprtool.execute.running.run import choose_device

    filled = fill_arguments(inputs.program, inputs.values, seed)
    chosen = choose_device(inputs.program, backend, device)
    return Ready(inputs.program, filled, chosen, seed, inputs.dropped)


def require_device(
    function: FunctionOptions, backend: str | None, index: int | None = None
) -> None:
    """Raise BackendError for a missing backend or device before tracing.

    This starts backends, whose options the module of TARGET may set, so it is imported first.
    """
    from jaxprtool.execute.running import backends

    if backend is not None or index is not None:
        function.import_module()
        backends.device(backend, index or 0)


@contextlib.contextmanager
def printed_by_functions(json: bool) -> Iterator[None]:
    """Leave a running function's output on stdout, or with `json` redirect it to stderr."""
    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        yield


def file_to_save(path: str | None) -> contextlib.AbstractContextManager[BinaryIO | None]:
    """Open the file of `--save`, created only on success; None without it."""
    return output.written_file(path) if path else contextlib.nullcontext()


def save_arrays(arrays: Mapping[str, object], file: BinaryIO) -> None:
    """Write arrays by name, for `--save`."""
    from jaxprtool.execute.running.arrays import plain_array
    from jaxprtool.ir.array_files import write_npz

    write_npz(file, {name: plain_array(array) for name, array in arrays.items()})


def results_file(
    path: str | None, is_first: bool
) -> contextlib.AbstractContextManager[BinaryIO | None]:
    """Open the file of `run --save` in the first process of a cluster.

    Return None in the other processes, and for a path that may become a folder. Raises OutputError
    if the path cannot be written.
    """
    if path is None or path.endswith(".npz") or is_stream(path):
        return file_to_save(path if is_first else None)
    from jaxprtool.ir.array_files import check_folder

    check_folder(path)
    return contextlib.nullcontext()


def save_results(
    arrays: Mapping[str, object], path: str, file: BinaryIO | None, is_first: bool
) -> None:
    """Write results by name to a path, or to the `file` that is open at it.

    A path without an open file becomes a folder if a result is sharded over devices, and a file
    otherwise. Each process of a cluster writes its shards to a folder; the first writes a file.
    """
    from jaxprtool.execute.running.arrays import plain_array
    from jaxprtool.ir.array_files import is_spread, write_checkpoint

    is_file = path.endswith(".npz") or is_stream(path)
    if not is_file and any(map(is_spread, arrays.values())):
        write_checkpoint(path, arrays)
        if is_first:
            output.say(f"wrote {path}")
        return
    whole = {name: plain_array(array) for name, array in arrays.items()}  # from all processes
    if is_first:
        with contextlib.nullcontext(file) if file else output.written_file(path) as opened:
            save_arrays(whole, opened)


def note_random(filled: FilledArguments, seed: int, dropped: Sequence[str] = ()) -> None:
    """Print which arguments have random values, and which of them replace given ones."""
    if filled.random:
        names, within = output.names_text(filled.random), filled.domains_text()
        output.note(f"{names} filled with random values (--seed {seed}){within}")
    if dropped:
        noun, do = ("values", "do") if len(dropped) > 1 else ("value", "does")
        output.note(
            f"the {noun} given for {output.names_text(dropped)} {do} not fit after the passes"
        )


# --- partitioned ----------------------------------------------------------------------------------
# How XLA partitions a program over devices, for `shardings` and for `--compiled`.
