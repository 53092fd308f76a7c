"""The lines of a program that have to stay in a wide dtype."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Run and debug",
    position=6,
    summary="Find the lines that have to stay in f32.",
    run="jaxprtool.commands.precision.command:precision_command",
    documents=("jaxprtool.commands.compare.variants:Precision",),
    tables=(
        (
            "jaxprtool.commands.compare.variants:Precision",
            "jaxprtool.commands.precision.command:precision_text",
        ),
    ),
)
