"""A server of commands, over JSON lines and over the Model Context Protocol."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Reference",
    position=3,
    summary="Answer commands from a warm process, for editors and agents.",
    run="jaxprtool.commands.serve.command:serve_command",
)
