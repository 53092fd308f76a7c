"""Running programs, JAX's own test programs, and the JAX release."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from jaxprtool.errors import described
from jaxprtool.jaxcompat.aliases import AnyJaxpr

#: JAX releases that the test suite runs on, newest last; others cause a warning.
TESTED_VERSIONS = ((0, 10), (0, 11), (0, 12))


def compiles_draws_slowly() -> bool:
    """Return True if XLA for the CPU takes long to compile each draw of random bits.

    Measured: 0.02 s with JAX 0.10.2, 0.2 s with JAX 0.12.
    """
    return jax.__version_info__ >= (0, 12)


def fuses_sines_and_pads() -> bool:
    """Return True if XLA's kernels for the CPU fuse `sin` and `pad` with a reduction."""
    return jax.__version_info__ >= (0, 12)


def keeps_bfloat16() -> bool:
    """Return True if XLA for the CPU multiplies matrices of bf16 to a result in bf16."""
    return jax.__version_info__ >= (0, 12)


def lgamma_reads_tables() -> bool:
    """Return True if JAX lowers `lgamma` to polynomials whose coefficients it looks up."""
    return jax.__version_info__ >= (0, 12)


def untested_version() -> str | None:
    """Return the running JAX's version if the test suite does not cover its release, else None."""
    return None if jax.__version_info__[:2] in TESTED_VERSIONS else jax.__version__


def primitive_test_programs() -> Iterator[Any]:
    """Yield JAX's own primitive test harnesses, thousands of them; needs absl-py."""
    from jax._src.internal_test_util import test_harnesses

    yield from test_harnesses.all_harnesses


def keep_backend_probing_quiet() -> None:
    """Keep JAX from logging the accelerators that it searches and does not find."""
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.CRITICAL)


@contextmanager
def failures_to_start() -> Iterator[dict[str, str]]:
    """Yield the reason, by name, of each backend and plug-in that JAX fails to start in the block.

    JAX logs most failures and goes on. It starts backends once per process.
    """
    logger = logging.getLogger("jax._src.xla_bridge")
    handler = _FailuresToStart()
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield handler.reasons
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates


class _FailuresToStart(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.reasons: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if failed := failure_to_start(str(record.msg)):
            self.reasons[failed[0]] = failed[1]
        elif error is not None and record.args and "initialize()" in str(record.msg):
            (module,) = record.args
            self.reasons[str(module)] = described(error)


def failure_to_start(message: str) -> tuple[str, str] | None:
    """Return the backend that a message of JAX says it cannot start, and the reason, if any."""
    found = re.match(r"Unable to initialize backend '([^']*)': (.*)", message)
    if found is None:
        return None
    reason = re.sub(r" \((set|you may need to) .*$", "", found[2])
    return found[1], reason


def has_backends() -> bool:
    """Return True if this process has started a backend, with threads of its own."""
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


class _Failures(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.errors.append(record.exc_info[1])


@contextmanager
def callback_failures() -> Iterator[list[BaseException]]:
    """Collect the exceptions that a program's Python callbacks raise while it runs.

    XLA forwards only their text; JAX logs each with its traceback before that, and this reads the
    log instead of printing it.
    """
    handler = _Failures()
    loggers = [logging.getLogger(f"jax._src.{name}") for name in ("callback", "debugging")]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield handler.errors
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagate


def default_tolerance(dtype: Any) -> float:
    """Return the error, absolute and relative, that JAX's tests tolerate by default for a dtype."""
    from jax._src.public_test_util import default_tolerance as tolerances

    return float(tolerances().get(np.dtype(dtype), 0))


def has_checks(jaxpr: AnyJaxpr) -> bool:
    """Return True if a jaxpr holds `checkify.check`s that have not been functionalized."""
    return any(type(effect).__name__ == "ErrorEffect" for effect in jaxpr.effects)
