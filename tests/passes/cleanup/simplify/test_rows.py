"""Every rule of `simplify` applies to its example, and keeps all bits of the results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool import jaxcompat, trace
from jaxprtool.ir.programs.program import type_check
from jaxprtool.passes.cleanup.dce import Dce
from jaxprtool.passes.cleanup.simplify import simplify_rules
from jaxprtool.passes.cleanup.simplify.engine import simplified
from tests.passes.cleanup.simplify.examples import ALL_DTYPES, DTYPES, EXAMPLES
from tests.programs.interpreter import evaluate
from tests.programs.same import count_equations
from tests.programs.values import difference, flushed_bits_agree, values_agree


def names():
    """Return the rules by name. Rules of the same name are numbered."""
    found = [row.name for row in simplify_rules]
    numbered = {}
    for row in simplify_rules:
        number = sum(name.startswith(f"{row.name} #") or name == row.name for name in numbered)
        numbered[f"{row.name} #{number}" if found.count(row.name) > 1 else row.name] = row
    return numbered


ROWS = names()


def numbers(dtype):
    """Return numbers that detect careless rules."""
    if dtype == jnp.bool_:
        return [False, True]
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return [0, 1, 2, 3, 7, 100, info.min, info.max, info.max - 1, info.max // 2, 31, 5]
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = [0.0, -0.0, 1.5, -2.0, np.inf, -np.inf, np.nan]
        return [complex(a, b) for a in parts for b in parts]
    info = jnp.finfo(dtype)
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 0.3, -2.5]
    return [*special, float(info.max), float(info.tiny), float(info.smallest_subnormal)]


def arrays(shapes, dtype):
    """Return arguments in which every number meets every other, as far as there is room."""
    values = np.asarray(numbers(dtype), dtype)
    pairs = np.asarray([(a, b) for a in values for b in values], dtype)
    sizes = [int(np.prod(shape)) for shape in shapes]
    return [
        jnp.asarray(np.resize(pairs[:, i], size).reshape(shape))
        for i, (shape, size) in enumerate(zip(shapes, sizes, strict=True))
    ]


def tame(shapes, dtype):
    """Return arguments for which all examples are well conditioned."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.uniform(0.5, 2, shape).astype(dtype)) for shape in shapes]


def test_every_rule_has_an_example():
    assert set(ROWS) == set(EXAMPLES)


def apply(name, args, *, fast):
    """Return the example before and after the rule."""
    program = traced(name, args)
    after = program.replace(jaxpr=simplified(program.jaxpr, [ROWS[name]], fast=fast))
    assert after.jaxpr is not program.jaxpr, "the rule does not apply"
    type_check(after)
    old, new = (Dce()(p).jaxpr for p in (program, after))
    fewer = count_equations(new) - count_equations(old)
    assert fewer < 0 or (fewer == 0 and kind(old.eqns[-1]) != kind(new.eqns[-1]))
    return program, after


def traced(name, args):
    program, instead = trace(EXAMPLES[name].fun, *args), EXAMPLES[name].for_copy
    if instead is None:
        return program
    (eqn,) = program.jaxpr.eqns
    primitive, params = instead(eqn.invars[0].aval)
    eqn = eqn.replace(primitive=primitive, params=params)
    return program.replace(jaxpr=jaxcompat.replace_jaxpr(program.jaxpr, eqns=[eqn]))


def kind(eqn):
    return eqn.primitive, len(eqn.invars)


def cases(table):
    return [
        pytest.param(name, dtype, id=f"{name} {dtype}")
        for name, example in EXAMPLES.items()
        for kind in example.kinds
        for dtype in table[kind]
    ]


def check_exact(name, dtype):
    with jax.enable_x64("64" in dtype or "128" in dtype):
        args = arrays(EXAMPLES[name].shapes, jnp.dtype(dtype))
        program, after = apply(name, args, fast=False)
        old, new = (evaluate(p.jaxpr, args) for p in (program, after))
    assert difference(old, new, flushed_bits_agree) is None


@pytest.mark.parametrize(("name", "dtype"), cases(DTYPES))
def test_an_exact_rule_keeps_every_bit(name, dtype):
    check_exact(name, dtype)


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "dtype"), cases(ALL_DTYPES))
def test_an_exact_rule_keeps_every_bit_of_every_type(name, dtype):
    check_exact(name, dtype)


FAST = [name for name, example in EXAMPLES.items() if example.fast]


@pytest.mark.parametrize("name", FAST)
def test_a_fast_rule_keeps_the_value_and_must_be_enabled(name):
    args = tame(EXAMPLES[name].shapes, jnp.float32)
    program, after = apply(name, args, fast=True)
    old, new = (evaluate(p.jaxpr, args) for p in (program, after))
    assert difference(old, new, values_agree) is None
    assert simplified(program.jaxpr, [ROWS[name]], fast=False) is program.jaxpr


@pytest.mark.parametrize("name", ROWS)
def test_a_row_says_whether_it_is_exact(name):
    row, example = ROWS[name], EXAMPLES[name]
    assert (row.exact is False) == (not example.kinds)
    assert (row.exact is True) == (not example.fast)
