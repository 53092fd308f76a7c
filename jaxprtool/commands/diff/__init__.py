"""The differences between two programs, by line."""

from jaxprtool.cli.registry import CommandInfo

INFO = CommandInfo(
    panel="Look",
    position=4,
    summary="Show by line which equations differ between two programs.",
    run="jaxprtool.cli.diff:diff_command",
    tables={
        "Diff": "jaxprtool.render.reports.diff:diff_text",
    },
)
