"""The subject of a command: a TARGET, traced once, and its programs after passes.

A command is a function under `@command`: its options, one call that returns programs and their
arguments, a call of the API, and its output. A parameter annotated with a group of options, such as
`Session`, represents all of them; `--traceback` is an option of every command. `on_progress` is not
an option but the receiver of progress messages (`cli.output`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import shlex
import sys
import typing
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.main import get_command

from jaxprtool.cli import options, output
from jaxprtool.cli.completion import require_package
from jaxprtool.cli.options import FUNCTION, OUTPUT
from jaxprtool.cli.output import OnProgress, silent
from jaxprtool.cli.start import start_jax, use_cache, use_host_devices, use_virtual_devices
from jaxprtool.errors import ArgumentsError, MeshConflictError, PipelineError, TooFewDevicesError
from jaxprtool.ir import source_text

if TYPE_CHECKING:
    from jaxprtool.api.targets import ProgramEntry, RunInputs, Traced
    from jaxprtool.cli.options import Reproducer
    from jaxprtool.ir.program import Program
    from jaxprtool.loading.load import Entry
    from jaxprtool.passes.framework.pipeline import Observer, Pipeline

#: Programs by name.
Named = Sequence[tuple[str, "Program"]]

#: Which frames of an equation to show.
FrameChoice = Literal["mine", "library", "all"]

#: Sets a mesh in a `with` block.
MeshSet = Callable[[], contextlib.AbstractContextManager[object]]

#: The number of virtual devices for a module that needs several, if no mesh is given.
_VIRTUAL_DEVICES = 8

#: Options that do not apply to a program file, and their default values.
_OF_FUNCTIONS: dict[str, Any] = {
    "factory": False,
    "static_argnums": None,
    "static_argnames": None,
    "in_specs": None,
    "out_specs": None,
}


@dataclass(frozen=True)
class Function:
    """A group of options: TARGET, how to find it, and its arguments."""

    target: Annotated[
        str,
        options.target_argument(
            "TARGET",
            "The function: package.module:function or path/file.py:function; or a program: "
            "file.jaxpr, or - for stdin.",
        ),
    ]
    args: Annotated[
        str | None,
        FUNCTION.option(
            "--args",
            "EXPR",
            "Its arguments: \"{'w': f32[3,4]}, f32[8,3], training=static(False)\". Default: its "
            "example arguments.",
        ),
    ] = None
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
            parser=options.numbers,
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
    on_progress: OnProgress = silent  # not an option: set by `command`

    def start(self, cache: bool | None = None) -> None:
        """Import JAX. For a command that compiles, `cache` is whether to use the user's cache."""
        start_jax(self.on_progress, self.x64)
        if self.host_devices is not None:
            use_host_devices(self.host_devices)
        if cache is not None:
            use_cache(cache)

    def viewed(self) -> contextlib.AbstractContextManager[None]:
        """Apply --frames and --mine in a `with` block."""
        from jaxprtool.ir.frames import frames

        packages = [name for each in self.mine or () for name in options.names(each)]
        for name in packages:
            require_package(name, self.target)
        return frames(self.frames or "mine", packages)

    @contextlib.contextmanager
    def devices_hinted(self) -> Iterator[None]:
        """Add to a TooFewDevicesError of a program file the hint to pass a smaller `--mesh`."""
        try:
            yield
        except TooFewDevicesError as error:
            if self._is_file:
                axes = ",".join(f"{axis}=…" for axis in error.axes)
                error.hint = f"--mesh {axes} puts it on a smaller mesh; {error.hint}"
            raise

    def listed(self, source: bool | None) -> dict[str, Any]:
        """Return the options of a listing; --frames implies source lines."""
        return {"source": bool(source) or self.frames is not None}

    def each_of(self, targets: Sequence[str]) -> list[Function]:
        """Return the options for each of several TARGETs.

        A factory and static arguments apply to functions only, not to program files.
        """
        from jaxprtool.api.targets import is_file

        files = list(map(is_file, targets))
        bare = {} if all(files) else _OF_FUNCTIONS
        pairs = zip(targets, files, strict=True)
        return [replace(self, target=t, **(bare if file else {})) for t, file in pairs]

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

    def trace(
        self,
        pipeline: Pipeline,
        *,
        runs: bool = False,
        types: str | None = None,
        symbolic: bool = False,
    ) -> Traced:
        """Return the program of TARGET and its arguments.

        Output of its module, and of the function during tracing, is not a result.

        Args:
            pipeline: The passes to run, which may bind named axes.
            runs: Whether the function is run on its arguments. If not, a note is printed if their
                values were slow to compute.
            types: The types to trace with. --args are then for the program after the passes.
            symbolic: Whether --args are for the program after the passes also if the passes need
                symbolic sizes.
        """
        self.import_module()

        def on_mesh(explicit: bool) -> Traced:
            mesh_set = self._mesh_set(explicit)
            with self._for_functions(mesh_set), contextlib.redirect_stdout(sys.stderr):
                entry = self._entry(pipeline, types, symbolic)
                if not runs and (needless := entry.needless_work):
                    output.note(needless)
                found = self.trace_entry(entry, pipeline)
            has_own = self._is_file and found.program.meshes and not pipeline.partitions
            return found if has_own else replace(found, mesh_set=mesh_set)

        explicit = not self._by_specs
        try:
            return on_mesh(explicit)
        except MeshConflictError as conflict:
            if not (self.mesh and conflict.is_alike):
                raise
            try:
                return on_mesh(not explicit)
            except ArgumentsError:
                raise conflict from conflict.__cause__

    def _entry(
        self, pipeline: Pipeline, types: str | None = None, symbolic: bool = False
    ) -> Entry | ProgramEntry:
        """Return what TARGET names, with its arguments."""
        from jaxprtool.api.targets import find

        return find(
            self.target,
            self.args,
            self.factory,
            types,
            symbolic and any(each.symbolic for each in pipeline.passes()),
            static_argnums=self.static_argnums or (),
            static_argnames=self.static_argnames or (),
            in_specs=self.in_specs,
            out_specs=self.out_specs,
            mesh=self.mesh,
            may_lack_mesh=bool(pipeline.steps),  # passes may use the mesh
        )

    def caller(self) -> Callable[..., object]:
        """Return a function that calls TARGET with its arguments, which must be values.

        JAX then compiles what it would in a new process. The function takes the `mesh_set` of
        TARGET as traced, if it was.

        Raises:
            ArgumentsError: If an argument is given by its type, or TARGET is a program.
        """
        import jax

        from jaxprtool.loading.load import Entry
        from jaxprtool.passes.framework.pipeline import Pipeline

        self.import_module()
        mesh_set = self._mesh_set(not self._by_specs)
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

    def trace_entry(self, entry: Entry | ProgramEntry, pipeline: Pipeline) -> Traced:
        """Return the program of an entry, with the named axes bound by the passes."""
        from jaxprtool.api.targets import traced

        self.on_progress(f"tracing {entry.name}")
        return traced(entry, self._axes(pipeline))

    def _axes(self, pipeline: Pipeline) -> Sequence[tuple[Hashable, int]]:
        """Return the named axes to trace under: those that the passes bind."""
        return pipeline.bound_axes

    def arguments(self) -> list[str]:
        """Return these options as command-line arguments, without TARGET."""
        listed = {
            "--args": self.args,
            "--static-argnums": ",".join(map(str, self.static_argnums or ())),
            "--static-argnames": ",".join(self.static_argnames or ()),
            "--mesh": ",".join(f"{axis}={size}" for axis, size in (self.mesh or {}).items()),
            "--in-specs": self.in_specs,
            "--out-specs": self.out_specs,
            "--host-devices": str(self.host_devices or ""),
        }
        flags = {"--factory": self.factory, "--x64": self.x64}
        given = [part for name, value in listed.items() if value for part in (name, value)]
        return [*given, *(name for name, flag in flags.items() if flag)]

    @property
    def _is_file(self) -> bool:
        """Whether TARGET is a program, not a function."""
        from jaxprtool.api.targets import is_file

        return is_file(self.target)

    def _for_functions(self, mesh_set: MeshSet) -> contextlib.AbstractContextManager[object]:
        """Set a mesh if TARGET is a function. A program file is read without one."""
        return contextlib.nullcontext() if self._is_file else mesh_set()

    def _mesh_set(self, explicit: bool) -> MeshSet:
        """Return what sets the mesh of `--mesh`: on devices, or an abstract one if they are few.

        Its axes are Explicit, since types name them, or Auto if specs are given. If the function
        has its own mesh, `trace` takes the axis types of that mesh.
        """
        if not self.mesh:
            return contextlib.nullcontext
        from jaxprtool.ir.meshes import mesh_set

        return functools.partial(mesh_set, self.mesh, explicit, self._on_virtual_devices)

    @property
    def _on_virtual_devices(self) -> bool:
        """Whether the mesh may have virtual devices, because the function is not run."""
        return False

    @property
    def _by_specs(self) -> bool:
        """Whether specs shard values over the mesh, and not types."""
        return self.in_specs is not None or self.out_specs is not None


@dataclass(frozen=True)
class Session(Function):
    """A group of options: TARGET, and the passes to run on its program first."""

    passes: options.Passes = None
    plugin: options.Plugin = None

    @cached_property
    def pipeline(self) -> Pipeline:
        """The pipeline of -p."""
        return pipeline(self.passes, self.plugin)

    @property
    def _by_specs(self) -> bool:
        return super()._by_specs or self.pipeline.partitions

    def start(self, cache: bool | None = None) -> None:
        super().start(cache)
        _ = self.pipeline  # report errors in -p before anything is loaded

    def traced(self, runs: bool = False) -> Traced:
        """Return the program of TARGET and its arguments; see `trace`."""
        return self.trace(self.pipeline, runs=runs)

    def programs(
        self,
        traced: Traced | None = None,
        observer: Observer | None = None,
        reproducer: Reproducer | None = None,
    ) -> list[tuple[str, Program]]:
        """Return the programs after the passes on the program of TARGET, traced unless given."""
        from jaxprtool.cli import pipeline_steps

        traced = traced or self.traced()
        with traced.mesh_set():
            return pipeline_steps.run(
                self.pipeline, traced.program, self.on_progress, observer, reproducer=reproducer
            )

    def command_line(self, command: str, passes: Sequence[str] | None = ()) -> str:
        """Return the command line of another command on the same programs.

        Args:
            command: The command with its options.
            passes: Passes after those of -p; None for the function as traced.
        """
        steps = [] if passes is None else [each for each in (self.passes, *passes) if each]
        plugins = [] if passes is None else self.plugin or []
        name, *more = command.split()
        words = ["jaxprtool", name, self.target, *self.arguments()]
        words += ["-p", ", ".join(map(str, steps))] if steps else []
        words += [word for each in plugins for word in ("--plugin", each)]
        return shlex.join([*words, *more])


@dataclass(frozen=True)
class PartitionSession(Session):
    """A group of options: TARGET, to be compiled for the devices of a mesh, and not run.

    The mesh gets virtual devices unless the machine, its environment, or the module of TARGET sets
    a number of devices.
    """

    def start(self, cache: bool | None = None) -> None:
        """Import JAX and the module of TARGET."""
        super().start(cache)
        if self.host_devices is None:
            use_virtual_devices(self.virtual_devices)
            self.import_module()
            use_virtual_devices(self.virtual_devices)  # the module may set their number

    @property
    def virtual_devices(self) -> int:
        """The number of virtual devices: enough for `--mesh`, and for a mesh in the function."""
        return max(prod((self.mesh or {}).values()), _VIRTUAL_DEVICES)

    @property
    def _on_virtual_devices(self) -> bool:
        return True


@dataclass(frozen=True)
class AxesFunction(Function):
    """A group of options: TARGET, traced under the named axes of `--axis-env`."""

    axis_env: Annotated[
        Any,
        FUNCTION.option(
            "--axis-env",
            "AXIS=N,…",
            "Named axes that collectives such as psum(x, 'i') may use, and their sizes: i=4,j=2.",
            parser=options.named_axes,
        ),
    ] = None

    def _axes(self, pipeline: Pipeline) -> Sequence[tuple[Hashable, int]]:
        from jaxprtool.api.targets import axes_under

        return axes_under(self.target, self.axis_env or {}, super()._axes(pipeline))


@dataclass(frozen=True)
class AxesSession(Session, AxesFunction):
    """A group of options: TARGET under named axes, and the passes to run on its program first."""


@dataclass(frozen=True)
class CheckSession(PartitionSession, AxesSession):
    """A group of options: TARGET to be checked, and compiled for the devices of a mesh."""


@dataclass(frozen=True)
class RunSession(Session):
    """A group of options: TARGET, to be run after passes."""

    types: options.Types = None

    def traced(self, runs: bool = True) -> Traced:
        return self.trace(self.pipeline, runs=runs, types=self.types, symbolic=True)

    def given(self, wanted: str) -> RunInputs:
        """Return the single program after the passes, and its arguments.

        `wanted` is the start of the error message for several programs.
        """
        traced = self.traced()
        return traced.given_to(only_program(wanted, self.programs(traced)))


# --- commands ---------------------------------------------------------------------------------


def command(body: Callable) -> Callable:
    """Return a function for Typer, with its groups of options expanded, and `--traceback`.

    Its progress messages are shown on the terminal.

    `cli.app` also checks for `--traceback`, before a command is known.
    """
    hints = _hints(body)
    groups = {name: hint for name, hint in hints.items() if _is_group(hint)}

    @functools.wraps(body)
    def run(**given: Any) -> None:
        del given["traceback"]
        with contextlib.ExitStack() as stack:
            on_progress = stack.enter_context(output.shown())
            for name, group in groups.items():
                values = {key: given.pop(key) for key in _hints(group) if key != "on_progress"}
                given[name] = group(**values, on_progress=on_progress)
                stack.enter_context(given[name].viewed())
                stack.enter_context(given[name].devices_hinted())
            stack.callback(_note_changed, stack.enter_context(source_text.citations()))
            body(**given, **({"on_progress": on_progress} if "on_progress" in hints else {}))

    run.__signature__ = inspect.Signature([*_parameters(body), _TRACEBACK])  # type: ignore[attr-defined]
    return run


def _note_changed(files: Mapping[str, str]) -> None:
    """Say which source files have changed whose lines a command shows, by their `citations`."""
    for path in dict.fromkeys(files.values()):
        output.note(source_text.citation_note(path))


@functools.cache
def reader(group: type[Function]) -> Any:
    """Return the Click command that reads a group of options alone, and returns it."""

    def read(**given: Any) -> Function:
        return group(**given)

    read.__signature__ = inspect.Signature([*_parameters(group)])  # type: ignore[attr-defined]
    alone = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    alone.command()(read)
    return get_command(alone)


def _is_group(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Function)


def _hints(what: Callable) -> dict[str, Any]:
    hints = typing.get_type_hints(what, include_extras=True)
    hints.pop("return", None)
    return hints


def _parameters(of: Callable) -> Iterator[inspect.Parameter]:
    hints = _hints(of)
    for parameter in inspect.signature(of).parameters.values():
        hint = hints[parameter.name]
        if _is_group(hint):
            yield from _parameters(hint)
        elif parameter.name != "on_progress":
            yield parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY)


_TRACEBACK = inspect.Parameter(
    "traceback", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=options.Traceback
)


# --- values of options ------------------------------------------------------------------------


def load_plugins(plugins: list[str] | None) -> None:
    """Import plug-ins; warn about one that fails."""
    from jaxprtool.passes.framework import pipeline

    for plugin in plugins or []:
        pipeline.load_plugin(plugin)


def pipeline(text: str | None, plugins: list[str] | None) -> Pipeline:
    """Return the pipeline of -p, after loading the plug-ins of --plugin; empty without -p."""
    from jaxprtool.passes.framework.pipeline import Pipeline

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
