"""Variables inside loops and branches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxprtool import jaxcompat, nest, sow, trace, unzip, variable
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.equations import equations
from jaxprtool.passes.unzip import UnzipError
from tests.programs.init_apply import primitives, unzips
from tests.share import first_and_proofs

KEY = jax.random.key(0)
X = jnp.linspace(-1.0, 1.0, 3)


def only(program, primitive: str):
    """Return the only equation of a primitive, at any depth."""
    eqns = equations(jaxcompat.open_jaxpr(program.jaxpr))
    (eqn,) = (e for e in eqns if e.primitive.name == primitive)
    return eqn


def shapes(tree):
    return jax.tree.map(jnp.shape, tree)


def layer(key, x):
    w = variable(jax.random.normal(key, (3, 3)), name="w")
    return jnp.tanh(x @ w)


# --- scan ---------------------------------------------------------------------------------------


@pytest.mark.proof
def test_a_scan_over_layers_is_a_scan_over_stacked_variables():
    def f(key, x):
        keys = jax.random.split(key, 4)
        return lax.scan(lambda x, key: (layer(key, x), x.sum()), x, keys)

    init, apply = unzips(f, KEY, X, count=1)
    variables = init(KEY)
    assert shapes(variables) == {"w": (4, 3, 3)}
    expected = [jax.random.normal(key, (3, 3)) for key in jax.random.split(KEY, 4)]
    np.testing.assert_array_equal(variables["w"], jnp.stack(expected))
    scan = only(apply, "scan")
    assert scan.params["length"] == 4
    assert [v.aval.shape for v in scan.invars] == [(3,), (4, 3, 3)]
    assert not primitives(apply)["random_bits"] and not primitives(init)["tanh"]


@pytest.mark.proof
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "length, unroll", first_and_proofs([(5, 2), (0, 1), (1, 1), (5, 1), (5, True)])
)
def test_scans_of_any_length_direction_and_unrolling(length, unroll, reverse):
    def f(key, x):
        def body(carry, xs):
            key, x = xs
            w = variable(jax.random.normal(key, (3,)), name="w")
            return carry * w + x, carry + w

        keys = jax.random.split(key, length)
        return lax.scan(body, x.sum(0), (keys, x), reverse=reverse, unroll=unroll)

    init, apply = unzips(f, KEY, jnp.arange(3.0 * length).reshape(length, 3), count=1)
    assert shapes(init(KEY)) == {"w": (length, 3)}
    params, original = (
        only(apply, "scan").params,
        only(trace(f, KEY, jnp.ones((length, 3))), "scan"),
    )
    assert all(params[k] == original.params[k] for k in ("reverse", "unroll", "length"))


@pytest.mark.proof
def test_nested_scans_stack_twice_outer_axis_first():
    def f(key, x):
        def inner(x, key):
            return layer(key, x), None

        def outer(x, key):
            b = variable(jax.random.normal(key, (3,)), name="b")
            return lax.scan(inner, x + b, jax.random.split(key, 2))

        return lax.scan(outer, x, jax.random.split(key, 4))[0]

    init, _ = unzips(f, KEY, X, count=2)
    variables = init(KEY)
    assert shapes(variables) == {"b": (4, 3), "w": (4, 2, 3, 3)}
    key = jax.random.split(jax.random.split(KEY, 4)[3], 2)[1]
    np.testing.assert_array_equal(variables["w"][3, 1], jax.random.normal(key, (3, 3)))


@pytest.mark.proof
def test_a_carried_key_is_carried_in_init_only():
    def f(key, x):
        def body(carry, _):
            key, x = carry
            key, now = jax.random.split(key)
            return (key, layer(now, x)), None

        return lax.scan(body, (key, x), length=3)[0][1]

    init, apply = unzips(f, KEY, X, count=1)
    assert [v.aval.shape for v in only(apply, "scan").outvars] == [(3,)]
    assert not any(jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key) for v in apply.jaxpr.invars)
    assert primitives(init)["dot_general"] == 0


def test_a_constant_key_gives_each_iteration_the_same_value():
    def f(key, x):
        return lax.scan(lambda x, _: (layer(key, x), None), x, length=3)[0]

    init, _ = unzips(f, KEY, X, count=1)
    w = init(KEY)["w"]
    np.testing.assert_array_equal(w, jnp.stack([w[0]] * 3))


@pytest.mark.proof
def test_a_variable_from_constants_in_a_loop_is_stacked():
    def f(key, x):
        return lax.scan(lambda x, _: (x + variable(jnp.ones(3), name="b"), None), x, length=2)[0]

    init, apply = unzips(f, KEY, X, count=1)
    assert shapes(init(KEY)) == {"b": (2, 3)}
    np.testing.assert_allclose(apply({"b": jnp.array([[1.0], [10.0]]) * jnp.ones(3)}, X), X + 11)


@pytest.mark.proof
def test_a_value_that_is_late_because_of_the_carry_is_not_a_variable():
    def f(key, x):
        def body(carry, _):
            sown = variable(carry, name="c")
            return sown * x, sown

        return lax.scan(body, jnp.ones(3), length=3)

    _, apply = unzips(f, KEY, X, count=0)
    assert primitives(apply)["sow"] == 1


@pytest.mark.proof
def test_a_variable_may_start_from_that_of_the_previous_iteration():
    def f(key, x):
        def body(carry, _):
            scale, x = carry
            scale = variable(scale * 2, name="scale")
            return (scale, x * scale), None

        start = jax.random.uniform(key)
        return lax.scan(body, (start, x), length=3)[0][1]

    init, apply = unzips(f, KEY, X, count=1)
    start = jax.random.uniform(KEY)
    np.testing.assert_allclose(init(KEY)["scale"], start * jnp.array([2.0, 4.0, 8.0]), rtol=1e-6)
    np.testing.assert_allclose(apply({"scale": jnp.array([1.0, 3.0, 5.0])}, X), 15 * X)


def test_a_variable_that_is_a_key_is_stacked():
    def f(key, x):
        def body(x, key):
            return x * jax.random.uniform(variable(key, name="key")), None

        return lax.scan(body, x, jax.random.split(key, 2))[0]

    init, _ = unzips(f, KEY, X, count=1)
    assert init.out_avals[0].dtype == KEY.dtype and init.out_avals[0].shape == (2,)


@pytest.mark.proof
def test_early_results_of_a_scan_are_in_init_only():
    def f(key, x):
        def body(x, key):
            noise = jax.random.normal(key, (3,))
            return layer(key, x), noise

        x, noise = lax.scan(body, x, jax.random.split(key, 2))
        return x + variable(noise.sum(0), name="mean")

    init, apply = unzips(f, KEY, X, count=2)
    assert shapes(init(KEY)) == {"w": (2, 3, 3), "mean": (3,)}
    assert primitives(apply)["random_bits"] == 0


@pytest.mark.proof
def test_append_and_scopes_in_a_scan():
    def f(key, x):
        def body(x, key):
            for _ in range(2):
                x = x * sow(jax.random.uniform(key), tag="variable", name="s", mode="append")
            return nest(layer, scope="layer")(key, x), None

        x = x * sow(jnp.ones(3), tag="variable", name="s", mode="append")
        return lax.scan(body, x, jax.random.split(key, 4))[0]

    init, _ = unzips(f, KEY, X, count=4)
    assert shapes(init(KEY)) == {"s": [(3,), (4,), (4,)], "layer": {"w": (4, 3, 3)}}


def test_clobber_inside_a_loop_is_refused():
    def f(key, x):
        def body(x, key):
            return x * sow(jax.random.uniform(key), tag="variable", name="s", mode="clobber"), None

        return lax.scan(body, x, jax.random.split(key, 4))[0]

    with pytest.raises(UnsupportedError, match=r"'s'.*clobber.*scan at .*test_control_flow.py:"):
        unzip(f)(KEY, X)


def test_a_name_in_a_loop_and_after_it_is_refused():
    def f(key, x):
        x, _ = lax.scan(lambda x, key: (layer(key, x), None), x, jax.random.split(key, 2))
        return layer(key, x)

    with pytest.raises(UnzipError, match="Cannot use duplicate variable name: w"):
        unzip(f)(KEY, X)


@pytest.mark.proof
def test_gradients_of_a_scanned_stack_are_those_of_the_function():
    def net(weights, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    def f(key, x):
        return lax.scan(lambda x, key: (layer(key, x), None), x, jax.random.split(key, 3))[0]

    init, apply = unzip(f)(KEY, X)
    variables = init(KEY)
    found = jax.jit(jax.grad(lambda v: apply(v, X).sum()))(variables)
    expected = jax.grad(lambda w: net(w, X).sum())(variables["w"])
    np.testing.assert_allclose(found["w"], expected, rtol=1e-5)


@pytest.mark.proof
def test_init_is_vmapped_over_keys_with_loops_in_it():
    def f(key, x):
        return lax.scan(lambda x, key: (layer(key, x), None), x, jax.random.split(key, 3))[0]

    init, apply = unzip(f)(KEY, X)
    keys = jax.random.split(KEY, 2)
    many = jax.jit(jax.vmap(init))(keys)
    out = jax.vmap(apply, in_axes=(0, None))(many, X)
    np.testing.assert_allclose(out[1], f(keys[1], X), rtol=1e-6)


# --- while and fori_loop ------------------------------------------------------------------------


def countdown(key, x):
    """A while loop whose counter is deep in the carry, counts down, and is not an int32."""

    def body(state):
        (x, (count, key)) = state
        return layer(jax.random.fold_in(key, count), x), (count - 2, key)

    start = (x, (jnp.uint8(7), key))
    return lax.while_loop(lambda state: state[1][0] > 1, body, start)[0]


def jitted_bounds(key, x):
    @jax.jit
    def run(key, x):
        def body(i, x):
            return layer(jax.random.fold_in(key, i), x)

        return lax.fori_loop(jnp.int32(1), jnp.int32(2) + 2, body, x)

    return run(key, x)


LOOPS = {
    "literal bounds": lambda key, x: lax.fori_loop(
        0, 3, lambda i, x: layer(jax.random.fold_in(key, i), x), x
    ),
    "bounds that are arrays": lambda key, x: lax.fori_loop(
        jnp.int32(2), jnp.int32(5), lambda i, x: layer(jax.random.fold_in(key, i), x), x
    ),
    "bounds computed from a shape": lambda key, x: lax.fori_loop(
        0, jnp.int32(x.shape[0]), lambda i, x: layer(jax.random.fold_in(key, i), x), x
    ),
    "bounds in a jit": jitted_bounds,
    "a counter deep in the carry": countdown,
}


@pytest.mark.parametrize("name", first_and_proofs(LOOPS))
def test_a_loop_of_static_length_is_a_scan(name):
    init, apply = unzips(LOOPS[name], KEY, X, count=1)
    assert shapes(init(KEY)) == {"w": (3, 3, 3)}
    assert primitives(apply)["while"] == 0 and primitives(apply)["scan"] == 1


def test_a_condition_that_is_more_than_a_counter_comparison():
    def f(key, x):
        def more(state):
            count, total, _ = state
            return (count < 10) & (total < 6)

        def body(state):
            count, total, x = state
            return count + 1, total + count, layer(jax.random.fold_in(key, count), x)

        return lax.while_loop(more, body, (0, 0, x))

    init, _ = unzips(f, KEY, X, count=1)
    assert shapes(init(KEY)) == {"w": (4, 3, 3)}


@pytest.mark.proof
def test_a_loop_that_never_runs():
    def f(key, x):
        return lax.while_loop(lambda s: s[0] < 0, lambda s: (s[0] + 1, layer(key, s[1])), (0, x))[1]

    init, apply = unzips(f, KEY, X, count=1)
    assert shapes(init(KEY)) == {"w": (0, 3, 3)}
    np.testing.assert_array_equal(apply(init(KEY), X), X)


@pytest.mark.proof
def test_a_static_loop_inside_a_scan_and_vice_versa():
    def f(key, x):
        def inner(i, x):
            return layer(jax.random.fold_in(key, i), x)

        def outer(x, _):
            return lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, inner(*s)), (0, x))[1]

        def body(x, _):
            return outer(x, None), None

        x, _ = lax.scan(body, x, length=3)

        def last(state):
            count, x = state
            x, _ = lax.scan(lambda x, k: (nest(layer, scope="b")(k, x), None), x, keys)
            return count + 1, x

        keys = jax.random.split(key, 4)
        return lax.while_loop(lambda s: s[0] < 2, last, (0, x))[1]

    init, _ = unzips(f, KEY, X, count=2)
    assert shapes(init(KEY)) == {"w": (3, 2, 3, 3), "b": {"w": (2, 4, 3, 3)}}


@pytest.mark.proof
def test_a_loop_without_variables_may_have_any_length():
    def f(key, x):
        w = variable(jax.random.normal(key, (3,)), name="w")
        return lax.while_loop(lambda x: (x < 5).any(), lambda x: x + jnp.abs(w) + 1, x)

    _, apply = unzips(f, KEY, X, count=1, gradients="forward")
    assert primitives(apply)["while"] == 1


@pytest.mark.proof
def test_a_loop_that_depends_on_the_key_only_is_in_init():
    def f(key, x):
        w = lax.while_loop(lambda w: w < 5, lambda w: w * 2, 1 + jax.random.uniform(key))
        return variable(w, name="w") * x

    init, apply = unzips(f, KEY, X, count=1)
    assert primitives(init)["while"] == 1 and primitives(apply)["while"] == 0


REFUSED = {
    "depends on values that are not constant": lambda key, x: lax.while_loop(
        lambda s: s[0].sum() < 5, lambda s: (s[0] + 1, layer(key, s[1])), (x, x)
    ),
    "not constant": lambda key, x: lax.fori_loop(
        0, x.sum().astype(int), lambda i, x: layer(key, x), x
    ),
    "depends on a variable": lambda key, x: lax.while_loop(
        lambda s: s[0] < 5,
        lambda s: (s[0] + variable(jax.random.uniform(key), name="w"), s[1]),
        (0.0, x),
    ),
    "a variable is sown in its condition": lambda key, x: lax.while_loop(
        lambda s: s < variable(5, name="n"), lambda s: s + 1, 0
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_loop_of_unknown_length_with_variables_is_refused_with_the_reason(why):
    with pytest.raises(UnsupportedError, match=why) as caught:
        unzip(REFUSED[why])(KEY, X)
    assert "while at" in caught.value.message
    assert "test_control_flow.py:" in caught.value.message
    assert caught.value.hint


def test_a_loop_whose_length_depends_on_the_key_is_refused():
    def f(key, x):
        count = jax.random.randint(key, (), 1, 4)
        return lax.fori_loop(0, count, lambda i, x: layer(jax.random.fold_in(key, i), x), x)

    with pytest.raises(UnsupportedError, match="while at"):
        unzip(f)(KEY, X)


def test_a_late_value_sown_in_an_endless_loop_is_ignored():
    def f(key, x):
        w = variable(jax.random.normal(key, (3,)), name="w")

        def body(x):
            return sow(x + jnp.abs(w) + 1, tag="seen", name="x", mode="clobber")

        return lax.while_loop(lambda x: (x < 5).any(), body, x)

    _, apply = unzips(f, KEY, X, count=1, gradients="forward")
    assert primitives(apply)["sow"] == 1


# --- cond and switch ----------------------------------------------------------------------------


@pytest.mark.proof
def test_variables_of_both_branches_are_returned_and_the_selected_ones_used():
    def f(key, x, flag):
        return lax.cond(
            flag,
            lambda x: x * variable(jax.random.normal(key, (3,)), name="a"),
            lambda x: x + variable(jax.random.uniform(key, (3,)), name="b"),
            x,
        )

    for flag in True, False:
        init, apply = unzips(f, KEY, X, flag, count=2)
        variables = init(KEY)
        assert shapes(variables) == {"a": (3,), "b": (3,)}
        out = apply({"a": 2 * jnp.ones(3), "b": 5 * jnp.ones(3)}, X, flag)
        np.testing.assert_allclose(out, 2 * X if flag else X + 5)
    assert primitives(apply)["cond"] == 1 and primitives(init)["cond"] == 0


@pytest.mark.parametrize("index", first_and_proofs([-1, 0, 1, 2, 9]))
def test_switch_with_variables_in_some_branches(index):
    def f(key, x, i):
        branches = [
            lambda x: layer(key, x),
            jnp.sin,
            lambda x: x * variable(jax.random.uniform(key), name="s") + variable(1.0, name="t"),
        ]
        return lax.switch(i, branches, x)

    init, _ = unzips(f, KEY, X, jnp.int32(index), count=3)
    assert shapes(init(KEY)) == {"w": (3, 3), "s": (), "t": ()}


def test_a_predicate_that_is_a_variable():
    def f(key, x):
        flag = variable(jax.random.uniform(key) > 2, name="flag")
        return lax.cond(flag, lambda x: layer(key, x), jnp.sin, x)

    init, apply = unzips(f, KEY, X, count=2)
    variables = init(KEY) | {"flag": jnp.array(True)}
    np.testing.assert_allclose(apply(variables, X), layer(KEY, X), rtol=1e-6)


@pytest.mark.proof
def test_a_predicate_that_is_constant():
    def f(key, x):
        return lax.cond(jnp.argmax(jnp.ones(3)) == 0, lambda x: layer(key, x), jnp.sin, x)

    unzips(f, KEY, X, count=1)


def test_a_predicate_that_depends_on_the_key_is_refused():
    def f(key, x):
        flag = jax.random.uniform(key) > 0.5
        return lax.cond(flag, lambda x: layer(key, x), jnp.sin, x)

    with pytest.raises(UnzipError, match=r"do not cut dependence graph.*key.*cond at") as caught:
        unzip(f)(KEY, X)
    assert "test_control_flow.py:" in caught.value.message


@pytest.mark.proof
def test_a_branch_that_depends_on_the_key_only_is_in_init():
    def f(key, x):
        flag = jax.random.uniform(key) > 0.5
        w = lax.cond(flag, jax.random.normal, jax.random.uniform, key)
        return x * variable(w, name="w")

    init, apply = unzips(f, KEY, X, count=1)
    assert primitives(init)["cond"] == 1 and primitives(apply)["cond"] == 0


def test_the_same_name_in_two_branches_is_refused():
    def f(key, x, flag):
        return lax.cond(flag, lambda x: layer(key, x), lambda x: layer(key, 2 * x), x)

    with pytest.raises(UnzipError, match="Cannot use duplicate variable name: w") as caught:
        unzip(f)(KEY, X, True)
    assert caught.value.message.count("test_control_flow.py:") == 2


@pytest.mark.proof
def test_append_in_two_branches_lists_both():
    def f(key, x, flag):
        def branch(i):
            return lambda x: (
                x * sow(jax.random.uniform(key) + i, tag="variable", name="s", mode="append")
            )

        return lax.cond(flag, branch(1), branch(0), x)

    init, _ = unzips(f, KEY, X, True, count=2)
    assert shapes(init(KEY)) == {"s": [(), ()]}


def test_a_branch_inside_a_scan_stacks_variables_of_untaken_branches_too():
    def f(key, x):
        def body(x, key_and_flag):
            key, flag = key_and_flag
            return lax.cond(flag, lambda x: layer(key, x), lambda x: x, x), None

        return lax.scan(body, x, (jax.random.split(key, 4), jnp.arange(4) % 2 == 0))[0]

    init, _ = unzips(f, KEY, X, count=1)
    assert shapes(init(KEY)) == {"w": (4, 3, 3)}


def test_a_scan_inside_a_branch():
    def f(key, x, flag):
        def deep(x):
            return lax.scan(lambda x, k: (layer(k, x), None), x, jax.random.split(key, 2))[0]

        return lax.cond(flag, lambda x: x, deep, x)

    init, _ = unzips(f, KEY, X, False, count=1)
    assert shapes(init(KEY)) == {"w": (2, 3, 3)}


def test_clobber_across_branches_and_after_them():
    def f(key, x, flag):
        def clobber(value):
            return sow(value, tag="variable", name="s", mode="clobber")

        x = lax.cond(flag, lambda x: x * clobber(2.0), lambda x: x * clobber(3.0), x)
        return x + clobber(jax.random.uniform(key))

    init, apply = unzip(f)(KEY, X, True)
    assert shapes(init(KEY)) == {"s": ()}
    for flag, factor in (True, 2), (False, 3):
        np.testing.assert_allclose(apply({"s": 7.0}, X, flag), factor * X + 7)
