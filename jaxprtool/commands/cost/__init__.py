"""The cost of a program: FLOPs and bytes, by line, scope and so on, and bounds of its time."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Measure",
    position=1,
    summary="Estimate FLOPs and memory traffic; --measure also times it.",
    run="jaxprtool.commands.cost.command:cost_command",
    rules={"cost": "jaxprtool.commands.cost.rules:cost_rules"},
    documents=("jaxprtool.commands.cost.table:CostDocument",),
    tables=(
        (
            "jaxprtool.commands.cost.estimate:Cost",
            "jaxprtool.commands.cost.table:cost_table",
        ),
    ),
)
