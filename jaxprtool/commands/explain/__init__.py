"""Descriptions of passes, pipelines and primitives."""

from jaxprtool.cli.registry import CommandInfo

INFO = CommandInfo(
    panel="Reference",
    position=1,
    summary="List the passes; describe a pass, a pipeline or a primitive.",
    run="jaxprtool.commands.explain.command:explain_command",
)
