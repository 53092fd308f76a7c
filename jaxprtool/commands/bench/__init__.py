"""Measured times of variants of a program, with confidence intervals."""

from jaxprtool.cli.registry import CommandInfo

INFO = CommandInfo(
    panel="Measure",
    position=5,
    summary="Time variants in turns, with confidence intervals of ratios.",
    run="jaxprtool.commands.bench.command:bench_command",
    tables={
        "Bench": "jaxprtool.commands.bench.table:bench_table",
    },
)
