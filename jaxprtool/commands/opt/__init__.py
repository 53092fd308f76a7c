"""Passes on a program, from the command line."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Rewrite and export",
    position=1,
    summary="Run passes over a function's jaxpr and print the result.",
    run="jaxprtool.commands.opt.command:opt_command",
    documents=("jaxprtool.commands.opt.command:OptDocument",),
)
