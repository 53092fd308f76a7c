"""The options that several commands share, each declared once, and how a command is declared.

A command is a function under `@command`. A parameter that is annotated with a group of options,
such as `Function`, stands for all of them; `--traceback` is an option of every command. A parameter
`told` is no option: it is what to tell what is being done (`cli.progress`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import pkgutil
import re
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass, replace
from enum import StrEnum
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxprtool.cli import completion, output, progress
from jaxprtool.cli.progress import Told
from jaxprtool.errors import ArgumentsError, PipelineError, did_you_mean

if TYPE_CHECKING:
    from jaxprtool.api.targets import ProgramEntry
    from jaxprtool.ir.program import Program, Programs
    from jaxprtool.loading.load import Entry
    from jaxprtool.passes.pipeline import Pipeline


# --- what options are declared with -----------------------------------------------------------


class Panel(str):
    """A panel of a command's help, and its options."""

    def flag(self, name: str, help: str) -> Any:
        """Return the declaration of an option without a value."""
        return self.option(name, "", help)

    def option(self, names: str, metavar: str, help: str, **more: Any) -> Any:
        """Return the declaration of an option; `more` is what `typer.Option` takes."""
        return typer.Option(
            *names.split(", "), metavar=metavar, help=help, rich_help_panel=self, **more
        )


FUNCTION, PASSES, RUN = Panel("Function and arguments"), Panel("Passes"), Panel("How it runs")
OUTPUT = Panel("Output")


def passes_option(help: str) -> Any:
    """Return the declaration of `-p`."""
    complete = completion.complete_passes
    return PASSES.option("-p, --passes", "PIPELINE", help, autocompletion=complete)


def out_option(help: str, metavar: str = "FILE|DIR/|-") -> Any:
    """Return the declaration of `-o`."""
    return OUTPUT.option("-o, --output", metavar, help)


def backend_option(help: str, panel: Panel) -> Any:
    """Return the declaration of `--backend`."""
    complete = completion.complete_backend
    return panel.option("--backend", "NAME", help, autocompletion=complete)


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as `0,2`."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise typer.BadParameter(f"'{text}' is not a list of numbers such as 1,2") from None


def names(text: str) -> tuple[str, ...]:
    """Return the parts of a list such as `dot_general,conv*`."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def mesh_axes(text: str) -> dict[str, int]:
    """Return the axes of a mesh such as `x=2,y=4`, with their sizes."""
    axes = dict(re.findall(r"(\w+)=(\d+)", text))
    shown = ",".join(f"{name}={size}" for name, size in axes.items())
    if not axes or shown != text.replace(" ", "") or "0" in {size[0] for size in axes.values()}:
        raise typer.BadParameter(f"'{text}' is not a list of axes and sizes such as x=2,y=4")
    return {name: int(size) for name, size in axes.items()}


# --- the options ------------------------------------------------------------------------------


class CallbackChoice(StrEnum):
    """What is done with Python functions that a program to be written calls."""

    refuse = "refuse"
    stub = "stub"


class FrameChoice(StrEnum):
    """Which frames are named of where an equation comes from."""

    mine = "mine"
    library = "library"
    all = "all"


#: Options that a program in a file does not take, and their values if they are not given.
_OF_FUNCTIONS: dict[str, Any] = {
    "factory": False,
    "static_argnums": None,
    "static_argnames": None,
}


@dataclass(frozen=True)
class Function:
    """A group of options: TARGET, how it is found, and what it is called with."""

    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="The function: package.module:function or path/file.py:function; or a program: "
            "file.jaxpr, or - for stdin.",
            show_default=False,
            autocompletion=completion.complete_target,
        ),
    ]
    args: Annotated[
        str | None,
        FUNCTION.option(
            "--args",
            "EXPR",
            "Its arguments: \"{'w': f32[3,4]}, f32[8,3], training=static(False)\". "
            "Without them, its own example arguments.",
        ),
    ] = None
    factory: Annotated[
        bool,
        FUNCTION.flag(
            "--factory",
            "TARGET() gives a function, (function, args) or (function, args, kwargs). One with "
            "arguments is called in TARGET: \"train.py:make_train({'lr': 1e-3})\".",
        ),
    ] = False
    static_argnums: Annotated[
        Any,
        FUNCTION.option(
            "--static-argnums", "N,…", "Positions of arguments that are not traced.", parser=numbers
        ),
    ] = None
    static_argnames: Annotated[
        Any,
        FUNCTION.option(
            "--static-argnames", "NAME,…", "Names of arguments that are not traced.", parser=names
        ),
    ] = None
    x64: Annotated[bool, FUNCTION.flag("--x64", "Keep 64-bit types as they are.")] = False
    mesh: Annotated[
        Any,
        FUNCTION.option(
            "--mesh",
            "AXIS=N,…",
            "Trace on a mesh of these axes, which types may name: f32[8@x].",
            parser=mesh_axes,
        ),
    ] = None
    frames: Annotated[
        FrameChoice | None,
        OUTPUT.option(
            "--frames",
            "<mine|library|all>",
            "Which line stands for an equation: the nearest of your own files, with the library's "
            "behind it (mine, the default), the innermost, or all from yours on.",
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

    def viewed(self) -> contextlib.AbstractContextManager[None]:
        """Show and count lines as --frames and --mine say, in a `with` block."""
        from jaxprtool.ir.frame_choice import frames

        packages = [name for each in self.mine or () for name in names(each)]
        for name in packages:
            _require_package(name, self.target)
        return frames((self.frames or FrameChoice.mine).value, packages)

    def listed(self, source: bool | None) -> dict[str, Any]:
        """Return the options of a listing, in which --frames asks for lines."""
        return {"source": bool(source) or self.frames is not None}

    def each_of(self, targets: Sequence[str]) -> list[Function]:
        """Return the same for each of several TARGETs.

        A factory and static arguments are those of functions: programs in files among these have
        none.
        """
        from jaxprtool.api.targets import is_file

        files = list(map(is_file, targets))
        bare = {} if all(files) else _OF_FUNCTIONS
        pairs = zip(targets, files, strict=True)
        return [replace(self, target=t, **(bare if file else {})) for t, file in pairs]

    def import_module(self, told: Told) -> None:
        """Import the module of TARGET, which may say how many devices a backend has.

        JAX starts no backend before this. What the module prints is no result.
        """
        from jaxprtool.api.targets import STDIN, import_module

        told("reading stdin" if self.target == STDIN else f"loading {self.target}")
        with contextlib.redirect_stdout(sys.stderr):
            import_module(self.target)

    def find(
        self,
        told: Told,
        runs: bool = False,
        types: str | None = None,
        pipeline: Pipeline | None = None,
    ) -> Entry | ProgramEntry:
        """Return what TARGET names, with its arguments. What its module prints is no result.

        Say where values of arguments took long to make, unless the function `runs` on them.
        `types`, or passes that are for symbolic sizes, make them those of what passes make.
        """
        from jaxprtool.api.targets import find

        self.import_module(told)
        with self._mesh_set(), contextlib.redirect_stdout(sys.stderr):
            entry = find(
                self.target,
                self.args,
                self.factory,
                types,
                any(each.symbolic for each in pipeline.passes()) if pipeline else False,
                static_argnums=self.static_argnums or (),
                static_argnames=self.static_argnames or (),
            )
            if not runs and (needless := entry.needless_work):
                output.note(needless)
            return entry

    def arguments(self) -> list[str]:
        """Return these options as a command line has them, without TARGET."""
        listed = {
            "--args": self.args,
            "--static-argnums": ",".join(map(str, self.static_argnums or ())),
            "--static-argnames": ",".join(self.static_argnames or ()),
            "--mesh": ",".join(f"{axis}={size}" for axis, size in (self.mesh or {}).items()),
        }
        flags = {"--factory": self.factory, "--x64": self.x64}
        given = [part for name, value in listed.items() if value for part in (name, value)]
        return [*given, *(name for name, flag in flags.items() if flag)]

    def trace(self, entry: Entry | ProgramEntry, pipeline: Pipeline, told: Told) -> Program:
        """Return the program of an entry, with the named axes that the passes of a pipeline bind.

        What the function prints while it is traced is no result.
        """
        told(f"tracing {entry.name}")
        with self._mesh_set(), contextlib.redirect_stdout(sys.stderr):
            return entry.trace(pipeline.bound_axes)

    def _mesh_set(self) -> contextlib.AbstractContextManager[object]:
        """Set the mesh of `--mesh`: on devices, as `run` will have it, or none if they are few."""
        if not self.mesh:
            return contextlib.nullcontext()
        import jax
        from jax.sharding import AbstractMesh, AxisType, use_abstract_mesh

        sizes, names = tuple(self.mesh.values()), tuple(self.mesh)
        explicit = (AxisType.Explicit,) * len(sizes)
        if math.prod(sizes) > len(jax.devices()):
            return use_abstract_mesh(AbstractMesh(sizes, names, axis_types=explicit))
        return jax.set_mesh(jax.make_mesh(sizes, names, axis_types=explicit))


Passes = Annotated[
    str | None,
    passes_option('Passes to run first, in order: "dce" or "dce(drop_inputs=True)".'),
]
Plugin = Annotated[
    list[str] | None,
    PASSES.option(
        "--plugin", "FILE|MODULE", "Import passes from plugin.py or from a module. May be repeated."
    ),
]
Rewrite = Annotated[
    list[str] | None,
    PASSES.option(
        "--rewrite",
        "FILE.py",
        "Run the rewrites (@jaxprtool.rewrite) of a file before other passes, "
        "or where -p names them. May be repeated.",
    ),
]
Types = Annotated[
    str | None,
    FUNCTION.option(
        "--types",
        "EXPR",
        'Types to trace with, of some or all parameters: "x=f32[n,8]". --args are then those of '
        "what the passes make.",
    ),
]
Backend = Annotated[
    str | None,
    backend_option("cpu, gpu, tpu, cuda, rocm, or a PJRT plug-in's; else JAX's default.", RUN),
]
Seed = Annotated[
    int,
    RUN.option("--seed", "N", "Of the random values for arguments given by type alone.", min=0),
]
Strict = Annotated[
    bool,
    RUN.flag("--strict", "Exit code 1 if a result is not finite in most elements."),
]
NoCache = Annotated[
    bool,
    RUN.flag(
        "--no-cache", "Compile all anew: read and keep nothing in the cache of compiled programs."
    ),
]
Callbacks = Annotated[
    CallbackChoice,
    OUTPUT.option(
        "--callbacks",
        "<refuse|stub>",
        "Python functions that a written program calls: refuse it, or write stubs that raise.",
    ),
]


@dataclass(frozen=True)
class Places:
    """A group of options: where a command that lists and writes programs says they come from."""

    source: Annotated[
        bool | None,
        OUTPUT.option(
            "--source/--no-source",
            "",
            "Say each equation's file and line, or not: files have them, listings do not.",
        ),
    ] = None


Json = Annotated[bool, OUTPUT.flag("--json", "One JSON document on stdout.")]
Full = Annotated[
    bool, OUTPUT.flag("--full", "All of the listing on a terminal too, where else a page is shown.")
]
Pager = Annotated[bool, OUTPUT.flag("--pager", "Show it in $PAGER (less).")]
_Traceback = Annotated[bool, OUTPUT.flag("--traceback", "Show an error's whole traceback.")]


# --- commands ---------------------------------------------------------------------------------


def command(body: Callable) -> Callable:
    """Return a function as Typer reads it: its groups of options spelled out, and `--traceback`.

    What it does is shown on the terminal, if it takes a `told` and tells.

    `cli.app` looks for `--traceback` by itself, before there is a command.
    """
    groups: dict[str, type] = {
        name: hint
        for name, hint in _hints(body).items()
        if isinstance(hint, type) and is_dataclass(hint)
    }

    @functools.wraps(body)
    def run(**given: Any) -> None:
        del given["traceback"]
        for name, group in groups.items():
            given[name] = group(**{key: given.pop(key) for key in _hints(group)})
        with contextlib.ExitStack() as stack:
            for group in given.values():
                if isinstance(group, Function):
                    stack.enter_context(group.viewed())
            if "told" not in _hints(body):
                return body(**given)
            body(**given, told=stack.enter_context(progress.shown()))

    run.__signature__ = inspect.Signature([*_parameters(body), _TRACEBACK])  # type: ignore[attr-defined]
    return run


def _hints(what: Callable) -> dict[str, Any]:
    hints = typing.get_type_hints(what, include_extras=True)
    hints.pop("return", None)
    return hints


def _parameters(of: Callable) -> Iterator[inspect.Parameter]:
    hints = _hints(of)
    for parameter in inspect.signature(of).parameters.values():
        if parameter.name == "told":
            continue
        hint = hints[parameter.name]
        if isinstance(hint, type) and is_dataclass(hint):
            yield from _parameters(hint)
        else:
            yield parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY)


_TRACEBACK = inspect.Parameter(
    "traceback", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_Traceback
)


# --- what they stand for ----------------------------------------------------------------------


def _require_package(name: str, target: str) -> None:
    """Raise ArgumentsError for a package that no program traced here can have lines of."""
    top = name.partition(".")[0].replace("-", "_")
    if target == "-" or target.endswith(".jaxpr") or not top.isidentifier():
        return
    if top not in sys.modules and not PathFinder.find_spec(top, [os.getcwd(), *sys.path]):
        known = {module.name for module in pkgutil.iter_modules()}
        held = _package_of_distribution(name)
        hint = f"write --mine {held}" if held else did_you_mean(top, known)
        raise ArgumentsError(f"--mine: no package '{name}' is installed", hint)


def _package_of_distribution(name: str) -> str:
    """Return the package that a distribution holds, `mujoco.mjx` of `mujoco-mjx`; "" if none."""
    import importlib.metadata

    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    folders = [file.parts[:-1] for file in files if file.name == "__init__.py"]
    return ".".join(sorted(folders, key=len)[0]) if folders else ""


def load_plugins(plugins: list[str] | None) -> None:
    """Import plug-ins; one that fails is a warning."""
    from jaxprtool.passes import registry

    for plugin in plugins or []:
        registry.load_plugin(plugin)


def pipeline(text: str | None, plugins: list[str] | None) -> Pipeline:
    """Return the pipeline of -p, with the plug-ins of --plugin at hand; empty if there is none."""
    from jaxprtool.passes.pipeline import Pipeline

    load_plugins(plugins)
    return Pipeline.parse(text) if text else Pipeline()


def each(result: Program | Programs) -> list[tuple[str, Program]]:
    """Return the programs that a pipeline gave, by name."""
    from jaxprtool.ir.program import Programs

    return list(result.items()) if isinstance(result, Programs) else [(result.name, result)]


def only_program(wanted: str, programs: Sequence[tuple[str, Program]]) -> Program:
    """Return the one program that passes gave. Raises PipelineError if they gave several."""
    if len(programs) != 1:
        names = ", ".join(name for name, _ in programs)
        hint = "`jaxprtool unzip --run` runs init and apply" if names == "init, apply" else None
        raise PipelineError(f"{wanted} one program, and the passes gave {names or 'none'}", hint)
    return programs[0][1]
