"""The user's editor, opened at a line of a file."""

from __future__ import annotations

import os
import shlex
import subprocess

from jaxprtool.errors import OutputError

#: The line options of editors that do not accept `+LINE FILE`.
_PLACES = {
    "code": ("-g", "{file}:{line}"),
    "codium": ("-g", "{file}:{line}"),
    "cursor": ("-g", "{file}:{line}"),
    "subl": ("{file}:{line}",),
    "zed": ("{file}:{line}",),
    "hx": ("{file}:{line}",),
    "helix": ("{file}:{line}",),
    "pycharm": ("--line", "{line}", "{file}"),
}


def command(file: str, line: int) -> list[str]:
    """Return the command that opens a file at a line in $VISUAL or $EDITOR, or vi."""
    chosen = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    try:
        editor = shlex.split(chosen)
    except ValueError:
        editor = []
    if not editor:
        raise OutputError(f"the editor '{chosen}' is not a command", "set EDITOR to a command")
    place = _PLACES.get(os.path.basename(editor[0]), ("+{line}", "{file}"))
    return [*editor, *(part.format(file=file, line=line) for part in place)]


def edit(file: str, line: int) -> None:
    """Run the editor until the user quits it. Raises OutputError if it cannot be started."""
    given = command(file, line)
    try:
        code = subprocess.run(given).returncode
    except OSError as error:
        raise OutputError(
            f"cannot start the editor '{given[0]}': {error.strerror}", "set EDITOR to a command"
        ) from error
    if code:
        raise OutputError(f"the editor '{given[0]}' exited with code {code}")
