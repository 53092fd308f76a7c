"""The entry point of the command line, minimal so that a later Ctrl-C is handled quietly."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default sys.argv, and return its exit code; see `cli.errors`."""
    try:
        from jaxprtool.cli.app import run_command_line
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return run_command_line(list(sys.argv[1:] if argv is None else argv))
