"""What JAX compiles in a script or a block, and why it compiles again."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Run and debug",
    position=1,
    summary="Run a script; record what JAX compiles, and why it recompiles.",
    run="jaxprtool.commands.record.command:record_command",
    documents=("jaxprtool.recording.recorded_run:Run",),
    tables=(
        (
            "jaxprtool.recording.recorded_run:Run",
            "jaxprtool.commands.record.table:run_summary",
        ),
    ),
)
