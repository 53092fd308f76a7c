"""Code that repeats, and what shortens compilation."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Measure",
    position=6,
    summary="Show code that repeats, and what shortens compilation.",
    run="jaxprtool.commands.outline.command:outline_command",
    documents=("jaxprtool.commands.outline.table:OutlineDocument",),
)
