"""The listing is JAX's own text, byte for byte; and what it adds to it."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxprtool import jaxcompat
from jaxprtool.jaxcompat import jaxpr_as_fun
from jaxprtool.render.listing import listing
from tests.programs.harnesses import harness_programs
from tests.render.programs import PROGRAMS, jaxpr_of

WIDTHS = (40, 80, 120, 160)


def same_as_jax(closed, width, types=True):
    ours = listing(closed, width=width, types=types).plain()
    theirs = jaxcompat.open_jaxpr(closed).pretty_print(
        width=width, print_shapes=types, use_color=False
    )
    assert ours == theirs


@pytest.mark.parametrize("name", PROGRAMS)
def test_text_is_jaxs_own(name):
    closed = PROGRAMS[name]()
    for width in (*range(10, 130, 7), *WIDTHS):
        same_as_jax(closed, width)
        same_as_jax(closed, width, types=False)
    assert listing(closed).plain() == str(jaxcompat.open_jaxpr(closed))


@pytest.mark.parametrize("width", WIDTHS)
def test_text_of_gradients_is_jaxs_own(width):
    for name in ("deep_nesting", "custom_jvp", "scan_while_cond_switch", "nested_jit"):
        closed = PROGRAMS[name]()
        flat = jaxpr_as_fun(closed)
        args = [np.ones(v.aval.shape, v.aval.dtype) for v in closed.invars]
        tangents = [
            np.zeros(x.shape, jax.dtypes.float0 if x.dtype.kind == "i" else x.dtype) for x in args
        ]
        same_as_jax(
            jaxpr_of(lambda *xs, f=flat, t=tangents: jax.jvp(f, xs, tuple(t)), *args), width
        )
        same_as_jax(jaxpr_of(lambda *xs, f=flat: jax.linearize(f, *xs)[0], *args), width)


def check_against_jax(cases):
    compared = 0
    for case in cases:
        closed = jax.make_jaxpr(case.fun)(*case.args)
        try:
            str(closed)
        except KeyError:
            listing(closed)  # JAX cannot print its own program; we can
            continue
        for width in WIDTHS:
            same_as_jax(closed, width)
        compared += 1
    return compared


def test_text_of_jaxs_own_test_programs_is_jaxs_own():
    assert check_against_jax(harness_programs(every=15)) > 300


@pytest.mark.sweep
def test_text_of_all_of_jaxs_own_test_programs_is_jaxs_own():
    assert check_against_jax(harness_programs(every=1)) > 5000
