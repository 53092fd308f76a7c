"""Statistics of the values that a program computes."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Run and debug",
    position=4,
    summary="Run a function and summarize its intermediate values.",
    run="jaxprtool.commands.watch.command:watch_command",
    documents=("jaxprtool.commands.watch.watch:Watched",),
    tables=(
        (
            "jaxprtool.commands.watch.watch:Watched",
            "jaxprtool.commands.watch.command:watched_text",
        ),
    ),
)
