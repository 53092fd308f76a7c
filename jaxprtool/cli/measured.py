"""`--measure`: measured times in the output of other commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

from jaxprtool.cli.options import RUN
from jaxprtool.cli.profile import profiled, warn_unexplained
from jaxprtool.cli.running import ready
from jaxprtool.errors import OutputError, UnsupportedError

if TYPE_CHECKING:
    from jaxprtool.analysis.profile import Profile
    from jaxprtool.api.targets import RunInputs

Measure = Annotated[
    bool,
    RUN.flag(
        "--measure", "Compile and run the program as `profile` does, and show the measured times."
    ),
]


def measured(
    given: RunInputs,
    target: str,
    seed: int,
    backend: str | None,
    device: int | None,
    json: bool,
    on_progress: Callable[[str], object],
) -> Profile:
    """Run a program under the profiler; print which arguments are random, and warnings.

    Raises:
        UnsupportedError: If it cannot be compiled, or the profiler records nothing on the device.
    """
    from jaxprtool.analysis.profile import NoOperationsError

    prepared = ready(given, seed, backend, device)
    try:
        found = profiled(prepared, None, json, on_progress)
    except NoOperationsError as error:
        raise UnsupportedError(error.message, "leave out --measure") from None
    prepared.note_random(target)
    warn_unexplained(found)
    return found


def require_measure(measure: bool, backend: str | None, device: int | None = None) -> None:
    """Raise OutputError for a device to run on if nothing is run."""
    if not measure and (backend is not None or device is not None):
        option = "--device" if backend is None else "--backend"
        raise OutputError(f"{option} needs --measure, which runs the program", "add --measure")
