"""A function mapped over an axis."""

from jaxprtool.cli.registry import CommandInfo

INFO = CommandInfo(
    panel="Rewrite and export",
    position=4,
    summary="Map a function over an axis, as jax.vmap does.",
    run="jaxprtool.cli.vmap:vmap_command",
)
