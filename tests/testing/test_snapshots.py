"""Snapshots of programs: equality, the messages of failures, and updates."""

import re

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool.errors import ArgumentsError
from jaxprtool.testing import assert_budget
from jaxprtool.testing.assertions import Snapshots
from jaxprtool.testing.places import TestPlace, running

W = jax.ShapeDtypeStruct((16, 16), "float32")
X = jax.ShapeDtypeStruct((4, 16), "float32")


def loss(w, x):
    hidden = jnp.tanh(x @ w)
    return (hidden**2).mean()


def with_sine(w, x):
    hidden = jnp.sin(x @ w) @ w  # grew
    return (hidden**2).mean()


def line(text):
    with open(__file__) as file:
        return next(i for i, each in enumerate(file, 1) if each.rstrip().endswith(text))


@pytest.fixture
def place(tmp_path):
    return TestPlace(tmp_path / "test_model.py", "test_loss")


def written(place, program, *args, **options):
    Snapshots(place, update=True)(program, *args, **options)


def failure(place, program, *args, **options):
    with pytest.raises(AssertionError) as found:
        Snapshots(place, update=False)(program, *args, **options)
    return str(found.value)


def by_another_release(place):
    """Mark the snapshots in a folder as written by another JAX release."""
    for path in place.folder.glob("*.jaxpr"):
        text = re.sub(r"^jax = .*$", "jax = '0.9.9'", path.read_text(), flags=re.MULTILINE)
        path.write_text(text)


def test_a_missing_snapshot_fails_and_an_update_writes_it(place):
    text = failure(place, loss, W, X)
    assert "loss has no snapshot __jaxprs__/test_model/test_loss.jaxpr" in text
    assert "--jaxpr-update" in text
    written(place, loss, W, X)
    Snapshots(place, update=False)(loss, W, X)
    read = jaxprtool.read(place.snapshot("test_loss"))
    assert jaxprtool.equivalent(read, jaxprtool.trace(loss, W, X))


def test_a_changed_program_fails_with_the_differences_and_the_lines_that_grew(place):
    written(place, loss, W, X)
    text = failure(place, jaxprtool.trace(with_sine, W, X))
    assert "differs from the snapshot __jaxprs__/test_model/test_loss.jaxpr\n" in text
    assert "= tanh " in text and "= sin " in text
    assert f"test_snapshots.py:{line('# grew')}" in text.partition("FLOPs grew since")[2]


def test_a_long_difference_names_the_command_that_shows_all_of_it(place):
    def without(w, x):
        return x.sum()

    def long(w, x):
        for i in range(30):
            x = jnp.sin(x) * i
        return x.sum()

    written(place, without, W, X)
    text = failure(place, long, W, X)
    more = "… 40 more: jaxprtool diff __jaxprs__/test_model/test_loss.jaxpr TARGET --all\n"
    assert text.count("\n  + ") == 20 and more in text


def test_an_update_writes_only_changed_snapshots(place):
    written(place, loss, W, X)
    path = place.snapshot("test_loss")
    path.write_text(path.read_text() + "\n")  # another text of the same program
    before = path.read_text()
    written(place, lambda w, x: loss(w, x), W, X)
    assert path.read_text() == before
    written(place, with_sine, W, X)
    assert path.read_text() != before
    Snapshots(place, update=False)(with_sine, W, X)


def test_each_program_of_a_test_has_a_file(place):
    snapshots = Snapshots(place, update=True)
    snapshots(loss, W, X)
    snapshots(with_sine, W, X)
    snapshots(loss, W, X, name="named/one")
    found = sorted(path.name for path in place.folder.iterdir())
    assert found == ["named_one.jaxpr", "test_loss-2.jaxpr", "test_loss.jaxpr"]
    for options in ({}, {"name": "named/one"}):
        Snapshots(place, update=False)(loss, W, X, **options)
    # With a duplicate name, each program would overwrite the other.
    with pytest.raises(ArgumentsError, match="two programs of test_loss have the name"):
        snapshots(with_sine, W, X, name="named/one")


def test_lost_donation_is_a_difference(place):
    def step(w, x):
        return w + x.sum()

    written(place, jax.jit(step, donate_argnums=0), W, X)
    Snapshots(place, update=False)(jax.jit(step, donate_argnums=0), W, X)
    assert "w is no longer donated" in failure(place, jax.jit(step), W, X)
    assert "x is donated now" in failure(place, jax.jit(step, donate_argnums=(0, 1)), W, X)


def test_large_constants_and_callbacks_are_part_of_a_snapshot(place):
    table = jnp.arange(1000.0)

    def reading(x):
        shape = jax.ShapeDtypeStruct((), "float32")
        return jax.pure_callback(lambda x: x, shape, x) + table.sum() + (table * x).sum()

    written(place, reading, 1.0)
    Snapshots(place, update=False)(reading, 1.0)
    table = table.at[3].set(7.0)
    assert "same up to constants" in failure(place, reading, 1.0)


def test_a_snapshot_of_another_release_is_compared_semantically(place):
    written(place, jax.grad(loss), W, X)
    by_another_release(place)
    Snapshots(place, update=False)(jax.grad(loss), W, X)

    def other_formula(w, x):
        hidden = jnp.tanh(x @ w)
        scaled = hidden * 2 / hidden.size
        return x.T @ (scaled * (1 - hidden * hidden))

    other = jaxprtool.trace(other_formula, W, X)
    assert not jaxprtool.diff(jaxprtool.trace(jax.grad(loss), W, X), other).is_equivalent
    Snapshots(place, update=False)(other)
    text = failure(place, jax.grad(with_sine), W, X)
    assert f", which JAX 0.9.9 wrote; this is JAX {jax.__version__}" in text and "= sin " in text


def test_a_snapshot_of_another_release_is_rewritten(place):
    written(place, loss, W, X)
    by_another_release(place)
    written(place, loss, W, X)
    assert f"jax = '{jax.__version__}'" in place.snapshot("test_loss").read_text()


def test_programs_of_two_releases_that_are_too_large_to_run_are_compared_by_equations(place):
    large = jax.ShapeDtypeStruct((1 << 15, 1 << 15), "float32")
    written(place, lambda x: jnp.sin(x) / 2, large)
    by_another_release(place)
    Snapshots(place, update=False)(lambda x: jnp.sin(x) / 2, large)
    assert "~ " in failure(place, lambda x: jnp.sin(x) * 0.5, large)


def test_unstacked_rows_are_equal_to_slices(place):
    rows = jax.ShapeDtypeStruct((2, 1 << 30), "float32")  # too large to be run

    def by_index(x):
        parts = [jax.lax.squeeze(jax.lax.slice_in_dim(x, i, i + 1), (0,)) for i in range(2)]
        return parts[0] - parts[1]

    def unstacked(x):
        first, second = jax.lax.unstack(x)
        return first - second

    written(place, by_index, rows)
    by_another_release(place)
    Snapshots(place, update=False)(unstacked, rows)


def test_an_unreadable_snapshot_fails(place):
    written(place, loss, W, X)
    path = place.snapshot("test_loss")
    path.write_text(path.read_text().replace("= tanh", "= tanhh"))
    assert "the snapshot cannot be read: " in failure(place, loss, W, X)
    by_another_release(place)
    assert "the snapshot, which JAX 0.9.9 wrote, cannot be read: " in failure(place, loss, W, X)
    written(place, loss, W, X)
    Snapshots(place, update=False)(loss, W, X)


def test_a_budget_names_the_lines_that_grew_since_the_snapshot(place):
    def step(w, x):
        return loss(w, x)

    written(place, step, W, X)

    def step(w, x):
        return with_sine(w, x)

    with running(place), pytest.raises(AssertionError) as found:
        assert_budget(step, W, X, flops=3000, equations=3)
    text = str(found.value)
    grown = f"test_snapshots.py:{line('# grew')}"
    assert "FLOPs grew since the snapshot __jaxprs__/test_model/test_loss.jaxpr:\n" in text
    assert re.search(rf"{grown} +\+2\.0 kFLOP +2\.0 kFLOP → 4\.1 kFLOP", text)
    assert re.search(rf"{grown} +\+1 equation +2 equations → 3 equations", text)


def test_a_budget_of_a_program_without_a_snapshot_names_no_other_program(place):
    written(place, loss, W, X)
    with running(place), pytest.raises(AssertionError) as found:
        assert_budget(with_sine, W, X, flops=3000)
    assert "grew" not in str(found.value)
