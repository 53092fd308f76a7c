"""The memory of a program at its peak: estimated, and as XLA assigned it."""

from jaxprtool.cli.registry import CommandInfo

INFO = CommandInfo(
    panel="Measure",
    position=2,
    summary="Estimate the peak memory, and list what is live at the peak.",
    run="jaxprtool.commands.memory.command:memory_command",
    tables={
        "CompiledPeak": "jaxprtool.commands.memory.table:compiled_table",
        "Memory": "jaxprtool.commands.memory.table:memory_table",
    },
)
