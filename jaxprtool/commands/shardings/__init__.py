"""The partition of a program over devices, as XLA makes it."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Several devices",
    position=1,
    summary="Show how XLA partitions a function over devices, by line.",
    run="jaxprtool.commands.shardings.command:shardings_command",
    documents=("jaxprtool.commands.shardings.partitions:Shardings",),
    tables=(
        (
            "jaxprtool.commands.shardings.partitions:Shardings",
            "jaxprtool.commands.shardings.table:shardings_tables",
        ),
    ),
)
