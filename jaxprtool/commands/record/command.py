"""`jaxprtool record`: run a script unchanged, and record what JAX compiles in it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxprtool.cli import options, output
from jaxprtool.cli.app import ColoredCommand
from jaxprtool.cli.completion import nearest_file, tool_table
from jaxprtool.cli.options import OUTPUT, Panel
from jaxprtool.cli.session import command
from jaxprtool.errors import TargetError, did_you_mean
from jaxprtool.files import NOTEBOOK, NOTEBOOK_HINT
from jaxprtool.ir.documents import bytes_of
from jaxprtool.render.terminal.tables import ALL

if TYPE_CHECKING:
    from jaxprtool.recording.new_run import NewRun
    from jaxprtool.recording.recorded_run import Run
    from jaxprtool.recording.settings import SummaryRequest

_RECORDED = Panel("Recording")

_Command = Annotated[
    list[str],
    typer.Argument(
        metavar="SCRIPT ARGS…|-- COMMAND…",
        help="A script and its arguments, run as `python SCRIPT ARGS…`; after --, any command that "
        "starts Python.",
        show_default=False,
    ),
]
_Module = Annotated[bool, _RECORDED.flag("-m", "SCRIPT is a module, run as `python -m`.")]
_Out = Annotated[
    str | None,
    OUTPUT.option(
        "-o, --output",
        "DIR/",
        "Write the run here. Default: run/. A run that is there is renamed to run-1/, run-2/, …",
    ),
]
_Overwrite = Annotated[
    bool, OUTPUT.flag("--overwrite", "Replace the run that is there instead of renaming it.")
]
_Calls = Annotated[
    bool,
    _RECORDED.flag(
        "--calls", "Count the calls of functions, and measure the time until results are ready."
    ),
]
_Keep = Annotated[
    list[str] | None,
    _RECORDED.option(
        "--keep",
        "NAME[:N],…",
        "Keep the arguments of the last call, or of the last N calls, of these functions: `nans "
        "run/NAME` replays them. May be repeated.",
    ),
]
_KeepBytes = Annotated[
    str, _RECORDED.option("--keep-bytes", "SIZE", "The size limit of --keep for each function.")
]
_Until = Annotated[
    str | None,
    _RECORDED.option(
        "--until", "nan", "End the script at the first NaN in a result of a --keep function."
    ),
]
_Profile = Annotated[
    int | None,
    _RECORDED.option(
        "--profile",
        "N",
        "Profile N steps. A step is a call of the first function that is called three times. "
        "`profile run` shows the times again.",
        min=1,
    ),
]
_Top = Annotated[int | None, options.top_option("as many as fit a screen")]
_NoConstants = Annotated[
    bool,
    _RECORDED.flag("--no-constants", "Write programs without the large arrays they close over."),
]


@command
def record_command(
    context: typer.Context,
    words: _Command,
    module: _Module = False,
    calls: _Calls = False,
    keep: _Keep = None,
    keep_bytes: _KeepBytes = "4GiB",
    until: _Until = None,
    profile: _Profile = None,
    no_constants: _NoConstants = False,
    out: _Out = None,
    overwrite: _Overwrite = False,
    top: _Top = None,
    all: options.All = False,
    json: options.Json = False,
) -> None:
    """Run a script; record what JAX compiles, and why it recompiles.

    The script runs unchanged, and its exit code is that of this command. Each recorded program is a
    TARGET of all commands: run/step, or run/step@2 for its second compilation. `run/` is the newest
    run: an older one is renamed to run-1/, run-2/, …, so that `diff run-1/step run/step` shows what
    an edit has changed.

    The summary ends with what to do, and the commands for it: values that the script read and that
    are NaN, findings of lint, states that could be donated, and functions that were compiled again.
    `show run/` prints it again; `lint run/` and `report run/` say more.

    [bold]Examples[/]

      jaxprtool record samples/train.py --steps 100
      jaxprtool record --keep step --until nan samples/train.py --steps 20
      jaxprtool record --profile 20 samples/train.py
      jaxprtool record -m samples.train --steps 20
      jaxprtool record -- python samples/train.py --steps 20
    """
    options.row_limit(top, all)  # refuse both before the script runs
    from jaxprtool.recording.new_run import new_run, run_recorded
    from jaxprtool.recording.settings import SHORT, Settings, kept_calls_of, require_until

    kept = kept_calls_of(keep or [])
    require_until(until or "", kept)
    keep_limit = bytes_of(keep_bytes)
    is_command = behind_dashes(context, words)
    words = launched(words, module, is_command)
    # The Python of another command may have other packages, or another jaxprtool.
    needs_jax = bool(is_command or kept or profile) or _configures_lint()
    with new_run(out, overwrite) as new:
        path = new.path
        _note_place(new)
        request = _summary_request(path, top, all, json)
        settings = Settings(
            run=os.path.abspath(path),
            start=time.time(),
            constants=0 if no_constants else Settings.constants,
            calls=calls,
            keep=tuple(kept.items()),
            keep_bytes=keep_limit,
            until=until or "",
            profile=profile or 0,
            summary=None if needs_jax else request,
        )
        reader = _ReaderImport(SHORT if settings.summary else 0.0)
        try:
            with reader, _long_phases_said(path):
                ended = run_recorded(words, settings)
        except TargetError:
            new.undo()
            raise
        if ended.summary is not None:
            _write_summary(ended.summary, json)
            raise typer.Exit(ended.exit_code)
        reader.join()
        from jaxprtool.commands.lint.command import configured_codes
        from jaxprtool.commands.record.record import finished, printed_summary

        run = finished(path, configured_codes())
    _note_missing(kept, run)
    _write_summary(printed_summary(run, request), json)
    if profile:
        _say_profile(path, options.row_limit(top, all))
    raise typer.Exit(ended.exit_code)


#: Seconds after which a compilation that still runs is said, and again each time they double.
LONG = 10.0


@contextlib.contextmanager
def _long_phases_said(path: str) -> Iterator[None]:
    """Say what a run compiles, while it does, if that takes long: `compiling step for 10 s`."""
    from jaxprtool.ir.documents import duration
    from jaxprtool.recording.folder import RunningPhases

    phases, ended = RunningPhases(path), threading.Event()
    due: dict[tuple[str, float], float] = {}

    def watch() -> None:
        while not ended.wait(LONG / 10):
            running = phases.now()
            for event in running[-1:]:  # the innermost
                seconds, key = time.time() - event["time"], (event["name"], event["time"])
                if seconds >= due.setdefault(key, LONG):
                    line = ":".join(map(str, event["user"][:2])) if event["user"][0] else ""
                    at = f" at {os.path.relpath(line)}" if line else ""
                    output.say(f"{event['event']} {event['name']} for {duration(seconds)}{at}")
                    due[key] *= 2

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _note_place(new: NewRun) -> None:
    """Say where an older run is now, or why this one is not where it was to be."""
    if new.older:
        output.note(f"the run in {new.path}/ is now {new.older}/")
    if new.is_other:
        output.note(f"a run is being recorded in run/, so this one is {new.path}/")


def launched(words: list[str], is_module: bool, is_command: bool) -> list[str]:
    """Return the command line to run. Raises TargetError if there is no such script."""
    from jaxprtool.recording.new_run import module_command, script_command

    if is_command:
        return words
    if words[0].endswith(NOTEBOOK) and not is_module:
        raise TargetError(f"'{words[0]}' is a notebook, not a script", NOTEBOOK_HINT)
    make = module_command if is_module else script_command
    return make(words[0], words[1:])


class ScriptCommand(ColoredCommand):
    """A command that passes all arguments after a script's name to the script.

    Click drops a leading `--`; `behind_dashes` tells whether there was one.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.allow_interspersed_args = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = list(args)
        return super().parse_args(ctx, args)


_WORDS = f"{__name__}.words"


def behind_dashes(context: typer.Context, command: Sequence[str]) -> bool:
    """Return True if the command is preceded by `--`."""
    words = context.meta[_WORDS]
    return "--" in words and words[words.index("--") + 1 :] == list(command)


record_command.click_class = ScriptCommand  # type: ignore[attr-defined]


def _note_missing(kept: Iterable[str], run: Run) -> None:
    """Warn about functions of --keep that were not called."""
    names = [function.name for function in run.functions]
    for name in kept:
        if not any(function.kept for function in run.functions if function.name == name):
            if name in names:
                output.warning(f"--keep {name}: its arguments exceed --keep-bytes")
                continue
            near = did_you_mean(name, names) or (f"there is {names[0]}" if names else "")
            output.warning(f"--keep {name}: no such function was called; {near}".rstrip("; "))


def _say_profile(path: str, top: int | None) -> None:
    """Print the times of the profiled steps on stderr, below the summary of the run."""
    from jaxprtool.commands.profile.profile import profile_in
    from jaxprtool.commands.profile.table import profile_table
    from jaxprtool.errors import JaxprToolError

    try:
        result = profile_in(path)
    except JaxprToolError as error:
        output.warning(f"--profile: {error.message}; steps begin with a third call of a function")
        return
    output.say("")
    width, whole = output.width(sys.stderr), f"profile {path} {ALL}"
    output.write_rendered(profile_table(result, width, "line", top, whole), sys.stderr)


def _summary_request(path: str, top: int | None, all: bool, json: bool) -> SummaryRequest:
    """Return how to print the summary of the run in a folder on stderr."""
    from jaxprtool.recording.settings import SummaryRequest, summary_environment

    return SummaryRequest(
        command=os.getpid(),
        path=path,
        width=output.width(sys.stderr),
        colored=output.colors(sys.stderr),
        top=top,
        all=all,
        json=json,
        max_bytes=output.max_bytes.get(),
        environment=summary_environment(),
    )


def _configures_lint() -> bool:
    """Return True if a pyproject.toml chooses codes of lint, which JAX is needed to check."""
    path = nearest_file()
    return path is not None and "lint" in tool_table(path)["jaxprtool"]


class _ReaderImport(threading.Timer):
    """Imports what reads a run, with JAX, while a script runs in a `with` block.

    A script that ends before the import begins may not need it.

    Args:
        seconds: The time after which the import begins.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds, _import_reader)
        self.daemon = True

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *error: object) -> None:
        self.cancel()


def _import_reader() -> None:
    import jaxprtool.commands.record.next_steps
    import jaxprtool.commands.record.record  # noqa: F401


def _write_summary(text: str, json: bool) -> None:
    if json:
        output.write_json_text(text)
    else:
        sys.stderr.write(text)
