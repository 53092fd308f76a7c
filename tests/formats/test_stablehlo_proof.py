"""JAX's test programs, samples and random programs through StableHLO: the same bits, or refused."""

import jax
import numpy as np
import pytest

from jaxprtool.errors import UnsupportedError
from jaxprtool.formats import lowering
from jaxprtool.formats.stablehlo import read_module_program
from jaxprtool.ir.meshes import on_axes
from jaxprtool.ir.program import type_check
from tests.programs import harness_share, sample_programs
from tests.programs.corpus import corpus
from tests.programs.samples import sample_files
from tests.share import first_and_proofs, share

#: Operations that are refused by name.
REFUSED = ("@ApproxTopK", "a Python function", "by tokens")


def raw(value):
    """Return a value as a module has it: keys as words."""
    is_key = jax.dtypes.issubdtype(getattr(value, "dtype", np.float32), jax.dtypes.prng_key)
    return jax.random.key_data(value) if is_key else value


def bits(values):
    return [(x.dtype, x.shape, np.asarray(x).tobytes()) for x in map(raw, values)]


def prove(case):
    """Return whether a program is read from its StableHLO; its results must be the same bits."""
    with case.setting():
        program, arguments = case.program(), case.arguments()
        text = lowering.module(program, keep_unused=True).operation.get_asm(enable_debug_info=True)
        try:
            read = read_module_program(text.encode(), program.name)
        except UnsupportedError as error:
            assert any(name in str(error) for name in REFUSED), error
            return False
        type_check(read)
        if read.meshes:
            read = on_axes(read, read.meshes[0].shape)
        wanted = jax.jit(program.flat_function(donate=False))(*arguments)
        results = jax.jit(read.flat_function(donate=False))(*map(raw, arguments))
        assert bits(results) == bits(wanted), program.name
        return True


def test_jaxs_test_programs():
    cases = harness_share()[::4]
    assert sum(map(prove, cases)) > 0.97 * len(cases) > 50


@pytest.mark.parametrize("file", first_and_proofs(sample_files()))
def test_samples(file):
    programs = sample_programs(file)
    read = [prove(sample) for sample in share(programs) or programs]
    assert all(read)


def test_random_programs():
    for _, case in share(corpus())[::3]:
        prove(case)
