"""JAX's configuration does not change the emitted source."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.xla_metadata import set_xla_metadata

from jaxprtool.formats.python.emit import to_python
from jaxprtool.ir.equivalence import structural_difference
from jaxprtool.loading.trace import trace
from tests.formats.python.emitting import defined, traced_again

X = jnp.ones((3, 3))

SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "precision": lambda: jax.default_matmul_precision("highest"),
    "keys": lambda: jax.default_prng_impl("rbg"),
    "metadata": lambda: set_xla_metadata(color="red"),
    "dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
    "threefry": lambda: jax.threefry_partitionable(False),
    "no jit": jax.disable_jit,
}


def noisy(x):
    key = jax.random.key(3)
    step = jax.lax.scan(lambda c, a: (c @ x + a, a.sum()), x, x)[0]
    mixed = jnp.arange(3)[:, None].astype(x.dtype) * x
    return step @ x.T + jax.random.normal(key, (3, 3)), jax.nn.softmax(mixed), jnp.argmax(x)


@pytest.mark.parametrize("setting", SETTINGS)
def test_jax_config_changes_nothing(setting: str) -> None:
    program = trace(noisy, X)
    with SETTINGS[setting]():
        inside = to_python(program)
    assert inside == to_python(program)


@pytest.mark.parametrize("setting", ["precision", "keys", "metadata", "threefry"])
def test_effects_of_jax_config_on_a_program_are_written_explicitly(setting: str) -> None:
    with SETTINGS[setting]():
        program = trace(noisy, X)
        source = to_python(program)
    assert structural_difference(program, traced_again(defined(source), program)) is None


def test_a_program_of_wide_types_is_written_for_them_under_any_config() -> None:
    with jax.enable_x64(True):
        program = trace(lambda x: (x + jnp.arange(3.0), jnp.argmax(x)), jnp.ones(3))
        source = to_python(program)
        assert structural_difference(program, traced_again(defined(source), program)) is None
    assert to_python(program) == source
    assert "jax_enable_x64 must be set" in source
