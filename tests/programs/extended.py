"""An extended dtype as another package would define it: pairs of numbers, with rules for JAX."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxprtool.primitives import variable

#: The base of extended dtypes, such as that of random keys.
ExtendedDType = type(jax.eval_shape(lambda: jax.random.key(0)).dtype).__base__


class pair_kind(jax.dtypes.extended):
    """The abstract dtype of pairs."""


class PairRules:
    allow_conversion = False

    @staticmethod
    def physical_element_aval(dtype):
        return ShapedArray((2,), np.dtype("float32"))

    @staticmethod
    def tangent_dtype(dtype):
        return jax.dtypes.float0

    @staticmethod
    def physical_const(value):
        return value.data

    @staticmethod
    def global_sharded_result_handler(aval, sharding, committed):
        numbers = ShapedArray((*aval.shape, 2), np.dtype("float32"))
        handler = jax._src.interpreters.pxla.global_aval_to_result_handler
        return handler(numbers, sharding, committed).wrap(PairArray)


class Pair(ExtendedDType):
    """A pair of floats. It has no `itemsize` or `kind`, as JAX does not require them."""

    _rules = PairRules
    type = pair_kind
    name = "pair"

    def __eq__(self, other):
        return isinstance(other, Pair)

    def __hash__(self):
        return hash(Pair)

    def __repr__(self):
        return self.name


class PairArray:
    """An array of pairs."""

    dtype = Pair()

    def __init__(self, data):
        self.data = data

    shape = property(lambda self: self.data.shape[:-1])
    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: math.prod(self.shape))
    sharding = property(lambda self: self.data.sharding)


def _sharded(arrays, shardings, layouts, copies):
    return jax._src.interpreters.pxla.shard_args(
        shardings, layouts, copies, [array.data for array in arrays]
    )


jax._src.core.pytype_aval_mappings[PairArray] = lambda x: ShapedArray(x.shape, x.dtype)
jax._src.dtypes.register_canonicalize_value_handler(PairArray, None)
jax._src.interpreters.pxla.shard_arg_handlers[PairArray] = _sharded
mlir.register_constant_handler(PairArray, lambda x, aval: mlir.ir_constant(np.asarray(x.data)))


def _primitive(name, result, lowering, batch):
    primitive = Primitive(name)
    primitive.def_abstract_eval(result)
    primitive.def_impl(jax.jit(primitive.bind))
    mlir.register_lowering(primitive, lowering)
    batching.primitive_batchers[primitive] = batch
    return primitive


def _like_operand(primitive_of):
    return lambda operands, dims: (primitive_of().bind(*operands), dims[0])


pair_p = _primitive(
    "pair",
    lambda x: ShapedArray(x.shape[:-1], Pair()),
    lambda ctx, x: [x],
    lambda xs, dims: (pair_p.bind(jnp.moveaxis(xs[0], dims[0], 0)), 0),
)
unpair_p = _primitive(
    "unpair",
    lambda x: ShapedArray((*x.shape, 2), np.dtype("float32")),
    lambda ctx, x: [x],
    _like_operand(lambda: unpair_p),
)


def paired(x):
    """Pass pairs, also a constant, through repeated code, a loop and a branch."""
    pairs = pair_p.bind(jnp.stack([x, x], -1))
    fixed = unpair_p.bind(jnp.flip(pair_p.bind(jnp.ones((3, 2)))))
    again = unpair_p.bind(jnp.reshape(pairs, (1, *x.shape)))[0] + unpair_p.bind(pairs)

    def step(carry, _):
        return carry, unpair_p.bind(carry).sum()

    _, sums = jax.lax.scan(step, pairs, None, length=2)
    chosen = jax.lax.cond(x.sum() > 0, lambda p: p, lambda p: p[::-1], pairs)
    return again.sum() + fixed.sum() + sums.sum() + unpair_p.bind(chosen).sum()


HELD = PairArray(jnp.arange(6, dtype=jnp.float32).reshape(3, 2))


def captured(x):
    """Take and return pairs, with a constant of pairs."""
    return jnp.flip(x), unpair_p.bind(x) + unpair_p.bind(HELD)


def given(x):
    """Return pairs."""
    return pair_p.bind(jnp.stack([x, x], -1))


def held_variable(key, x):
    """Declare a variable of pairs."""
    pairs = pair_p.bind(jax.random.normal(key, (*x.shape, 2)))
    return unpair_p.bind(variable(pairs, name="pairs")).sum() + x.sum()


def masked(x):
    """Multiply by numbers that are stored as pairs."""
    return (x * unpair_p.bind(HELD)).sum()
