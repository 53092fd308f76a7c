"""The entry `jit` in the header of a `.jaxpr` file: what `jax.jit` was told of the function.

    jit = {
        'donated': ("params['b']", "params['w']"),
        'in': {'x': NamedSharding(mesh=..., spec=P('data',))},
        'compiler_options': {'xla_cpu_enable_fast_math': True},
    }

Arguments and results go by their names. What nothing is asked of is left out, down to `jit = {}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental.layout import Format

from jaxprtool import jaxcompat
from jaxprtool.formats.jaxpr import values
from jaxprtool.ir.jit_options import JitOptions
from jaxprtool.ir.program import Program


def jit_entry(program: Program, options: JitOptions) -> dict[str, str]:
    """The parts of the entry and their spelling. Raises values.Unwritable."""
    arguments, results = (
        options.of_arguments(program.arguments),
        options.of_results(program.results),
    )
    parts = {
        "donated": tuple(a.name for a in arguments if a.donated),
        "in": {a.name: a.placement for a in arguments if a.placement is not None},
        "out": {r.name: r.placement for r in results if r.placement is not None},
        "compiler_options": dict(options.compiler_options),
        "keep_unused": options.keep_unused,
        "inline": jaxcompat.inline_as_word(options.inline),
    }
    return {name: values.encode((value,))[1:-2] for name, value in parts.items() if value}


def read_jit_entry(value: Any) -> dict[str, Any]:
    """The parts of an entry, checked. Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError("what jit was told is written {'donated': ('x',), ...}")
    for name, part in value.items():
        if name not in _PARTS:
            raise ValueError(f"jit is told nothing of '{name}'; it may be: {', '.join(_PARTS)}")
        if not _PARTS[name](part):
            raise ValueError(f"'{name}' of jit is not well formed")
    return {**value, "inline": jaxcompat.inline_of_word(value.get("inline", False))}


def options_of(program: Program, parts: Mapping[str, Any]) -> JitOptions:
    """The options that an entry tells of a program. Raises ValueError for a name it has not."""
    donated, placed, given = (parts.get(name, {}) for name in ("donated", "in", "out"))
    pairs = ((*donated, *placed), program.arg_names), (tuple(given), program.out_names)
    for told, known in pairs:
        for name in told:
            if name not in known:
                raise ValueError(f"jit is told of '{name}', which the program does not have")
    told = jaxcompat.TracedOptions(
        donated=tuple(name in donated for name in program.arg_names),
        in_placements=tuple(placed.get(name) for name in program.arg_names),
        out_placements=tuple(given.get(name) for name in program.out_names),
        compiler_options=tuple(parts.get("compiler_options", {}).items()),
        keep_unused=parts.get("keep_unused", False),
        inline=parts["inline"],
    )
    return JitOptions.from_traced(program.arguments, program.results, told)


def _are_placements(part: Any) -> bool:
    kinds = (jax.sharding.Sharding, Format)
    return _has_names(part) and all(isinstance(value, kinds) for value in part.values())


def _has_names(part: Any) -> bool:
    return isinstance(part, dict) and all(isinstance(name, str) for name in part)


_PARTS: dict[str, Callable[[Any], bool]] = {
    "donated": lambda part: isinstance(part, tuple) and all(isinstance(name, str) for name in part),
    "in": _are_placements,
    "out": _are_placements,
    "compiler_options": _has_names,
    "keep_unused": lambda part: isinstance(part, bool),
    "inline": lambda part: isinstance(part, bool | str),
}
