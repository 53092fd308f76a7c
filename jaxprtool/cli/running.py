"""Common parts of commands that run or compile a program: arguments, devices, partitions."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from jaxprtool.cli import output
from jaxprtool.files import is_stream

if TYPE_CHECKING:
    import jax

    from jaxprtool.api.targets import RunInputs
    from jaxprtool.cli.session import FunctionOptions
    from jaxprtool.execute.running.arrays import FilledArguments
    from jaxprtool.ir.program import Program

# --- running --------------------------------------------------------------------------------------
# Common parts of commands that run a program: its arguments, its device, and messages.


@dataclass(frozen=True)
class Ready:
    """A program ready to run; `seed` is the seed of its random arguments."""

    program: Program
    filled: FilledArguments
    device: jax.Device | None
    seed: int
    dropped: Sequence[str]

    def note_random(self, target: str = "") -> None:
        """Print which arguments have random values, and which given ones do not fit.

        Args:
            target: TARGET. For a recorded program, a note says how to keep the script's arguments.
        """
        from jaxprtool.recording.folder import run_and_program

        note_random(self.filled, self.seed, self.dropped)
        recorded = run_and_program(target) if self.filled.random else None
        if recorded is not None:
            name = recorded[1].rpartition("/")[2].partition("@")[0]
            output.note(f"`record --keep {name}` keeps the arguments that the script gives")


def ready(
    inputs: RunInputs, seed: int, backend: str | None = None, device: int | None = None
) -> Ready:
    """Return a program with its device, and random values for arguments given by type."""
    from jaxprtool.execute.running.arrays import fill_arguments
    from jaxprtool.execute.running.run import choose_device

    filled = fill_arguments(inputs.program, inputs.values, seed)
    chosen = choose_device(inputs.program, backend, device)
    return Ready(inputs.program, filled, chosen, seed, inputs.dropped)


def require_device(
    function: FunctionOptions, backend: str | None, index: int | None = None
) -> None:
    """Raise BackendError for a missing backend or device before tracing.

    This starts backends, whose options the module of TARGET may set, so it is imported first.
    """
    from jaxprtool.execute.running import backends

    if backend is not None or index is not None:
        function.import_module()
        backends.device(backend, index or 0)


@contextlib.contextmanager
def printed_by_functions(json: bool) -> Iterator[None]:
    """Leave a running function's output on stdout, or with `json` redirect it to stderr."""
    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        yield


def file_to_save(path: str | None) -> contextlib.AbstractContextManager[BinaryIO | None]:
    """Open the file of `--save`, created only on success; None without it."""
    return output.written_file(path) if path else contextlib.nullcontext()


def save_arrays(arrays: Mapping[str, object], file: BinaryIO) -> None:
    """Write arrays by name, for `--save`."""
    from jaxprtool.execute.running.arrays import plain_array
    from jaxprtool.ir.array_files import write_npz

    write_npz(file, {name: plain_array(array) for name, array in arrays.items()})


def results_file(
    path: str | None, is_first: bool
) -> contextlib.AbstractContextManager[BinaryIO | None]:
    """Open the file of `run --save` in the first process of a cluster.

    Return None in the other processes, and for a path that may become a folder. Raises OutputError
    if the path cannot be written.
    """
    if path is None or path.endswith(".npz") or is_stream(path):
        return file_to_save(path if is_first else None)
    from jaxprtool.ir.array_files import check_folder

    check_folder(path)
    return contextlib.nullcontext()


def save_results(
    arrays: Mapping[str, object], path: str, file: BinaryIO | None, is_first: bool
) -> None:
    """Write results by name to a path, or to the `file` that is open at it.

    A path without an open file becomes a folder if a result is sharded over devices, and a file
    otherwise. Each process of a cluster writes its shards to a folder; the first writes a file.
    """
    from jaxprtool.execute.running.arrays import plain_array
    from jaxprtool.ir.array_files import is_spread, write_checkpoint

    is_file = path.endswith(".npz") or is_stream(path)
    if not is_file and any(map(is_spread, arrays.values())):
        write_checkpoint(path, arrays)
        if is_first:
            output.say(f"wrote {path}")
        return
    whole = {name: plain_array(array) for name, array in arrays.items()}  # from all processes
    if is_first:
        with contextlib.nullcontext(file) if file else output.written_file(path) as opened:
            save_arrays(whole, opened)


def note_random(filled: FilledArguments, seed: int, dropped: Sequence[str] = ()) -> None:
    """Print which arguments have random values, and which of them replace given ones."""
    if filled.random:
        names, within = output.names_text(filled.random), filled.domains_text()
        output.note(f"{names} filled with random values (--seed {seed}){within}")
    if dropped:
        noun, do = ("values", "do") if len(dropped) > 1 else ("value", "does")
        output.note(
            f"the {noun} given for {output.names_text(dropped)} {do} not fit after the passes"
        )


# --- partitioned ----------------------------------------------------------------------------------
# How XLA partitions a program over devices, for `shardings` and for `--compiled`.
