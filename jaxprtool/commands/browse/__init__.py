"""A program on the full screen, beside its source."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Look",
    position=2,
    summary="Browse a jaxpr on the full screen, beside its source.",
    run="jaxprtool.commands.browse.command:browse_command",
)
