"""The differences between runs of one program."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Run and debug",
    position=7,
    summary="Run a function in several ways, and compare results bitwise.",
    run="jaxprtool.commands.determinism.command:determinism_command",
    documents=("jaxprtool.commands.compare.divergence:Determinism",),
    tables=(
        (
            "jaxprtool.commands.compare.divergence:Determinism",
            "jaxprtool.commands.determinism.table:determinism_table",
        ),
    ),
)
