"""Every pass on programs with elements of another package's dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool import jit, trace, vmap
from jaxprtool.analysis.stats import stats
from jaxprtool.errors import UnsupportedError
from jaxprtool.formats.lowering import exported
from jaxprtool.ir.dtypes import itemsize
from tests.programs.extended import Pair, paired

X = jnp.arange(3.0)
PASSES = ["dce", "cse", "fold", "forward", "hoist", "inline", "schedule", "simplify", "unroll"]


@pytest.mark.parametrize("passes", [*PASSES, "-O1", "-O2"])
def test_passes_keep_the_results_of_programs_of_pairs(passes):
    np.testing.assert_allclose(jit(paired, passes=passes)(X), jax.jit(paired)(X))


def test_pairs_are_batched():
    xs = jnp.stack([X, -X])
    np.testing.assert_allclose(jax.jit(vmap(paired))(xs), jax.jit(jax.vmap(paired))(xs))


def test_pairs_are_shown_and_counted():
    assert itemsize(Pair()) == 8
    program = trace(paired, X)
    assert "pair[3]" in str(program)
    stats(program)


def test_pairs_as_arguments_or_results_cannot_be_exported():
    program = trace(lambda x: x, jax.ShapeDtypeStruct((3,), Pair()))
    with pytest.raises(UnsupportedError, match=r"x has elements of pair, a type defined by"):
        exported(program)
