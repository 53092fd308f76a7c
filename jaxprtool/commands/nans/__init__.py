"""The origins of NaNs and infinities."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Run and debug",
    position=3,
    summary="Find the equation that produces the first NaN or infinity.",
    run="jaxprtool.commands.nans.command:nans_command",
    documents=("jaxprtool.commands.nans.command:NansDocument",),
    tables=(
        (
            "jaxprtool.commands.nans.nans:NanSearch",
            "jaxprtool.commands.nans.command:first_found",
        ),
    ),
)
