"""`jaxprtool opt`: a function's jaxpr after passes, and the effect of each pass."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from jaxprtool.cli import options, output
from jaxprtool.cli.options import OUTPUT, PASSES, Panel, Reproducer, ReproducerOption
from jaxprtool.cli.output import OnProgress
from jaxprtool.cli.session import FunctionOptions, Named, command, only_program, pipeline
from jaxprtool.commands.show.command import write_pages, write_pages_or_listings, write_states
from jaxprtool.errors import JaxprToolError, OutputError, PipelineError, did_you_mean
from jaxprtool.files import STDOUT
from jaxprtool.formats.emission import Emission, Format

if TYPE_CHECKING:
    from jaxprtool.api.targets import RunInputs
    from jaxprtool.commands.compare.requested import Verified, Verifier
    from jaxprtool.passes import Pipeline
    from jaxprtool.passes.patterns import NamedRewrites
    from jaxprtool.render.documents import programs as documents
    from jaxprtool.render.documents.programs import PassRun


#: The formats of the result.
PageFormat = Literal["text", "html"]

_WATCHED = Panel("Diagnostics (on stderr)")

_Level = Annotated[
    str | None,
    PASSES.option(
        "-O",
        "0|1|2|3",
        "A named pipeline, run after the passes of -p; see `jaxprtool explain -O1`.",
    ),
]
_NoCheck = Annotated[
    bool, PASSES.flag("--no-check", "Do not type-check the program after each pass.")
]
_PrintBeforeAll = Annotated[
    bool, _WATCHED.flag("--print-before-all", "Print the program before each pass.")
]
_PrintAfterAll = Annotated[
    bool, _WATCHED.flag("--print-after-all", "Print the program after each pass.")
]
_PrintAfter = Annotated[
    list[str] | None,
    _WATCHED.option("--print-after", "NAME", "Print the program after this pass. May be repeated."),
]
_PrintChanged = Annotated[
    bool,
    _WATCHED.flag("--print-changed", "Print the diff of each pass that changed the program."),
]
_Stats = Annotated[
    bool, _WATCHED.flag("--stats", "Print the number of equations before and after each pass.")
]
_Timing = Annotated[bool, _WATCHED.flag("--timing", "Print the time of each pass.")]
_Verify = Annotated[
    bool,
    PASSES.flag("--verify", "Run the program before and after each pass, and compare the results."),
]
_Format = Annotated[
    PageFormat,
    OUTPUT.choice(
        "--format, -f", PageFormat, "html: a page for a browser, with a tab for each pass."
    ),
]
_Out = Annotated[
    str | None,
    options.out_option(
        "Write the result as a .jaxpr file, several results into a folder, or an HTML page: "
        "FILE.html. - is stdout."
    ),
]


@command
def opt_command(
    function: FunctionOptions,
    axis_env: options.AxisEnv = None,
    types: options.Types = None,
    passes: options.Passes = None,
    level: _Level = None,
    plugin: options.Plugin = None,
    rewrite: options.Rewrite = None,
    no_check: _NoCheck = False,
    verify: _Verify = False,
    strict: options.Strict = False,
    no_cache: options.NoCache = False,
    print_before_all: _PrintBeforeAll = False,
    print_after_all: _PrintAfterAll = False,
    print_after: _PrintAfter = None,
    print_changed: _PrintChanged = False,
    stats: _Stats = False,
    timing: _Timing = False,
    format: _Format = "text",
    out: _Out = None,
    reproducer: ReproducerOption = None,
    callbacks: options.Callbacks = "refuse",
    json: options.Json = False,
    full: options.Full = False,
    pager: options.Pager = False,
    source: options.Source = None,
) -> None:
    """Run passes over a function's jaxpr and print the result.

    [bold]Examples[/]

      jaxprtool opt samples/transformer.py:loss -p dce
      jaxprtool opt samples/transformer.py:loss -O1 --stats
      jaxprtool opt samples/transformer.py:loss -O1 --verify
      jaxprtool opt samples/rnn.py:loss -p "dce(drop_inputs=True)" --stats --timing
      jaxprtool opt samples/transformer.py:loss --rewrite samples/attention_rewrite.py
      jaxprtool opt samples/transformer.py:loss -p dce --print-after-all
      jaxprtool opt samples/transformer.py:loss -O1 --print-changed
      jaxprtool opt samples/transformer.py:loss -p dce -o loss.jaxpr
      jaxprtool opt samples/transformer.py:loss -O2 -o loss.html
      jaxprtool opt samples/rnn.py:loss -o - | jaxprtool opt - -p dce
    """
    output.check_out("opt", out, json, (Format.jaxpr,), "jaxprtool emit TARGET", page=True)
    as_page = format == "html" or output.is_page(out)
    if as_page and json and out in (None, STDOUT):
        raise OutputError(
            "--json and an HTML page cannot both write to stdout", "write the page to a file"
        )
    if no_cache and not verify:
        message = "--no-cache needs --verify"
        raise OutputError(message, "add --verify")
    if strict and not verify:
        raise OutputError("--strict needs --verify", "add --verify")
    function.start(not no_cache if verify else None)
    from jaxprtool.api.targets import RunInputs
    from jaxprtool.cli import pipeline_steps
    from jaxprtool.commands.compare.requested import Verifier
    from jaxprtool.commands.opt import steps as watched_steps
    from jaxprtool.passes.patterns import NamedRewrites

    users = NamedRewrites(rewrite or ())
    named = None if level is None else f"-O{level}"
    steps = users.before(pipeline(", ".join(filter(None, (passes, named))), plugin))
    watcher = watched_steps.Watcher(
        print_before_all,
        print_after_all,
        _checked(print_after, steps),
        as_page,
        print_changed,
    )
    traced = function.trace(steps, runs=verify, types=types, symbolic=True, axis_env=axis_env)
    inputs = RunInputs(traced.program, traced.values)
    verifier = Verifier(watcher, output.note) if verify else None
    writer = Reproducer(reproducer, plugin or ()) if reproducer else None
    try:
        with traced.mesh_set():
            programs = pipeline_steps.run_pipeline(
                steps,
                traced.program,
                function.on_progress,
                verifier or watcher,
                not no_check,
                writer,
            )
    except JaxprToolError:
        if verifier is not None:
            _verify(
                verifier, inputs, function.on_progress
            )  # an earlier incorrect pass may be why a later one failed
        raise
    if traced.after is not None:
        inputs = traced.given_to(only_program("--args apply to", programs))
    if verifier is not None:
        if out is not None and not as_page:
            _require_writable(programs, callbacks)
        _say_verified(_verify(verifier, inputs, function.on_progress), strict)
    function.on_progress("rendering")
    _write_matches(users)
    watched_steps.write_notes(watcher.noted)
    if as_page:
        from jaxprtool.render.terminal.listing import ShowOptions

        shown = ShowOptions(names=True, terse=True, source=source is not False)
        write_states(watched_steps.states(watcher, programs), shown, out)
    elif out is not None:
        emission = Emission(Format.jaxpr, callbacks=callbacks, source=source, on_opaque=output.note)
        output.write_files(programs, emission, out)
    if json:
        from jaxprtool.render.reports import program_document

        documents = [program_document(program) for _, program in programs]
        output.write_json(OptDocument(documents, watcher.rows))
        return
    if out is None and not as_page and (full or pager or function.listed(source)["source"]):
        write_pages_or_listings(programs, full, pager, **function.listed(source))
    elif out is None and not as_page:
        _write_pages(programs, [] if stats or timing else watcher.rows)
    if stats or timing:
        sys.stdout.flush()
        watched_steps.write_rows(watcher.rows, stats, timing)


def _write_pages(programs: Named, rows: list[PassRun]) -> None:
    """Show the programs; on a terminal, below the table of passes."""
    above = 0
    if rows and sys.stdout.isatty():
        from jaxprtool.commands.opt import steps

        shown = steps.merged(rows)
        steps.write_rows(shown, equations=True, timing=True)
        output.say("")
        above = len(shown) + 4  # the heading, a rule, the total and an empty line
    write_pages(programs, above)


def _say_verified(verified: Verified, strict: bool) -> None:
    """Print the number of compared passes, or that non-finite results prove nothing."""
    for what in verified.unproven:
        output.warning(f"{what}: equal results after the passes prove little")
    passes = "1 pass" if verified.passes == 1 else f"{verified.passes or 'no'} passes"
    if not verified.unproven:
        unchanged = verified.passes and not verified.changed
        how = "changed nothing" if unchanged else "on the same inputs"
        counts = f"{verified.nonfinite:,} of {verified.elements:,} elements not finite"
        output.say(f"verified: {passes} {how}{f', {counts}' if verified.nonfinite else ''}")
        return
    output.say(f"not verified: {passes} compared on the same inputs; pass other inputs in --args")
    if strict:
        raise typer.Exit(1)


def _verify(verifier: Verifier, inputs: RunInputs, on_progress: OnProgress) -> Verified:
    with contextlib.redirect_stdout(sys.stderr):  # output of callbacks is not a result
        return verifier.verify(inputs.values, inputs.sizes, on_progress)


def _write_matches(rewrites: NamedRewrites) -> None:
    """Print the matches of each rewrite on stderr; warn about one without matches."""
    for name, matches in rewrites.matches().items():
        if not matches:
            output.warning(f"rewrite '{name}' has no matches")
            continue
        lines = ", ".join(dict.fromkeys(match.source or "an unknown line" for match in matches))
        count = "1 match" if len(matches) == 1 else f"{len(matches)} matches"
        output.note(f"rewrite '{name}': {count}, at {lines}")


def _require_writable(programs: Named, callbacks: str) -> None:
    """Raise UnsupportedError if one of the programs cannot be written to a `.jaxpr` file."""
    from jaxprtool.formats.jaxpr import write

    for _, program in programs:
        write.require_writable(program, callbacks)


def _checked(wanted: list[str] | None, pipeline: Pipeline) -> frozenset[str]:
    """Return the passes of --print-after; each must be in the pipeline."""
    run = [type(transform).name for transform in pipeline.passes()]
    for name in wanted or []:
        if name not in run:
            raise PipelineError(
                f"--print-after names '{name}', which is not in the pipeline",
                did_you_mean(name, run),
            )
    return frozenset(wanted or [])


class OptDocument(NamedTuple):
    """`opt`."""

    programs: Annotated[list[documents.Program], "The programs after the passes."]
    passes: Annotated[Sequence[PassRun], "The effect of each pass, in the order in which they ran."]
