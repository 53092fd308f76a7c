"""What a value affects and depends on, and why a gradient is zero."""

from jaxprtool.cli.registry import CommandInfo

INFO = CommandInfo(
    panel="Look",
    position=5,
    summary="Show what a value affects, and why a gradient is zero.",
    run="jaxprtool.cli.why:why_command",
    tables={
        "GradientAnswer": "jaxprtool.render.reports.why:gradient_text",
        "Path": "jaxprtool.render.reports.why:path_text",
        "Why": "jaxprtool.render.reports.why:slices_by_line",
    },
)
