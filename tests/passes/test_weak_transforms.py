"""Transformations, passes over sizes, unzip and plug-ins keep weak types as in JAX."""

import random
from collections import Counter
from contextlib import nullcontext
from functools import partial
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxprtool.loading.trace import trace
from tests.passes.test_weak_types import CASES, squared
from tests.passes.unzip.test_proof import key_args
from tests.programs import Case, harness_programs, random_programs
from tests.programs.symbolic import SymbolicProgram, symbolic_programs
from tests.programs.weak_transforms import (
    prove_batch,
    prove_derivatives,
    prove_sizes,
    prove_tile,
    prove_unzip,
)
from tests.programs.weakening import prove_weak_types, weakened
from tests.share import first_and_proofs
from tests.sweep.corpora import Harnesses, RandomPrograms, Samples
from tests.sweep.parts import Part

PROOFS = {
    "batch": prove_batch,
    "tile": prove_tile,
    "derivatives": prove_derivatives,
    "unzip": partial(prove_unzip, key_args=key_args),
}

#: Passes that the other proof does not cover.
PIPELINES = (
    'checkpoint(policy="dots_saveable")',
    'checkpoint(policy="everything_saveable"), simplify',
    "mixed_precision",
)


@pytest.mark.parametrize("proof", first_and_proofs(PROOFS.values()), ids=PROOFS)
@pytest.mark.parametrize(("name", "fun", "args"), CASES, ids=[case[0] for case in CASES])
def test_programs_of_python_numbers(proof, name, fun, args):
    outcomes = proof(Case(name, fun, args), random.Random(name))
    assert outcomes or not args


@pytest.mark.parametrize(("name", "fun", "args"), CASES, ids=[case[0] for case in CASES])
def test_policies_and_narrower_products(name, fun, args):
    prove_weak_types(Case(name, fun, args), PIPELINES)


def test_products_of_weakly_typed_arrays_are_weakly_typed_in_mixed_precision():
    def product(s, t):
        return jnp.dot(jnp.broadcast_to(s, (3, 4)), jnp.broadcast_to(t, (4,)))

    assert prove_weak_types(Case("product", product, (0.5, 2.0)), PIPELINES)["gradients"] == 3


def test_tiles_of_a_result_are_as_weakly_typed_as_its_batch_elements():
    """JAX's batching rule of `fft` returns a strongly typed result for a weakly typed array."""
    fft = partial(lax.fft_p.bind, fft_type=lax.FftType.FFT, fft_lengths=(4,))
    case = weakened(Case("fft", fft, (np.ones((2, 4), "complex64"),)))
    assert prove_tile(case, random.Random(0))["tile"]


@pytest.mark.parametrize("strong", ["none", "array", "update"])
def test_an_update_at_an_unbatched_start_has_weakly_typed_gradients(strong):
    def updated(s, t, start):
        pair = [jnp.broadcast_to(s, (3,)), jnp.broadcast_to(t, (1,))]
        return lax.dynamic_update_slice(*pair, (start,))

    numbers = {"array": 0.5, "update": 2.0}
    numbers |= {strong: np.float32(1)} if strong in numbers else {}
    case = Case("updated", updated, (*numbers.values(), np.int32(1)))
    for seed in range(4):  # draws the mapped arguments
        prove_batch(case, random.Random(seed))


# --- sizes --------------------------------------------------------------------------------------


def rows(s, x):
    return jnp.broadcast_to(s, x.shape)


def carried(s, x):
    carry, each = lax.scan(lambda c, row: (c * 2, (c * 3, c + row)), s, x)
    return carry, each, lax.fori_loop(0, 3, lambda i, c: c * 2, s), x


def looked_for(s, x):
    return lax.while_loop(lambda c: c < x.shape[0], lambda c: c * 2, s), x.sum()


def branches(s, x):
    return lax.cond(x.sum() > 0, lambda: (s, s * rows(s, x)), lambda: (s * 2, rows(s, x)))


def doubled(s, x):
    return lax.scan(lambda c, row: (jnp.where(row > 0, c, 2.0), c), rows(s, x[0]), x)


#: Functions of a number and of an array with symbolic sizes.
SIZED = [
    ("sum", lambda s, x: s + x.sum()),
    ("broadcast", rows),
    ("where", lambda s, x: jnp.where(x > 0, s, 0.0)),
    ("reverse", lambda s, x: jnp.flip(rows(s, x), 0)),
    ("concatenate", lambda s, x: jnp.concatenate([rows(s, x), rows(s * 2, x)])),
    ("roll", lambda s, x: jnp.roll(rows(s, x), 1, 0)),
    ("pad", lambda s, x: lax.pad(rows(s, x), 0.0, [(1, 1, 0)] * x.ndim)),
    ("slice", lambda s, x: rows(s, x)[1:]),
    ("gather", lambda s, x: rows(s, x)[np.array([0, 0])]),
    ("update", lambda s, x: rows(s, x).at[0].set(s)),
    ("cumsum", lambda s, x: jnp.cumsum(rows(s, x), 0)),
    ("cummax", lambda s, x: lax.cummax(rows(s, x), reverse=True)),
    ("sort", lambda s, x: jnp.sort(rows(s, x), 0)),
    ("max", lambda s, x: (rows(s, x).max(), rows(s, x).argmax())),
    ("reshape", lambda s, x: rows(s, x).reshape(-1)),
    ("stack", lambda s, x: jnp.stack([rows(s, x), rows(s, x)], 1)),
    ("dot", lambda s, x: (jnp.dot(rows(s, x).T, rows(s, x)), jnp.dot(x.T, rows(s, x)))),
    (
        "pool",
        lambda s, x: lax.reduce_window(
            rows(s, x), 0.0, lax.add, (2,) * x.ndim, (1,) * x.ndim, "SAME"
        ),
    ),
    ("jit", lambda s, x: jax.jit(lambda a: jnp.sin(a) * rows(a, x))(s)),
    ("rule", lambda s, x: squared(rows(s, x)) * squared(s)),
    ("scan", carried),
    ("while", looked_for),
    ("cond", branches),
    ("carries", doubled),
]


#: One of them always, and all in the sweep.
SHAPES = [*(pytest.param(each, marks=pytest.mark.sweep) for each in ("n", "3,n", "n,m")), "n,3"]


@pytest.mark.parametrize("shape", first_and_proofs(SHAPES))
@pytest.mark.parametrize(("name", "fun"), SIZED, ids=[case[0] for case in SIZED])
def test_programs_of_numbers_and_symbols(name, fun, shape):
    def traced(sizes):
        dims = tuple(sizes.get(n) or int(n) for n in shape.split(","))
        return trace(fun, 0.5, jax.ShapeDtypeStruct(dims, "float32"))

    names = [n for n in shape.split(",") if n.isalpha()]
    symbols = jax.export.symbolic_shape(",".join(names))
    choices = (dict.fromkeys(names, 4), dict(zip(names, (3, 2), strict=False)))
    made = traced(dict(zip(names, symbols, strict=True)))
    program = SymbolicProgram(name, made, choices, traced, lambda _: [], nullcontext)
    outcomes = prove_sizes(program)
    assert outcomes["specialize"] == 2 and (outcomes["mask"] or outcomes["ragged"]), outcomes


# --- many programs ------------------------------------------------------------------------------


def prove(kind: str, number: int, case: Case) -> Counter[str]:
    """Prove a program, whose arguments are all or, every other time, partly weakly typed."""
    rng = random.Random(number)
    return PROOFS[kind](weakened(case, rng if number % 2 else None), rng)


def prove_passes(number: int, case: Case) -> Counter[str]:
    return prove_weak_types(weakened(case), PIPELINES)


def prove_symbolic(number: int, case: Case) -> Counter[str]:
    """Prove the programs of a case with symbols, half of them partly weakly typed."""
    case = weakened(case, random.Random(number) if number % 2 else None)
    return sum(map(prove_sizes, islice(symbolic_programs(case), 3)), Counter({"cases": 1}))


@pytest.mark.parametrize("kind", PROOFS)
def test_some_harnesses_keep_weak_types(kind):
    cases = harness_programs(1)[::2500]
    assert sum((prove(kind, i, case) for i, case in enumerate(cases)), Counter())


@pytest.mark.proof
def test_some_harnesses_with_symbols_keep_weak_types():
    cases = harness_programs(1)[::2500]
    assert sum((prove_symbolic(i, case) for i, case in enumerate(cases)), Counter())


SWEEP = [
    *(Part(f"weak types, {kind}: harnesses", Harnesses(), partial(prove, kind)) for kind in PROOFS),
    *(
        Part(
            f"weak types, {kind}: random programs",
            RandomPrograms(1000, programs=random_programs),
            partial(prove, kind),
        )
        for kind in PROOFS
    ),
    Part("weak types, more passes: harnesses", Harnesses(), prove_passes),
    Part("weak types, sizes: harnesses", Harnesses(), prove_symbolic),
    Part("weak types, batch: samples", Samples(), partial(prove, "batch")),
    Part("weak types, derivatives: samples", Samples(), partial(prove, "derivatives")),
]
