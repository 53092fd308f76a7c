"""Where programs go with `-o`: one into a file, several into a folder, one to a file each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from jaxprtool.cli import output
from jaxprtool.errors import OutputError

if TYPE_CHECKING:
    from jaxprtool.ir.program import Program

STDOUT = "-"


def write_jaxprs(
    programs: Sequence[tuple[str, Program]], out: str, callbacks: str = "refuse"
) -> None:
    """Write programs as `.jaxpr` files where `-o` says, all or none; - is stdout."""
    from jaxprtool.formats.jaxpr import write

    new = not os.path.exists(out)
    found = places(programs, out, ".jaxpr")
    if [path for _, path in found] == [STDOUT]:
        output.write(write.text(found[0][0], callbacks))
        return
    try:
        write.write_all(found, callbacks)
    except BaseException:
        if new:
            with suppress(OSError):  # no folder was made for a single file
                os.rmdir(out)
        raise


def require_writable(programs: Sequence[tuple[str, Program]], callbacks: str) -> None:
    """Raise UnsupportedError if one of the programs cannot be written to a `.jaxpr` file."""
    from jaxprtool.formats.jaxpr import write

    for _, program in programs:
        write.require_writable(program, callbacks)


def places(
    programs: Sequence[tuple[str, Program]], out: str, suffix: str
) -> list[tuple[Program, str]]:
    """Each program with the path it goes to; a folder that `out` names is made.

    `suffix` is that of files in a folder, `.jaxpr`. Raises OutputError for several programs that
    are to go to one file, and for a folder that cannot be made.
    """
    if not out:
        raise OutputError("the path to write to is empty")
    if not (out.endswith(os.sep) or os.path.isdir(out)):
        if len(programs) == 1:
            return [(programs[0][1], out)]
        names = ", ".join(name for name, _ in programs) or "none"
        raise OutputError(
            f"'{out}' takes one program, and the passes gave {names}",
            f"write a folder, with one file for each: -o {os.path.splitext(out)[0]}/"
            if out != STDOUT
            else "write a folder, with one file for each: -o DIR/",
        )
    try:
        os.makedirs(out, exist_ok=True)
    except OSError as fault:
        raise OutputError(f"cannot make the folder '{out}': {fault.strerror}") from fault
    return [(program, os.path.join(out, name + suffix)) for name, program in programs]
