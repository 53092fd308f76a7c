"""Claims of rules about wrong results hold for their bad examples, and not for the good ones."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.commands.lint.lint import all_rules, lint
from tests.benchmarks.models import synthetic

RULES = {rule.code: rule for rule in all_rules()}

#: For each rule, arguments at which the value or gradient of the bad example is not finite.
UNSAFE = {
    "JT701": ("value", np.full((8, 64), 100.0, np.float32)),
    "JT702": ("gradient", np.linspace(-1, 1, 65, dtype=np.float32)[:64]),
    "JT703": ("value", np.linspace(-200, 200, 512, dtype=np.float32).reshape(64, 8).T),
    "JT704": ("gradient", np.linspace(-1, 1, 48, dtype=np.float32).reshape(16, 3)),
}


def function(tmp_path, code, kind):
    path = tmp_path / f"{code.lower()}_{kind}.py"
    path.write_text(getattr(RULES[code], kind))
    return jaxprtool.load(f"{path}:f")


@pytest.mark.parametrize("code", UNSAFE)
def test_the_bad_example_is_not_finite_and_the_good_one_is(code, tmp_path):
    which, x = UNSAFE[code]
    finite = []
    for kind in ("bad", "good"):
        program = function(tmp_path, code, kind)
        if which == "gradient":
            assert np.isfinite(jax.jit(program)(x)).all()
            program = jax.grad(program)
        finite.append(bool(np.isfinite(jax.jit(program)(x)).all()))
    assert finite == [False, True]


@pytest.mark.proof
def test_the_gradient_of_an_empty_mean_is_nan_unless_the_mask_selects_the_operand():
    def chosen(x, mask):
        mean = x.mean(where=mask)
        return jnp.where(jnp.isnan(mean), 0.0, mean)

    def multiplied(x, mask):
        count = mask.sum()
        return jnp.where(count > 0, (x * mask).sum() / count, 0.0)

    x, mask = jnp.ones(8), jnp.zeros(8, bool)
    assert np.isfinite(jax.grad(chosen)(x, mask)).all()
    assert np.isnan(jax.grad(multiplied)(x, mask)).all()
    found = [lint(jaxprtool.trace(f, x, mask), select="JT7") for f in (chosen, multiplied)]
    assert list(map(len, found)) == [0, 1]


@pytest.mark.proof
def test_a_maximum_with_zero_does_not_guard_and_a_relu_does():
    x, found = jnp.array([-1.0, 0.0, 2.0]), []
    for guard in (lambda x: jnp.maximum(x, 0.0), jax.nn.relu, lambda x: jnp.where(x > 0, x, 0.0)):

        def loss(x, guard=guard):
            return jnp.where(x > 0, jnp.sqrt(guard(x)), 0.0).sum()

        is_finite = bool(np.isfinite(jax.grad(loss)(x)).all())
        found.append((is_finite, len(lint(jaxprtool.trace(loss, x)))))
    assert found == [(False, 1), (True, 0), (True, 0)]


@pytest.mark.proof
def test_the_suggested_passes_remove_an_unrolled_loop(tmp_path):
    text = RULES["JT501"].bad.replace("gelu(x @ w)", "softmax(jax.nn.gelu(x @ w))")
    (tmp_path / "unrolled.py").write_text(text)
    program = jaxprtool.load(f"{tmp_path / 'unrolled.py'}:f")
    codes = {passes: len(lint(program.apply(passes))) for passes in ("", "roll", "outline")}
    assert codes == {"": 1, "roll": 0, "outline": 0}


@pytest.mark.proof
def test_a_gradient_reported_as_zero_is_zero(tmp_path):
    x = np.linspace(-1, 1, 8 * 64, dtype=np.float32).reshape(8, 64)
    params = {name: jnp.linspace(0.1, 1.0, 64) for name in ("scale", "w")}
    gradients = [
        jax.grad(function(tmp_path, "JT801", kind))(params, x)["scale"] for kind in ("bad", "good")
    ]
    assert (gradients[0] == 0).all() and (gradients[1] != 0).all()


@pytest.mark.proof
def test_a_checkpoint_of_everything_does_not_lower_the_peak_but_parts_do(tmp_path):
    rule, peaks = RULES["JT802"], {}
    without = rule.bad.replace("@jax.checkpoint\n", "")
    for name, text in {"bad": rule.bad, "good": rule.good, "without": without}.items():
        (tmp_path / f"{name}.py").write_text(text)
        program = jaxprtool.load(f"{tmp_path / name}.py:f", "f32[16,64,64], f32[800,64]")
        peaks[name] = jaxprtool.memory(program.apply("grad")).peak_bytes
    assert peaks["bad"] == peaks["without"] > 1.3 * peaks["good"]


def test_exponentially_nested_calls_are_linted_fast():
    function = jnp.tanh
    for _ in range(40):  # 2**40 calls of tanh
        function = jax.jit(lambda x, inner=function: inner(inner(x)))
    program = jaxprtool.trace(function, jnp.ones(8))
    assert {found.code for found in lint(program)} == {"JT501"}


@pytest.mark.proof
def test_ten_thousand_equations_take_at_most_a_second():
    program = synthetic(10_000)
    lint(program)
    start = time.process_time()
    lint(program)
    assert time.process_time() - start < 1.0


@pytest.mark.proof
def test_integers_reported_to_overflow_do_and_are_the_exact_numbers():
    def position(count):
        row, column = jnp.indices((count, 2))
        return (row * 2 + column) * 1_000_000

    (found,) = lint(jaxprtool.trace(lambda: position(2000)))
    assert found.code == "JT404" and "this mul is 3,999,000,000 at one end" in found.message
    assert position(2000).min() < 0 and not len(lint(jaxprtool.trace(lambda: position(1000))))
    assert position(1000).min() == 0


def test_a_callback_in_a_branch_under_vmap_runs_for_every_element():
    seen = []

    def one(x):
        jax.lax.cond(x > 2, lambda: jax.debug.callback(seen.append, x), lambda: None)
        return x

    x = jnp.arange(4.0)
    assert [each.code for each in lint(jaxprtool.trace(jax.vmap(one), x))] == ["JT603"]
    jax.vmap(one)(x)
    jax.effects_barrier()
    assert len(seen) == 4


def test_fold_ins_reported_as_equal_are_and_others_are_not():
    def keys(key, first, second):
        pair = [jax.random.fold_in(key, number) for number in (first, second)]
        return [jax.random.normal(each, (4,)) for each in pair]

    for second in (1, 2):
        equal = bool((jnp.stack(keys(jax.random.key(0), 1, second)).std(0) == 0).all())
        program = jaxprtool.trace(lambda key, n=second: keys(key, 1, n), jax.random.key(0))
        assert len(lint(program)) == equal == (second == 1)


def test_a_loss_without_any_gradient_is_reported_and_its_gradients_are_zero():
    def loss(w, x):
        return jnp.square(jnp.round(w * x)).mean()

    w = jnp.linspace(0.1, 3.0, 16)
    (found,) = lint(jaxprtool.trace(loss, w, w))
    assert found.message.startswith("the gradient with respect to every argument is zero: round")
    assert not any(gradient.any() for gradient in jax.grad(loss, (0, 1))(w, w))


@pytest.mark.parametrize("step", [2, -1, -3])
def test_the_suggested_slice_is_not_a_gather(step):
    def gathered(x):
        return x[jnp.arange(0, 64)[::step]]

    (found,) = lint(jaxprtool.trace(gathered, jnp.ones((64, 16))))
    assert found.advice == f"write the slice: x[start:stop:{step}]"
    sliced = str(jax.make_jaxpr(lambda x: x[::step])(jnp.ones((64, 8))))
    assert "gather" not in sliced
