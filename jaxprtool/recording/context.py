"""Read the settings of JAX that a trace depends on, and the options of `jax.jit`, as text."""

from __future__ import annotations

from typing import Any

from jaxprtool.jaxcompat import TracedOptions
from jaxprtool.jaxcompat.compile_hooks import trace_settings

#: The maximum length of the text of a setting.
_LONGEST = 200


def context() -> dict[str, str]:
    """Return the current settings of JAX, such as `enable_x64` and `mesh`."""
    return {name: _text(value) for name, value in trace_settings().items()}


def jit_options(options: TracedOptions) -> dict[str, str]:
    """Return the options of `jax.jit` that are part of its cache key, without default values."""
    found: dict[str, Any] = {
        "in_shardings": _placements(options.in_placements),
        "out_shardings": _placements(options.out_placements),
        "compiler_options": dict(options.compiler_options),
        "keep_unused": options.keep_unused,
    }
    return {name: str(value)[:_LONGEST] for name, value in found.items() if value}


def _placements(placements: tuple[Any, ...]) -> str:
    if all(each is None for each in placements):
        return ""
    return ", ".join(_text(getattr(each, "spec", each)) for each in placements)


def _text(value: object) -> str:
    try:
        return value if isinstance(value, str) else repr(value)[:_LONGEST]
    except Exception:  # the context of a library may raise anything
        return type(value).__name__
