"""A server of commands, over JSON lines and over the Model Context Protocol."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Reference",
    position=3,
    summary="Answer command lines in a process that stays warm, for editors and assistants.",
    run="jaxprtool.commands.serve.command:serve_command",
)
