"""The origins of NaNs and infinities."""

from jaxprtool.cli.registry import CommandInfo

INFO = CommandInfo(
    panel="Run and debug",
    position=3,
    summary="Find the equation that produces the first NaN or infinity.",
    run="jaxprtool.cli.nans:nans_command",
    tables={
        "NanSearch": "jaxprtool.render.reports.nans:first_found",
    },
)
