"""`jaxprtool opt`: a function's jaxpr after passes, and what each of them did to it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxprtool.cli import options, output
from jaxprtool.errors import PipelineError, did_you_mean

if TYPE_CHECKING:
    from jaxprtool.passes.pipeline import Pipeline, Step

_WATCHED = "What is watched (on stderr)"


def opt(
    target: options.Target,
    args: options.Args = None,
    factory: options.Factory = False,
    static_argnums: options.StaticArgnums = None,
    static_argnames: options.StaticArgnames = None,
    x64: options.X64 = False,
    passes: options.Passes = None,
    plugin: options.Plugin = None,
    no_check: Annotated[
        bool,
        typer.Option(
            "--no-check",
            help="Do not type-check the program after each pass.",
            rich_help_panel="Passes",
        ),
    ] = False,
    print_before_all: Annotated[
        bool,
        typer.Option(
            "--print-before-all",
            help="The program before each pass.",
            rich_help_panel=_WATCHED,
        ),
    ] = False,
    print_after_all: Annotated[
        bool,
        typer.Option(
            "--print-after-all",
            help="The program after each pass.",
            rich_help_panel=_WATCHED,
        ),
    ] = False,
    print_after: Annotated[
        list[str] | None,
        typer.Option(
            "--print-after",
            metavar="NAME",
            help="The program after this pass. May be repeated.",
            rich_help_panel=_WATCHED,
        ),
    ] = None,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats",
            help="How many equations each pass was given, and left.",
            rich_help_panel=_WATCHED,
        ),
    ] = False,
    timing: Annotated[
        bool,
        typer.Option("--timing", help="How long each pass took.", rich_help_panel=_WATCHED),
    ] = False,
    json: options.Json = False,
    traceback: options.Traceback = False,
) -> None:
    """Run passes over a function's jaxpr and print the result.

    [bold]Examples[/]

      jaxprtool opt samples/transformer.py:loss -p dce
      jaxprtool opt samples/rnn.py:run -p "dce(drop_inputs=True)" --stats --timing
      jaxprtool opt samples/transformer.py:loss -p dce --print-after-all > after.txt
    """
    options.start_jax(x64)
    pipeline = options.pipeline(passes, plugin)
    watcher = Watcher(print_before_all, print_after_all, _checked(print_after, pipeline))
    entry = options.find(target, args, factory, static_argnums, static_argnames)
    result = pipeline.run(options.trace(entry), watcher, check=not no_check)
    programs = options.each(result)
    if json:
        from jaxprtool.render.as_json import as_json

        shown = [as_json(program) for _, program in programs]
        output.write_json({"programs": shown, "passes": [row.as_json() for row in watcher.rows]})
        return
    _write(programs)
    if stats or timing:
        sys.stdout.flush()
        _write_rows(watcher.rows, stats, timing)


def _checked(wanted: list[str] | None, pipeline: Pipeline) -> frozenset[str]:
    """The passes that --print-after names; each must be one that the pipeline runs."""
    run = [step.transform.name for step in pipeline.steps]
    for name in wanted or []:
        if name not in run:
            raise PipelineError(
                f"--print-after names '{name}', which is not in the pipeline",
                did_you_mean(name, run),
            )
    return frozenset(wanted or [])


@dataclass(frozen=True)
class Row:
    """What one pass did to one program."""

    step: str
    program: str
    seconds: float
    before: int
    after: int

    def as_json(self) -> dict[str, Any]:
        return {
            "pass": self.step,
            "program": self.program,
            "seconds": self.seconds,
            "equations_before": self.before,
            "equations_after": self.after,
        }


class Watcher:
    """An `Observer` that prints programs between passes, as asked for, and keeps a Row of each."""

    def __init__(self, before_all: bool, after_all: bool, after: frozenset[str]):
        self.rows: list[Row] = []
        self._before_all = before_all
        self._after_all = after_all
        self._after = after

    def before(self, step: Step, program: Any) -> None:
        if self._before_all:
            _dump(f"before {step}", program)

    def after(self, step: Step, program: Any, result: Any, seconds: float) -> None:
        programs = [each for _, each in options.each(result)]
        count = sum(_equations(each) for each in programs)
        self.rows.append(Row(str(step), program.name, seconds, _equations(program), count))
        if self._after_all or step.transform.name in self._after:
            for each in programs:
                _dump(f"after {step}", each)


def _equations(program: Any) -> int:
    from jaxprtool.render.selection import Selection

    return sum(map(Selection().count_equation, program.jaxpr.eqns))


def _dump(when: str, program: Any) -> None:
    output.say(f"# {when}: {program.name}")
    _write([(program.name, program)], sys.stderr)
    output.say("")


def _write(programs: Any, stream: Any = None) -> None:
    from jaxprtool.render.listing import listing

    output.write_programs(programs, listing, stream, width=output.width(stream))


def _write_rows(rows: list[Row], stats: bool, timing: bool) -> None:
    columns = ["pass", "program"]
    columns += ["equations before", "after", "removed"] if stats else []
    columns += ["seconds"] if timing else []
    table = []
    for row in rows:
        counts = (str(row.before), str(row.after), str(row.before - row.after))
        cells = [row.step, row.program, *(counts if stats else ())]
        table.append([*cells, f"{row.seconds:.4f}"] if timing else cells)
    if timing:
        total = sum(row.seconds for row in rows)
        table.append(["total", *[""] * (len(columns) - 2), f"{total:.4f}"])
    output.write_table(columns, table, right=columns[2:], stream=sys.stderr)
