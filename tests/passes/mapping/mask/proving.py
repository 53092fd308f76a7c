"""Prove small masked functions, values and derivatives, at every size and with any padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool import trace
from jaxprtool.ir.symbols import value_of
from jaxprtool.loading.argspec import read_args
from tests.programs.masking import prove_masked
from tests.programs.symbolic import Sizes, SymbolicProgram


def marked(cases: Iterable[str], mark: Any, *unmarked: str) -> list[Any]:
    """Return the names of cases for pytest, with a mark on those that are not excepted."""
    return [name if name in unmarked else pytest.param(name, marks=mark) for name in cases]


def prove(fun: Callable[..., Any], types: str, seed: int = 3, least: int = 3) -> Counter[str]:
    """Return the outcome of `prove_masked` at every size up to a bound. Integers are 0 to 3.

    Raises:
        AssertionError: If it is wrong, refused, or there were fewer sizes at which it is defined.
    """
    avals, _ = read_args(types)
    program = trace(fun, *avals)

    def at(sizes: Sizes) -> list[jax.ShapeDtypeStruct]:
        shapes = [tuple(value_of(n, sizes) for n in aval.shape) for aval in avals]
        return [jax.ShapeDtypeStruct(s, a.dtype) for s, a in zip(shapes, avals, strict=True)]

    def arguments(sizes: Sizes) -> list[Any]:
        return [_random(each, seed + i) for i, each in enumerate(at(sizes))]

    found = SymbolicProgram(
        "function", program, (), lambda sizes: trace(fun, *at(sizes)), arguments, nullcontext
    )
    outcomes = prove_masked(found, seed)
    refused = [each for each in outcomes if each.startswith("refused")]
    assert outcomes["sizes"] >= least and not refused, outcomes
    return outcomes


def _random(like: jax.ShapeDtypeStruct, seed: int) -> Any:
    rng = np.random.RandomState(seed)
    if like.dtype == np.bool_:
        return jnp.asarray(rng.randint(2, size=like.shape), like.dtype)
    if jnp.issubdtype(like.dtype, np.integer):
        return jnp.asarray(rng.randint(0, 4, size=like.shape), like.dtype)
    return jnp.asarray(rng.normal(size=like.shape), like.dtype)
