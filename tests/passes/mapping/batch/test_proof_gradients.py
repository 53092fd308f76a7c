"""Derivatives of batched programs, and batched derivatives, compared with `jax.vmap`.

The derivative of a batched program equals JAX's. The derivative of a program is itself a program,
which batches as in JAX. Over all arguments the two agree: a batched derivative is the derivative of
the batched program. In reverse and forward mode.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool import jaxcompat
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import sub_jaxprs
from jaxprtool.loading.trace import trace
from tests.programs import harness_programs
from tests.programs.corpus import prove_corpus
from tests.programs.gradients import NO_DERIVATIVE, NO_DERIVATIVE_OF_REFS
from tests.programs.mapped import (
    Mapping,
    are_equivalent,
    flat,
    mappings,
    ours,
    prove_mapped,
    same_programs,
    theirs,
)
from tests.programs.rewriting import prove_all
from tests.programs.values import first_value_difference, values_agree
from tests.sweep.corpora import Harnesses, RandomPrograms
from tests.sweep.parts import Part

CHUNKS = 8


def derivative(program: Program, mode: str) -> Program | str:
    """Return the flat program of a derivative, or why there is none.

    It takes the arguments and a cotangent for each inexact result, and returns a cotangent for each
    inexact argument; in forward mode, the tangents of these and those.
    """
    closed = program.jaxpr
    at = [i for i, aval in enumerate(program.in_avals) if inexact(aval)]
    outs = [i for i, aval in enumerate(program.out_avals) if inexact(aval)]
    if not at or not outs:
        return "no inexact argument" if not at else "no inexact result"

    def restricted(args: list[Any]) -> Callable[..., list[Any]]:
        def function(*xs: Any) -> list[Any]:
            given = list(args)
            for i, x in zip(at, xs, strict=True):
                given[i] = x
            results = jaxcompat.jaxpr_as_fun(closed)(*given)
            return [results[i] for i in outs]

        return function

    def reverse(*args: Any) -> Any:
        args, cotangents = args[: len(closed.invars)], args[len(closed.invars) :]
        _, pullback = jax.vjp(restricted(args), *(args[i] for i in at))
        return tuple(pullback(list(cotangents)))

    def forward(*args: Any) -> Any:
        args, tangents = args[: len(closed.invars)], args[len(closed.invars) :]
        return tuple(jax.jvp(restricted(args), [args[i] for i in at], list(tangents))[1])

    fun, along = {"reverse": (reverse, program.out_avals), "forward": (forward, program.in_avals)}[
        mode
    ]
    specs = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
        for aval in (*program.in_avals, *filter(inexact, along))
    ]
    try:
        jaxpr = jax.make_jaxpr(fun)(*specs)
    except NO_DERIVATIVE + NO_DERIVATIVE_OF_REFS as error:
        return f"none in {mode}: {type(error).__name__}"
    if mentions(jaxpr, "custom_lin"):  # the tangent of a function with only a reverse rule
        return f"none in {mode}: custom_vjp"
    names = tuple(f"x{i}" for i in range(len(jaxpr.invars)))
    results = tuple(f"y{i}" for i in range(len(jaxpr.outvars)))
    made = program.replace(jaxpr=jaxpr, arg_names=names, out_names=results)
    return flat(made)


def mentions(jaxpr: Any, name: str) -> bool:
    """Return True if a primitive of this name occurs, at any depth."""
    return any(
        eqn.primitive.name == name or any(mentions(body, name) for _, body in sub_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def inexact(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def directions(program: Program, count: int) -> list[Any]:
    """Return fixed random values for the arguments of a derivative after the first `count`."""
    made = []
    for aval in program.in_avals[count:]:
        rng = np.random.RandomState(zlib.crc32(f"{aval.dtype}{aval.shape}".encode()))
        made.append(jnp.asarray(rng.uniform(0.5, 1.5, aval.shape), aval.dtype))
    return made


def prove_derivatives(program: Program, args: list[Any], rng: random.Random) -> Counter[str]:
    """Prove all statements above for one program, and count the outcomes."""
    outcomes: Counter[str] = Counter()
    program = flat(program)
    every = Mapping((0,) * len(program.in_avals), (0,) * len(program.out_avals), 2)
    some = mappings(program, rng, 3)[2] if program.in_avals else every
    for mode in ("reverse", "forward"):
        inside = derivative(program, mode)
        if isinstance(inside, str):
            outcomes[inside] += 1
            continue
        given = [*args, *directions(inside, len(args))]
        all_lanes = Mapping((0,) * len(given), (0,) * len(inside.out_avals), 2)
        for mapping in (all_lanes, mappings(inside, rng, 3)[2]):
            outcome = prove_mapped(inside, mapping, given)
            outcomes[f"batch of {mode}: {outcome.how}"] += 1
        for mapping in (every, some):
            outcomes[f"{mode} of batch: {prove_outside(program, mapping, args, mode)}"] += 1
        outcomes[
            f"{mode}, in either order: {prove_order(program, every, inside, given, mode)}"
        ] += 1
    return outcomes


def prove_outside(program: Program, mapping: Mapping, args: list[Any], mode: str) -> str:
    """Prove that the derivative of the batched program equals JAX's."""
    try:
        reference, _ = theirs(program, mapping)
    except Exception:  # then ours raises too, as tested in `test_proof`
        return "JAX does not batch it"
    batched = ours(program, mapping)
    if are_equivalent(batched.jaxpr, reference.jaxpr):
        return "of the same program"
    expected, result = derivative(reference, mode), derivative(batched, mode)
    if isinstance(expected, str) or isinstance(result, str):
        assert result == expected
        return expected
    count = len(program.in_avals)
    return same_programs(result, expected, [*mapping.stack(args), *directions(result, count)])


def prove_order(
    program: Program, every: Mapping, inside: Program, given: list[Any], mode: str
) -> str:
    """Prove that batching and differentiation commute if all arguments are mapped."""
    if program.jaxpr.effects:
        return "not run: effects"
    lanes = Mapping((0,) * len(given), (0,) * len(inside.out_avals), every.size)
    try:
        outside = derivative(ours(program, every), mode)
        batched = ours(inside, lanes)
    except NotImplementedError:  # like JAX's, as tested in `test_proof`
        return "not batched"
    if isinstance(outside, str):
        return outside
    pair = [jaxcompat.jaxpr_as_fun(p.jaxpr) for p in (outside, batched)]
    got, expected = jax.jit(lambda *xs: [f(*xs) for f in pair])(*lanes.stack(given))
    fault = first_value_difference(expected, got, values_agree)
    assert fault is None, f"{mode}, batched derivative before, derivative of batch after: {fault}"
    return "the same"


# --- JAX's own test programs ------------------------------------------------------------------


def prove_case(number: int, case: Any, seed: Any = None) -> Counter[str]:
    with case.setting():
        rng = random.Random(number if seed is None else seed)
        return prove_derivatives(case.program(), case.arguments(), rng)


def prove_harness(number: int, case: Any) -> Counter[str]:
    """Prove a program that has an inexact argument."""
    if not any(map(inexact_value, case.args)):
        return Counter({"no inexact argument": 1})
    return prove_case(number, case, case.name)


def inexact_value(x: Any) -> bool:
    return hasattr(x, "dtype") and inexact(x)


@pytest.mark.parametrize("chunk", range(0, CHUNKS, 4))
def test_derivatives_of_some_harnesses_are_those_of_jax(chunk):
    cases = [case for case in harness_programs(1)[::97] if any(map(inexact_value, case.args))]
    assert prove_all(enumerate(cases[chunk::CHUNKS]), prove_harness).total() > 10


# --- random programs --------------------------------------------------------------------------


def test_derivatives_of_random_programs_are_those_of_jax():
    assert prove_corpus(8, prove_case).total() >= 8


SWEEP = [
    Part(
        "derivatives of batch: harnesses",
        Harnesses(),
        prove_harness,
        refusals=(),
        expected=lambda n: n.total() - n["no inexact argument"] > 8000,
    ),
    Part("derivatives of batch: random programs", RandomPrograms(1500), prove_case, refusals=()),
]


# --- custom rules -----------------------------------------------------------------------------


def test_the_rules_of_custom_derivatives_are_kept_and_batched():
    """The random programs' rules return three times the derivative, which detects lost rules."""
    from tests.programs.rules import RULE_FACTOR, with_jvp_rule, with_vjp_rule

    for wrapped in (with_jvp_rule, lambda f: with_vjp_rule(f, saving=True)):
        program = flat(trace(wrapped(jnp.sin), jnp.float32(0.5)))
        batched = ours(program, Mapping((0,), (0,), 3))
        function = jaxcompat.jaxpr_as_fun(batched.jaxpr)
        xs = jnp.arange(3.0)
        gradient = jax.grad(lambda xs, function=function: function(xs)[0].sum())(xs)
        np.testing.assert_allclose(gradient, RULE_FACTOR * jnp.cos(xs), rtol=1e-6)
