"""`jaxprtool opt`: a function's jaxpr after passes, and what each of them did to it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from jaxprtool.cli import options, output, rewrites
from jaxprtool.cli.emit import SUFFIXES
from jaxprtool.cli.places import STDOUT, require_writable, write_jaxprs
from jaxprtool.errors import JaxprToolError, OutputError, PipelineError, did_you_mean

if TYPE_CHECKING:
    from jaxprtool.passes.pipeline import Pipeline

_WATCHED = "What is watched (on stderr)"


_Level = Annotated[
    str | None,
    typer.Option(
        "-O",
        metavar="0|1|2",
        help="A named pipeline, run after the passes of -p: `jaxprtool explain -O1`.",
        rich_help_panel="Passes",
    ),
]
_NoCheck = Annotated[
    bool,
    typer.Option(
        "--no-check",
        metavar="",
        help="Do not type-check the program after each pass.",
        rich_help_panel="Passes",
    ),
]
_PrintBeforeAll = Annotated[
    bool,
    typer.Option(
        "--print-before-all",
        metavar="",
        help="The program before each pass.",
        rich_help_panel=_WATCHED,
    ),
]
_PrintAfterAll = Annotated[
    bool,
    typer.Option(
        "--print-after-all",
        metavar="",
        help="The program after each pass.",
        rich_help_panel=_WATCHED,
    ),
]
_PrintAfter = Annotated[
    list[str] | None,
    typer.Option(
        "--print-after",
        metavar="NAME",
        help="The program after this pass. May be repeated.",
        rich_help_panel=_WATCHED,
    ),
]
_Stats = Annotated[
    bool,
    typer.Option(
        "--stats",
        metavar="",
        help="How many equations each pass was given, and left.",
        rich_help_panel=_WATCHED,
    ),
]
_Timing = Annotated[
    bool,
    typer.Option("--timing", metavar="", help="How long each pass took.", rich_help_panel=_WATCHED),
]
_Verify = Annotated[
    bool,
    typer.Option(
        "--verify",
        metavar="",
        help="Run the program before and after each pass, and compare what they give.",
        rich_help_panel="Passes",
    ),
]
_Out = Annotated[
    str | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FILE|DIR/|-",
        help="Write the result as a .jaxpr file, several results into a folder; - is stdout.",
        rich_help_panel="Output",
    ),
]


def opt(
    target: options.Target,
    args: options.Args = None,
    factory: options.Factory = False,
    static_argnums: options.StaticArgnums = None,
    static_argnames: options.StaticArgnames = None,
    x64: options.X64 = False,
    passes: options.Passes = None,
    level: _Level = None,
    plugin: options.Plugin = None,
    rewrite: rewrites.Files = None,
    no_check: _NoCheck = False,
    verify: _Verify = False,
    print_before_all: _PrintBeforeAll = False,
    print_after_all: _PrintAfterAll = False,
    print_after: _PrintAfter = None,
    stats: _Stats = False,
    timing: _Timing = False,
    out: _Out = None,
    callbacks: options.Callbacks = options.CallbackChoice.refuse,
    json: options.Json = False,
    traceback: options.Traceback = False,
) -> None:
    """Run passes over a function's jaxpr and print the result.

    [bold]Examples[/]

      jaxprtool opt samples/transformer.py:loss -p dce
      jaxprtool opt samples/transformer.py:loss -O1 --stats
      jaxprtool opt samples/transformer.py:loss -O1 --verify
      jaxprtool opt samples/rnn.py:loss -p "dce(drop_inputs=True)" --stats --timing
      jaxprtool opt samples/transformer.py:loss --rewrite samples/attention_rewrite.py
      jaxprtool opt samples/transformer.py:loss -p dce --print-after-all
      jaxprtool opt samples/transformer.py:loss -p dce -o loss.jaxpr
      jaxprtool opt samples/rnn.py:loss -o - | jaxprtool opt - -p dce
    """
    if json and out == STDOUT:
        raise OutputError("--json and -o - both want stdout", "write the program to a file")
    suffix = os.path.splitext(out or "")[1]
    if suffix in SUFFIXES and suffix != ".jaxpr":
        hint = f"`jaxprtool emit TARGET -o {out}` writes what its name says"
        raise OutputError(f"opt writes .jaxpr files, and '{out}' is named otherwise", hint)
    options.start_jax(x64)
    from jaxprtool.cli import verifying, watch

    users = rewrites.load(rewrite)
    named = None if level is None else f"-O{level}"
    pipeline = users.before(options.pipeline(", ".join(filter(None, (passes, named))), plugin))
    watcher = watch.Watcher(print_before_all, print_after_all, _checked(print_after, pipeline))
    entry = options.find(target, args, factory, static_argnums, static_argnames)
    program = options.trace(entry, pipeline)
    verifier = verifying.Verifier(watcher, program, entry.arguments()) if verify else None
    try:
        result = pipeline.run(program, verifier or watcher, check=not no_check)
    except JaxprToolError:
        if verifier is not None:
            verifier.verify()  # a pass that went wrong may be why a later one failed
        raise
    programs = options.each(result)
    if verifier is not None:
        if out is not None:
            require_writable(programs, callbacks)
        verifier.verify()
        verifier.write_summary()
    rewrites.write_matches(users)
    if out is not None:
        write_jaxprs(programs, out, callbacks)
    if json:
        from jaxprtool.render.as_json import program_document

        shown = [program_document(program) for _, program in programs]
        output.write_json({"programs": shown, "passes": [row.as_json() for row in watcher.rows]})
        return
    if out is None:
        output.write_listings(programs)
    if stats or timing:
        sys.stdout.flush()
        watch.write_rows(watcher.rows, stats, timing)


def _checked(wanted: list[str] | None, pipeline: Pipeline) -> frozenset[str]:
    """The passes that --print-after names; each must be one that the pipeline runs."""
    run = [type(each).name for each in pipeline.passes()]
    for name in wanted or []:
        if name not in run:
            raise PipelineError(
                f"--print-after names '{name}', which is not in the pipeline",
                did_you_mean(name, run),
            )
    return frozenset(wanted or [])
