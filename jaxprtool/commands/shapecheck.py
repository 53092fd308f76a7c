"""Claims about the types of results, checked for all sizes."""

from jaxprtool.cli.registry import CommandInfo

INFO = CommandInfo(
    panel="Rewrite and export",
    position=5,
    summary="Check the types of results for all sizes of the arguments.",
    run="jaxprtool.cli.shapecheck:shapecheck_command",
)
