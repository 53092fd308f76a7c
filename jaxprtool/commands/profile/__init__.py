"""The measured time of a program by the user's lines, from JAX's profiler."""

from jaxprtool.cli.registry import CommandInfo

INFO = CommandInfo(
    panel="Measure",
    position=4,
    summary="Time a compiled function by your lines, with JAX's profiler.",
    run="jaxprtool.commands.profile.command:profile_command",
    tables={
        "Profile": "jaxprtool.commands.profile.table:profile_table",
    },
)
