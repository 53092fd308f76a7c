"""The measured time of a program by the user's lines, from JAX's profiler."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Measure",
    position=4,
    summary="Time a compiled function by your lines, with JAX's profiler.",
    run="jaxprtool.commands.profile.command:profile_command",
    documents=(
        "jaxprtool.commands.profile.lines:Profile",
        "jaxprtool.commands.cost.table:CostDocument",
    ),
    tables=(
        (
            "jaxprtool.commands.profile.lines:Profile",
            "jaxprtool.commands.profile.table:profile_table",
        ),
    ),
)
