"""Rules for reductions, windows and transforms, beside JAX's, for every choice of dimensions."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import primitives

from tests.programs.mapped import Cost
from tests.programs.one_equation import example, savings

IMAGE = example((4, 6))
COMPLEX = example((4, 6), jnp.complex64)
ONE, HIGH = jnp.float32(1), jnp.float32(9)
WINDOWS = {"window_dimensions": (2, 2), "window_strides": (2, 3), "padding": ((0, 0), (0, 1))}


def product(x):
    return lax.reduce(x, ONE, lambda a, b: a * b, (0,))


def sums(x, y):
    return lax.reduce((x, y), (ONE, HIGH), lambda a, b: (a[0] + b[0], a[1] - 2 * b[1]), (0,))


def products_from(x, start):
    return lax.reduce(x, start, lambda a, b: a * b, (1,))


def in_windows(x, y):
    starts = ONE, HIGH
    return lax.reduce_window((x, y), starts, lambda a, b: (a[0] + b[0], a[1] * b[1]), **WINDOWS)


def scatter_add(source, operand):
    bind = lax.select_and_scatter_add_p.bind
    return bind(source, operand, select_prim=primitives.ge_p, **WINDOWS)


def gather_add(tangents, operand):
    ones = {"base_dilation": (1, 1), "window_dilation": (1, 1)}
    bind = lax.select_and_gather_add_p.bind
    return bind(tangents, operand, select_prim=primitives.le_p, **WINDOWS, **ones)


def fft(kind, length):
    return lambda x: primitives.fft_p.bind(x, fft_type=lax.FftType[kind], fft_lengths=(length,))


# The equation, and what is saved for some of the dimensions along which its operands are mapped;
# three lanes of an image have 288 bytes.
CASES = {
    "reduce": (product, [IMAGE], {(1,): Cost(1, 288), (2,): Cost(1, 288)}),
    "reduce two": (sums, [IMAGE, IMAGE], {(2, 2): Cost(2, 576), (1, 2): Cost(0, 0)}),
    "reduce from several": (products_from, [IMAGE, ONE], {(1, None): Cost(1, 288)}),
    "reduce windows": (in_windows, [IMAGE, IMAGE], {(2, 2): Cost(2, 576), (1, None): Cost(0, 0)}),
    "scatter": (scatter_add, [example((2, 2)), IMAGE], {(2, 2): Cost(2, 336), (0, 1): Cost(0, 0)}),
    "gather": (gather_add, [IMAGE, IMAGE], {(1, 1): Cost(2, 576), (1, None): Cost(1, 288)}),
    # JAX's rule leaves a call of a jitted function behind.
    "fft": (fft("FFT", 6), [COMPLEX], {(1,): Cost(2, 576), (2,): Cost(1, 0)}),
    "rfft": (fft("RFFT", 6), [IMAGE], {(1,): Cost(1, 0)}),
    "irfft": (fft("IRFFT", 10), [COMPLEX], {(1,): Cost(2, 576)}),
}


@pytest.mark.parametrize("case", CASES)
def test_reduction_rules_cost_no_more_than_jaxs_and_less_where_they_can(case):
    fun, lanes, expected = CASES[case]
    saved = savings(fun, *lanes)
    assert {dims: saved[dims] for dims in expected} == expected


def test_initial_values_that_differ_by_lane_are_refused_as_by_jax():
    assert all(start is None for _, start in savings(products_from, IMAGE, ONE))
