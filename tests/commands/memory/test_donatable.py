"""Arguments that could be donated, and the peak that this saves, which is XLA's."""

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool.commands.memory.donatable import donatable

W = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
X = jax.ShapeDtypeStruct((8, 1024), jnp.float32)


def momentum(state, x):
    slope = jax.grad(lambda w: jnp.square(x @ w).mean())(state["w"])
    velocity = 0.9 * state["m"] + slope
    return {"w": state["w"] - 0.1 * velocity, "m": velocity}


def adam(w, moments, x):
    slope = jax.grad(lambda w: jnp.square(x @ w["w"]).mean())(w)
    mean, square = (
        jax.tree.map(lambda m, g, power=power: 0.9 * m + g**power, m, slope)
        for power, m in enumerate(moments, 1)
    )
    new = jax.tree.map(lambda w, m, s: w - m / jnp.sqrt(s), w, mean, square)
    return new, (mean, square)


def cache(cache, row):
    return jax.tree.map(lambda c: c.at[3].set(row), cache), row.sum()


def loop(state, x):
    return jax.lax.fori_loop(0, x.shape[0], lambda i, s: momentum(s, x), state)


STATE = {"w": W, "m": W}
CASES = {
    "momentum": (momentum, (STATE, X), ("state",)),
    "adam": (adam, ({"w": W}, ({"w": W}, {"w": W}), X), ("w", "moments")),
    "cache": (cache, ({"k": W, "v": W}, jax.ShapeDtypeStruct((1024,), jnp.float32)), ("cache",)),
    "loop": (loop, (STATE, X), ("state",)),
}


def peak(function, args, names=()):
    """Return XLA's peak of a function that donates arguments."""
    compiled = jax.jit(function, donate_argnames=names).lower(*args).compile()
    stats = compiled.memory_analysis()
    sizes = stats.argument_size_in_bytes, stats.output_size_in_bytes, stats.temp_size_in_bytes
    return sum(sizes) - stats.alias_size_in_bytes


@pytest.mark.parametrize("name", CASES)
def test_a_donation_saves_what_xla_saves(name):
    function, args, names = CASES[name]
    entry = donatable(jaxprtool.trace(jax.jit(function), *args))
    assert entry.arguments == names and not entry.is_dropped
    saved = peak(function, args) - peak(function, args, names)
    assert entry.saved_bytes == pytest.approx(saved, rel=0.01) and saved >= 1 << 20


def test_only_a_jitted_function_that_does_not_donate_yet_could():
    donating = jax.jit(momentum, donate_argnums=0)
    assert donatable(jaxprtool.trace(momentum, STATE, X)) is None
    assert donatable(jaxprtool.trace(donating, STATE, X)) is None


def test_the_option_names_keyword_arguments_and_those_that_are_donated_already():
    def step(w, **rest):
        return [{"w": 2 * w["w"]}, {"rest": {"w": 3 * rest["rest"]["w"]}}, rest["x"]]

    function = jax.jit(step, donate_argnums=0)
    args, keywords = ({"w": W},), {"rest": {"w": W}, "x": X}
    entry = donatable(jaxprtool.trace(function, *args, **keywords))
    assert entry.arguments == ("rest",) and entry.option == "donate_argnames=['w', 'rest']"
    donating = jax.jit(step, donate_argnames=("w", "rest")).lower(*args, **keywords)
    leaves = jax.tree.leaves(donating.args_info)
    assert [leaf.donated for leaf in leaves] == [True, True, False]


def test_positional_only_parameters_are_donated_by_numbers_that_count_static_arguments():
    def step(rate, state, x, /):
        return momentum(state, rate * x)

    entry = donatable(jaxprtool.trace(jax.jit(step, static_argnums=0), 0.5, STATE, X))
    assert entry.arguments == ("state",) and entry.option == "donate_argnums=1"
    jax.jit(step, static_argnums=0, donate_argnums=1).lower(0.5, STATE, X)  # JAX accepts it


def test_which_of_two_alike_arguments_is_the_old_state_is_unknown():
    def average(params, mean):
        return jax.tree.map(lambda p, m: 0.1 * p + 0.9 * m, params, mean)

    assert donatable(jaxprtool.trace(jax.jit(average), STATE, STATE)) is None


def test_an_argument_that_the_caller_drops_needs_only_a_result_of_its_type():
    program = jaxprtool.trace(jax.jit(lambda x, y: x * jnp.sin(y)), W, W)
    assert donatable(program) is None
    entry = donatable(program.replace(after_call=(("y", "dropped"),)))
    assert entry.arguments == ("y",) and entry.is_dropped and entry.saved_bytes == 4 << 20


def test_an_argument_that_is_placed_otherwise_is_not_donated():
    mesh = jax.make_mesh((1,), ("x",))
    here, there = (
        jax.NamedSharding(mesh, jax.P(*names), memory_kind=kind)
        for names, kind in (((), None), (("x",), None))
    )
    placed = jax.jit(momentum, in_shardings=here, out_shardings=there)
    assert donatable(jaxprtool.trace(placed, STATE, X)) is None


def test_an_argument_that_the_caller_keeps_is_not_donated():
    program = jaxprtool.trace(jax.jit(momentum), STATE, X)
    assert donatable(program.replace(after_call=(("state['w']", "kept"),))) is None
