"""The differences between the results of variants of a program."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Run and debug",
    position=5,
    summary="Measure how the results of variants of a function differ.",
    run="jaxprtool.commands.compare.command:compare_command",
    documents=("jaxprtool.commands.compare.divergence:Comparison",),
    tables=(
        (
            "jaxprtool.commands.compare.divergence:Comparison",
            "jaxprtool.commands.compare.table:comparison_tables",
        ),
    ),
)
