"""The user's source lines with their cost, the bytes they keep, and their time."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Look",
    position=3,
    summary="Show each source line with its FLOPs, bytes and residuals.",
    run="jaxprtool.commands.source.command:source_command",
    documents=("jaxprtool.commands.source.table:SourceDocument",),
    tables=(
        (
            "jaxprtool.commands.source.lines:Source",
            "jaxprtool.commands.source.table:source_text",
        ),
    ),
)
