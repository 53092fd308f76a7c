"""The options that several commands share, each declared once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

import typer

from jaxprtool.cli import completion
from jaxprtool.errors import OutputError
from jaxprtool.render.terminal.top import ALL, ROWS, TALL_ROWS

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


def rows(top: int | None, all: bool, default: int | None = ROWS) -> int | None:
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
        parser=numbers,
    )


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
