"""What a user is told of a match: to decide whether to replace it, or just to look at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxprtool.ir.equations import type_of
from jaxprtool.jaxcompat import JaxprEqn


@dataclass(frozen=True, eq=False)
class Match:
    """One place in a program where a pattern was found.

    `types` has the type of each argument of the pattern, by its name (`q`, `params['w']`): with
    `.shape`, `.dtype`, `.ndim`. `values` has those arguments that are constants: a NumPy scalar,
    also for an array that is one number throughout, or an array. `sizes` are those that the
    pattern names. `equations` are the program's that are to go, and `source` is the line of the
    user's code, `file.py:12`, that made the last of them (None if unknown).
    """

    rewrite: str
    types: dict[str, Any]
    values: dict[str, Any]
    sizes: dict[str, Any]
    equations: tuple[JaxprEqn, ...]
    source: str | None

    def __str__(self) -> str:
        """`attention(q: f32[8,64], k: f32[8,64]) at model.py:12`."""
        shown = ", ".join(
            f"{name}={self.values[name]}"
            if getattr(self.values.get(name), "shape", None) == ()
            else f"{name}: {type_of(aval)}"
            for name, aval in self.types.items()
        )
        return f"{self.rewrite}({shown})" + (f" at {self.source}" if self.source else "")
