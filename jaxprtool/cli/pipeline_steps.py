"""The run of a pipeline: its progress, and the program on which a pass fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxprtool.cli.output import OnProgress
from jaxprtool.ir.program import Program, Programs
from jaxprtool.passes import Observer, Pipeline, Step

if TYPE_CHECKING:
    from jaxprtool.cli.options import Reproducer


def run_pipeline(
    pipeline: Pipeline,
    program: Program | Programs,
    on_progress: OnProgress,
    observer: Observer | None = None,
    check: bool = True,
    reproducer: Reproducer | None = None,
) -> list[tuple[str, Program]]:
    """Run a pipeline, and return the resulting programs by name.

    `on_progress` is called with each pass and its number: `fold 3/12`. `reproducer` writes the
    program on which a pass fails.
    """
    progress_observer = _ProgressObserver(pipeline, on_progress, observer or Observer())
    try:
        return named_programs(pipeline.run(program, progress_observer, check=check))
    except Exception as error:
        if reproducer is not None and progress_observer.running is not None:
            step, failing = progress_observer.running
            reproducer.failed(failing, step, error)
        raise


def named_programs(result: Program | Programs) -> list[tuple[str, Program]]:
    """Return the results of a pass by name."""
    return list(result.items()) if isinstance(result, Programs) else [(result.name, result)]


class _ProgressObserver(Observer):
    """Reports progress before each pass, and forwards to another observer."""

    def __init__(self, pipeline: Pipeline, on_progress: OnProgress, inner: Observer):
        steps = pipeline.flat()
        self._places = {id(step): f"{i}/{len(steps)}" for i, step in enumerate(steps, 1)}
        self._on_progress, self._inner = on_progress, inner
        self.running: tuple[Step, Program] | None = None

    def before(self, step: Step, program: Program) -> None:
        self.running = step, program
        self._on_progress(f"{type(step.transform).name} {self._places[id(step)]}")
        self._inner.before(step, program)

    def after(
        self, step: Step, program: Program, result: Program | Programs, seconds: float
    ) -> None:
        self._inner.after(step, program, result, seconds)
