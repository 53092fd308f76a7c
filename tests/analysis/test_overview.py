"""What a program is at first sight: counts as `stats` has them, grouped as the user knows them."""

import jax
import jax.numpy as jnp

import jaxprtool
from jaxprtool.analysis.overview import overview
from jaxprtool.analysis.stats import stats

PARAMS = {"embedding": jnp.ones((4, 3)), "layers": [{"w": jnp.ones((3, 3))}] * 2}


@jax.jit
def dense(w, x):
    return jnp.tanh(x @ w)


def model(params, tokens):
    x = params["embedding"][tokens]
    for layer in params["layers"]:
        x = dense(layer["w"], x)
    return {"x": x, "n": tokens.sum()}


def found(fun=model, *args):
    return overview(jaxprtool.trace(fun, *(args or (PARAMS, jnp.zeros(5, jnp.int32)))))


def test_arguments_and_results_are_grouped_by_what_the_user_calls_them():
    groups = [(each.name, each.values, each.bytes, each.type) for each in found().arguments]
    assert groups == [("params", 3, 48 + 36 + 36, None), ("tokens", 1, 20, "i32[5]")]
    assert [each.name for each in found().outputs] == ["result['n']", "result['x']"]


def test_one_pytree_is_told_by_what_it_is_made_of():
    groups = found(lambda params: model(params, jnp.zeros(5, jnp.int32)), PARAMS).arguments
    assert [(each.name, each.values) for each in groups] == [
        ("params['embedding']", 1),
        ("params['layers']", 2),
    ]


def test_a_list_of_many_is_not_taken_apart():
    (group,) = found(lambda xs: sum(xs), [jnp.ones(3)] * 20).arguments
    assert (group.name, group.values, group.bytes) == ("xs", 20, 240)


def test_a_body_counts_at_each_call_and_those_within_it_too():
    def twice(x):
        return dense(PARAMS["layers"][0]["w"], dense(PARAMS["layers"][0]["w"], x))

    outer = jax.jit(twice)
    bodies = found(lambda x: outer(outer(x)), jnp.ones((2, 3))).bodies
    assert [(each.kind, each.name, each.calls, each.equations) for each in bodies] == [
        ("jit", "twice", 2, 6),
        ("jit", "dense", 4, 2),
    ]


def test_lines_add_up_to_the_equations_of_the_program():
    program = jaxprtool.trace(model, PARAMS, jnp.zeros(5, jnp.int32))
    lines = overview(program).lines
    assert sum(number for _, number in lines) == stats(program).equations
    assert [number for _, number in lines] == sorted((n for _, n in lines), reverse=True)


def test_a_program_of_nothing_has_nothing_to_tell():
    nothing = overview(jaxprtool.trace(lambda: ()))
    assert nothing.arguments == nothing.outputs == nothing.bodies == nothing.lines == ()
