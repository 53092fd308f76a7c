"""The options that several commands share, and what they stand for."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxprtool.cli import completion, output

if TYPE_CHECKING:
    from jaxprtool.ir.program import Program, Programs
    from jaxprtool.loading.load import Entry
    from jaxprtool.passes.pipeline import Pipeline
    from jaxprtool.targets import ProgramEntry

_FUNCTION, _PASSES, _OUTPUT = "Function and arguments", "Passes", "Output"


class CallbackChoice(StrEnum):
    """What is done with Python functions that a program to be written calls."""

    refuse = "refuse"
    stub = "stub"


def numbers(text: str) -> tuple[int, ...]:
    """The numbers of a list such as `0,2`."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise typer.BadParameter(f"'{text}' is not a list of numbers such as 1,2") from None


def names(text: str) -> tuple[str, ...]:
    """The parts of a list such as `dot_general,conv*`."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="The function: package.module:function or path/file.py:function; or a program: "
        "file.jaxpr, or - for stdin.",
        show_default=False,
        autocompletion=completion.complete_target,
    ),
]
Args = Annotated[
    str | None,
    typer.Option(
        "--args",
        metavar="EXPR",
        help="Its arguments: \"{'w': f32[3,4]}, f32[8,3], training=static(False)\". "
        "Without them, its own example arguments.",
        rich_help_panel=_FUNCTION,
    ),
]
Factory = Annotated[
    bool,
    typer.Option(
        "--factory",
        metavar="",
        help="TARGET() gives (function, args) or (function, args, kwargs).",
        rich_help_panel=_FUNCTION,
    ),
]
StaticArgnums = Annotated[
    Any,
    typer.Option(
        "--static-argnums",
        metavar="N,…",
        parser=numbers,
        help="Positions of arguments that are not traced.",
        rich_help_panel=_FUNCTION,
    ),
]
StaticArgnames = Annotated[
    Any,
    typer.Option(
        "--static-argnames",
        metavar="NAME,…",
        parser=names,
        help="Names of arguments that are not traced.",
        rich_help_panel=_FUNCTION,
    ),
]
X64 = Annotated[
    bool,
    typer.Option(
        "--x64", metavar="", help="Keep 64-bit types as they are.", rich_help_panel=_FUNCTION
    ),
]
Passes = Annotated[
    str | None,
    typer.Option(
        "-p",
        "--passes",
        metavar="PIPELINE",
        help='Passes to run first, in order: "dce" or "dce(drop_inputs=True)".',
        rich_help_panel=_PASSES,
        autocompletion=completion.complete_passes,
    ),
]
Plugin = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="FILE|MODULE",
        help="Import passes from plugin.py or from a module. May be repeated.",
        rich_help_panel=_PASSES,
    ),
]
Callbacks = Annotated[
    CallbackChoice,
    typer.Option(
        "--callbacks",
        help="Python functions that a written program calls: refuse it, or write stubs that raise.",
        rich_help_panel=_OUTPUT,
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json", metavar="", help="One JSON document on stdout.", rich_help_panel=_OUTPUT
    ),
]
Traceback = Annotated[
    bool,
    typer.Option(
        "--traceback",
        metavar="",
        help="Show an error's whole traceback.",
        rich_help_panel=_OUTPUT,
    ),
]


def load_plugins(plugins: list[str] | None) -> None:
    """Import plug-ins; one that fails is a warning."""
    from jaxprtool.passes import registry

    for plugin in plugins or []:
        registry.load_plugin(plugin)


def pipeline(text: str | None, plugins: list[str] | None) -> Pipeline:
    """The pipeline of -p, with the plug-ins of --plugin at hand; empty if there is none."""
    from jaxprtool.passes.pipeline import Pipeline

    load_plugins(plugins)
    return Pipeline.parse(text) if text else Pipeline()


def start_jax(x64: bool = False) -> None:
    """Import JAX, configured as asked for, and say so if it is one that we do not know."""
    # What is imported stays, and need not be gone through by the garbage collector meanwhile.
    gc.disable()
    with _interrupts_held_back():
        import jax

        import jaxprtool.api  # noqa: F401  (a user's pass may say program.apply)
        from jaxprtool import jaxcompat
    gc.freeze()
    gc.enable()
    for path in _own_frames():
        jaxcompat.hide_frames(path)
    jaxcompat.keep_backend_probing_quiet()
    if x64:
        jax.config.update("jax_enable_x64", True)
    if version := jaxcompat.untested_version():
        output.warning(f"jaxprtool has not been tested with JAX {version}")


def _own_frames() -> Iterator[str]:
    """What stands on the stack below a command: Typer, Click, and what has started Python.

    JAX would take them for code of the user's, and list them as sources of the HLO.
    """
    for name in ("typer", "click"):
        if file := getattr(sys.modules.get(name), "__file__", None):
            yield os.path.join(os.path.dirname(file), "")
    yield "<frozen "
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    if os.path.basename(script).partition(".")[0] == "jaxprtool":
        yield script


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Hold Ctrl-C back: JAX's extension modules crash if it cuts their import short."""
    held: list[int] = []
    try:
        before = signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    except ValueError:  # only the main thread may; another one is not interrupted
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        raise KeyboardInterrupt


def find(
    target: str, args: str | None, factory: bool, argnums: Any = None, argnames: Any = None
) -> Entry | ProgramEntry:
    """What a TARGET names, with its arguments. What its module prints is no result."""
    from jaxprtool.targets import find

    with contextlib.redirect_stdout(sys.stderr):
        return find(
            target,
            args,
            factory=factory,
            static_argnums=argnums or (),
            static_argnames=argnames or (),
        )


def trace(entry: Entry | ProgramEntry, pipeline: Pipeline) -> Program:
    """The program of an entry for a pipeline, with the named axes that its passes bind.

    What the function prints while it is traced is no result.
    """
    with contextlib.redirect_stdout(sys.stderr):
        return entry.trace(pipeline.bound_axes)


def each(result: Program | Programs) -> list[tuple[str, Program]]:
    """The programs that a pipeline gave, by name."""
    from jaxprtool.ir.program import Programs

    return list(result.items()) if isinstance(result, Programs) else [(result.name, result)]
