"""Measured times of variants of a program, with confidence intervals."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Measure",
    position=5,
    summary="Time variants in turns, with confidence intervals of ratios.",
    run="jaxprtool.commands.bench.command:bench_command",
    documents=("jaxprtool.commands.bench.turns:Bench",),
    tables=(
        (
            "jaxprtool.commands.bench.turns:Bench",
            "jaxprtool.commands.bench.table:bench_table",
        ),
    ),
)
