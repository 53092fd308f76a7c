"""Start recording in a Python process, as soon as it has imported JAX.

`launch` starts the process with the folder `site` on PYTHONPATH, whose `sitecustomize` calls
`begin` after the import of JAX.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys

from jaxprtool.recording.folder import VARIABLE, Settings
from jaxprtool.recording.recorder import Recorder


def begin() -> None:
    """Record this process until its end."""
    settings = Settings(**json.loads(os.environ[VARIABLE]))
    recorder = Recorder(settings)
    stack = contextlib.ExitStack()
    stack.enter_context(recorder.recording(uncaught))
    atexit.register(stack.close)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=recorder.fork)


def uncaught() -> BaseException | None:
    """Return the uncaught exception that ends this process, or None.

    `sys.last_value` alone is not enough: pytest and IPython store caught exceptions there.
    """
    error: BaseException | None = getattr(sys, "last_value", None)
    trace = error.__traceback__ if error is not None else None
    return error if trace is not None and trace.tb_frame.f_back is None else None
