"""Measure the time of `lint` and count its findings, for large programs and gradients of models.

    python tests/benchmarks/bench_lint.py [--size N] [--rounds N]

Times are medians of CPU seconds without tracing, in total and by rule.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxprtool import lint, trace
from jaxprtool.analysis.stats import count_equations
from jaxprtool.commands.lint.lint import LintedProgram, all_rules
from tests.benchmarks.bench_cost import median
from tests.benchmarks.gradient_models import losses
from tests.benchmarks.models import synthetic, transformer_gradient


def programs(size: int) -> dict[str, Any]:
    """Return the programs, by name."""
    found = {f"synthetic, {size:,}": synthetic(size)}
    found["transformer, 48 layers, gradient"] = transformer_gradient()
    for name, (loss, args) in losses().items():
        found[name] = trace(jax.value_and_grad(loss), *args)
    return found


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    table, rules = Table("program", "equations", "s", "findings"), Table("rule", "s")
    for name, program in programs(asked.size).items():
        seconds = median(lambda p=program: lint(p), asked.rounds)
        codes = [f"{each.code} {each.line}" for each in lint(program)]
        table.add_row(name, f"{count_equations(program):,}", f"{seconds:.2f}", ", ".join(codes))
    linted = LintedProgram(transformer_gradient())
    for rule in all_rules():
        seconds = median(lambda r=rule: list(r.check(linted)), asked.rounds)
        rules.add_row(f"{rule.code} {rule.name}", f"{seconds:.3f}")
    Console().print(table, rules)


if __name__ == "__main__":
    main()
