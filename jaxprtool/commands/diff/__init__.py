"""The differences between two programs, by line."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Look",
    position=4,
    summary="Show by line which equations differ between two programs.",
    run="jaxprtool.commands.diff.command:diff_command",
    documents=(
        "jaxprtool.commands.diff.table:DiffDocument",
        "jaxprtool.commands.diff.modules:ModuleDiff",
    ),
    tables=(
        (
            "jaxprtool.commands.diff.modules:ModuleDiff",
            "jaxprtool.commands.diff.table:module_diff_table",
        ),
        (
            "jaxprtool.commands.diff.diff:Diff",
            "jaxprtool.commands.diff.table:diff_text",
        ),
    ),
)
