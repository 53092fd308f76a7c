"""Every test program of JAX's primitives, mapped by `jaxprtool.vmap` and by `jax.vmap`."""

import jax
import jax.numpy as jnp
import pytest

from jaxprtool import vmap
from tests.programs import harness_programs

CHUNKS = 10


def outcome(mapping, case, args, in_axes):
    """The types of the results, or the type of the error that JAX raises."""
    try:
        return jax.make_jaxpr(mapping(case.fun, in_axes=in_axes))(*args).out_avals
    except Exception as error:
        return type(error)


@pytest.mark.sweep
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_test_programs_are_mapped_as_by_jax(chunk):
    count = 0
    for case in harness_programs(every=1)[chunk::CHUNKS]:
        arrays = [i for i, arg in enumerate(case.args) if hasattr(arg, "shape")]
        for chosen in (arrays[:1], arrays) if arrays else ():
            axes = tuple(0 if i in chosen else None for i in range(len(case.args)))
            args = [
                arg if axis is None else jnp.stack([jnp.asarray(arg)] * 2)
                for arg, axis in zip(case.args, axes, strict=True)
            ]
            theirs, ours = (outcome(v, case, args, axes) for v in (jax.vmap, vmap))
            refused = isinstance(ours, type) and isinstance(theirs, type)
            assert ours == theirs or (refused and issubclass(ours, theirs)), case.name
            count += 1
    assert count > 900
