"""Why a gradient is missing, zero or NaN, with the responsible line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxprtool
from jaxprtool import why_gradient
from jaxprtool.errors import ArgumentsError, PointError, UnsupportedError
from tests.share import first_and_proofs

ones = jnp.ones(3)


@jax.custom_vjp
def mute(w):
    return w * 2


mute.defvjp(lambda w: (w * 2, None), lambda _, ct: (ct * 0,))


@jax.custom_vjp
def silent(w):
    return w * 2


silent.defvjp(lambda w: (w * 2, None), lambda _, ct: (None,))


def looped(w):
    def step(carry, i):
        return jnp.where(i == 2, carry * 0 + 1, carry * 2), None

    return lax.scan(step, w, jnp.arange(5))[0].sum()


def vq(w):
    codes = jnp.arange(12.0).reshape(4, 3)
    nearest = codes[jnp.argmin(jnp.square(codes - w).sum(-1))]
    return jnp.square(nearest).sum()


def straight(w):
    return (w + lax.stop_gradient(jnp.round(w) - w)).sum()


#: Functions of one argument, its value, the kind of the gradient, and the responsible operations.
CASES = {
    "round": (lambda w: jnp.round(w).sum(), ones, "zero", {"round"}),
    "argmin": (vq, ones, "zero", {"argmin"}),
    "cast": (lambda w: w.astype(int).astype(float).sum(), ones, "zero", {"convert_element_type"}),
    "silent": (lambda w: silent(w).sum(), ones, "zero", {"silent"}),
    "straight through": (straight, ones, "nonzero", {"round", "stop_gradient"}),
    "smooth": (lambda w: jnp.tanh(w).sum(), ones, "nonzero", set()),
    "integer": (lambda w: (w * 2.0).sum(), jnp.arange(3), "integer", set()),
    "unused": (lambda w: jnp.float32(1), ones, "unused", set()),
    "relu": (lambda w: jax.nn.relu(w - 9).sum(), ones, "vanishing", {"relu"}),
    "maximum": (lambda w: jnp.maximum(w, 9.0).sum(), ones, "vanishing", {"max"}),
    "where": (lambda w: jnp.where(w > 9, w, 1.0).sum(), ones, "vanishing", {"select_n"}),
    "factor": (lambda w: (w * (ones - 1)).sum(), ones, "vanishing", {"mul"}),
    "branch": (
        lambda w: lax.cond(w[0] > 9, jnp.sum, lambda _: 1.0, w),
        ones,
        "vanishing",
        {"cond"},
    ),
    "iteration": (looped, ones, "vanishing", {"mul", "select_n"}),
    "rule": (lambda w: mute(w).sum(), ones, "vanishing", {"mul"}),
    "remat": (jax.checkpoint(lambda w: jax.nn.relu(w - 9).sum()), ones, "vanishing", {"relu"}),
    "index": (lambda w: w[jnp.array([5])].sum(), ones, "vanishing", {"gather"}),
    "cancel": (lambda w: (w - w).sum(), ones, "vanishing", {"add_any"}),
    "norm": (lambda w: jnp.linalg.norm(w), ones * 0, "NaN", {"sqrt"}),
    "sqrt": (lambda w: jnp.sqrt(w).sum(), ones * 0, "infinity", {"sqrt"}),
    "double where": (lambda w: jnp.where(w > 0, jnp.log(w), 0).sum(), ones * 0, "NaN", {"log"}),
    "division": (lambda w: (w / jnp.sum(w)).sum(), ones * 0, "NaN", {"div"}),
}


@pytest.mark.parametrize("name", first_and_proofs(CASES))
def test_the_answer_agrees_with_jax_and_names_the_responsible_operation(name):
    fun, value, kind, operations = CASES[name]
    answer = why_gradient(jaxprtool.trace(fun, value), "w", (value,))
    (group,) = answer.groups
    assert group.kind == kind
    assert {each.forward or each.primitive for each in group.causes} == operations
    assert all("test_why_gradient.py:" in each.source for each in group.causes)
    gradient = np.asarray(jax.grad(fun, allow_int=True)(value))
    if kind in ("zero", "unused", "vanishing"):
        assert not gradient.any()
    elif kind != "integer":
        assert np.isnan(gradient).any() == (kind == "NaN")
        np.testing.assert_allclose(group.norm, np.linalg.norm(gradient), rtol=1e-5)


def test_the_responsible_iteration_is_named():
    def fun(w):
        return lax.scan(lambda c, x: (c + jnp.sqrt(x), None), jnp.float32(0), w)[0]

    w = jnp.arange(4.0)[::-1]
    (cause,) = why_gradient(jaxprtool.trace(fun, w), "w", (w,)).groups[0].causes
    assert cause.forward == "sqrt" and cause.iteration == (3,)
    assert "the derivative of sqrt is infinite at 0" in cause.reason


def test_leaves_with_the_same_answer_are_folded():
    def loss(params, x):
        hidden = jnp.round(params["a"]) + jnp.round(params["b"]) + params["c"]
        return {"loss": (hidden * x).sum(), "other": jnp.sin(params["d"])}

    params = dict.fromkeys("abcd", ones)
    answer = why_gradient(jaxprtool.trace(loss, params, ones), "params", (params, ones))
    assert answer.result == "result['loss']" and answer.value == 9.0
    assert [(g.kind, g.arguments) for g in answer.groups] == [
        ("zero", ("params['a']", "params['b']")),
        ("nonzero", ("params['c']",)),
        ("missing", ("params['d']",)),
    ]
    missing = answer.groups[2]
    assert missing.reaches == ("result['other']",)
    assert [each.primitive for each in missing.causes] == ["sin"]


def test_a_result_can_be_selected_and_must_be_a_real_scalar():
    program = jaxprtool.trace(lambda w: (w.sum(), jnp.sin(w).max(), w, w.sum() * 1j), ones)
    with pytest.raises(ArgumentsError, match="2 scalar results") as error:
        why_gradient(program, "w")
    assert error.value.hint == "choose one with --to: result[0], result[1]"
    assert why_gradient(program, "w", (ones,), to="result[1]").groups[0].kind == "nonzero"
    for to in ("[2]", "[3]"):
        with pytest.raises(ArgumentsError, match="one real number"):
            why_gradient(program, "w", to=to)
    with pytest.raises(ArgumentsError, match="no result is one real number"):
        why_gradient(jaxprtool.trace(jnp.sin, ones), "x")
    with pytest.raises(PointError, match="no argument 'v'"):
        why_gradient(program, "v", to="[0]")


def test_a_while_loop_has_no_gradient_in_reverse_mode():
    def fun(w):
        return lax.while_loop(lambda c: c.sum() < 9, lambda c: c * 2, w).sum()

    with pytest.raises(UnsupportedError):
        why_gradient(jaxprtool.trace(fun, ones), "w", (ones,))


def test_keyword_arguments_and_random_inputs():
    program = jaxprtool.trace(lambda x, *, w: (x * jnp.sin(w)).sum(), ones, w=ones)
    assert why_gradient(program, "w").groups[0].kind == "nonzero"


def test_prints_happen_once(capfd):
    def fun(w):
        jax.debug.print("seen {}", w.sum())
        return jax.nn.relu(w - 9).sum()

    answer = why_gradient(jaxprtool.trace(fun, ones), "w", (ones,))
    jax.effects_barrier()
    assert answer.groups[0].kind == "vanishing"
    assert capfd.readouterr().out.count("seen") == 1


def test_a_whole_training_step_is_differentiated_by_its_loss():
    def step(params, x):
        def loss(params):
            return jnp.square(jnp.tanh(x @ params["w"]) * jnp.round(params["s"])).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = {"w": jnp.ones((3, 3)), "s": ones}
    answer = why_gradient(jaxprtool.trace(step, params, ones), "params", (params, ones))
    assert answer.result == "result[1]"
    assert [(g.kind, g.arguments) for g in answer.groups] == [
        ("zero", ("params['s']",)),
        ("nonzero", ("params['w']",)),
    ]


@pytest.mark.parametrize("stop", [False, True])
def test_a_gradient_names_the_expressions_that_it_comes_from_if_they_are_several(stop):
    def value(w, x):
        return jnp.tanh(x @ w).sum()

    def loss(w, x, following):
        target = 1.0 + 0.9 * value(w, following)
        return jnp.square((lax.stop_gradient(target) if stop else target) - value(w, x))

    (group,) = why_gradient(jaxprtool.trace(loss, ones, ones, 2 * ones), "w").groups
    codes = [use.code for use in group.uses]
    assert codes == ([] if stop else ["value(w, following)", "value(w, x)"])
