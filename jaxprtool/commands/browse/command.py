"""`jaxprtool browse`: a full-screen view of a function's jaxpr next to its source."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from typing import TYPE_CHECKING

from jaxprtool.cli.session import Session, command
from jaxprtool.errors import OutputError

if TYPE_CHECKING:
    from jaxprtool.commands.browse.document import PassState


@command
def browse_command(
    session: Session,
) -> None:
    """Browse a jaxpr on the full screen, beside its source.

    Fold and search the listing, go from a value to its definition and uses, from a source line to
    its equations, and from the program before a pass to the one after it. ? shows the keys.

    [bold]Examples[/]

      jaxprtool browse samples/transformer.py:loss
      jaxprtool browse samples/transformer.py:loss -p "grad, -O1"
      jaxprtool browse samples/mlp_variables.py:net -p unzip
      jaxprtool browse dump/jit_step
    """
    _require_terminal(session.target)
    _require_textual()
    session.start()
    states = _states(session)
    session.on_progress("")  # the terminal is the browser's
    gc.freeze()  # the program is large and stays alive
    from jaxprtool.commands.browse import app

    app.browse(states)


def _states(session: Session) -> list[PassState]:
    """Return the states of the TARGET: an HLO module, or a program before and after passes."""
    from jaxprtool.commands.browse.document import PassState, StateRecorder

    if (stored := session.module()) is not None:
        from jaxprtool.extend.listing import ModuleJaxpr

        module = ModuleJaxpr(stored.module)
        return [PassState("module", module.jaxpr, module=module)]
    traced = session.traced()
    recorder = StateRecorder(traced.program)
    session.programs(traced, recorder)
    return recorder.states


def _require_terminal(target: str) -> None:
    """Raise OutputError without a screen and keyboard, or if the terminal is too limited."""
    if target == "-":
        raise OutputError(
            "browse reads keys from stdin, so stdin cannot be the program",
            "write the program to a file",
        )
    for name in ("stdin", "stdout", "stderr"):
        if not getattr(sys, name).isatty():
            raise OutputError(
                f"browse needs a terminal, but {name} is not a terminal",
                "`jaxprtool show` writes to files and pipes",
            )
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        raise OutputError(
            "browse needs a terminal that can move its cursor, but TERM is not set to one",
            "set TERM",
        )


def _require_textual() -> None:
    if importlib.util.find_spec("textual") is None:
        raise OutputError("browse needs Textual", 'pip install "textual>=8"')
