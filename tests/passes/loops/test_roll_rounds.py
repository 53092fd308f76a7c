"""roll finds iterations with similar parts, that read older results, or that update an array."""

import random

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.ir.equations import equations
from jaxprtool.passes.loops.roll import Roll
from tests.programs import Case, prove

a, b, c = (jnp.linspace(-1.0, 1.0, 4) + i for i in range(3))
rows = jnp.linspace(-1.0, 1.0, 48).reshape(12, 4)


def rolled(fun, *args, gradients=False):
    """Roll a function, which computes the same; return the program and its scans' lengths."""
    _, after, _ = prove(Case("fun", fun, args), Roll(), gradients=gradients)
    found = equations(jaxcompat.open_jaxpr(after.jaxpr))
    return after, [eqn.params["length"] for eqn in found if eqn.primitive.name == "scan"]


# --- iterations of several calls ------------------------------------------------------------------


def springs(a, b):
    for _ in range(50):
        a, b = a + 0.01 * (b - a), b + 0.01 * (a - b)
    return a, b


def short_halves(a, b):
    for _ in range(20):
        a, b = a - 0.1 * b, b - 0.1 * a
    return a, b


def in_turn(a, b):
    for _ in range(10):
        a = a + 0.01 * (b - a)
        b = b + 0.01 * (a - b)
    return a, b


def thirds(a, b, c):
    for _ in range(10):
        a, b, c = (x + 0.01 * jnp.sin(y - x) for x, y in ((a, b), (b, c), (c, a)))
    return a, b, c


@pytest.mark.parametrize(
    "fun, args, lengths",
    [
        (springs, (a, b), [50]),
        (short_halves, (a, b), [20]),
        (in_turn, (a, b), [20]),
        (thirds, (a, b, c), [10]),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_iterations_with_similar_parts_become_one_scan(fun, args, lengths):
    assert rolled(fun, *args)[1] == lengths


@pytest.mark.proof
def test_an_iteration_with_parts_may_take_rows_and_return_results():
    def fun(a, b, xs):
        sums = []
        for x in xs:
            a, b = a + x * (b - a), b + x * (a - b)
            sums.append(a.sum())
        return a, b, sums

    after, lengths = rolled(fun, a, b, rows)
    assert lengths == [12]
    assert len(after.jaxpr.eqns) < 6


def test_scan_iterations_may_start_and_end_within_a_python_iteration():
    def step(x, y):
        return x * 0.5 + jnp.sin(y) - 0.1 * x

    def fun(a, b, c):
        for i in range(6):
            a = step(b, b)
            b = step(a, a)
            c = step(b, a)
            if i == 0:
                a = jnp.sort(a)
        return a, b, c

    assert rolled(fun, a, b, c)[1] == [4]


@pytest.mark.proof
def test_two_loops_of_the_same_parts_stay_separate():
    def fun(a, b):
        a, b = springs(a, b)
        return springs(jnp.sort(a), b)

    assert rolled(fun, a, b)[1] == [50, 50]


def test_a_dependence_between_the_parts_keeps_them_separate():
    step = jax.jit(lambda x, y: x + 0.01 * jnp.sin(y - x))

    def fun(a, b):
        for between in (jnp.sort, jnp.cumsum, jnp.flip, jnp.exp):
            a = step(a, b)
            b = step(b, between(a))
        return a, b

    assert rolled(fun, a, b)[1] == []


# --- older results ----------------------------------------------------------------------------


def stoermer(x, y):
    for _ in range(20):
        x, y = y, 2 * y - x - 0.01 * jnp.sin(y)
    return x, y


@pytest.mark.proof
def test_an_iteration_may_read_the_result_before_the_last():
    after, lengths = rolled(stoermer, a, b, gradients=True)
    assert lengths == [20]
    (scan,) = (eqn for eqn in after.jaxpr.eqns if eqn.primitive.name == "scan")
    assert jaxcompat.scan_counts(scan.params) == (0, 2)


def test_an_iteration_may_read_the_last_three_results():
    def fun(a, b, c):
        for _ in range(12):
            a, b, c = b, c, a + 0.5 * jnp.sin(b) * c
        return a, b, c

    assert rolled(fun, a, b, c)[1] == [12]


def test_unroll_undoes_such_loops():
    program = jaxprtool.trace(springs, a, b)
    back = program.apply("roll").apply("unroll(max_length=50), inline, simplify, dce")
    assert jaxprtool.equivalent(back, program.apply("inline, simplify, dce"))


# --- array updates --------------------------------------------------------------------------------


def recurrence(x):
    for i in range(1, 12):
        x = x.at[i].set(jnp.sin(x[i - 1]) * 0.5 + x[i])
    return x


def columns(x):
    for i in range(1, 4):
        x = x.at[:, i].add(jnp.sin(x[:, i - 1]) * 0.5)
    return x


def blocks(x):
    for i in range(1, 8):
        x = x.at[i : i + 2].multiply(jnp.cos(x[i - 1]))
    return x


@pytest.mark.parametrize("fun, length", [(recurrence, 11), (columns, 3), (blocks, 7)])
def test_chains_through_updates_become_scans(fun, length):
    assert rolled(fun, rows)[1] == [length]


def test_slices_of_an_updated_array_outside_of_the_loop_are_unchanged():
    def fun(x):
        y = x[2] + x[5:7].sum()
        x = x.at[0].set(y)
        return springs(x[0], x[1])

    after, lengths = rolled(fun, rows)
    assert lengths == [50]
    assert not [e for e in after.jaxpr.eqns if e.primitive.name == "dynamic_slice"]


@pytest.mark.proof
def test_a_fixed_position_in_a_loop_is_a_static_slice():
    def fun(x):
        for i in range(1, 12):
            x = x.at[i].set(jnp.sin(x[0]) * 0.5 + x[i])
        return x

    after, lengths = rolled(fun, rows)
    assert lengths == [11]
    names = [eqn.primitive.name for eqn in equations(jaxcompat.open_jaxpr(after.jaxpr))]
    assert names.count("slice") == names.count("dynamic_slice") == 1


def test_slices_at_positions_beyond_32_bits_are_kept():
    first = 2**31

    def fun(x):
        for i in range(4):
            row = jax.lax.slice(x, (first + i,), (first + i + 1,))
            x = jax.lax.dynamic_update_slice(x, row * 2 + 1, (i,))
        return x

    program = jaxprtool.trace(fun, jax.ShapeDtypeStruct((first + 8,), jnp.int8))
    assert program.apply("roll") is program


# --- random loops -----------------------------------------------------------------------------


def random_loop(seed):
    """Return a random loop that updates variables together, in turn or shifted; its arguments."""
    draw = random.Random(seed)
    count, steps = draw.choice([2, 3, 4]), draw.randint(4, 9)
    kind, updates = draw.choice(["at once", "in turn", "shifted"]), draw.random() < 0.4
    reads = [[draw.randrange(count) for _ in range(2)] for _ in range(count)]
    changed = draw.randrange(2 * steps)

    def step(x, y):
        return x * 0.5 + jnp.sin(y) - 0.1 * x

    def fun(*values):
        values, array = list(values), jnp.zeros((steps + 1, 4))
        for i in range(steps):
            if kind == "at once":
                values = [step(values[j], values[k]) for j, k in reads]
            elif kind == "in turn":
                for place, (j, k) in enumerate(reads):
                    values[place] = step(values[j], values[k])
            else:
                values = [*values[1:], step(*(values[j] for j in reads[0]))]
            if i == changed:
                values[0] = jnp.sort(values[0])
            if updates:
                array = array.at[i + 1].set(array[i] * 0.5 + values[0])
        return values, array

    return fun, tuple(a + i for i in range(count))


@pytest.mark.proof
def test_random_loops_compute_the_same():
    lengths = [rolled(fun, *args)[1] for fun, args in map(random_loop, range(4))]
    assert sum(map(bool, lengths)) > 2
