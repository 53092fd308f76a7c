"""One equation of each kind, for every choice of batch dimensions: types as in JAX, and values.

Most are batched by JAX's own rule. Each is compared with JAX's rule and its batch elements one by
one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import primitives

from jaxprtool import trace
from jaxprtool.passes.mapping.batch import Batch
from tests.programs.beside import batched, prove
from tests.programs.one_equation import example, savings
from tests.share import for_sweep_unless, share

ARRAY = example((2, 4))
SCALAR = example(())
ROW = example((8,))
MASK = example((8,), bool)
FLAG = example((), bool)
IMAGE = example((4, 6))
COMPLEX = example((4, 6), jnp.complex64)
ONE, HIGH = jnp.float32(1), jnp.float32(9)
WINDOWS = {"window_dimensions": (2, 2), "window_strides": (2, 3), "padding": ((0, 0), (0, 1))}

ELEMENTWISE = {
    "arrays": (lax.add, [ARRAY, ARRAY]),
    "arrays apart": (lax.nextafter, [ARRAY, ARRAY]),
    "a comparison": (lax.lt, [ARRAY, ARRAY]),
    "a larger type": (lax.complex, [ARRAY, ARRAY]),
    "three dimensions": (lax.mul, [example((2, 1, 2))] * 2),
    "size 1 beside more": (primitives.sub_p.bind, [example((2, 1)), ARRAY]),
    "outer": (primitives.max_p.bind, [example((2, 1)), example((1, 4))]),
    "a scalar": (primitives.sub_p.bind, [SCALAR, ARRAY]),
    "scalars": (lax.max, [SCALAR, SCALAR]),
    "no elements": (lax.add, [example((0, 4))] * 2),
    "cotangents": (primitives.add_jaxvals_p.bind, [ARRAY, ARRAY]),
    "scalar cotangents": (primitives.add_jaxvals_p.bind, [SCALAR, SCALAR]),
    "clamp": (lax.clamp, [SCALAR, ROW, ROW]),
    "clamp between scalars": (lax.clamp, [SCALAR, ROW, SCALAR]),
    "clamp a scalar": (lax.clamp, [SCALAR, SCALAR, SCALAR]),
    "select": (lax.select_n, [MASK, ROW, ROW]),
    "select one": (lax.select_n, [FLAG, ROW, ROW]),
    "select a scalar": (lax.select_n, [FLAG, SCALAR, SCALAR]),
    "select of three": (
        lambda p, x, y: lax.select_n(p, x, y, x),
        [example((8,), jnp.int32) % 3, ROW, ROW],
    ),
    "random bits": (
        lambda key, count: primitives.threefry2x32_p.bind(key, key, count, count),
        [jnp.arange(4, dtype=jnp.uint32)] * 2,
    ),
}

LAYOUT = {
    "squeeze": (lambda x: lax.squeeze(x, [1, 3]), [example((2, 1, 4, 1))]),
    "reshape that merges": (lambda x: lax.reshape(x, (2, 12)), [example((2, 3, 4))]),
    "reshape that splits": (lambda x: lax.reshape(x, (2, 2, 2)), [ARRAY]),
    "reshape that mixes": (lambda x: lax.reshape(x, (4, 2)), [ARRAY]),
    "reshape of no elements": (lambda x: lax.reshape(x, (0, 3)), [example((2, 0))]),
    "reshape to a scalar": (lambda x: lax.reshape(x, ()), [example((1, 1))]),
    "reshape from a scalar": (lambda x: lax.reshape(x, (1, 1)), [SCALAR]),
    "dimensions of size 1": (lambda x: lax.broadcast_in_dim(x, (1, 2, 1, 4), (1, 3)), [ARRAY]),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (2, 3, 4), (0, 2)), [ARRAY]),
    "broadcast of a scalar": (lambda x: lax.broadcast_in_dim(x, (2,), ()), [SCALAR]),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 1), [ARRAY, ARRAY]),
    "concatenate three": (lambda x, y, z: lax.concatenate([x, y, z], 0), [example((2,))] * 3),
}


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


REDUCTIONS = {
    "reduce": (lambda x: lax.reduce(x, ONE, lambda a, b: a * b, (0,)), [IMAGE]),
    "reduce two": (sums, [IMAGE, IMAGE]),
    "reduce from several": (products_from, [IMAGE, ONE]),
    "reduce windows": (in_windows, [IMAGE, IMAGE]),
    "scatter": (scatter_add, [example((2, 2)), IMAGE]),
    "gather": (gather_add, [IMAGE, IMAGE]),
    "fft": (fft("FFT", 6), [COMPLEX]),
    "rfft": (fft("RFFT", 6), [IMAGE]),
    "irfft": (fft("IRFFT", 10), [COMPLEX]),
}


def array(*shape):
    size = jnp.zeros(shape).size
    return (jnp.arange(float(size)) % 5 - 2).reshape(shape)


def convolution(layout, **options):
    def fun(x, w):
        return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=layout, **options)

    return fun


NWC, NCW = ("NWC", "WIO", "NWC"), ("NCW", "OIW", "NCW")

CONVOLUTIONS = {
    f"{layout} to {features}": (
        convolution(layout, feature_group_count=4),
        [array(*lhs), array(*rhs)],
    )
    for features in (4, 8)
    for layout, lhs, rhs in ((NWC, (2, 5, 4), (3, 1, features)), (NCW, (2, 4, 5), (features, 1, 3)))
} | {
    f"examples in {groups}": (
        convolution(NWC, batch_group_count=groups),
        [array(4, 5, 3), array(2, 3, 4)],
    )
    for groups in (2, 4)
}

CASES = ELEMENTWISE | LAYOUT | REDUCTIONS | CONVOLUTIONS


@pytest.mark.parametrize("case", for_sweep_unless(share(list(CASES)), CASES))
def test_an_equation_costs_no_more_than_by_jaxs_rule_and_equals_its_batch_elements(case):
    fun, lanes = CASES[case]
    assert savings(fun, *lanes)


def test_a_scalar_is_clamped_where_jaxs_rule_fails():
    assert savings(lax.clamp, SCALAR, SCALAR, SCALAR)[None, None, 0] is None


def test_bitcasts_to_a_wider_type_do_not_merge_the_batch_dimension():
    halves = jnp.arange(8, dtype=jnp.uint16).reshape(4, 2)
    saved = savings(lambda x: lax.bitcast_convert_type(x, jnp.uint32), halves, size=2)
    assert list(saved) == [(0,), (1,), (2,)]
    assert saved[(2,)] is None  # JAX's rule is wrong


def test_batched_initial_values_are_refused_as_by_jax():
    assert all(start is None for _, start in savings(products_from, IMAGE, ONE))


@pytest.mark.parametrize("dims", [(0, None), (None, 0), (1, None)])
def test_sums_of_cotangents_keep_their_weak_types(dims):
    strong, weak = (jax.ShapeDtypeStruct((4,), "float32", weak_type=w) for w in (False, True))
    for terms in [(strong, weak), (weak, strong), (weak, weak)]:
        program = trace(primitives.add_jaxvals_p.bind, *terms)
        (result,) = Batch(dims, 0, 3)(program).out_avals
        assert result.weak_type == terms[0].weak_type


@pytest.mark.parametrize("dims", [(1, None), (None, 2), (1, 2), (0, 1)])
def test_symbolic_dimensions(dims):
    n, m = jax.export.symbolic_shape("n, m")
    x = jax.ShapeDtypeStruct((n, 2), "float32")
    for fun in [lax.add, lambda x, y: lax.select_n(x > 0, x, y), lambda x, y: lax.clamp(x, y, x)]:
        program = Batch(dims, 0, m)(trace(fun, x, x))
        specs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in program.in_avals]
        expected = jax.eval_shape(jax.vmap(fun, in_axes=dims), *specs)
        assert program.out_avals[0].shape == expected.shape


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_symbolic_dimensions_in_reshapes(dim):
    n, m = jax.export.symbolic_shape("n, m")
    x = jax.ShapeDtypeStruct((n, 4), "float32")
    for fun in [
        lambda x: lax.reshape(x, (n * 4,)),
        lambda x: lax.reshape(x, (n, 2, 2)),
        lambda x: lax.broadcast_in_dim(x, (n, 1, 4), (0, 2)),
        lambda x: lax.broadcast_in_dim(x, (n, n, 4), (0, 2)),
        lambda x: lax.concatenate([x, x], 0),
    ]:
        program = Batch(dim, 0, m)(trace(fun, x))
        (aval,) = program.in_avals
        spec = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        expected = jax.eval_shape(jax.vmap(fun, in_axes=dim), spec)
        assert program.out_avals[0].shape == expected.shape


# --- contractions -------------------------------------------------------------------------------


@pytest.mark.parametrize("in_axes", [(0, 0), (1, 2), (2, None), (None, 1)])
def test_a_dot_remains_one_equation_without_transposes(in_axes):
    def fun(x, y):
        return lax.dot_general(x, y, (((1,), (0,)), ((0,), (1,))))

    program = batched(fun, array(2, 3, 4), array(3, 2, 5), in_axes=in_axes)
    assert [e.primitive.name for e in program.jaxpr.eqns].count("dot_general") == 1
    assert sum(e.primitive.name != "dot_general" for e in program.jaxpr.eqns) <= 1
    prove(fun, array(2, 3, 4), array(3, 2, 5), in_axes=in_axes, derivatives=0)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("option", "in_axes"), [("feature_group_count", (None, 1)), ("batch_group_count", (2, None))]
)
def test_grouped_convolutions_have_the_same_derivatives(option, in_axes):
    channels = 4 if option == "feature_group_count" else 2
    fun = convolution(NWC, **{option: 2})
    prove(fun, array(2, 5, channels), array(3, 2, 4), in_axes=in_axes)


def test_grouped_convolutions_of_an_empty_batch_are_empty():
    def fun(x, w):
        return lax.conv_general_dilated(x, w, (1,), "SAME", feature_group_count=2)

    for in_axes in [(0, 0), (None, 0), (0, None)]:
        prove(fun, array(1, 4, 5), array(2, 2, 3), in_axes=in_axes, size=0, derivatives=0)
