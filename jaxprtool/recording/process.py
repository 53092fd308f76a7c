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

from jaxprtool.recording.recorder import Recorder
from jaxprtool.recording.settings import VARIABLE, Settings


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
    """Return the exception by which this process ends: Python printed it, and nobody caught it.

    `sys.last_value` may be another one: pytest and IPython store there what they have caught.
    """
    error: BaseException | None = getattr(sys, "last_value", None)
    trace = error.__traceback__ if error is not None else None
    return error if trace is not None and trace.tb_frame.f_back is None else None
