"""Every test program of JAX's primitives, mapped by `jaxprtool.vmap` and by `jax.vmap`."""

from collections import Counter

import jax
import jax.numpy as jnp

from jaxprtool import vmap
from tests.programs import harness_programs
from tests.programs.rewriting import prove_all
from tests.sweep.corpora import Harnesses
from tests.sweep.parts import Part


def outcome(mapping, case, args, in_axes):
    """Return the types of the results, or the type of the error that JAX raises."""
    try:
        return jax.make_jaxpr(mapping(case.fun, in_axes=in_axes))(*args).out_avals
    except Exception as error:
        return type(error)


def prove(number, case):
    """Map the first array of the arguments, and all of them."""
    outcomes = Counter()
    arrays = [i for i, arg in enumerate(case.args) if hasattr(arg, "shape")]
    for chosen in (arrays[:1], arrays) if arrays else ():
        axes = tuple(0 if i in chosen else None for i in range(len(case.args)))
        args = [
            arg if axis is None else jnp.stack([jnp.asarray(arg)] * 2)
            for arg, axis in zip(case.args, axes, strict=True)
        ]
        theirs, ours = (outcome(v, case, args, axes) for v in (jax.vmap, vmap))
        refused = isinstance(ours, type) and isinstance(theirs, type)
        assert ours == theirs or (refused and issubclass(ours, theirs)), (ours, theirs)
        outcomes["refused" if refused else "mapped"] += 1
    return outcomes


def test_some_test_programs_are_mapped_as_by_jax():
    assert prove_all(enumerate(harness_programs(every=1)[::400]), prove)["mapped"] > 10


SWEEP = [Part("vmap: harnesses", Harnesses(), prove, expected=lambda n: n.total() > 9000)]
