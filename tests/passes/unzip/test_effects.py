"""Effects and refs of a program that is split in two: each effect happens once, in its place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from jaxprtool import unzip, variable
from jaxprtool.errors import UnsupportedError
from jaxprtool.passes.unzip import UnzipError
from tests.programs.init_apply import primitives, unzips
from tests.programs.recorder import record, recording

KEY = jax.random.key(0)
X = jnp.linspace(-1.0, 1.0, 3)


def shapes(tree):
    return jax.tree.map(jnp.shape, tree)


def layer(key, x):
    w = variable(jax.random.normal(key, (3, 3)), name="w")
    return jnp.tanh(x @ w)


def debug(tag, x, ordered=False):
    jax.debug.callback(lambda x: record(tag, ordered, x), x, ordered=ordered)


def io(tag, x, ordered=False):
    def call(x):
        record(tag, ordered, x)
        return np.float32(tag)

    return io_callback(call, jax.ShapeDtypeStruct((), jnp.float32), x, ordered=ordered)


def tags(program, *args) -> list[int]:
    with recording() as seen:
        jax.block_until_ready(program(*args))
    return [event.tag for event in seen.events]


def test_an_effect_happens_in_the_program_that_has_its_operands():
    def f(key, x):
        debug(1, jax.random.uniform(key))
        w = variable(jax.random.normal(key, (3,)), name="w")
        debug(2, w)
        debug(3, x)
        debug(4, w * x)
        debug(5, 1.0)
        return w * x

    init, apply = unzips(f, KEY, X, count=1)
    assert tags(init, KEY) == [1]
    assert sorted(tags(apply, init(KEY), X)) == [2, 3, 4, 5]


def test_ordered_effects_keep_their_order_in_each_program():
    def f(key, x):
        debug(1, key.shape[0] if key.shape else jax.random.uniform(key), ordered=True)
        w = variable(io(2, jax.random.uniform(key), ordered=True), name="w")
        debug(3, x, ordered=True)
        return w * x + io(4, w, ordered=True)

    init, apply = unzips(f, KEY, X, count=1, gradients="not differentiable")
    assert tags(init, KEY) == [1, 2]
    assert tags(apply, init(KEY), X) == [3, 4]


def test_ordered_effects_that_would_be_reordered_are_refused():
    def f(key, x):
        debug(1, x, ordered=True)
        debug(2, jax.random.uniform(key), ordered=True)
        return variable(jax.random.uniform(key), name="w") * x

    with pytest.raises(UnsupportedError, match="order") as caught:
        unzip(f)(KEY, X)
    assert "test_effects.py:" in caught.value.message


def test_ordered_effects_of_both_kinds_in_a_loop_are_refused():
    def f(key, x):
        def body(x, key):
            w = variable(jax.random.uniform(key), name="w")
            debug(1, jax.random.uniform(key), ordered=True)
            debug(2, x, ordered=True)
            return x * w, None

        return lax.scan(body, x, jax.random.split(key, 3))[0]

    with pytest.raises(UnsupportedError, match="order"):
        unzip(f)(KEY, X)


def test_unordered_effects_in_a_loop_happen_once_in_each_iteration():
    def f(key, x):
        def body(x, key):
            noise = jax.random.uniform(key)
            debug(1, noise)
            w = variable(noise, name="w")
            debug(2, w)
            return x * w, None

        return lax.scan(body, x, jax.random.split(key, 3))[0]

    init, apply = unzips(f, KEY, X, count=1)
    assert tags(init, KEY) == [1] * 3
    assert tags(apply, init(KEY), X) == [2] * 3


def test_an_effect_that_needs_key_and_argument_is_refused():
    def f(key, x):
        debug(1, jax.random.uniform(key) * x)
        return variable(jax.random.uniform(key), name="w") * x

    with pytest.raises(UnzipError, match="do not cut dependence graph") as caught:
        unzip(f)(KEY, X)
    assert "debug_callback at" in caught.value.message


@pytest.mark.proof
def test_only_the_effect_in_the_branch_that_is_taken_happens():
    def f(key, x, flag):
        def taken(x):
            w = variable(jax.random.uniform(key), name="w")
            debug(1, w)
            return x * w

        def other(x):
            debug(2, x)
            return x

        return lax.cond(flag, taken, other, x)

    init, apply = unzips(f, KEY, X, True, count=1)
    assert tags(init, KEY) == []
    assert tags(apply, init(KEY), X, True) == [1]
    assert tags(apply, init(KEY), X, False) == [2]


def test_an_effect_of_the_key_in_a_branch_with_variables_is_refused():
    def f(key, x, flag):
        def taken(x):
            debug(1, jax.random.uniform(key))
            return layer(key, x)

        return lax.cond(flag, taken, jnp.sin, x)

    with pytest.raises(UnzipError, match=r"do not cut.*key -> cond at .*test_effects.py"):
        unzip(f)(KEY, X, True)


@pytest.mark.proof
def test_an_effect_of_the_key_in_one_branch_happens_where_another_has_variables():
    def f(key, x):
        def other(x):
            debug(1, jax.random.uniform(key))
            return jnp.sin(x)

        flag = variable(jax.random.uniform(key) > 2, name="flag")
        return lax.cond(flag, lambda x: layer(key, x), other, x)

    init, apply = unzips(f, KEY, X, count=2)
    assert (tags(init, KEY), tags(apply, init(KEY), X)) == ([1], [])


def test_a_callback_without_arguments_is_called_once():
    def f(key, x):
        now = io(1, 0.0)
        return variable(jax.random.uniform(key), name="w") * x + now

    init, apply = unzips(f, KEY, X, count=1)
    assert tags(init, KEY) == []
    assert tags(apply, init(KEY), X) == [1]


@pytest.mark.parametrize("ordered", [False, True])
def test_an_effect_of_constants_in_a_call_that_both_programs_need_happens_once(ordered):
    @jax.jit
    def shared():
        half = jnp.cos(0.5)
        debug(1, half, ordered)
        return lax.scan(lambda c, x: (c * x, debug(2, x, ordered)), half, jnp.arange(3.0))[0]

    def f(key, x):
        value = shared()
        return variable(jax.random.normal(key) * value, name="w") * x + value

    init, apply = unzips(f, KEY, X, count=1)
    assert tags(init, KEY) == []
    assert sorted(tags(apply, init(KEY), X)) == [1, 2, 2, 2]


def branch_of_the_key(key):
    def taken(key):
        debug(1, 1.0)
        return jax.random.uniform(key)

    return lax.cond(jax.random.uniform(key) < 2, taken, jax.random.uniform, key)


def loop_of_the_key(key):
    def body(state):
        count, w = state
        debug(1, 1.0)
        return count + 1, w * 2

    limit = jax.random.randint(key, (), 1, 2)
    return lax.while_loop(lambda s: s[0] < limit, body, (0, jax.random.uniform(key)))[1]


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint])
@pytest.mark.parametrize("make", [branch_of_the_key, loop_of_the_key])
def test_an_effect_of_constants_in_a_branch_on_the_key_happens_in_init(make, around):
    def f(key, x):
        return variable(around(make)(key), name="w") * x

    init, apply = unzips(f, KEY, X, count=1)
    assert (tags(init, KEY), tags(apply, init(KEY), X)) == ([1], [])


def test_printed_text_is_printed_once(capfd):
    def f(key, x):
        jax.debug.print("early {}", jax.random.uniform(key).shape)
        w = variable(jax.random.uniform(key), name="w")
        jax.debug.print("late {}", w.shape)
        return w * x

    init, apply = unzip(f)(KEY, X)
    apply(init(KEY), X)
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split()) == ["()", "()", "early", "late"]


@pytest.mark.proof
def test_effects_in_a_loop_of_static_length():
    def f(key, x):
        def body(i, x):
            w = variable(jax.random.uniform(jax.random.fold_in(key, i)), name="w")
            return x * w + io(1, w)

        return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, body(*s)), (0, x))[1]

    init, apply = unzips(f, KEY, X, count=1, gradients="not differentiable")
    assert (tags(init, KEY), tags(apply, init(KEY), X)) == ([], [1, 1, 1])


# --- refs ---------------------------------------------------------------------------------------


@pytest.mark.proof
def test_a_ref_of_late_values_is_in_apply():
    def f(key, x):
        w = variable(jax.random.normal(key, (3,)), name="w")
        total = jax.new_ref(jnp.zeros(3))

        def body(i, x):
            total[...] += x * w
            return x + 1

        lax.fori_loop(0, 3, body, x)
        return total[...]

    _, apply = unzips(f, KEY, X, count=1)
    assert primitives(apply)["addupdate"] or primitives(apply)["swap"]


def test_a_ref_of_the_key_is_in_init():
    def f(key, x):
        state = jax.new_ref(jax.random.uniform(key))
        state[...] = state[...] * 2
        return variable(state[...], name="w") * x

    init, apply = unzips(f, KEY, X, count=1)
    assert not {"get", "swap"} & primitives(apply).keys()
    np.testing.assert_allclose(init(KEY)["w"], 2 * jax.random.uniform(KEY))


@pytest.mark.parametrize("call", [jax.jit, jax.checkpoint])
def test_a_ref_inside_a_call_of_the_key_is_in_init(call):
    def local(key):
        state = jax.new_ref(jnp.zeros(3))
        state[...] = jax.random.normal(key, (3,))
        return state[...]

    def f(key, x):
        return variable(call(local)(key), name="w") * x

    init, _ = unzips(f, KEY, X, count=1)
    np.testing.assert_array_equal(init(KEY)["w"], jax.random.normal(KEY, (3,)))


def test_a_ref_of_the_key_with_late_writes_is_refused():
    def f(key, x):
        state = jax.new_ref(jax.random.normal(key, (3,)))
        w = variable(jax.random.uniform(key), name="w")
        state[...] = x * w
        return state[...]

    with pytest.raises(UnzipError, match="do not cut"):
        unzip(f)(KEY, X)


@pytest.mark.proof
def test_a_loop_of_static_length_that_writes_to_a_ref():
    def f(key, x):
        total = jax.new_ref(jnp.zeros(3))

        def body(i):
            w = variable(jax.random.normal(jax.random.fold_in(key, i), (3,)), name="w")
            total[...] = total[...] + w * x
            return i + 1

        lax.while_loop(lambda i: i < 3, body, 0)
        return total[...]

    init, _ = unzips(f, KEY, X, count=1)
    assert shapes(init(KEY)) == {"w": (3, 3)}


def test_variables_sown_in_a_loop_that_writes_to_a_ref():
    def f(key, x):
        total = jax.new_ref(jnp.zeros(3))

        def body(x, key):
            x = layer(key, x)
            total[...] += x
            return x, None

        x, _ = lax.scan(body, x, jax.random.split(key, 3))
        return x + total[...]

    init, _ = unzips(f, KEY, X, count=1)
    assert shapes(init(KEY)) == {"w": (3, 3, 3)}
