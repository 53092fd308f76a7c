"""A program in JAX's own notation, as a tree or a table, or its summary."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Look",
    position=1,
    summary="Show a function's jaxpr in JAX's own notation.",
    run="jaxprtool.commands.show.command:show_command",
    documents=(
        "jaxprtool.commands.show.command:ShowDocument",
        "jaxprtool.commands.show.command:StatsDocument",
        "jaxprtool.recording.recorded_run:Run",
    ),
    tables=(
        (
            "jaxprtool.analysis.stats:Stats",
            "jaxprtool.commands.show.table:stats_tables",
        ),
    ),
)
