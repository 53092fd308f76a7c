"""Limit how many programs a block compiles; failures have the reasons of `jaxprtool.record`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from jaxprtool.api.investigate.budgets import amount_of, compile_measure
from jaxprtool.api.record import Recording, recorded_compilations
from jaxprtool.testing.messages import over_budget
from jaxprtool.testing.programs import without_frames

#: pytest leaves the frames of this module out of tracebacks.
__tracebackhide__ = True


@dataclass(frozen=True, repr=False)
class CompileLimit:
    """A `with` block that may compile a limited number of programs.

    Attributes:
        recording: The recording, which began with the test.
        at_most: The maximum number of programs.
        before: The number of programs that the test had compiled before the block.
    """

    recording: Recording
    at_most: float
    before: int

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            found = compile_measure(self.recording.compilations[self.before :])
            if found.amount > self.at_most:
                raise AssertionError(over_budget("the block", found, self.at_most))


@dataclass(frozen=True, repr=False)
class CompileCounter:
    """The fixture `jax_compiles`, which records from the start of a test.

    A reason compares a compilation with all earlier ones of the test.

    Attributes:
        recording: The recording.
    """

    recording: Recording

    @without_frames
    def __call__(self, *, at_most: int) -> CompileLimit:
        """Return a context manager that limits the number of programs that a block compiles.

        If the block compiles more, an AssertionError with the reasons is raised at its end.

        Args:
            at_most: The maximum number of programs. Single operations outside of `jit` do not
                count, nor do programs that JAX has compiled before.

        Raises:
            ArgumentsError: If `at_most` is not a number.
        """
        return CompileLimit(
            self.recording, amount_of("compiles", at_most), len(self.recording.compilations)
        )


@contextmanager
def counting_compiles() -> Iterator[CompileCounter]:
    """Record what JAX compiles in a `with` block."""
    with tempfile.TemporaryDirectory() as folder, recorded_compilations(folder) as recording:
        yield CompileCounter(recording)
