"""The memory of a program at its peak: estimated, and as XLA assigned it."""

from jaxprtool.cli.registry import CommandInfo

INFO = CommandInfo(
    panel="Measure",
    position=2,
    summary="Estimate the peak memory, and list what is live at the peak.",
    run="jaxprtool.cli.memory:memory_command",
    tables={
        "CompiledPeak": "jaxprtool.render.reports.memory:compiled_table",
        "Memory": "jaxprtool.render.reports.memory:memory_table",
    },
)
