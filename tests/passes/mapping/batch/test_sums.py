"""`batch(sum_match=True)`: mapped results are summed where out_axes is None."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool import trace

ROWS = jnp.arange(12.0).reshape(4, 3)


def several(w, x):
    return {"sum": x.sum(), "rows": [x * w, x > 3], "same": w + 1, "small": x.astype(jnp.int8)}


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize(
    "out_axes", [None, {"sum": None, "rows": [1, None], "same": None, "small": 0}]
)
def test_mapped_results_without_an_axis_are_summed_as_in_jax(out_axes, chunk):
    options = {"in_axes": (None, 0), "out_axes": out_axes}
    text = f"batch(in_axes=(None, 0), out_axes={out_axes}, axis_size=4, chunk={chunk}"
    program = trace(several, 2.0, ROWS[0]).apply(f"{text}, sum_match=True)")
    mapped = jax.vmap(several, sum_match=True, **options)
    got, expected = (jax.jit(f)(2.0, ROWS) for f in (program, mapped))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert jax.typeof(ours) == jax.typeof(theirs)
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_an_argument_that_is_a_result_is_summed_once_for_each_result():
    program = trace(lambda x: (x, x), ROWS[0])
    summed = program.apply("batch(out_axes=None, axis_size=4, sum_match=True)")
    for result in summed(ROWS):
        np.testing.assert_array_equal(result, ROWS.sum(0))


def test_a_sum_has_the_source_line_of_its_operand():
    program = trace(lambda x: jnp.sin(x), ROWS[0])
    summed = program.apply("batch(out_axes=None, axis_size=4, sum_match=True)")
    sine, total = summed.jaxpr.eqns
    assert (sine.primitive.name, total.primitive.name) == ("sin", "reduce_sum")
    assert total.source_info.traceback is sine.source_info.traceback
