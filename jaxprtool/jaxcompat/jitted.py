"""Functions under `jax.jit`, and what they were told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax._src.pjit import PjitInfo
from jax._src.sharding_impls import UnspecifiedValue
from jax.experimental.layout import Format
from jax.extend.core import Var

from jaxprtool.jaxcompat.jaxprs import new_jaxpr

_JITTED = type(jax.jit(lambda: ()))


class TracedOptions(NamedTuple):
    """What `jax.jit` was told about a call: of each flat argument and result, and as a whole.

    A placement is a sharding, a `Format` (a layout and a sharding), or None.
    """

    donated: tuple[bool, ...]
    in_placements: tuple[Any, ...]
    out_placements: tuple[Any, ...]
    compiler_options: tuple[tuple[str, Any], ...]
    keep_unused: bool
    inline: Any


def is_jitted(fun: Any) -> bool:
    """Return True for what `jax.jit` returns."""
    return isinstance(fun, _JITTED)


def jit_static_arguments(jitted: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The static positions and names of a function under `jax.jit`."""
    info: PjitInfo = jitted._jit_info
    return info.static_argnums, info.static_argnames


def jit_arguments(jitted: Any) -> tuple[Any, dict[str, Any]]:
    """The function that `jax.jit` was given, and the keyword arguments that it was given."""
    info: PjitInfo = jitted._jit_info
    told: dict[str, Any] = {
        "static_argnums": info.static_argnums,
        "static_argnames": info.static_argnames,
        "donate_argnums": info.donate_argnums,
        "donate_argnames": info.donate_argnames,
        "keep_unused": info.keep_unused,
        "inline": info.inline,
    }
    for place in ("in", "out"):
        tree = getattr(info, f"{place}_shardings_treedef")
        pairs = zip(
            getattr(info, f"{place}_shardings_leaves"),
            getattr(info, f"{place}_layouts_leaves"),
            strict=True,
        )
        placements = [_placement(*pair) for pair in pairs]
        if any(placement is not None for placement in placements):
            told[f"{place}_shardings"] = jax.tree.unflatten(tree, placements)
    if info.compiler_options_kvs:
        told["compiler_options"] = dict(info.compiler_options_kvs)
    for name in ("device", "backend"):
        if getattr(info, name) is not None:
            told[name] = getattr(info, name)
    return jitted._fun, told


def traced_options(traced: jax.stages.Traced) -> TracedOptions:
    """What a traced function was told, of the arguments that it is called with."""
    params, captured = traced._params, len(traced._consts)
    ins = zip(params["in_shardings"], params["in_layouts"], strict=True)
    outs = zip(params["out_shardings"], params["out_layouts"], strict=True)
    return TracedOptions(
        donated=tuple(params["donated_invars"])[captured:],
        in_placements=tuple(_placement(*pair) for pair in ins)[captured:],
        out_placements=tuple(_placement(*pair) for pair in outs),
        compiler_options=tuple(params["compiler_options_kvs"]),
        keep_unused=params["keep_unused"],
        inline=params["inline"],
    )


def captured_values(traced: jax.stages.Traced) -> list[Any]:
    """The values that a traced function takes before its arguments, since it closes over them."""
    return list(traced._consts)


def with_constants(jaxpr: Any, places: Sequence[int], values: Sequence[Any]) -> Any:
    """A closed jaxpr whose arguments at `places` are constants."""
    if not places:
        return jaxpr
    chosen = set(places)
    bound: list[Var] = [jaxpr.invars[i] for i in places]
    rest = [v for i, v in enumerate(jaxpr.invars) if i not in chosen]
    return new_jaxpr(
        [*jaxpr.constvars, *bound],
        [*jaxpr.consts, *values],
        rest,
        jaxpr.outvars,
        jaxpr.eqns,
        jaxpr.debug_info._replace(arg_names=None),
    )


def _placement(sharding: Any, layout: Any) -> Any:
    known = None if isinstance(sharding, UnspecifiedValue) else sharding
    return known if layout is None else Format(layout, known)
