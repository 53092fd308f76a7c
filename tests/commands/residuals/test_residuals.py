"""The residuals of a gradient: line, readers and cost of each, and the bytes under policies."""

import cProfile
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals

from jaxprtool import jaxcompat, residuals, trace
from jaxprtool.commands.residuals.residuals import passed_residuals
from jaxprtool.commands.residuals.table import recompute_text
from jaxprtool.errors import ArgumentsError
from jaxprtool.loading.argspec import read_args

W = np.ones((8, 8), np.float32)
X = np.ones((4, 8), np.float32)
START = "test_residuals.py:"


def net(w, x):
    hidden = checkpoint_name(jnp.tanh(x @ w), "hidden")

    def layer(y, _):
        return jnp.sin(y @ w), None

    return jax.lax.scan(layer, hidden, length=3)[0].sum()


def by_primitive(found):
    return {each.primitive or each.argument: each for each in found.residuals}


def test_residuals_agree_with_jax(capsys):
    found = residuals(trace(net, W, X))
    print_saved_residuals(net, W, X)
    theirs = re.findall(r"^(\w+\[[\d,]*\]) ", capsys.readouterr().out, re.MULTILINE)
    assert sorted(each.type for each in found.residuals) == sorted(theirs)
    assert found.total_bytes == sum(each.bytes for each in found.residuals)
    sizes = [each.bytes for each in found.residuals]
    assert sizes == sorted(sizes, reverse=True)


def test_each_residual_has_its_line_and_readers():
    found, start = by_primitive(residuals(trace(net, W, X))), net.__code__.co_firstlineno
    assert found["cos"].source.endswith(f"{START}{start + 4}")
    assert found["cos"].readers[0].primitive == "mul"
    weights = found["w"]
    assert weights.source == "" and weights.argument == "w" and weights.recompute == 0
    assert {each.primitive for each in weights.readers} == {"dot_general"}
    # Its product with x is read for the gradient of x alone.
    lines = [str(start + number) for number in (1, 4)]
    assert {each.source.rpartition(":")[2] for each in weights.readers} == set(lines[1:])
    both = by_primitive(residuals(trace(net, W, X), argnums=(0, 1)))
    assert {each.source.rpartition(":")[2] for each in both["w"].readers} == set(lines)


def test_the_cost_is_that_of_the_equations_between_a_residual_and_other_saved_values():
    found = by_primitive(residuals(trace(net, W, X)))
    product, elements = 2 * 4 * 8 * 8, 4 * 8
    # The cosine is computed from the carry of its iteration, which is saved.
    assert found["cos"].recompute == 3 * (product + elements)


def test_the_cost_is_unknown_if_that_of_an_equation_on_the_way_is():
    strange = jax.extend.core.Primitive("strange_of_residuals")
    strange.def_abstract_eval(lambda x: x)
    f = jax.custom_jvp(strange.bind)
    f.defjvp(lambda primals, tangents: (strange.bind(*primals), tangents[0]))

    def loss(x):
        body = jax.lax.scan(lambda y, _: (jnp.sin(y), jnp.exp(f(y))), x, length=2)[1]
        return jnp.cos(jax.jit(f)(x)).sum() + body.sum()

    found = residuals(trace(loss, X))
    costs = {each.primitive: recompute_text(each) for each in found.residuals}
    assert costs == {"cos": str(2 * X.size), "sin": "?", "exp": "?"}


def test_the_cost_of_values_on_an_unsaved_chain_counts_the_chain_once():
    def chain(w, x):
        for _ in range(3):
            x = jnp.tanh(x) * w + x
        return x.sum()

    found = residuals(trace(chain, W[0], W[0]))
    prices = sorted(each.recompute for each in found.residuals if each.primitive == "tanh")
    # Before each tanh there are a product and a sum of 8 elements, computed from saved values.
    assert prices == [8, 8 + 16, 8 + 32]


@pytest.mark.proof
def test_the_calls_for_the_residuals_of_a_loop_grow_with_its_body():
    def calls(rounds):
        def body(x, _):
            for _ in range(rounds):
                x = jnp.sin(x) * jnp.tanh(x)
            return x, None

        halves = trace(lambda x: jax.lax.scan(body, x, length=3)[0].sum(), X).apply("vjp")
        with cProfile.Profile() as profile:
            passed_residuals(halves["forward"], halves["backward"], {})
        return sum(entry.callcount for entry in profile.getstats())

    calls(5)
    assert calls(100) < 2.1 * calls(50)


def test_a_loop_may_start_with_a_python_number():
    def count(w):
        return jax.lax.scan(lambda c, x: (c * jnp.sin(x), None), 1.0, w)[0]

    (cosine,) = [r for r in residuals(trace(count, W[0])).residuals if r.primitive == "cos"]
    assert cosine.recompute == 8


def test_a_loop_may_stack_a_saved_number():
    def loss(x, ws):
        one = np.float32(1.0)
        c, ones = jax.lax.scan(lambda c, w: (jnp.sin(c * w), one), x, ws)
        return (jnp.sin(ws) * ones).sum() + c.sum()

    found = residuals(trace(loss, W[0], jnp.ones(4))).residuals
    assert [r.recompute for r in found if r.primitive == "cos" and "4," in r.type] == [64]


def test_a_policy_lists_dropped_and_saved_values():
    found = residuals(trace(net, W, X))
    named = "save_only_these_names('hidden')"
    assert "dots_saveable" in by_primitive(found)["cos"].policies
    assert found.policies["everything_saveable"] >= found.total_bytes
    assert found.policies["nothing_saveable"] == W.nbytes + X.nbytes
    assert found.policies[named] == W.nbytes + 2 * X.nbytes
    assert found.policies["dots_saveable"] > found.policies[named]


def test_a_value_saved_by_a_policy_has_its_name_and_primitive():
    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    found = residuals(trace(jax.checkpoint(net, policy=policy), W, X))
    (hidden,) = [each for each in found.residuals if each.name]
    assert hidden.name == "hidden" and hidden.primitive == "name"
    assert hidden.source.endswith(f"{START}{net.__code__.co_firstlineno + 1}")
    dots = jax.checkpoint(net, policy=jax.checkpoint_policies.dots_saveable)
    assert "dot_general" in by_primitive(residuals(trace(dots, W, X)))


def test_symbolic_sizes_have_costs_and_no_bytes():
    program = trace(lambda w, x: jnp.sin(x @ w).sum(), *read_args("f32[8,8], f32[n,8]")[0])
    found = residuals(program)
    assert found.total_bytes is None
    assert str(by_primitive(found)["cos"].recompute) == "136*n"


@pytest.mark.parametrize("fun", [jnp.sum, lambda x: x * 2])
def test_a_linear_function_has_no_residuals(fun):
    found = residuals(trace(fun, X))
    assert found.total_bytes == 0 and found.residuals == ()


def in_scan(w, x):
    body = jax.checkpoint(lambda y, _: (named_layer(w, y), None), policy=POLICY)
    return jax.lax.scan(body, x, length=3)[0].sum()


def named_layer(w, x):
    return jnp.sin(checkpoint_name(jnp.tanh(x @ w), "hidden"))


POLICY = jax.checkpoint_policies.save_only_these_names("hidden")


@jax.custom_vjp
def custom(w, x):
    return jnp.sin(x @ w)


custom.defvjp(
    lambda w, x: (jnp.sin(x @ w), (w, checkpoint_name(jnp.cos(x @ w), "cosine"), x)),
    lambda kept, g: ((kept[2].T @ (kept[1] * g)), (kept[1] * g) @ kept[0].T),
)


@pytest.mark.parametrize(
    "fun",
    [
        in_scan,
        lambda w, x: jax.checkpoint(in_scan, policy=POLICY)(w, x),
        lambda w, x: jax.checkpoint(
            lambda w, x: jax.checkpoint(named_layer, policy=POLICY)(w, x).sum(), policy=POLICY
        )(w, x),
        lambda w, x: jax.jit(jax.checkpoint(named_layer, policy=POLICY))(w, x).sum(),
        lambda w, x: jax.checkpoint(
            named_layer,
            policy=jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=["hidden"],
                names_which_can_be_offloaded=[],
                offload_src="device",
                offload_dst="pinned_host",
            ),
        )(w, x).sum(),
        lambda w, x: jax.checkpoint(
            named_layer,
            policy=jax.checkpoint_policies.save_any_names_but_these("other"),
        )(w, x).sum(),
        lambda w, x: jax.checkpoint(
            named_layer,
            policy=jax.checkpoint_policies.save_from_both_policies(
                POLICY, jax.checkpoint_policies.dots_saveable
            ),
        )(w, x).sum(),
    ],
)
def test_under_each_policy_a_value_has_its_name(fun):
    found = residuals(trace(fun, W, X)).residuals
    assert [each.primitive for each in found if each.name == "hidden"] == ["name"]
    line = named_layer.__code__.co_firstlineno + 1
    (hidden,) = [each for each in found if each.name]
    assert hidden.source.endswith(f"{START}{line}")


def test_readers_are_found_through_loops_and_rules():
    found = by_primitive(residuals(trace(lambda w, x: custom(w, x).sum(), W, X)))
    assert {each.primitive for each in found["w"].readers} == {"dot_general"}
    assert found["name"].name == "cosine" and found["name"].readers
    weights = by_primitive(residuals(trace(in_scan, W, X)))["w"]
    assert weights.readers[0].primitive == "dot_general"


@pytest.mark.parametrize("turned", [False, True])
def test_each_branch_that_computes_a_residual_has_its_own_cost(turned):
    def short(w, x):
        return jnp.exp(jnp.sum(w * x, 0))

    def long(w, x):
        return jnp.sin(x @ w).sum(0)

    branches = (long, short) if turned else (short, long)

    def loss(w, x):
        return jax.lax.cond(x[0, 0] > 0, *branches, w, x).sum()

    w = np.ones((8, 8), np.float32)
    found = by_primitive(residuals(trace(loss, w, w)))
    assert found["cos"].recompute == 2 * 8**3 + 64
    assert found["exp"].recompute == 64 + 8 * 7 + 8


def test_a_library_function_has_the_users_arguments():
    """`eqx.filter_jit` passes all arguments as one; their names tell them apart."""
    program = trace(lambda held: jnp.sin(held["x"] @ held["model"]).sum(), {"model": W, "x": X})
    names = {"held['model']": "model.weight", "held['x']": "x"}
    program = program.replace(arg_names=tuple(names[name] for name in program.arg_names))
    assert residuals(program).with_respect_to == ("model",)
    assert residuals(program, argnums=1).with_respect_to == ("x",)


def test_only_an_argument_without_floats_is_refused():
    def loss(state, key):
        return (jax.random.normal(key) * jnp.sin(state["w"])).sum() + state["step"]

    program = trace(loss, {"w": W, "step": 3}, jax.random.key(0))
    assert residuals(program).with_respect_to == ("state",)
    with pytest.raises(ArgumentsError, match=r"argument 1: key is key<fry>\[\]") as error:
        residuals(program, argnums=1)
    assert "0 (state)" in error.value.hint


def test_jax_splits_a_program_once_for_policies_that_answer_alike(monkeypatch):
    """Without products, all policies but the one that saves everything save nothing."""
    split, halves = [], jaxcompat.CheckpointedJvp.halves
    monkeypatch.setattr(
        jaxcompat.CheckpointedJvp, "halves", lambda *args: split.append(args) or halves(*args)
    )
    found = residuals(trace(lambda x: jnp.sum(jnp.sin(jnp.sin(x))), X), peaks=True)
    assert len(found.policies) == 4 and len(split) == 2
