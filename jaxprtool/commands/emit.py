"""Programs in other formats: Python, StableHLO, HLO, graphs and `jax.export`."""

from jaxprtool.cli.registry import CommandInfo

INFO = CommandInfo(
    panel="Rewrite and export",
    position=2,
    summary="Export to Python, StableHLO, HLO, a graph or jax.export.",
    run="jaxprtool.cli.emit:emit_command",
)
