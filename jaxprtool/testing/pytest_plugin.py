"""The pytest plug-in: the fixtures `jaxpr_snapshot` and `jax_compiles`, and `--jaxpr-update`.

pytest loads it in every run, so it imports JAX only when a fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jaxprtool.testing.places import TestPlace, running

if TYPE_CHECKING:
    from jaxprtool.testing.assertions import CompileCounter


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--jaxpr-update`."""
    parser.getgroup("jaxprtool").addoption(
        "--jaxpr-update",
        action="store_true",
        help="Write the snapshots of programs that are new or have changed.",
    )


@pytest.hookimpl(hookwrapper=True)  # the form that pytest 7 knows too
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """State which test runs, so that assertions find its snapshots."""
    with running(_place(item)):
        yield


@pytest.fixture
def jaxpr_snapshot(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Compare a program with the one in a file beside the test; `--jaxpr-update` writes the file.

    Call it with a Program, or with a function and its arguments: `jaxpr_snapshot(loss, x)`. With
    `name="loss"` the file is `loss.jaxpr`, else it has the name of the test.
    """
    from jaxprtool.testing.assertions import Snapshots

    update = request.config.getoption("--jaxpr-update")
    return Snapshots(_place(request.node), update=update)


@pytest.fixture
def jax_compiles() -> Iterator[CompileCounter]:
    """Limit how many programs a block compiles, and fail with the reason of each compilation.

    `with jax_compiles(at_most=1): train()`. Operations outside of `jit` do not count.
    """
    from jaxprtool.testing.assertions import counting_compiles

    with counting_compiles() as counter:
        yield counter


def _place(item: Any) -> TestPlace:
    """Return the place of a test: its file, and its name with those of its classes."""
    return TestPlace(Path(item.path), ".".join(item.nodeid.split("::")[1:]))
