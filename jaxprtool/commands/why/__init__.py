"""What a value affects and depends on, and why a gradient is zero."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Look",
    position=5,
    summary="Show what a value affects, and why a gradient is zero.",
    run="jaxprtool.commands.why.command:why_command",
    documents=(
        "jaxprtool.commands.why.slices:Why",
        "jaxprtool.commands.why.slices:Path",
        "jaxprtool.commands.why.gradients:GradientAnswer",
    ),
    tables=(
        (
            "jaxprtool.commands.why.gradients:GradientAnswer",
            "jaxprtool.commands.why.table:gradient_text",
        ),
        (
            "jaxprtool.commands.why.slices:Path",
            "jaxprtool.commands.why.table:path_text",
        ),
        (
            "jaxprtool.commands.why.slices:Why",
            "jaxprtool.commands.why.table:slices_by_line",
        ),
    ),
)
