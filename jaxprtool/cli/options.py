"""The options that several commands share, and `--reproducer`, for what a pass fails on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from jaxprtool.cli import completion, output
from jaxprtool.errors import JaxprToolError, OutputError, described
from jaxprtool.files import file_written_whole
from jaxprtool.render.terminal.tables import ALL, ROWS, TALL_ROWS

if TYPE_CHECKING:
    from jaxprtool.ir.program import Program
    from jaxprtool.passes import Step

# --- options --------------------------------------------------------------------------------------
# The options that several commands share, each declared once.

# --- declaration of options -------------------------------------------------------------------


class Panel(str):
    """A panel of a command's help, and its options."""

    def flag(self, name: str, help: str) -> Any:
        """Return the declaration of an option without a value."""
        return self.option(name, "", help)

    def option(self, names: str, metavar: str, help: str, **more: Any) -> Any:
        """Return the declaration of an option; `more` are arguments of `typer.Option`."""
        return typer.Option(
            *names.split(", "), metavar=metavar, help=help, rich_help_panel=self, **more
        )

    def choice(self, names: str, values: Any, help: str) -> Any:
        """Return the declaration of an option that takes one of the values of a `Literal`."""
        return self.option(names, f"<{'|'.join(get_args(values))}>", help)


FUNCTION, PASSES, RUN = Panel("Function and arguments"), Panel("Passes"), Panel("Execution")
OUTPUT = Panel("Output")


def target_argument(metavar: str, help: str) -> Any:
    """Return the declaration of an argument that names a program."""
    complete = completion.complete_target
    return typer.Argument(metavar=metavar, help=help, show_default=False, autocompletion=complete)


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


def top_option(default: str = str(ROWS)) -> Any:
    """Return the declaration of `--top`; `default` describes the rows shown without it."""
    help = f"Show N rows of each list. Default: {default}."
    return OUTPUT.option("--top", "N", help, min=1)


def row_limit(top: int | None, all: bool, default: int | None = ROWS) -> int | None:
    """Return the number of rows to show of each list; None for all.

    Raises OutputError for both --top and --all.
    """
    if all and top is not None:
        raise OutputError(f"--top and {ALL} cannot be combined", "give one of them")
    return None if all else top or default


def chosen_format(format: FormatChoice | None, json: bool) -> FormatChoice:
    """Return the format of `--format` or `--json`. Raises typer.BadParameter if they differ."""
    if json and format not in (None, "json"):
        raise typer.BadParameter(f"--json and --format {format} are two formats: give one")
    return "json" if json else format or "text"


def format_in(arguments: Sequence[str]) -> FormatChoice:
    """Return the format that a command line asks for, before it is parsed."""
    if "--json" in arguments:
        return "json"
    given = " ".join(arguments).replace("--format=", "--format ")
    found = re.search(r"(?:^| )--format (json|sarif|github)(?: |$)", given)
    return found[1] if found else "text"  # type: ignore[return-value]


def argnums_option(panel: Panel) -> Any:
    """Return the declaration of `--argnums`."""
    return panel.option(
        "--argnums",
        "N,…",
        "The positions of the arguments that the gradient is with respect to. Default: 0, the "
        "first.",
        parser=parsed_numbers,
    )


def parsed_numbers(text: str) -> tuple[int, ...]:
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
    return _axes(text, "x=2,y=4")


def named_axes(text: str) -> dict[str, int]:
    """Return the named axes such as `i=4,j=2`, with their sizes."""
    return _axes(text, "i=4,j=2")


def _axes(text: str, example: str) -> dict[str, int]:
    axes = dict(re.findall(r"(\w+)=(\d+)", text))
    shown = ",".join(f"{name}={size}" for name, size in axes.items())
    if not axes or shown != text.replace(" ", "") or "0" in {size[0] for size in axes.values()}:
        raise typer.BadParameter(f"'{text}' is not a list of axes and sizes such as {example}")
    return {name: int(size) for name, size in axes.items()}


# --- the options ------------------------------------------------------------------------------


#: How Python functions called by a written program are handled.
CallbackChoice = Literal["refuse", "stub"]

Passes = Annotated[
    str | None,
    passes_option('Passes to run first, in order: "dce" or "dce(drop_inputs=True)".'),
]
VariantPasses = Annotated[
    list[str] | None,
    passes_option('Passes to run first. Each -p adds a variant; -p "" is the function as traced.'),
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
        "Run the rewrites (@jaxprtool.rewrite) of a file before other passes, or where -p names "
        "them. May be repeated.",
    ),
]
Types = Annotated[
    str | None,
    FUNCTION.option(
        "--types",
        "EXPR",
        'Types of some or all parameters for tracing: "x=f32[n,8]". --args then apply to the '
        "program after the passes.",
    ),
]
AxisEnv = Annotated[
    Any,
    FUNCTION.option(
        "--axis-env",
        "AXIS=N,…",
        "Named axes that collectives such as psum(x, 'i') may use, and their sizes: i=4,j=2.",
        parser=named_axes,
    ),
]
Backend = Annotated[
    str | None,
    backend_option(
        "cpu, gpu, tpu, cuda, rocm, or the name of a PJRT plug-in. Default: JAX's.", RUN
    ),
]
Device = Annotated[
    int | None,
    RUN.option(
        "--device",
        "N",
        "Index of the backend's device. A program with a mesh runs on all devices of the mesh.",
    ),
]
Seed = Annotated[
    int,
    RUN.option("--seed", "N", "Seed of the random values of arguments given as types.", min=0),
]
Strict = Annotated[
    bool,
    RUN.flag("--strict", "Exit with code 1 if most elements of a result are not finite."),
]
NoCache = Annotated[
    bool,
    RUN.flag(
        "--no-cache",
        "Compile everything again; do not read or write the cache of compiled programs.",
    ),
]
Callbacks = Annotated[
    CallbackChoice,
    OUTPUT.choice(
        "--callbacks",
        CallbackChoice,
        "For a program that calls Python functions: refuse to write it, or write stubs that raise.",
    ),
]
Source = Annotated[
    bool | None,
    OUTPUT.option(
        "--source/--no-source",
        "",
        "Show each equation's file and line, or not. Default: in files, not in listings.",
    ),
]
Top = Annotated[int | None, top_option()]
TopTall = Annotated[int | None, top_option(str(TALL_ROWS))]
All = Annotated[bool, OUTPUT.flag(ALL, "Show all rows.")]
Json = Annotated[bool, OUTPUT.flag("--json", "Print one JSON document on stdout.")]
MaxBytes = Annotated[
    int | None,
    OUTPUT.option(
        "--max-bytes",
        "N",
        "With --json: leave out the last entries of long lists, so that the document has at most N "
        "bytes; it says how many.",
        min=1,
    ),
]
FormatChoice = Literal["text", "json", "sarif", "github"]
Format = Annotated[
    FormatChoice | None,
    OUTPUT.choice(
        "--format",
        FormatChoice,
        "text, the default; a JSON document; SARIF 2.1.0; or annotations for GitHub's log.",
    ),
]
Full = Annotated[
    bool, OUTPUT.flag("--full", "Show the whole listing on a terminal too, instead of one page.")
]
Pager = Annotated[bool, OUTPUT.flag("--pager", "Show the output in $PAGER (less).")]
Traceback = Annotated[bool, OUTPUT.flag("--traceback", "Show the whole traceback of an error.")]


# --- reproducer -----------------------------------------------------------------------------------
# `--reproducer DIR`: save the program that a pass or the compiler fails on, for `reduce`.

ReproducerOption = Annotated[
    str | None,
    OUTPUT.option(
        "--reproducer",
        "DIR",
        "If a pass or the compiler fails, write the program before it, for jaxprtool reduce DIR.",
    ),
]

_PROGRAM, _ABOUT = "program.jaxpr", "reproducer.json"


class Reproducer:
    """Writes a folder with everything needed to reproduce a failure.

    Args:
        folder: A folder that does not exist yet, or is empty.
        plugins: Files or modules with passes.

    Raises:
        OutputError: If the folder exists and is not empty.
    """

    def __init__(self, folder: str, plugins: Sequence[str]):
        if os.path.exists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
            raise OutputError(f"--reproducer takes a new folder, but '{folder}' exists")
        self._folder = folder
        self._plugins = [os.path.abspath(p) if os.path.exists(p) else p for p in plugins]

    def failed(self, program: Program, step: Step, error: Exception) -> None:
        """Write the program on which a pass failed.

        Args:
            program: The program before the pass.
            step: The pass.
            error: The exception that it raised.
        """
        words = f"error -p {shlex.quote(str(step))}"
        if self._write(program, words, str(step), described(error)):
            output.note(f"the program before {step} is in {self._folder}")

    @contextlib.contextmanager
    def compiler(self, program: Program) -> Iterator[None]:
        """Keep a program in the folder while it is compiled, and remove it if that succeeds.

        It is written first because a crash of the compiler may end the process.
        """
        self._write(program, "crash", "", "the process died")
        try:
            yield
        except Exception as error:
            if self._write(program, "error", "", described(error)):
                output.note(f"the program is in {self._folder}")
            raise
        shutil.rmtree(self._folder)

    def _write(self, program: Program, check: str, pipeline: str, error: str) -> bool:
        """Write a program and the facts about its failure. Return False if that is impossible."""
        import jax
        import jaxlib

        import jaxprtool

        versions = {"jax": jax, "jaxlib": jaxlib, "jaxprtool": jaxprtool}
        about = {
            "check": check,
            "pipeline": pipeline,
            "plugins": self._plugins,
            "x64": bool(jax.config.jax_enable_x64),
            "error": error,
            "versions": {name: module.__version__ for name, module in versions.items()},
        }
        os.makedirs(self._folder, exist_ok=True)
        try:
            # The failure of a pass or the compiler does not depend on callbacks.
            jaxprtool.write(program, os.path.join(self._folder, _PROGRAM), callbacks="stub")
        except JaxprToolError as fault:
            output.warning(f"no reproducer is written: {fault.message}")
            return False
        with file_written_whole(os.path.join(self._folder, _ABOUT)) as file:
            file.write(json.dumps(about, indent=2).encode() + b"\n")
        return True


@dataclass(frozen=True)
class Reproduction:
    """The contents of a reproducer's folder, for `reduce`.

    Attributes:
        program: The path of the program's file.
        check: The check that holds for the program, in the syntax of `--check`.
        plugins: Files or modules with passes.
        x64: Whether 64-bit types are enabled.
    """

    program: str
    check: str
    plugins: Sequence[str]
    x64: bool


def read_reproducer(folder: str) -> Reproduction:
    """Read the folder of a reproducer.

    Raises:
        JaxprToolError: If the folder has no reproducer, or it cannot be read.
    """
    path = os.path.join(folder, _ABOUT)
    try:
        with open(path) as file:
            about = json.load(file)
        program = os.path.join(folder, _PROGRAM)
        return Reproduction(program, about["check"], about["plugins"], about["x64"])
    except FileNotFoundError:
        message = f"no reproducer in '{folder}': it has no {_ABOUT}"
        raise JaxprToolError(message, "opt and run write one with --reproducer") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JaxprToolError(f"'{path}' is not a reproducer: {described(error)}") from None


#: A device that times are estimated for.
ModeledDevice = Annotated[
    str | None,
    Panel("Cost").option(
        "--device",
        "NAME|FILE.toml",
        "Show the minimum time on a device, and what limits it: h200, h100, a100, l4, tpu-v5e, "
        "tpu-v5p, tpu-v6e, m3, or a TOML file of figures.",
    ),
]


_DEVICES = Panel("Several devices")


CompileBackend = Annotated[
    str | None,
    backend_option(
        "Compile for the devices of cpu, gpu or tpu. With the package libtpu, also for a TPU that "
        "this machine lacks: tpu:v5e:2x2.",
        _DEVICES,
    ),
]
Compiled = Annotated[
    bool,
    _DEVICES.flag(
        "--compiled",
        "Compile the function for its mesh, and show what each device sends, as `shardings` does.",
    ),
]


def bandwidth_option(panel: Panel = _DEVICES) -> Any:
    """Return the declaration of `--bandwidth`."""
    return panel.option(
        "--bandwidth",
        "NAME|SPEED",
        "Show the minimum time of collectives over an interconnect: nvlink4, tpu-v5e, pcie5, "
        "300GB/s.",
    )
