"""The command `jaxprtool bounds`, as `jaxprtool --help` lists it."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Look",
    summary="Bound the results of a function, from bounds of its arguments.",
    run="jaxprtool_intervals.command:bounds_command",
    documents=("jaxprtool_intervals.results:ProgramBounds",),
)
