"""Implement `--profile`: run JAX's profiler during the first steps of a script.

A step is a call of the first function under `jax.jit` that is called three times; by then it is
compiled. A step lasts until the next call, so that it includes what the script does in between.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax

from jaxprtool.errors import UnsupportedError
from jaxprtool.execute.profile import MODULE, finish, live_modules, start, step
from jaxprtool.jaxcompat.compile_hooks import unobserved

#: The call of a function that begins the first step.
_FIRST = 3

#: The folder of the profile in that of a process.
FOLDER = "profile"


class ProfiledSteps:
    """Profiles the first steps of a process.

    Args:
        folder: The folder of the process.
        steps: The number of steps to profile.
        failed: Called with the error if nothing can be profiled.
    """

    def __init__(self, folder: str, steps: int, failed: Callable[[Exception], None]) -> None:
        self._folder, self._left, self._failed = os.path.join(folder, FOLDER), steps, failed
        self._counts: Counter[str] = Counter()
        self._function: str | None = None
        self._step: contextlib.AbstractContextManager[object] | None = None
        # Without this, programs from JAX's compilation cache may have lines of an earlier source.
        jax.config.update("jax_compilation_cache_include_metadata_in_key", True)

    def called(self, function: str) -> None:
        """Note that a function is about to be called."""
        if self._function is None:
            self._counts[function] += 1
            if self._counts[function] == _FIRST:
                self._start(function)
        elif function == self._function and self._step is not None:
            self._left -= 1
            if self._left:
                self._step.__exit__(None, None, None)
                self._begin()
            else:
                self.stop()

    def stop(self) -> None:
        """End the last step, and write the profile."""
        if self._step is None:
            return
        with unobserved():
            finish()
        self._step.__exit__(None, None, None)
        self._step = None
        jax.profiler.stop_trace()
        # The profiler lacks the modules that come from JAX's compilation cache.
        for number, data in enumerate(live_modules()):
            with open(os.path.join(self._folder, f"{number}{MODULE}"), "wb") as file:
                file.write(data)

    def _start(self, function: str) -> None:
        self._function = function
        with unobserved():
            finish()
        try:
            start(self._folder)
        except UnsupportedError as error:  # the script runs its own profiler
            self._failed(error)
        else:
            self._begin()

    def _begin(self) -> None:
        self._step = step()
        self._step.__enter__()


class ProfiledCalls:
    """Reports each call of a function to the steps.

    Args:
        call: Calls the function.
        name: The name of the function in the run.
        steps: The steps of the process.
    """

    def __init__(self, call: Callable[..., Any], name: str, steps: ProfiledSteps) -> None:
        self._call, self._name, self._steps = call, name, steps

    def __call__(self, jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._steps.called(self._name)
        return self._call(jitted, args, kwargs)
