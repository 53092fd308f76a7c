"""Where the command line begins, so small that a Ctrl-C at any time after it is a quiet one."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, sys.argv's by default, and give its exit code; see `cli.errors`."""
    try:
        from jaxprtool.cli.app import answer
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return answer(list(sys.argv[1:] if argv is None else argv))
