"""A program to try a pass on: a function, arguments for it, and the setting it is traced in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax

from jaxprtool.ir.programs.program import Program
from jaxprtool.loading.trace import trace


@dataclass(frozen=True)
class Case:
    """A named function with concrete arguments; `x64` says that it needs 64-bit types.

    Trace, rewrite and run it inside `with case.setting():`.
    """

    name: str
    fun: Callable[..., Any] = field(repr=False)
    args: tuple[Any, ...] = field(repr=False)
    kwargs: dict[str, Any] = field(repr=False, default_factory=dict)
    x64: bool = False

    def setting(self) -> AbstractContextManager[Any]:
        """The JAX configuration that the case is traced and run in."""
        return jax.enable_x64(True) if self.x64 else nullcontext()

    def program(self) -> Program:
        """The traced function, traced once for all proofs that look at it."""
        return self._program

    @cached_property
    def _program(self) -> Program:
        return self.trace()

    def trace(self) -> Program:
        """The function, traced anew."""
        with self.setting():
            return trace(self.fun, *self.args, **self.kwargs)

    def arguments(self) -> list[Any]:
        """The flat concrete arguments, in the program's order."""
        return jax.tree.leaves((self.args, self.kwargs))
