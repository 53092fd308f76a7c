"""A budget of residuals: the proposal fits, is optimal, and agrees with JAX."""

import inspect
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxprtool
from jaxprtool import residuals, trace
from jaxprtool.commands.residuals.residuals import total_bytes
from jaxprtool.errors import ArgumentsError
from jaxprtool.ir.documents import bytes_of
from jaxprtool.loading.argspec import read_args
from tests.share import first_and_proofs, shared_proofs

RANDOM = np.random.default_rng(0)
W = {
    name: RANDOM.normal(0, 0.3, shape).astype(np.float32)
    for name, shape in {"up": (8, 32), "down": (32, 8)}.items()
}
X = RANDOM.normal(size=(16, 8)).astype(np.float32)


def plain(w, x):
    for _ in range(3):
        hidden = x @ w["up"]
        x = x + jnp.tanh(jnp.sin(hidden) @ w["down"])
    return x.sum()


def with_names(w, x):
    hidden = checkpoint_name(x @ w["up"], "hidden")
    wide = checkpoint_name(jnp.sin(hidden), "wide")
    narrow = checkpoint_name(jnp.sin(wide) @ w["down"], "narrow")
    again = checkpoint_name(narrow @ w["up"], "again")
    return checkpoint_name(jnp.cos(again) @ w["down"], "last").sum()


def scanned(w, x):
    def layer(x, _):
        hidden = jax.jit(lambda x: jnp.cos(x @ w["up"]) * 2)(x)
        return x + jnp.tanh(hidden @ w["down"]), None

    return jax.lax.scan(layer, x, length=4)[0].sum()


@pytest.mark.parametrize("fun", shared_proofs([plain, with_names, scanned]))
def test_a_proposal_fits_and_more_bytes_never_need_more_flops(fun):
    program = trace(fun, W, X)
    found = residuals(program)
    least, most = found.policies["nothing_saveable"], found.total_bytes
    flops = []
    for budget in np.linspace(least, most, 6).astype(int).tolist():
        proposal = residuals(program, budget).proposal
        assert proposal.total_bytes <= budget == proposal.budget
        assert proposal.flops >= proposal.flops_before
        flops.append(proposal.flops)
    # A name must save a minimum share of the operations.
    assert all(after <= before * 1.01 for before, after in itertools.pairwise(flops))
    assert flops[0] > flops[-1]


@pytest.mark.proof
def test_the_cheapest_set_of_names_that_fits_is_proposed():
    names = ("hidden", "wide", "narrow", "again", "last")
    measured = []
    for count in range(len(names) + 1):
        for chosen in itertools.combinations(names, count):
            policy = jax.checkpoint_policies.save_only_these_names(*chosen)
            program = trace(jax.checkpoint(with_names, policy=policy), W, X)
            halves = program.apply("vjp(argnums=0)")
            flops = sum(jaxprtool.cost(half).total.work.flops for _, half in halves.items())
            measured.append((residuals(program).total_bytes, flops))
    for budget in sorted({size for size, _ in measured}):
        proposal = residuals(trace(with_names, W, X), budget).proposal
        best = min(flops for size, flops in measured if size <= budget)
        # A name must save a minimum share of the operations.
        assert proposal.flops <= best * 1.02
        if proposal.policy and not any(value.code for value in proposal.values):
            policy = f"checkpoint(policy={proposal.policy!r})"
            kept = residuals(trace(with_names, W, X).apply(policy)).total_bytes
            assert kept == proposal.total_bytes


def test_values_to_name_are_expressions_of_the_source():
    found = residuals(trace(plain, W, X), 11000).proposal
    (hidden,) = [value for value in found.values if value.name == "hidden"]
    line = plain.__code__.co_firstlineno + 2
    assert hidden.code == 'x @ w["up"]' and hidden.source.endswith(f"test_budget.py:{line}")
    assert hidden.bytes == 3 * 16 * 32 * 4


def one_name(w, x):
    hidden = checkpoint_name(x, "hidden")
    for _ in range(3):
        hidden = hidden + jnp.tanh(jnp.sin(hidden @ w["up"]) @ w["down"])
    return hidden.sum()


@pytest.mark.proof
def test_new_names_are_proposed_in_addition_to_existing_ones():
    values = residuals(trace(one_name, W, X), 11000).proposal.values
    assert any(value.code for value in values)
    assert "hidden" not in [value.name for value in values if value.code]
    # A named value needs no other name.
    values = residuals(trace(with_names, W, X), 9000).proposal.values
    assert not {'x @ w["up"]', "jnp.sin(hidden)"} & {value.code for value in values}


@pytest.mark.parametrize("fun", [plain, one_name])
@pytest.mark.parametrize("budget", first_and_proofs([4500, 6000, 9000, 11000]))
def test_naming_the_proposed_values_saves_the_predicted_bytes(fun, budget):
    found = residuals(trace(fun, W, X), budget).proposal
    source = inspect.getsource(fun)
    for value in sorted(found.values, key=lambda value: -len(value.code)):
        assert value.code in source
        if value.code:
            source = source.replace(value.code, f'checkpoint_name({value.code}, "{value.name}")')
    room = dict(globals())
    exec(source, room)
    policy = f"checkpoint(policy={found.policy!r})"
    halves = trace(room[fun.__name__], W, X).apply(f"{policy}, vjp(argnums=0)")
    assert total_bytes(halves["backward"]) == found.total_bytes <= budget
    assert sum(jaxprtool.cost(half).total.work.flops for _, half in halves.items()) == found.flops


@pytest.mark.proof
def test_a_scan_counts_all_iterations_and_library_internals_are_not_named():
    found = residuals(trace(scanned, W, X), 12000).proposal
    assert found.values and all(value.code for value in found.values)
    by_name = {value.code: value.bytes for value in found.values}
    assert by_name.get('x @ w["up"]', 4 * 16 * 32 * 4) == 4 * 16 * 32 * 4


@pytest.mark.proof
def test_gradients_of_the_named_program_are_unchanged():
    from jaxprtool.commands.residuals.policies import _with_names

    for fun in (plain, scanned):
        program = trace(fun, W, X)
        labelled, places = _with_names(program)
        assert places
        policy = jax.checkpoint_policies.save_only_these_names(*list(places)[::2])
        grads = jax.grad(jax.checkpoint(labelled, policy=policy))(W, X)
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), grads, jax.grad(fun)(W, X))


def test_a_large_budget_needs_no_policy():
    found = residuals(trace(plain, W, X), "1GiB").proposal
    assert found.policy == "" and found.values == () and found.flops == found.flops_before


def test_an_impossible_budget_reports_the_minimum():
    with pytest.raises(ArgumentsError, match="the minimum is") as error:
        residuals(trace(plain, W, X), 100)
    least = int(
        str(error.value)
        .partition("the minimum is ")[2]
        .partition(", including")[0]
        .replace(",", "")
    )
    assert residuals(trace(plain, W, X), least).proposal.total_bytes == least


def test_a_small_value_is_saved_in_place_of_a_large_argument():
    def narrow(x):
        total = x.sum()
        return jnp.sin(total * jnp.arange(100.0)).sum()

    found = residuals(trace(narrow, np.ones(1000, np.float32)), 100)
    assert found.total_bytes >= 400 and found.policies["nothing_saveable"] == 4000
    assert [value.name for value in found.proposal.values] == ["total"]
    assert found.proposal.total_bytes == 4


def test_symbolic_sizes_are_refused():
    program = trace(lambda w, x: jnp.sin(x @ w).sum(), *read_args("f32[8,8], f32[n,8]")[0])
    with pytest.raises(ArgumentsError, match="sizes that are numbers"):
        residuals(program, "1GiB")


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 8 << 30), ("500MiB", 500 << 20), ("2e9", 2 * 10**9), ("1.5 kB", 1500), ("7", 7)],
)
def test_sizes_are_parsed(text, size):
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "8 apples", "1GiBB", "nan", "1e400"])
def test_invalid_sizes_are_refused(text):
    with pytest.raises(ArgumentsError, match="is not a number of bytes"):
        bytes_of(text)
