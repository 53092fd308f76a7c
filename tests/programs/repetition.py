"""Variants of a body."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.programs.ops import Type
from tests.programs.plans import Block, Detail

_OTHERWISE: dict[str, dict[str, Any]] = {
    "scale": {"scale": 3.0},
    "swapped": {"swapped": True},
    "backwards": {"backwards": True},
    "weak": {"weak": True},
    "effect": {"effect": True},
}


def differing(block: Block, difference: str) -> Block:
    """Return a block that differs from another in one of `plans.DIFFERENCES`, or in nothing."""
    if difference == "shape":
        return _reshaped(block)
    changes = _OTHERWISE.get(difference)
    if changes is None:
        return block
    steps = (replace(step, **changes) if isinstance(step, Detail) else step for step in block.steps)
    return replace(block, steps=tuple(steps))


def _reshaped(block: Block) -> Block:
    """Return a block whose inputs and own steps have other shapes."""
    steps = (
        replace(step, type=_other(step.type)) if hasattr(step, "type") else step
        for step in block.steps
    )
    return replace(block, inputs=tuple(map(_other, block.inputs)), steps=tuple(steps))


def _other(t: Type) -> Type:
    return replace(t, shape=(4,) if t.shape == (3,) else (3,))
