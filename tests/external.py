"""Programs that some tests need, and that not every machine has: Chromium, Graphviz, git.

What needs one that is missing is skipped, unless JAXPRTOOL_PROGRAMS=required, as CI has it.
"""

from __future__ import annotations

import os
import shutil

import pytest


def missing(*programs: str) -> str | None:
    """Return which of the programs are not on the PATH; None if all are, or are required."""
    lacking = [program for program in programs if shutil.which(program) is None]
    if not lacking or os.environ.get("JAXPRTOOL_PROGRAMS") == "required":
        return None
    return f"not on the PATH: {', '.join(lacking)}"


def needs(*programs: str) -> pytest.MarkDecorator:
    """Return the mark that skips a test where one of the programs is missing."""
    reason = missing(*programs)
    return pytest.mark.skipif(reason is not None, reason=str(reason))
