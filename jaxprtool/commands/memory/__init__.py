"""The memory of a program at its peak: estimated, and as XLA assigned it."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Measure",
    position=2,
    summary="Estimate the peak memory, and list what is live at the peak.",
    run="jaxprtool.commands.memory.command:memory_command",
    rules={"memory": "jaxprtool.commands.memory.walk:workspace_rules"},
    documents=(
        "jaxprtool.commands.memory.table:MemoryDocument",
        "jaxprtool.commands.memory.table:ModuleMemoryDocument",
    ),
    tables=(
        (
            "jaxprtool.commands.memory.compiled:CompiledPeak",
            "jaxprtool.commands.memory.table:compiled_table",
        ),
        (
            "jaxprtool.commands.memory.estimate:Memory",
            "jaxprtool.commands.memory.table:memory_table",
        ),
    ),
)
