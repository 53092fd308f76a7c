"""All comparisons of programs agree on when values of parameters are equal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool import jaxcompat
from jaxprtool.ir.equivalence import EquationKeys, same_operation, structural_difference
from jaxprtool.ir.keys import type_key

(SIN,) = jax.make_jaxpr(jnp.sin)(1.0).eqns

PAIRS = [
    (1, 1, True),
    (1, True, False),
    (1, np.int64(1), True),
    (1, 1.0, False),
    (0.0, -0.0, False),
    (float("nan"), float("nan"), True),
    (2.0, np.float32(2.0), False),
    ("a", "a", True),
    ("a", b"a", False),
    (None, False, False),
    (np.dtype("float32"), np.dtype("float32"), True),
    ((1, (2.0,)), [1, [2.0]], True),
    ({"a": True}, {"a": 1}, False),
    (np.arange(3), np.arange(3), True),
    (np.arange(3), np.arange(3.0), False),
    (np.float32([1, 2]), jnp.float32([1, 2]), True),
    (jnp.sin, jnp.sin, True),
    (jnp.sin, jnp.cos, False),
]


def with_parameter(value):
    """Return a jaxpr of one equation with a parameter of this value."""
    eqn = SIN.replace(params={**SIN.params, "accuracy": value})
    return jaxcompat.new_jaxpr((), (), eqn.invars, eqn.outvars, [eqn], DEBUG)


DEBUG = jaxcompat.DebugInfo("test", "test", None, None)


@pytest.mark.parametrize(("a", "b", "same"), PAIRS)
def test_equivalence_and_numbering_agree_on_values(a, b, same):
    keys = EquationKeys()
    keys.keep([a, b])
    p, q = map(with_parameter, (a, b))
    for first, second in ((p, q), (q, p)):
        assert (structural_difference(first, second) is None) == same
        assert same_operation(first.eqns[0], second.eqns[0]) == same
    assert (keys.value(a) == keys.value(b)) == same


def test_types_with_symbolic_dimensions_are_compared_by_text():
    shapes = [jax.export.symbolic_shape(text) for text in ("n, 3", "n, 3", "m, 3")]
    a, b, c = (jax.core.ShapedArray(shape, jnp.float32) for shape in shapes)
    assert type_key(a) == type_key(b) != type_key(c)
    refs = [jaxcompat.AbstractRef(aval) for aval in (a, b, c)]
    assert type_key(refs[0]) == type_key(refs[1]) != type_key(refs[2])
    assert type_key(refs[0]) != type_key(a)
