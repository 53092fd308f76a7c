"""The origins of NaNs and infinities."""

from jaxprtool.cli.registry import CommandInfo

INFO = CommandInfo(
    panel="Run and debug",
    position=3,
    summary="Find the equation that produces the first NaN or infinity.",
    run="jaxprtool.commands.nans.command:nans_command",
    tables={
        "NanSearch": "jaxprtool.commands.nans.table:first_found",
    },
)
