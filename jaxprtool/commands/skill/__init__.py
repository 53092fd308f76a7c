"""A page for coding assistants: which command answers which question, and how to read it."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Reference",
    position=4,
    summary="Print a page for coding agents: which command answers what.",
    run="jaxprtool.commands.skill.command:skill_command",
)
