"""The overview of a program: the counts of `stats`, grouped by the user's names."""

import jax
import jax.numpy as jnp

import jaxprtool
from jaxprtool.analysis.stats import stats
from jaxprtool.commands.show.summary import overview

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


def test_arguments_and_results_are_grouped_by_the_users_names():
    groups = [(each.name, each.values, each.bytes, each.type) for each in found().arguments]
    assert groups == [("params", 3, 48 + 36 + 36, None), ("tokens", 1, 20, "i32[5]")]
    assert [each.name for each in found().outputs] == ["result['n']", "result['x']"]


def test_a_single_pytree_is_described_by_its_contents():
    groups = found(lambda params: model(params, jnp.zeros(5, jnp.int32)), PARAMS).arguments
    assert [(each.name, each.values) for each in groups] == [
        ("params['embedding']", 1),
        ("params['layers']", 2),
    ]


def test_a_long_list_is_not_expanded():
    (group,) = found(lambda xs: sum(xs), [jnp.ones(3)] * 20).arguments
    assert (group.name, group.values, group.bytes) == ("xs", 20, 240)


def test_a_body_counts_at_each_call_including_nested_ones():
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


def test_an_empty_program_has_an_empty_overview():
    nothing = overview(jaxprtool.trace(lambda: ()))
    assert nothing.arguments == nothing.outputs == nothing.bodies == nothing.lines == ()
