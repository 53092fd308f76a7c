"""The notebook extension: `%load_ext jaxprtool` gives the cell magic `%%record`.

    %%record -o run/ --calls
    state = step(state, batch)

runs the cell, and shows what JAX compiled in it.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import HTML, display

from jaxprtool.commands.record.page import record_cell
from jaxprtool.commands.record.record import record
from jaxprtool.commands.record.table import run_summary
from jaxprtool.errors import JaxprToolError
from jaxprtool.recording.folder import PAGE
from jaxprtool.recording.recorded_run import Run
from jaxprtool.recording.settings import kept_calls_of


@magics_class
class RecordMagics(Magics):
    """The magics of jaxprtool, for an IPython shell."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._shell = shell

    @magic_arguments()
    @argument("-o", "--output", metavar="DIR/", help="Write the run here. Default: run/")
    @argument(
        "--overwrite",
        action="store_true",
        help="Replace a run in that folder instead of renaming it to run-1/, run-2/, …",
    )
    @argument("--calls", action="store_true", help="Count the calls of functions.")
    @argument("--keep", metavar="NAME[:N],…", help="Keep arguments of these functions.")
    @argument("--until", metavar="nan", default="", help="Stop at the first NaN in their results.")
    @argument("--no-constants", action="store_true", help="Do not write large closed-over arrays.")
    @line_cell_magic("record")
    def record(self, line: str, cell: str | None = None) -> None:
        """Run a cell that begins with %%record, and show what JAX compiled in it, and why."""
        if cell is None:
            raise UsageError("%record records a cell\nhint: begin the cell with a line %%record")
        options = parse_argstring(self.record, line)
        try:
            recorder = record(
                options.output,
                overwrite=options.overwrite,
                calls=options.calls,
                keep=kept_calls_of([options.keep] if options.keep else []),
                until=options.until,
                constants=not options.no_constants,
            )
            with recorder as recording:
                result = _run_cell(self._shell, cell)
        except JaxprToolError as error:
            raise UsageError("\nhint: ".join(filter(None, (error.message, error.hint)))) from None
        display(_RecordedCell(recording.run, Path(recording.folder, PAGE)))
        result.raise_error()


class _RecordedCell(HTML):  # type: ignore[misc]
    """A run as HTML in a notebook, and as the summary of `record` in a terminal."""

    def __init__(self, run: Run, page: Path) -> None:
        super().__init__(record_cell(run, str(page), page.read_text()))
        summary = run_summary(run, shutil.get_terminal_size().columns, str(page)).plain()
        self._summary = summary.replace("\n    jaxprtool ", "\n    !jaxprtool ")

    def __repr__(self) -> str:
        return self._summary


def _run_cell(shell: Any, cell: str) -> Any:
    """Run a cell whose error, if there is one, is shown by the caller."""
    with _replaced(shell, "showtraceback"), _replaced(shell, "showsyntaxerror"):
        return shell.run_cell(cell)


@contextlib.contextmanager
def _replaced(shell: Any, name: str) -> Iterator[None]:
    """Let a method do nothing in a `with` block."""
    original = vars(shell).get(name)
    setattr(shell, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        if original is None:
            delattr(shell, name)
        else:
            setattr(shell, name, original)


def register_magics(shell: Any) -> None:
    """Register the magics in an IPython shell."""
    shell.register_magics(RecordMagics)
