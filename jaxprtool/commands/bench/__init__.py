"""Measured times of variants of a program, with confidence intervals."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="Measure",
    position=5,
    summary="Time variants in turns, with confidence intervals of ratios.",
    run="jaxprtool.commands.bench.command:bench_command",
    documents=("jaxprtool.commands.bench.bench:Bench",),
    tables=(
        (
            "jaxprtool.commands.bench.bench:Bench",
            "jaxprtool.commands.bench.command:bench_table",
        ),
    ),
)
