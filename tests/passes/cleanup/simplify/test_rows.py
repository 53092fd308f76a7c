"""Every rule of `simplify` applies to its example, and keeps all bits of the results."""

import random
import re
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxprtool import jaxcompat, trace
from jaxprtool.errors import UserFunctionError
from jaxprtool.ir.dtypes import array_dtypes
from jaxprtool.ir.program import type_check
from jaxprtool.passes.cleanup.dce import Dce
from jaxprtool.passes.cleanup.simplify import simplify_rules
from jaxprtool.passes.cleanup.simplify.engine import simplified
from tests.passes.cleanup.simplify.examples import DTYPES, EXAMPLES
from tests.programs.interpreter import evaluate
from tests.programs.same import count_equations
from tests.programs.values import (
    bits_agree,
    first_value_difference,
    flushed_bits_agree,
    special_values,
    values_agree,
)
from tests.share import HALF


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


def check_exact(name, dtype):
    with jax.enable_x64("64" in dtype or "128" in dtype):
        args = arrays(EXAMPLES[name].shapes, jnp.dtype(dtype))
        program, after = apply(name, args, fast=False)
        old, new = (evaluate(p.jaxpr, args) for p in (program, after))
    assert first_value_difference(old, new, flushed_bits_agree) is None


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, id=f"{name} {dtype}")
        for name, example in EXAMPLES.items()
        for kind in example.kinds
        for dtype in DTYPES[kind]
    ],
)
def test_an_exact_rule_keeps_every_bit(name, dtype):
    check_exact(name, dtype)


# --- every dtype --------------------------------------------------------------------------------

EXACT = [name for name, row in ROWS.items() if row.exact is not False]
#: XLA cannot compile them for the CPU, or crashes: arrays of 6 bits and of one, and parts of arrays
#: with several elements in a byte.
NO_ARRAYS = {"float6_e2m3fn", "float6_e3m2fn", "int1", "uint1", jax.dtypes.float0.name}
PACKED = {"int2", "uint2", "int4", "uint4", "float4_e2m1fn"}
DTYPE_NAMES = sorted({dtype.name for dtype in array_dtypes().values()} - NO_ARRAYS)


def drawn(shapes, dtype):
    """Yield arguments until every special value was in the first, in random pairs."""
    values, rng = special_values(dtype), np.random.default_rng(0)
    size = max(int(np.prod(shape)) for shape in shapes)
    for start in range(0, max(len(values), 1), size):
        first = values[(np.arange(size) + start) % len(values)]
        yield [
            jnp.asarray((np.resize(first, n) if i == 0 else rng.choice(values, n)).reshape(shape))
            for i, shape in enumerate(shapes)
            for n in [int(np.prod(shape))]
        ]


def keeps_every_bit(name, dtype):
    """Return False if the rule does not apply to the type. Raise if it changes a bit.

    A subnormal number counts as zero in single equations, if XLA does not flush it in the whole.
    """
    if dtype.name in PACKED and re.search("concatenate|split|pad", name):
        return False
    for args in drawn(EXAMPLES[name].shapes, dtype):
        try:
            program = traced(name, args)
            old = evaluate(program.jaxpr, args)
        except (UserFunctionError, TypeError, ValueError, jax.errors.JaxRuntimeError):
            return False  # the primitive is not defined on this type
        after = program.replace(jaxpr=simplified(program.jaxpr, [ROWS[name]], fast=False))
        if after.jaxpr is program.jaxpr:
            return False
        new = evaluate(after.jaxpr, args)
        fault = first_value_difference(old, new, flushed_bits_agree)
        if fault is None and first_value_difference(old, new, bits_agree) is not None:
            old, new = (jax.jit(jaxcompat.jaxpr_as_fun(p.jaxpr))(*args) for p in (program, after))
            fault = first_value_difference(old, new, bits_agree)
        assert fault is None, f"{name} {dtype.name}: {fault}"
    return True


def check_types(pairs):
    with jax.enable_x64(True):
        return sum(keeps_every_bit(name, jnp.dtype(dtype)) for name, dtype in pairs)


@pytest.mark.proof
def test_an_exact_rule_keeps_every_bit_of_some_types():
    pairs = list(product(EXACT, DTYPE_NAMES))
    assert check_types(random.Random(HALF).sample(pairs, 12)) > 2


@pytest.mark.sweep
@pytest.mark.parametrize("name", EXACT)
def test_an_exact_rule_keeps_every_bit_of_every_type(name):
    assert check_types((name, dtype) for dtype in DTYPE_NAMES) > 0


def converted(values, dtype):
    """Return values converted by JAX alone, or None if XLA cannot convert them."""
    try:
        return np.asarray(lax.convert_element_type(jnp.asarray(values), dtype))
    except jax.errors.JaxRuntimeError:
        return None


def converts_at_once(first, inner, last):
    """Return True if two conversions become one. Raise if that changes a bit.

    The subnormal numbers of bf16 are zero in f64, unless XLA converts the bf16 at once, as it does.
    """
    twice = lambda x: lax.convert_element_type(lax.convert_element_type(x, inner), last)  # noqa: E731
    program = trace(twice, jax.ShapeDtypeStruct((4,), first))
    outs = simplified(program.jaxpr, CONVERSIONS, fast=False).eqns
    if len(program.jaxpr.eqns) < 2 or not outs or outs[-1].invars[0] not in program.jaxpr.invars:
        return False
    values = special_values(first)
    if (first, inner) == (jnp.bfloat16, np.float64):
        values = values[~((values != 0) & (abs(values) < jnp.finfo(first).tiny))]
    once, half = converted(values, last), converted(values, inner)
    whole = None if half is None else converted(half, last)
    if once is None or whole is None:
        return False
    fault = first_value_difference([whole], [once], bits_agree)
    assert fault is None, f"{first} → {inner} → {last}: {fault}"
    return True


CONVERSIONS = [row for row in simplify_rules if row.pattern.startswith("convert_element_type")]


def check_conversions(triples):
    with jax.enable_x64(True):
        return sum(converts_at_once(*map(jnp.dtype, triple)) for triple in triples)


def test_conversions_become_one_only_if_no_value_changes():
    triples = list(product(("bool", "int8", "bfloat16"), DTYPE_NAMES, ("float32", "int32")))
    some = random.Random(HALF).sample(triples, 6)
    assert check_conversions([*some, ("bool", "int8", "float32")]) > 0
    assert not check_conversions([("bool", "float8_e8m0fnu", "float32")])  # it has no zero


@pytest.mark.sweep
@pytest.mark.parametrize("first", DTYPE_NAMES)
def test_conversions_of_any_three_types_become_one_only_if_no_value_changes(first):
    check_conversions(product((first,), DTYPE_NAMES, DTYPE_NAMES))


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_a_rule_matches_no_equation_with_an_option_that_it_does_not_name(name):
    example = EXAMPLES[name]
    program = traced(name, tame(example.shapes, DTYPES[(example.kinds or example.fast)[0]][0]))
    *others, root = program.jaxpr.eqns
    inner = {p for node in ROWS[name].tree.operands for p in getattr(node, "primitives", ())}
    marked = [root, *(eqn for eqn in others if eqn.primitive.name in inner)]
    for one in [marked, *([eqn] for eqn in marked)]:
        eqns = [
            eqn.replace(params=eqn.params | {"later_option": "set"}) if eqn in one else eqn
            for eqn in program.jaxpr.eqns
        ]
        jaxpr = jaxcompat.replace_jaxpr(program.jaxpr, eqns=eqns)
        after = simplified(jaxpr, [ROWS[name]], fast=True)
        kept = [eqn for eqn in after.eqns if "later_option" in eqn.params]
        assert len(kept) == len(one)


FAST = [name for name, example in EXAMPLES.items() if example.fast]


@pytest.mark.parametrize("name", FAST)
def test_a_fast_rule_keeps_the_value_and_must_be_enabled(name):
    args = tame(EXAMPLES[name].shapes, jnp.float32)
    program, after = apply(name, args, fast=True)
    old, new = (evaluate(p.jaxpr, args) for p in (program, after))
    assert first_value_difference(old, new, values_agree) is None
    assert simplified(program.jaxpr, [ROWS[name]], fast=False) is program.jaxpr


@pytest.mark.parametrize("name", ROWS)
def test_a_row_says_whether_it_is_exact(name):
    row, example = ROWS[name], EXAMPLES[name]
    assert (row.exact is False) == (not example.kinds)
    assert (row.exact is True) == (not example.fast)
