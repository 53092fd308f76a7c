"""The differences between runs of one program."""

from jaxprtool.cli.registry import CommandInfo

INFO = CommandInfo(
    panel="Run and debug",
    position=7,
    summary="Run a function in several ways, and compare results bitwise.",
    run="jaxprtool.cli.determinism:determinism_command",
    tables={
        "Determinism": "jaxprtool.render.reports.determinism:determinism_table",
    },
)
