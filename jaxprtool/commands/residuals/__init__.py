"""The residuals of a gradient, and what to save instead."""

from jaxprtool.cli.registry import CommandInfo

INFO = CommandInfo(
    panel="Measure",
    position=3,
    summary="Show the values that a gradient keeps for its backward pass.",
    run="jaxprtool.commands.residuals.command:residuals_command",
    tables={
        "Residuals": "jaxprtool.commands.residuals.table:residuals_table",
    },
)
