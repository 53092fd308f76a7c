"""The residuals of a gradient, and what to save instead."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Measure",
    position=3,
    summary="Show the values that a gradient keeps for its backward pass.",
    run="jaxprtool.commands.residuals.command:residuals_command",
    documents=("jaxprtool.commands.residuals.residuals:Residuals",),
    tables=(
        (
            "jaxprtool.commands.residuals.residuals:Residuals",
            "jaxprtool.commands.residuals.table:residuals_table",
        ),
    ),
)
