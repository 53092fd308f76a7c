"""Slices of JAX's own test programs, of random programs and of the samples.

The backward slice of a result is what dce leaves for that result; other arguments may have any
values. The forward slices of arguments agree with the backward slices of results. A path leads from
an argument to a result if and only if these are in a slice.
"""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool import jaxcompat
from jaxprtool.commands.why.slices import flow_path
from jaxprtool.ir.dataflow import Start, backward_slice, forward_slice
from jaxprtool.ir.equations import bodies, equations
from jaxprtool.ir.regions import regions
from jaxprtool.passes.cleanup.dce import dce_jaxpr
from tests.programs import Case, harness_programs, sample_programs
from tests.programs.corpus import prove_corpus
from tests.programs.rewriting import prove_all
from tests.programs.same import lasting_effects, without_ref_writes
from tests.programs.samples import sample_files
from tests.programs.stepwise import evaluate
from tests.share import share
from tests.sweep.corpora import Harnesses, RandomPrograms, Samples
from tests.sweep.parts import Part

CHUNKS = 4

#: The maximum number of results to check per program.
MOST = 3


def prove_slices(number: int, case: Case) -> Counter[str]:
    with case.setting():
        return Counter(_outcomes(case))


def _outcomes(case: Case):
    program = case.program()
    top = jaxcompat.open_jaxpr(program.jaxpr)
    exact = _is_exact(program)
    forward = [forward_slice(top, Start([(top, var)])) for var in top.invars]
    for i, atom in list(enumerate(top.outvars))[-MOST:]:
        start = [] if isinstance(atom, jaxcompat.Literal) else [(top, atom)]
        back = backward_slice(top, Start(start))
        wanted = [j == i for j in range(len(top.outvars))]
        left, used = dce_jaxpr(program.jaxpr, wanted, live_inputs=False)
        mine, theirs = _leaves(top) & back.members(), _leaves(jaxcompat.open_jaxpr(left))
        if exact:
            assert mine == theirs and list(back.arguments) == used
        elif exact is False:
            assert mine <= theirs and all(map(bool.__le__, back.arguments, used))
        assert list(back.arguments) == [run.results[i] for run in forward]
        for name, flag in list(zip(program.arg_names, back.arguments, strict=True))[:MOST]:
            path = flow_path(program, f"argument:{name}", f"result:{program.out_names[i]}")
            assert (path.steps is not None) == flag
        others = "" if all(back.arguments) else ", others replaced"
        if others:
            _prove_independent(program, case.arguments(), i, back.arguments)
        yield f"{'as dce' if exact else 'within dce'}{others}"


def _is_exact(program) -> bool | None:
    """Return if dce leaves exactly the slice; None if bodies of unknown kinds are sliced."""
    top = jaxcompat.open_jaxpr(program.jaxpr)
    exact = not without_ref_writes(lasting_effects(program.jaxpr))
    for eqn in equations(top):
        held = regions(eqn)
        if held is None and bodies(eqn):
            return None
        # A user's rule may read more than the body; JAX's own rules keep freed values.
        exact &= not (held is not None and held.edges.has_rule)
        exact &= eqn.primitive not in jaxcompat.jax_dce_rules or held is not None
    return exact


def _leaves(top) -> set[int]:
    return {id(eqn) for eqn in equations(top) if not bodies(eqn)}


def _prove_independent(program, values, result, needed) -> None:
    """Check that a result is bitwise unchanged by all arguments it does not depend on."""
    others = [v if flag else _other(v) for v, flag in zip(values, needed, strict=True)]
    before, after = (evaluate(program.jaxpr, args)[result] for args in (values, others))
    if jnp.issubdtype(jnp.asarray(before).dtype, jax.dtypes.prng_key):
        before, after = jax.random.key_data(before), jax.random.key_data(after)
    np.testing.assert_array_equal(np.asarray(before), np.asarray(after))


def _other(value):
    """Return zeros, or ones in place of zeros."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.clone(jax.random.split(value.ravel()[0], value.shape))
    zeros = jnp.zeros_like(value)
    return jnp.ones_like(value) if np.array_equal(np.asarray(value), np.asarray(zeros)) else zeros


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_slices_of_some_harnesses(chunk):
    cases = enumerate(harness_programs(20)[chunk::CHUNKS])
    outcomes = prove_all(cases, prove_slices)
    assert outcomes.total() > 80


def test_slices_of_random_programs():
    outcomes = prove_corpus(25, prove_slices)
    assert outcomes["as dce, others replaced"] > 2


@pytest.mark.parametrize("file", share(sample_files()))
def test_slices_of_samples(file):
    for case in sample_programs(file):
        assert prove_slices(0, case)


SWEEP = [
    Part("slices: harnesses", Harnesses(), prove_slices, expected=lambda n: n.total() > 9600),
    Part("slices: random programs", RandomPrograms(2500), prove_slices),
    Part("slices: samples", Samples(), prove_slices),
]
