"""`jaxprtool browse`: a function's jaxpr on a full screen, beside its source."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys

from jaxprtool.cli import options
from jaxprtool.cli.progress import Told
from jaxprtool.cli.start import start_jax
from jaxprtool.errors import OutputError


@options.command
def browse(
    function: options.Function,
    passes: options.Passes = None,
    plugin: options.Plugin = None,
    *,
    told: Told,
) -> None:
    """Look through a function's jaxpr on a full screen, beside its source.

    It folds, searches, and leads from a value to its definition and its uses, from a line of your
    source to its equations, and from what a pass was given to what it made. ? shows the keys.

    [bold]Examples[/]

      jaxprtool browse samples/transformer.py:loss
      jaxprtool browse samples/transformer.py:loss -p "grad, -O1"
      jaxprtool browse samples/mlp_variables.py:net -p unzip
    """
    _require_terminal(function.target)
    _require_textual()
    start_jax(told, function.x64)
    pipeline = options.pipeline(passes, plugin)
    entry = function.find(told)
    program = function.trace(entry, pipeline, told)
    from jaxprtool.browse.states import Recorder
    from jaxprtool.cli import pipeline_steps

    recorder = Recorder(program)
    pipeline_steps.run(pipeline, program, told, recorder)
    told("")  # the terminal is the browser's
    gc.freeze()  # the program stays, and is large
    from jaxprtool.browse import app

    app.browse(recorder.states)


def _require_terminal(target: str) -> None:
    """Raise OutputError where there is no screen or keyboard, or one that cannot be drawn on."""
    if target == "-":
        raise OutputError(
            "browse reads keys from stdin, and so no program", "write the program to a file"
        )
    for name in ("stdin", "stdout", "stderr"):
        if not getattr(sys, name).isatty():
            raise OutputError(
                f"browse needs a terminal, and {name} is none",
                "`jaxprtool show` writes to files and pipes",
            )
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        raise OutputError(
            "browse needs a terminal that can move its cursor, and TERM names none", "set TERM"
        )


def _require_textual() -> None:
    if importlib.util.find_spec("textual") is None:
        raise OutputError("browse needs Textual", 'pip install "jaxprtool[browse]"')
