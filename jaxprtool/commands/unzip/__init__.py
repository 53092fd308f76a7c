"""A function split into init and apply, by its variables."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Rewrite and export",
    position=3,
    summary="Split a function into init and apply, by its variables.",
    run="jaxprtool.commands.unzip.command:unzip_command",
    documents=("jaxprtool.commands.unzip.table:UnzipDocument",),
)
