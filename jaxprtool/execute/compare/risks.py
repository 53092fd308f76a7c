"""Equations whose results may differ from run to run, or from machine to machine.

The program is inspected, not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.ir.core.equations import bodies, is_inexact
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.source.frames import Frames, frames_now
from jaxprtool.jaxcompat import Jaxpr, JaxprEqn

_CALLBACK = "calls Python, which may return different values in each run"
_GPU_ORDER = "not deterministic on GPU: threads add in any order where indices are not unique"
_GPU_LAST = "on GPU, any of the updates with the same index may be the last"
_WINDOW = "not deterministic on GPU: windows that overlap are added in any order"
_GENERATOR = "its bits come from the backend's own generator, which differs on CPU, GPU and TPU"
_COLLECTIVE = "sums over devices: another number or order of devices rounds differently"
_UNSTABLE = "the order of equal keys is not defined: is_stable is False"


@dataclass(frozen=True)
class Risk:
    """Equations of one primitive whose results may differ, and why.

    Attributes:
        primitive: The primitive.
        why: Why its results may differ.
        count: The number of such equations.
        lines: The user's lines of these equations, without repeats.
    """

    primitive: str
    why: str
    count: int
    lines: tuple[str, ...]


def risks(program: Program) -> tuple[Risk, ...]:
    """Return the equations of a program, at any depth, that may not be deterministic.

    Kernels of Pallas are not searched.
    """
    frames, found = frames_now(program.roots), dict[tuple[str, str], list[str]]()
    _search(jaxcompat.open_jaxpr(program.jaxpr), (), frames, found)
    return tuple(
        Risk(primitive, why, len(lines), tuple(dict.fromkeys(filter(None, lines))))
        for (primitive, why), lines in found.items()
    )


def _search(
    jaxpr: Jaxpr,
    around: tuple[JaxprEqn, ...],
    frames: Frames,
    found: dict[tuple[str, str], list[str]],
) -> None:
    for eqn in jaxpr.eqns:
        name = str(eqn.primitive.name)
        if why := _why(eqn, name):
            found.setdefault((name, why), []).append(frames.line_of((*around, eqn)))
        if name != "pallas_call":
            for _, body in bodies(eqn):
                _search(body, (*around, eqn), frames, found)


def _why(eqn: JaxprEqn, name: str) -> str:
    """Return why the results of an equation may differ, or ""."""
    held = traits(eqn)
    if held.callback:
        # Prints have no results.
        return _CALLBACK if eqn.outvars else ""
    rule = _RULES.get(name)
    if rule is not None:
        return rule(eqn)
    return _COLLECTIVE if held.collective and _sums(eqn, name) else ""


def _adds_in_any_order(eqn: JaxprEqn) -> str:
    if eqn.params["unique_indices"] or not is_inexact(eqn.outvars[0]):
        return ""
    return "" if _is_one_update(eqn) else _GPU_ORDER


def _writes_in_any_order(eqn: JaxprEqn) -> str:
    return "" if eqn.params["unique_indices"] or _is_one_update(eqn) else _GPU_LAST


def _is_one_update(eqn: JaxprEqn) -> bool:
    """Return True if a scatter has a single index vector, so that no two can be equal."""
    shape = eqn.invars[1].aval.shape[:-1]
    return all(isinstance(size, int) for size in shape) and int(np.prod(shape, dtype=int)) <= 1


def _sorts_unstably(eqn: JaxprEqn) -> str:
    moves_more = len(eqn.invars) > eqn.params["num_keys"]
    return _UNSTABLE if moves_more and not eqn.params["is_stable"] else ""


def _generates(eqn: JaxprEqn) -> str:
    # The key's implementation decides: bits of threefry are the same everywhere.
    text = str(eqn.invars[0].aval)
    return _GENERATOR if "rbg" in text else ""


def _sums(eqn: JaxprEqn, name: str) -> bool:
    """Return True for a collective that adds floats."""
    adds = "psum" in name or "reduce_scatter" in name
    return adds and any(map(is_inexact, eqn.outvars))


#: Why results may differ, by primitive; "" if they may not.
_RULES: Mapping[str, Callable[[JaxprEqn], str]] = {
    "scatter-add": _adds_in_any_order,
    "scatter-mul": _adds_in_any_order,
    "scatter": _writes_in_any_order,
    "select_and_scatter_add": lambda eqn: _WINDOW if is_inexact(eqn.outvars[0]) else "",
    "sort": _sorts_unstably,
    "random_bits": _generates,
    "rng_bit_generator": lambda eqn: _GENERATOR,
    "rng_uniform": lambda eqn: _GENERATOR,
}
