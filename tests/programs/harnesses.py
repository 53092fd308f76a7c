"""JAX's own primitive test programs, thousands of them, as cases.

They are defined with 64-bit types disabled, as in the test suite. The few programs whose nominal
dtype is float64 or complex128 are kept, and JAX narrows their arguments. Programs that JAX marks as
not implemented on the CPU are left out; `skipped_harnesses` counts them by JAX's reason. No program
is left out because it raised an error.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import cache
from typing import Any

import numpy as np

from jaxprtool.jaxcompat import primitive_test_programs
from tests.programs.case import Case
from tests.share import share


def harness_programs(every: int = 10) -> list[Case]:
    """Return each `every`-th program of each group in order of name, at least one of every group.

    `every=1` returns all of them. The choice is the same in every process. The first call in a
    process imports JAX's harnesses, which is slow: call it in tests, not at import time.
    """
    chosen = (each[::every] for each in harnesses_by_group().values())
    return [_case(harness) for harnesses in chosen for harness in harnesses]


def harness_share() -> list[Case]:
    """Return this release's half of `harness_programs()`, with at least one of every group."""
    groups = harnesses_by_group().values()
    chosen = (share(each[::10]) or each[:1] for each in groups)
    return [_case(harness) for harnesses in chosen for harness in harnesses]


def skipped_harnesses() -> Counter[str]:
    """Count the programs that are left out, by JAX's reason."""
    reasons: Counter[str] = Counter()
    for harness in _harnesses():
        if not harness.filter("cpu"):
            reasons[_reason(harness)] += 1
    return reasons


@cache
def _harnesses() -> list[Any]:
    # JAX defines some of them in the order of a set, which varies between processes.
    return sorted(primitive_test_programs(), key=lambda harness: harness.fullname)


@cache
def harnesses_by_group() -> dict[str, list[Any]]:
    groups = defaultdict(list)
    for harness in _harnesses():
        if harness.filter("cpu"):
            groups[harness.group_name].append(harness)
    return dict(sorted(groups.items()))


def _reason(harness: Any) -> str:
    limits = [
        limit
        for limit in harness.jax_unimplemented
        if limit.filter(device="cpu", dtype=harness.dtype)
    ]
    return f"{limits[0].description}: {harness.group_name} {np.dtype(harness.dtype).name}"


@cache
def _case(harness: Any) -> Case:
    args = harness.dyn_args_maker(np.random.RandomState(0))
    return Case(harness.fullname, harness.dyn_fun, tuple(args))
