"""External programs that some tests need: Chromium, Graphviz, git.

Tests that need a missing one are skipped, unless JAXPRTOOL_PROGRAMS=required, as in CI.
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
    """Return the mark that skips a test if one of the programs is missing."""
    reason = missing(*programs)
    return pytest.mark.skipif(reason is not None, reason=str(reason))
