"""A program to test a pass on: a function, its arguments, and the JAX configuration it needs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax

from jaxprtool.ir.program import Program
from jaxprtool.loading.trace import trace


@dataclass(frozen=True)
class Case:
    """A named function with concrete arguments. `x64` is True if it needs 64-bit types.

    Trace, rewrite and run it inside `with case.setting():`.
    """

    name: str
    fun: Callable[..., Any] = field(repr=False)
    args: tuple[Any, ...] = field(repr=False)
    kwargs: dict[str, Any] = field(repr=False, default_factory=dict)
    x64: bool = False

    def setting(self) -> AbstractContextManager[Any]:
        """Return the JAX configuration to trace and run the case in."""
        return jax.enable_x64(True) if self.x64 else nullcontext()

    def program(self) -> Program:
        """The traced function, cached for all tests of this program."""
        return self._program

    @cached_property
    def _program(self) -> Program:
        return self.trace()

    def trace(self) -> Program:
        """Trace the function anew."""
        with self.setting():
            return trace(self.fun, *self.args, **self.kwargs)

    def arguments(self) -> list[Any]:
        """Return the flat concrete arguments, in the program's order."""
        return jax.tree.leaves((self.args, self.kwargs))
