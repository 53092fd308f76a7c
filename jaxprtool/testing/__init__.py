"""Assertions for tests of JAX programs: their costs, their contents, and changes to them.

    from jaxprtool.testing import assert_budget
    assert_budget(loss, params, batch, flops="3 GFLOP", peak_bytes="16MiB")

The pytest plug-in (`pytest_plugin`) adds the fixtures `jaxpr_snapshot` and `jax_compiles`. Names
are imported when they are first used, so that collecting tests does not import JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxprtool.testing.assertions import (
        assert_budget,
        assert_donated,
        assert_equivalent,
        assert_no,
    )

__all__ = ["assert_budget", "assert_donated", "assert_equivalent", "assert_no"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'jaxprtool.testing' has no attribute {name!r}")
    return getattr(import_module("jaxprtool.testing.assertions"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
