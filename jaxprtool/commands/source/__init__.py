"""The user's source lines with their cost, the bytes they keep, and their time."""

from jaxprtool.cli.registry import CommandInfo

INFO = CommandInfo(
    panel="Look",
    position=3,
    summary="Show each source line with its FLOPs, bytes and residuals.",
    run="jaxprtool.cli.source:source_command",
    tables={
        "Source": "jaxprtool.render.reports.source:source_text",
    },
)
