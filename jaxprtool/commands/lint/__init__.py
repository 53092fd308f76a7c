"""What wastes time or memory in a program, and likely mistakes."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="In your repository",
    position=2,
    summary="Find wasted memory and time, and likely mistakes.",
    run="jaxprtool.commands.lint.command:lint_command",
    documents=("jaxprtool.commands.lint.lint:Findings",),
    tables=(
        (
            "jaxprtool.commands.lint.lint:Findings",
            "jaxprtool.commands.lint.table:findings_by_line",
        ),
    ),
)
