"""JAX's own primitive test programs, thousands of them, as cases.

They are taken as JAX defines them with 64-bit types off, which is how the suite runs: the few
whose nominal dtype is float64 or complex128 are among them on purpose, and JAX traces them with
their arguments narrowed. Programs that JAX says it has not implemented on the CPU are left out;
`skipped_harnesses` counts them by JAX's own reason. Nothing is left out because it raised.
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
    """Each `every`-th program of each group in order of name, so at least one of every group.

    `every=1` gives all of them. The choice is the same in every process. The first call in a
    process imports JAX's harnesses, which takes a moment: call it in tests, not at import time.
    """
    chosen = (each[::every] for each in _runnable_by_group().values())
    return [_case(harness) for harnesses in chosen for harness in harnesses]


def harness_share() -> list[Case]:
    """This release's half of `harness_programs()`, with at least one of every group."""
    groups = _runnable_by_group().values()
    chosen = (share(each[::10]) or each[:1] for each in groups)
    return [_case(harness) for harnesses in chosen for harness in harnesses]


def skipped_harnesses() -> Counter[str]:
    """How many programs are left out, by JAX's reason why the CPU does not run them."""
    reasons: Counter[str] = Counter()
    for harness in _harnesses():
        if not harness.filter("cpu"):
            reasons[_reason(harness)] += 1
    return reasons


@cache
def _harnesses() -> list[Any]:
    # JAX defines some of them in the order of a set, which differs from process to process.
    return sorted(primitive_test_programs(), key=lambda harness: harness.fullname)


@cache
def _runnable_by_group() -> dict[str, list[Any]]:
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
