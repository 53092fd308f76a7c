"""The smallest program for which a check still holds."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Run and debug",
    position=8,
    summary="Shrink a function while a check holds, to reproduce a fault.",
    run="jaxprtool.commands.reduce.command:reduce_command",
    documents=("jaxprtool.commands.reduce.reduction:Reduction",),
)
