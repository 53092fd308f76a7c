"""The parts of a model that are measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """A function of arrays and its arguments, and the same as a scan by hand if there is one."""

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    scan_args: tuple[Any, ...] | None = None
    """With these arguments, the parameters of the layers stacked, `fun` scans over the layers."""
