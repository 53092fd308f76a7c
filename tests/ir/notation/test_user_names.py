"""Variables under the names of the user's source."""

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool.ir.equations import bodies, equations
from jaxprtool.ir.program import program_signature
from jaxprtool.render.terminal.listing import ShowOptions, listing
from jaxprtool.render.terminal.tree import Reader, tree
from tests.render.programs import PROGRAMS

PARAMS = [{"w": jnp.ones((3, 3)), "b": jnp.ones(3)} for _ in range(2)]
X = jnp.ones((2, 3))


def dense(layer, x):
    hidden = jnp.tanh(x @ layer["w"] + layer["b"])
    return hidden * 2


def net(params, x):
    for layer in params:
        x = dense(layer, x)
    low, high = jnp.split(x, [1], axis=1)
    scale = jnp.abs(low).sum()
    return high / scale


def shown(program, **options):
    return listing(program, ShowOptions(width=120, names=True, **options)).plain()


def bound(fun, *args):
    """Return the names that the top equations of a function bind, letters as `_`."""
    lines = shown(jaxprtool.trace(fun, *args), types=False, terse=True).splitlines()
    names = [line.split(" = ")[0].strip() for line in lines if " = " in line]
    return [name if len(name) > 2 else "_" for name in names]


def test_arguments_have_their_paths_and_values_their_names_in_the_source():
    text = shown(jaxprtool.trace(net, PARAMS, X))
    assert text.startswith("{ lambda ; params[0]['b']:f32[3] params[0]['w']:f32[3,3]")
    assert "dot_general[dimension_numbers=(([1], [0]), ([], []))" in text
    assert " x params[0]['w']" in text


def test_parts_of_an_expression_have_letters_and_copies_a_number():
    names = bound(net, PARAMS, X)
    assert [name for name in names if name != "_"] == [
        "hidden",
        "x_1",
        "hidden_1",
        "x_2",
        "low high",
        "scale",
    ]


def test_an_operand_of_an_augmented_assignment_has_a_letter():
    def fun(weights):
        weights /= weights.sum(-1, keepdims=True)
        return weights * 2

    assert bound(fun, X) == ["_", "_", "weights_1", "_"]


def test_bodies_have_the_names_of_their_parameters_and_captured_values():
    def run(params, xs):
        def cell(state, x):
            new = jnp.tanh(state @ params["w"] + x)
            return new, new

        return jax.lax.scan(cell, jnp.zeros(3), xs)

    text = shown(jaxprtool.trace(run, PARAMS[0], X), terse=True)
    assert "{ lambda ; params['w']:f32[3,3] state:f32[3] x:f32[3]. let" in text
    assert "new:f32[3] = tanh" in text


def test_the_arrays_of_a_model_have_the_same_names_inside_filter_jit():
    import equinox as eqx

    model = eqx.nn.Linear(3, 4, key=jax.random.key(0))
    program = jaxprtool.trace(eqx.filter_jit(lambda model, x: model(x)), model, jnp.ones(3))
    text = shown(program, terse=True)
    assert text.count("model.weight:f32[4,3] model.bias:f32[4]") == 2 and "dynamic_" not in text
    assert " model.weight x\n" in text


def test_values_of_a_backward_pass_have_letters():
    program = jaxprtool.trace(jax.grad(lambda p, x: net(p, x).sum()), PARAMS, X)
    assert shown(program).count("hidden:") <= 1


def test_names_with_underscores_are_kept():
    inner = jax.jit(lambda x: jnp.sin(jnp.cos(x)))

    def outer(inner_):
        inner__1 = inner(inner_)
        return inner(inner__1) + inner__1

    text = shown(jaxprtool.trace(outer, X))
    assert text.startswith("let lambda = { lambda ; x:f32[2,3]. let")
    assert text.count("inner__1:") == 1


def test_bodies_have_their_own_scopes():
    text = shown(jaxprtool.trace(lambda x, p: jax.jit(dense)(p, jnp.sin(x)), X, PARAMS[0]))
    assert text.startswith("{ lambda ; x:f32[2,3] p['b']") and "x_1" not in text
    assert "{ lambda ; layer['b']:f32[3] layer['w']:f32[3,3] x:f32[2,3]. let" in text


@pytest.mark.parametrize("name", PROGRAMS)
def test_variables_of_a_body_have_distinct_names(name):
    about = program_signature(PROGRAMS[name]())
    reader = Reader(about, ShowOptions(names=True))
    for jaxpr in {about.jaxpr, *(body for e in equations(about.jaxpr) for _, body in bodies(e))}:
        bound = [*jaxpr.constvars, *jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars)]
        names = [text for v in bound if (text := reader.name(v)) != "_"]
        assert len(set(names)) == len(names)


def test_the_tree_has_the_names_of_the_listing():
    lines = tree(jaxprtool.trace(net, PARAMS, X), ShowOptions(width=160, names=True)).plain()
    assert "── scale:f32[] = reduce_sum" in lines and "div high scale" in lines


def test_a_program_without_its_source_has_letters(tmp_path):
    path = tmp_path / "net.jaxpr"
    jaxprtool.write(jaxprtool.trace(net, PARAMS, X), path, source=False)
    text = shown(jaxprtool.read(path))
    assert "params[0]['w']" in text and "hidden" not in text
