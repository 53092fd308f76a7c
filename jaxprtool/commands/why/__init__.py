"""What a value affects and depends on, and why a gradient is zero."""

from jaxprtool.cli.registry import CommandInfo

INFO = CommandInfo(
    panel="Look",
    position=5,
    summary="Show what a value affects, and why a gradient is zero.",
    run="jaxprtool.commands.why.command:why_command",
    tables={
        "GradientAnswer": "jaxprtool.commands.why.table:gradient_text",
        "Path": "jaxprtool.commands.why.table:path_text",
        "Why": "jaxprtool.commands.why.table:slices_by_line",
    },
)
