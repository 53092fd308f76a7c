"""Passes keep the weak type of each result and of each gradient as in JAX."""

import random
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxprtool
from jaxprtool import Pass, jaxcompat
from jaxprtool.errors import CheckError
from jaxprtool.ir.program import type_check
from tests.programs import Case, harness_programs, random_programs, sample_programs
from tests.programs.samples import sample_files
from tests.programs.waste import WASTE, wasteful
from tests.programs.weakening import (
    PIPELINES,
    prove_weak_types,
    weakened,
)
from tests.share import first_and_proofs
from tests.sweep.corpora import Harnesses, RandomPrograms, Samples
from tests.sweep.parts import Part

ONES = np.ones(3, np.float32)


def scanned():
    return lax.scan(lambda carry, _: (carry + 2, carry * 3), 1, None, length=5)[1]


def filled():
    return jnp.broadcast_to(lax.while_loop(lambda c: c < 9.0, lambda c: c * 2, 1.0), (4,))


def chosen(x):
    return lax.cond(True, lambda: 2.0, lambda: 3.0), x * 1


def loop(x, y):
    return lax.fori_loop(0, 3, lambda i, carry: (carry[0] * 2, carry[1] + x), (x, y))


@jax.custom_jvp
def squared(x):
    return x * x


@squared.defjvp
def _(primals, tangents):
    return squared(*primals), 3.0 * primals[0] * tangents[0]


def layers(s, x):
    for _ in range(6):  # the first layer has a weakly typed input, the others do not
        s = jnp.tanh(jnp.sin(s) * x.sum() + jnp.cos(s)) * x[0]
    return s


#: Programs of Python's numbers, with arguments.
CASES = [
    ("scan", scanned, ()),
    ("while", filled, ()),
    ("cond", chosen, (1.0,)),
    ("carries", loop, (1.0, 2.0)),
    ("sum", lambda s, x: s + x.sum(), (0.5, ONES)),
    ("scale", lambda s, x: (s * x, jnp.sum(x / s)), (0.5, ONES)),
    ("one", lambda s, x: (s * np.float32(1), x * 1), (0.5, ONES)),
    ("select", lambda s, x: jnp.where(x > 0, jnp.where(x > 0, s, x), 2.0).sum(), (0.5, ONES)),
    ("jit", lambda s: jax.jit(lambda a: jnp.sin(a) * 2)(s) + np.float32(3), (0.5,)),
    ("rule", lambda s, x: squared(s) * squared(x), (0.5, ONES)),
    ("both", lambda s, t: (jnp.negative(-s) + 0.0) * jnp.float32(t), (0.5, 2.0)),
    ("pad", lambda s: lax.pad(jnp.broadcast_to(s, (3,)), 0.0, [(0, 0, 0)]), (0.5,)),
    ("slice", lambda s: lax.slice(jnp.broadcast_to(s, (3,)), (0,), (3,)), (0.5,)),
    ("layers", layers, (0.5, ONES)),
    ("integers", lambda n, x: (n * 2, x * n), (3, ONES)),
    ("complex", lambda z: (z * 1j, jnp.abs(z)), (1j,)),
]


@pytest.mark.parametrize(
    ("name", "fun", "args"), first_and_proofs(CASES), ids=[case[0] for case in CASES]
)
def test_results_and_gradients_of_numbers_keep_their_weak_types(name, fun, args):
    assert prove_weak_types(Case(name, fun, args))["rewritten"]
    wanted = jax.jit(fun)(*args)
    for passes in ("-O1", "-O3"):
        found = jaxprtool.jit(fun, passes=passes)(*args)
        assert _weak(found) == _weak(wanted)
    program = jaxprtool.trace(fun, *args)
    assert _weak(program.apply("-O1")(*args)) == _weak(wanted)


def _weak(tree):
    return [(x.dtype, jax.typeof(x).weak_type) for x in jax.tree.leaves(tree)]


def test_a_gradient_by_a_number_has_its_type():
    fun = lambda s, x: s + x.sum()  # noqa: E731
    wanted = jax.grad(jax.jit(fun))(0.5, ONES)
    found = jax.grad(jaxprtool.jit(fun))(0.5, ONES)
    assert _weak(found) == _weak(wanted) == [(np.float32, True)]
    program = jaxprtool.trace(fun, 0.5, ONES)
    for passes in ("grad", "simplify, grad", "-O3, grad", "grad, -O3"):
        assert [aval.weak_type for aval in program.apply(passes).out_avals] == [True]


def test_weak_constants_survive_a_file_and_python(tmp_path):
    weak = jnp.broadcast_to(jnp.asarray(2.0), (3,))
    program = jaxprtool.trace(lambda x: (weak, weak * x), 1.0)
    jaxprtool.write(program, tmp_path / "p.jaxpr")
    again = jaxprtool.read(tmp_path / "p.jaxpr")
    assert _weak(again(1.0)) == _weak(program(1.0)) == [(np.float32, True)] * 2
    namespace = {}
    exec(jaxprtool.to_python(program), namespace)
    (fun,) = (v for k, v in namespace.items() if k.startswith("lambda"))
    assert jaxprtool.equivalent(jaxprtool.trace(fun, 1.0), program)


strong_pullback = jax.custom_vjp(jnp.sin)
strong_pullback.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * np.float32(2),))


@jax.custom_jvp
def strong_tangent(x):
    return jnp.sin(x)


@strong_tangent.defjvp
def _(primals, tangents):
    return strong_tangent(*primals), tangents[0] * np.float32(2)


@pytest.mark.parametrize("rule", [strong_pullback, strong_tangent])
def test_cotangents_of_a_rule_are_added_in_the_order_that_determines_their_type(rule):
    def first(s, x):
        return s * 2, s * 3 + rule(s) * x.sum()

    def last(s, x):
        return rule(s) * x.sum(), rule(s * x), s * 3

    def inside(s, x):
        return s * 2, s * 3 + jax.jit(lambda s: rule(s) + 1)(s) * x.sum()

    cases = [Case(fun.__name__, fun, (0.5, ONES)) for fun in (first, last, inside)]
    passes = ("sink", "schedule", "-O2", "-O3")
    assert sum((prove_weak_types(case, passes) for case in cases), Counter())["gradients"]


# --- the type check after a pass ----------------------------------------------------------------


def changed(program, **changes):
    return program.replace(jaxpr=jaxcompat.replace_jaxpr(program.jaxpr, **changes))


def test_a_pass_that_loses_a_weak_type_is_found():
    before = jaxprtool.trace(lambda x, s: (jnp.sin(s), x), ONES, 1.0)
    after = jaxprtool.trace(lambda x, s: (jnp.sin(s), x), ONES, np.float32(1))
    type_check(after, before)
    with pytest.raises(
        CheckError, match=r"argument 's' of .* was ~f32\[\] before, but is f32\[\] now"
    ):
        type_check(after, before, preserves=True)
    with pytest.raises(CheckError, match=r"result\[0\] of .* is ~f32\[\] before, f32\[\] after"):
        jaxprtool.verify(before, after, [ONES, 1.0])


def test_a_result_less_weak_than_annotated_is_found():
    before = jaxprtool.trace(lambda s: jnp.sin(jnp.float32(s)), 1.0)
    cast, sine = before.jaxpr.eqns
    sine = sine.replace(invars=cast.invars)
    after = changed(before, eqns=[sine])
    type_check(after, before)
    with pytest.raises(CheckError, match=r"sin gives a weakly typed float32\[\], annotated as"):
        type_check(after, before, preserves=True)


def test_jit_finds_a_pass_that_changes_the_type_of_a_result():
    @dataclass(frozen=True)
    class Strong(Pass):
        name: ClassVar[str] = "strong"

        def __call__(self, program):
            return jaxprtool.trace(lambda s, x: (jnp.float32(s), x), *program.in_avals)

    fun = jaxprtool.jit(lambda s, x: (s, x), passes=Strong())
    with pytest.raises(CheckError, match=r"'strong' produced .* was ~f32\[\] before, but is f32"):
        fun(0.5, ONES)


# --- many programs ------------------------------------------------------------------------------


def prove(number: int, case: Case) -> Counter[str]:
    """Prove a program with weakly typed arguments by some pipelines; every third one in waste."""
    rng = random.Random(number)
    case = weakened(case)
    if number % 3 == 0 and isinstance(case, Case):
        case = wasteful(case, rng.choice(list(WASTE)))
    return prove_weak_types(case, rng.sample(PIPELINES, 6))


def test_some_samples_keep_weak_types():
    found = sum((prove(1, case) for case in sample_programs(sample_files()[0])), Counter())
    assert found["rewritten"]


def test_some_harnesses_keep_weak_types():
    cases = harness_programs(1)[::1000]
    assert sum((prove(i, case) for i, case in enumerate(cases)), Counter())["rewritten"]


def _as_expected(outcomes: Counter[str]) -> bool:
    return outcomes["gradients"] > 100 and outcomes["weakly typed"] > 100


SWEEP = [
    Part("weak types of harnesses", Harnesses(), prove, expected=_as_expected),
    Part("weak types of random programs", RandomPrograms(4000, programs=random_programs), prove),
    Part("weak types of samples", Samples(), prove),
]
