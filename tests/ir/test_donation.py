"""Donated arguments are paired with results as in JAX. Unused ones have a reason."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool.ir.donation import donation_notes, donations

STATE = {"w": jnp.ones((4, 4)), "m": jnp.ones((4, 4)), "key": jnp.ones(3), "old": jnp.ones((4, 4))}


@partial(jax.jit, donate_argnames="state")
def step(state, batch):
    m = 0.9 * state["m"] + batch.T @ batch
    return {"w": state["w"] - m, "m": m.astype(jnp.bfloat16)}, state["key"].sum()


@pytest.fixture
def program():
    return jaxprtool.trace(step, STATE, jnp.ones((2, 4)))


def test_results_take_the_first_used_donated_arguments_of_their_type(program):
    found = donations(program)
    lent = {program.out_names[r]: program.arg_names[a] for r, a in found.by_result.items()}
    assert lent == {"result[0]['w']": "state['m']"}


def test_each_unusable_argument_has_a_reason(program):
    reasons = {each.argument: each.reason for each in donations(program).unused}
    assert reasons == {
        "state['w']": "the results of this type reuse other donated arguments",
        "state['key']": "no result has this type",
        "state['old']": "the program does not read it",
    }
    notes = list(donation_notes(program.name, donations(program).unused))
    assert "step cannot use the donated state['key'], f32[3]: no result has this type" in notes


def test_a_result_of_the_same_name_or_shape_in_another_type_is_named():
    only_m = jax.jit(lambda state: {"m": state["m"].astype(jnp.bfloat16)}, donate_argnums=0)
    (unused,) = donations(jaxprtool.trace(only_m, {"m": STATE["m"]})).unused
    assert unused.reason == "no result has this type; result['m'] is bf16[4,4]"


def test_xla_reuses_the_memory_of_the_others(program):
    used = [program.in_avals[argument] for argument in donations(program).by_result.values()]
    stats = step.lower(STATE, jnp.ones((2, 4))).compile().memory_analysis()
    assert stats.alias_size_in_bytes == sum(4 * aval.size for aval in used) == 64


@pytest.mark.parametrize(
    "function", [lambda x: x.reshape(16) * 2, lambda x: x.astype(jnp.int32), lambda x: 2 * x[None]]
)
def test_results_of_the_same_size_take_arguments_of_other_types(function):
    donated = jax.jit(function, donate_argnums=0)
    found = donations(jaxprtool.trace(donated, STATE["w"]))
    stats = donated.lower(STATE["w"]).compile().memory_analysis()
    assert found.by_result == {0: 0} and found.unused == () and stats.alias_size_in_bytes == 64


def test_arguments_that_are_not_donated_have_no_notes():
    found = donations(jaxprtool.trace(jnp.sin, 1.0))
    assert found.by_result == {} and found.unused == ()
