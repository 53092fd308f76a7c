"""Repeated code: the number of copies, and its source."""

import textwrap

import jax
import jax.numpy as jnp
import pytest

from jaxprtool import trace
from jaxprtool.analysis.stats import count_equations
from jaxprtool.ir.frames import Frames
from jaxprtool.ir.repetition import SourceRange, repetition, source_range
from jaxprtool.loading.target import import_place
from jaxprtool.passes.loops.outline import Outline

X = jax.ShapeDtypeStruct((4,), jnp.float32)

MODEL = """
    import jax.numpy as jnp


    def norm(x):
        x = x - jnp.sum(x)
        x = x / jnp.sqrt(jnp.max(x))
        return x * jnp.exp(jnp.tanh(x))


    def layer(x):
        x = jnp.cos(norm(x))
        x = jnp.cumsum(x) * jnp.sin(x)
        x = jnp.log1p(jnp.cosh(norm(jnp.abs(x))))
        return x + jnp.exp(-x)


    def model(x, depth=6):
        for _ in range(depth):
            x = layer(x)
        return jnp.sum(x)


    def inline(x, depth=6):
        for _ in range(depth):
            x = jnp.cumsum(x) * jnp.sin(x)
            x = jnp.log1p(jnp.cosh(jnp.abs(x)))
            x = x + jnp.exp(-x)
        return jnp.sum(x)


    def sine(x):
        return jnp.sin(x)


    def written(x):
        y = sine(x)
        x = x * x * x * x * x * x * x * x * x * x * x * x * x * x * x * x * x * x * x * x
        return x, y
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "model.py"
    path.write_text(textwrap.dedent(MODEL))
    return import_place(str(path))


def analysed(fun, **options):
    """Return a program, the result of the pass, and the description of its repetition."""
    before = trace(fun, X)
    after = Outline(**options)(before)
    return before, after, repetition(after, before)


def rows(bodies, depth=0):
    for body in bodies:
        yield depth, body
        yield from rows(body.bodies, depth + 1)


def test_copies_and_the_rest_are_all_equations_of_the_program(model):
    before, after, found = analysed(model.model, equations=4)
    assert found.bodies and found.name == "model"
    assert found.equations == count_equations(before.apply("inline(force=True)"))
    assert found.equations == count_equations(after.apply("inline(force=True)"))
    covered = sum(body.copies * body.equations for body in found.bodies)
    assert covered + found.rest == found.equations
    assert sum(body.share for body in found.bodies) == pytest.approx(covered / found.equations)


def test_xla_compiles_each_marked_body_once_and_plain_ones_at_each_call(model):
    _, after, found = analysed(model.model, equations=4)
    shared = {}
    todo = [after.jaxpr.eqns]
    for eqns in todo:
        for eqn in eqns:
            if eqn.primitive.name == "jit" and id(eqn.params["jaxpr"].eqns) not in shared:
                shared[id(eqn.params["jaxpr"].eqns)] = len(eqn.params["jaxpr"].eqns)
                todo.append(eqn.params["jaxpr"].eqns)
    assert found.compiled == len(after.jaxpr.eqns) + sum(shared.values())
    assert found.compiled < found.equations / 2
    assert analysed(model.model, equations=4, mark="call")[2].compiled == found.compiled
    plain = analysed(model.model, equations=4, mark="plain")[2]
    assert plain.bodies == found.bodies
    assert plain.compiled == plain.equations == found.equations


def test_a_body_is_listed_below_each_caller_and_expanded_once():
    tail = jax.jit(lambda x: jnp.sin(x) * x)
    norm = jax.jit(lambda x: tail(jnp.exp(x)) + tail(x))
    layer = jax.jit(lambda x: norm(x) * norm(x + x))
    program = trace(lambda x: norm(layer(layer(jnp.cos(x)))), X)
    found = repetition(program, trace(jnp.cos, X))
    at = [(depth, body.copies, body.equations) for depth, body in rows(found.bodies)]
    assert at == [(0, 2, 14), (1, 4, 6), (2, 8, 2), (0, 1, 6)]
    assert found.rest == 1 and found.equations == 1 + 2 * 14 + 6
    assert [body.share for body in found.bodies] == [28 / 35, 6 / 35]


def test_a_body_has_the_lines_of_the_repeated_function(model):
    _, _, found = analysed(model.model, equations=20)
    (body,) = found.bodies
    assert body.copies == 6
    assert body.source == SourceRange(model.__file__, 12, 15)
    (looped,) = analysed(model.inline, equations=5)[2].bodies
    assert looped.source == SourceRange(model.__file__, 26, 28)


def test_a_body_with_one_line_has_that_line_even_for_a_single_call(model):
    found = source_range(trace(model.written, X).jaxpr.eqns, Frames())
    assert found == SourceRange(model.__file__, 38, 38)


def test_equations_without_source_have_no_lines():
    assert source_range([], Frames()) is None


def test_a_body_of_a_loop_counts_once_and_repetition_in_it_is_found(model):
    def looped(x):
        return jax.lax.fori_loop(0, 9, lambda i, x: model.model(x, 5) * x, x)

    before, _, found = analysed(looped, equations=20)
    (body,) = found.bodies
    assert body.copies == 5
    assert found.equations == count_equations(before.apply("inline(force=True)"))


def test_a_function_called_often_is_not_repetition_before_outlining():
    f = jax.jit(lambda x: jnp.sin(x) * jnp.exp(x))
    program = trace(lambda x: f(f(f(x))), X)
    found = repetition(program, program)
    assert found.bodies == () and found.compiled == found.equations == found.rest == 12


def test_an_already_outlined_program_is_described_again(model):
    _, after, found = analysed(model.model, equations=20)
    assert repetition(after, after) == found


def test_bodies_that_unfold_to_huge_programs_are_counted():
    def double(f):
        return jax.jit(lambda x: f(x) + f(x * 2))

    f = jax.jit(jnp.sin)
    for _ in range(50):
        f = double(f)
    program = trace(f, X)
    found = repetition(program, trace(jnp.sin, X))
    assert found.equations > 2**50 and found.compiled >= 2**50
    assert len(list(rows(found.bodies))) < 200
