"""What is measured of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """A function of arrays and its arguments; the same by hand as a scan, where there is one."""

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    scan_args: tuple[Any, ...] | None = None
    """With these arguments, the parameters of the layers stacked, `fun` scans over the layers."""
