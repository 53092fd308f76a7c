"""The assertions of `jaxprtool.testing` on training steps with Optax, Flax NNX and Equinox."""

import jax
import jax.numpy as jnp
import pytest

from jaxprtool.testing import assert_budget, assert_donated, assert_no

pytestmark = pytest.mark.models
optax = pytest.importorskip("optax")

X = jnp.linspace(-1, 1, 32).reshape(8, 4)
ADAM = optax.adam(1e-2)


def failure(function, *args, **kwargs):
    with pytest.raises(AssertionError) as found:
        function(*args, **kwargs)
    return str(found.value)


# --- Optax ----------------------------------------------------------------------------------------


def loss(params, x):
    hidden = jnp.tanh(x @ params["w"])
    return ((hidden @ params["out"]) ** 2).mean()


def step(params, state, x):
    gradient = jax.grad(loss)(params, x)
    updates, state = ADAM.update(gradient, state)
    return optax.apply_updates(params, updates), state


def started():
    params = {"w": jnp.ones((4, 16)), "out": jnp.ones((16, 2))}
    return params, ADAM.init(params)


def test_a_step_of_adam_stays_within_its_budgets():
    donating = jax.jit(step, donate_argnums=(0, 1))
    assert_donated(donating, *started(), X)
    assert_budget(donating, *started(), X, flops="8 kFLOP", peak_bytes="8KiB", equations=120)
    assert_no(donating, jnp.float64, *started(), X)
    assert "x, f32[8,4]: no result has this type" in failure(
        assert_donated, jax.jit(step, donate_argnums=(0, 1, 2)), *started(), X
    )


def test_a_step_of_adam_needs_no_more_memory_than_with_donation():
    # Without donation, parameters and both moments are stored twice: 3 * 96 * 4 bytes more.
    text = failure(assert_budget, jax.jit(step), *started(), X, peak_bytes=3000)
    kept = failure(assert_budget, jax.jit(step, donate_argnums=(0, 1)), *started(), X, peak_bytes=1)
    assert "test_assertions.py" in text and "KiB at its peak" in text
    assert text.splitlines()[0] != kept.splitlines()[0]


def test_steps_of_adam_compile_once(jax_compiles):
    params, state = started()
    jitted = jax.jit(step)
    with jax_compiles(at_most=1):
        for _ in range(3):
            params, state = jitted(params, state, X)
    why = r"(?s)compiled 1 program.*x: f32\[8,4\] → f32\[5,4\]"
    with pytest.raises(AssertionError, match=why), jax_compiles(at_most=0):
        jitted(params, state, X[:5])


# --- Flax NNX -------------------------------------------------------------------------------------


def test_a_step_of_flax_nnx(jax_compiles):
    nnx = pytest.importorskip("flax.nnx")

    def train(model, optimizer, x):
        def mean_square(model):
            return jnp.square(model(x)).mean()

        optimizer.update(model, nnx.grad(mean_square)(model))

    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    jitted = nnx.jit(train)
    assert_budget(jitted, model, optimizer, X, equations=150, flops="4 kFLOP")
    assert_no(jitted, "sort", model, optimizer, X)
    text = failure(assert_budget, jitted, model, optimizer, X, flops=100)
    assert "models/test_assertions.py:" in text
    assert failure(assert_donated, jitted, model, optimizer, X).startswith("train donates no")
    donating = nnx.jit(train, donate_argnums=(0, 1))
    assert_donated(donating, model, optimizer, X)
    failed = failure(assert_donated, nnx.jit(train, donate_argnums=2), model, optimizer, X)
    assert "x, f32[8,4]: no result has this type" in failed
    with jax_compiles(at_most=1):
        for _ in range(2):
            jitted(model, optimizer, X)


# --- Equinox --------------------------------------------------------------------------------------


def test_a_step_of_equinox(jax_compiles):
    eqx = pytest.importorskip("equinox")

    def mean_square(model, x):
        return jnp.square(jax.vmap(model)(x)).mean()

    def train(model, x):
        gradient = eqx.filter_grad(mean_square)(model, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g if eqx.is_array(p) else p, model, gradient)

    model = eqx.nn.MLP(4, 2, 16, 1, key=jax.random.key(0))
    donating = eqx.filter_jit(train, donate="all")
    text = failure(assert_donated, donating, model, X)
    assert text.splitlines() == [
        "train cannot use 1 donated argument:",
        "  x, f32[8,4]: no result has this type",
    ]
    kept, saved = (
        failure(assert_budget, each, model, X, peak_bytes=1).splitlines()[0]
        for each in (eqx.filter_jit(train), donating)
    )
    assert kept != saved
    assert_budget(donating, model, X, equations=60)
    jitted = eqx.filter_jit(train)
    with jax_compiles(at_most=1):
        for _ in range(2):
            model = jitted(model, X)
