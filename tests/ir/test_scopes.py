"""The scopes of equations: name scopes, functions, and the parts of a gradient."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxprtool import trace
from jaxprtool.ir.program import top_jaxpr
from jaxprtool.ir.scopes import ScopeCall, ScopeReader
from jaxprtool.jaxcompat.source_locations import UserFrame, source_infos
from tests.programs import sample_programs
from tests.programs.corpus import corpus, prove_corpus
from tests.programs.samples import sample_files


def parts(jaxpr):
    return ScopeReader().parts(top_jaxpr(jaxpr))


def tree(found):
    """Return the primitives of equations, and each scope as its name and contents."""
    return [
        (part.name, tree(part.parts)) if isinstance(part, ScopeCall) else part.primitive.name
        for part in found
    ]


def names(found, depth=99):
    """Return the names of scopes, nested."""
    return {
        part.name: names(part.parts, depth - 1) if depth else {}
        for part in found
        if isinstance(part, ScopeCall)
    }


def with_scopes(*scopes):
    """Return a jaxpr with an equation in each of these name scopes, of unknown functions."""
    jaxpr = top_jaxpr(jax.make_jaxpr(lambda x: [jnp.sin(x) for _ in scopes])(1.0))
    infos = source_infos([((), scope) for scope in scopes])
    eqns = [e.replace(source_info=i) for e, i in zip(jaxpr.eqns, infos, strict=True)]
    return jaxpr.replace(eqns=eqns)


def layer(x, w):
    hidden = jnp.sin(x) @ w
    return normalised(hidden) + x


def normalised(x):
    centred = x - x.sum()
    return centred / 2.0


def model(ws, x):
    for w in ws:
        x = layer(x, w)
    return jnp.exp(x)


WEIGHTS = [jnp.ones((4, 4))] * 3


def test_name_scopes_are_nested():
    jaxpr = with_scopes("", "GPT", "GPT/Dense_0", "GPT/Dense_0", "GPT/Dense_1", "GPT/Dense_0/act")
    assert tree(parts(jaxpr)) == [
        "sin",
        ("GPT", ["sin", ("Dense_0", ["sin", "sin"]), "sin", "sin"]),
    ]


def test_a_gradient_has_two_parts():
    inside = "transpose(jvp(Net))/Layer_0"
    jaxpr = with_scopes("jvp(Net)", "jvp(Net)/Layer_0", inside, inside, "transpose(jvp())")
    assert tree(parts(jaxpr)) == [
        ("forward/Net", ["sin", "sin"]),
        ("backward", [("Net/Layer_0", ["sin", "sin"]), "sin"]),
    ]


def test_vmap_is_not_a_scope_and_an_inner_gradient_is_one():
    jaxpr = with_scopes("vmap(a)/b", "vmap(a)/b", "a/jvp(vmap(c))", "a/jvp(vmap(c))")
    assert names(parts(jaxpr)) == {"a": {"b": {}, "forward/c": {}}}


def test_a_function_is_a_scope_and_its_calls_are_distinguished():
    found = parts(trace(model, WEIGHTS, jnp.ones(4)))
    assert names(found) == {f"layer #{i}": {"normalised": {}} for i in (1, 2, 3)}
    assert tree(found)[-1] == "exp"
    assert tree(found)[0][1][0] == "sin" and tree(found)[0][1][-1] == "add"


def test_the_backward_pass_numbers_calls_like_the_forward_pass():
    def loss(ws, x):
        return model(ws, x).sum()

    found = parts(trace(jax.grad(loss), WEIGHTS, jnp.ones(4)))
    forward, backward = (names(found)[part]["model"] for part in ("forward", "backward"))
    assert list(forward) == ["layer #1", "layer #2", "layer #3"]
    assert list(backward) == ["layer #3", "layer #2", "layer #1"]


def test_iterations_of_a_loop_in_a_function_are_one_call():
    def rounds(x):
        for _ in range(3):
            x = jnp.sin(x)
            x = x * 2.0
        return x

    def twice(x):
        x = rounds(x)
        return rounds(x) + 1.0

    found = tree(parts(trace(twice, 1.0)))
    assert found == [("rounds #1", ["sin", "mul"] * 3), ("rounds #2", ["sin", "mul"] * 3), "add"]


def test_a_named_scope_is_nested_in_the_functions_that_call_it():
    def net(x):
        with jax.named_scope("net"):
            return jnp.cos(jnp.sin(x))

    def two(x):
        return net(x) * net(x + 1.0)

    assert tree(parts(trace(two, 1.0))) == [
        ("net #1", ["sin", "cos"]),
        "add",
        ("net #2", ["sin", "cos"]),
        "mul",
    ]


def test_library_functions_that_open_a_name_scope_are_not_scopes():
    library = "/home/me/.venv/lib/python3.12/site-packages/haiku/module.py"
    loss = UserFrame("/home/me/model.py", 3, "loss", 4, 3, 4)
    wrapped = UserFrame(library, 7, "wrapped", 0, 7, 0)
    inside = [loss, wrapped, UserFrame(library, 9, "ResNet.__call__", 0, 9, 0)]
    jaxpr = with_scopes("res_net", "res_net/logits", "")
    places = [(inside, "res_net"), (inside, "res_net/logits"), ([loss], "")]
    eqns = [e.replace(source_info=i) for e, i in zip(jaxpr.eqns, source_infos(places), strict=True)]
    assert tree(parts(jaxpr.replace(eqns=eqns))) == [("res_net", ["sin", "sin"]), "sin"]


def test_a_scope_around_calls_is_one():
    def f(x):
        with jax.named_scope("block"):
            x = normalised(x)
            x = normalised(x * 2.0)
        return x + 1.0

    assert names(parts(trace(f, jnp.ones(4)))) == {"block": {}}


def test_equations_of_one_function_or_without_a_location_have_no_scope():
    assert tree(parts(trace(normalised, jnp.ones(3)))) == ["reduce_sum", "sub", "div"]
    assert tree(parts(with_scopes("", ""))) == ["sin", "sin"]


def flat(found):
    """Return the equations of a tree. Check that names are unique and no scope is redundant."""
    scopes = [part for part in found if isinstance(part, ScopeCall)]
    assert len({scope.name for scope in scopes}) == len(scopes)
    assert not (len(found) == 1 and scopes)
    for part in found:
        yield from flat(part.parts) if isinstance(part, ScopeCall) else [part]


def check(jaxpr):
    found = parts(jaxpr)
    if len(found) == 1 and isinstance(found[0], ScopeCall):
        found = found[0].parts
    assert list(map(id, flat(found))) == list(map(id, top_jaxpr(jaxpr).eqns))


@pytest.mark.sweep
@pytest.mark.parametrize("file", sample_files())
def test_no_equation_of_a_sample_is_lost_or_moved(file):
    for sample in sample_programs(file):
        check(sample.program())


@pytest.mark.proof
def test_no_equation_of_a_random_program_is_lost_or_moved():
    def prove(number, case):
        with case.setting():
            check(case.program())

    prove_corpus(5, prove, partial(corpus, 10))  # not all, which take three seconds to draw


def test_a_function_called_forward_is_not_the_forward_part():
    def forward(w, x):
        return jnp.tanh(x @ w)

    def loss(w, x):
        return forward(w, x).sum()

    def step(w, x):
        return w - jax.grad(loss)(w, x) + forward(w, x)

    found = names(parts(trace(step, jnp.ones((4, 4)), jnp.ones((4, 4)))))
    assert set(found) == {"forward/loss", "backward/loss", "forward()"}
