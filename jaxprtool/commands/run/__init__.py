"""A run of a program, with its results and times."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Run and debug",
    position=2,
    summary="Compile a function, run it, and show its results and times.",
    run="jaxprtool.commands.run.command:run_command",
    documents=("jaxprtool.commands.run.table:RunDocument",),
)
