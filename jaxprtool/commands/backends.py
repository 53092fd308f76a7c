"""The backends and devices that JAX has here."""

from jaxprtool.cli.registry import CommandInfo

INFO = CommandInfo(
    panel="Several devices",
    position=2,
    summary="List the backends and devices, and those that do not start.",
    run="jaxprtool.cli.backends:backends_command",
)
