"""Collectives and their reasons in programs with several possible values and operations."""

import os
import re
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.lax import with_sharding_constraint
from jax.sharding import PartitionSpec as P

import jaxprtool
from tests.commands.shardings.test_collectives import shardings, totals
from tests.programs.sharded import MISTAKES, SHARDED, Sharded, floats, mesh_of, under_jit
from tests.programs.sharded_features import FEATURES
from tests.share import first_and_proofs, shared_proofs

PROGRAMS = {**FEATURES, **SHARDED, **MISTAKES}


@pytest.fixture(scope="module")
def found():
    return {name: shardings(make()) for name, make in FEATURES.items()}


@pytest.mark.parametrize("name", shared_proofs(FEATURES))
def test_bytes_agree_with_an_independent_parser(found, name):
    listed, by_kind = totals(found[name], FEATURES[name]())
    assert listed == by_kind


def _text(each):
    """Return a collective as text: its kind and axes, the moved value, and the reason."""
    what = f"{each.kind} {','.join(each.axes)}: {each.value.partition(' at ')[0]}"
    if each.reason is None:
        return what
    specs = f"{each.reason.operand_spec} → {each.reason.consumer_spec}"
    if each.reason.mixes and not each.reduces:
        specs = f"{each.reason.operand_spec} across"
    return f"{what} {specs} for {each.reason.consumer.partition(' at ')[0]}"


#: The reasons in JAX 0.12, where the slice shares the gathered x with another operation.
GATHERED_FOR = "slice" if jax.__version_info__ >= (0, 12) else "reduce_window_sum"

#: The collectives of the programs. Each line was checked by hand against the program and its
#: module.
EXPECTED = {
    "unknown_length": {
        "all-gather data: carry of while P('data') → P() for dot_general",
        "all-reduce data: mul P('data') → P() for reduce_sum",
        "all-reduce data: abs P('data') → P() for reduce_max",
    },
    "branches_by_hand": {"all-reduce data: x", "collective-permute data: x"},
    "unreduced": {"all-reduce x: add P(None, unreduced={'x'}) → P() for reshard"},
    "moved_result": {
        "all-gather x: sub P('y', None, 'x') → P(None, ('x', 'y')) for sharding_constraint",
        "all-gather y: sub P('y') → P(None, ('x', 'y')) for sharding_constraint",
    },
    "cached": {
        "all-reduce model: dot_general P('data', 'model') → P('data') for dot_general",
        "all-gather model: dot_general P('data', 'model') across for reduce",
        "all-gather model: iota P('data', 'model') across for reduce",
    },
    "sorted_and_sliced": {
        "all-to-all data: x P('data') across for sort",
        "all-to-all data: slice P('data') across for concatenate",
        "collective-permute data: slice P('data') across for concatenate",
        "collective-permute data: sort P('data') across for slice",
        "collective-permute data: x P('data') across for slice",
        "all-gather data: concatenate P('data') → P() for gather",
        f"all-gather data: x P('data') → P() for {GATHERED_FOR}",
    },
}


@pytest.mark.parametrize("name", EXPECTED)
def test_collectives_and_reasons_are_those_of_the_program(found, name):
    assert set(map(_text, found[name].collectives)) == EXPECTED[name]


_GATHER = re.compile(r"%([\w.-]+) = \S+ all-gather\(%([\w.-]+)\)")
_PARAMETER = re.compile(r"%([\w.-]+) = \S+ parameter\((\d+)\)")


@pytest.mark.parametrize("name", first_and_proofs(PROGRAMS))
def test_arguments_that_are_gathered_directly_have_their_names(found, name):
    """The module that runs says which argument a gather reads, independently."""
    made = PROGRAMS[name]()
    given = found[name] if name in found else shardings(made)
    text = made.compiled().as_text()
    entry = text[text.index("\nENTRY ") :]
    numbers = {each[1]: int(each[2]) for each in _PARAMETER.finditer(entry)}
    gathers = {each[1]: each[2] for each in _GATHER.finditer(entry) if each[2] in numbers}
    with jax.set_mesh(made.mesh):
        names = jaxprtool.trace(made.function, *made.arguments).arg_names
    values = {each.operation: each.value for each in given.collectives if each.operation in gathers}
    assert values == {each: names[numbers[moved]] for each, moved in gathers.items()}


#: Operations of a fusion that compute; the others only lay values out, or pick a device's part.
_COMPUTES = re.compile(r" (?:add|subtract|multiply|divide|tanh|exponential|maximum|select|dot)\(")
_OPERAND = re.compile(r"%([\w.-]+) = \S+ (?:all-gather|all-to-all)\(%([\w.-]+)\)")
_FUSION = re.compile(r"%([\w.-]+) = \S+ fusion\(.*calls=%([\w.-]+)")


@pytest.mark.parametrize("name", first_and_proofs(PROGRAMS))
def test_a_computed_value_that_moves_is_not_named_after_an_argument(found, name):
    """The module that runs says which operands of collectives are computed, independently."""
    made = PROGRAMS[name]()
    given = found[name] if name in found else shardings(made)
    text = made.compiled().as_text()
    bodies = {each.split(" ", 1)[0]: each for each in text.split("\n%")}
    fusions = {each[1]: each[2] for each in _FUSION.finditer(text)}
    with jax.set_mesh(made.mesh):
        names = jaxprtool.trace(made.function, *made.arguments).arg_names
    operands = {each[1]: each[2] for each in _OPERAND.finditer(text)}
    for each in given.collectives:
        body = bodies.get(fusions.get(operands.get(each.operation, ""), ""), "")
        if _COMPUTES.search(body) and each.reason and not each.reason.mixes:
            assert each.value not in names


_WARNED = """
import sys
from tests.commands.shardings.test_features import PROGRAMS
from tests.commands.shardings.test_collectives import shardings
for name in ("moved_result", "explicit", "sorted_and_sliced", "grouped_batches", "fsdp"):
    listed = shardings(PROGRAMS[name]()).collectives
    said = sum(bool(each.reason and each.reason.rematerializes) for each in listed)
    print("listed " * said, file=sys.stderr, flush=True)
"""


@pytest.mark.sweep
def test_xla_warns_of_the_same_full_rematerializations():
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "0", "JAX_NUM_CPU_DEVICES": "8"}
    run = subprocess.run([sys.executable, "-c", _WARNED], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("Involuntary full rematerialization") == run.stderr.count("listed") == 2


def test_a_gradient_is_summed_over_the_batch_and_not_over_the_weights(found):
    """Both products of a layer's gradient sum over a dimension that is split along "fsdp"."""
    summed = [each for each in found["grouped_batches"].collectives if each.kind == "all-reduce"]
    for axis in ("replica", "fsdp"):
        along = [each for each in summed if each.axes == (axis,)]
        assert len(along) == 4  # the gradients of two weights in two layers
        for each in along:
            assert each.reason.operand_spec.startswith("P(('replica', 'fsdp')")
            assert "fsdp" in each.reason.consumer_spec


def test_results_that_xla_gathers_after_the_last_operation_are_the_reason():
    mesh = mesh_of(data=4, model=2)

    def forward(params, x):
        hidden = with_sharding_constraint(x @ params["in"], P("data", "model"))
        return {"bias": params["bias"] + hidden.sum(0), "scale": params["bias"] * hidden.sum(0)}

    place = lambda *spec: jax.NamedSharding(mesh, P(*spec))  # noqa: E731
    function = jax.jit(
        forward,
        in_shardings=({"in": place(None, "model"), "bias": place()}, place("data")),
        out_shardings={"bias": place(), "scale": place()},
    )
    params = {"in": floats(16, 64), "bias": floats(64)}
    found = shardings(Sharded(function, (params, floats(32, 16)), mesh))
    gathered = [each for each in found.collectives if each.kind == "all-gather"]
    specs = {(each.reason.operand_spec, each.reason.consumer_spec) for each in gathered}
    assert len(gathered) == 2 and specs == {("P('model')", "P()")}
    for each in found.values:
        assert each.kind != "result" or each.replicated


def test_moved_indices_are_distinguished_from_the_indexed_table():
    mesh = mesh_of(fsdp=4, tensor=2)

    def look_up(table, tokens):
        return with_sharding_constraint(table[tokens], P("fsdp", None, "tensor"))

    function = under_jit(look_up, mesh, P("tensor", "fsdp"), P("fsdp"))
    tokens = jax.ShapeDtypeStruct((8, 16), "int32")
    made = Sharded(function, (floats(64, 32), tokens), mesh)
    found = shardings(made)
    text = made.compiled().as_text()
    integers = set(re.findall(r"%([\w.-]+) = s32\S* (?:all-|collective-)", text))
    moved = [each for each in found.collectives if each.operation in integers]
    assert moved and not any(each.value == "table" for each in moved)


def test_each_value_of_a_sum_of_a_tree_is_named():
    mesh = mesh_of(data=8)

    def body(x):
        sums = {"a": jnp.sin(x).sum(0), "b": jnp.cos(x), "c": jnp.tanh(x).sum(1)}
        return jax.lax.psum(sums, "data")

    over = jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P())
    found = shardings(Sharded(jax.jit(over), (floats(64, 16),), mesh)).collectives
    values = {each.bytes: each.value.partition(" at ")[0] for each in found}
    assert values == {16 * 4: "reduce_sum", 8 * 16 * 4: "cos", 8 * 4: "reduce_sum"}


def test_a_sum_of_gradients_by_pmap_names_each():
    @partial(jax.pmap, axis_name="i", devices=jax.devices("cpu")[:8])
    def step(params, x):
        grads = jax.grad(lambda w: jnp.exp(x @ w["a"]).sum() + jnp.sin(w["b"]).sum())(params)
        return jax.lax.pmean(grads, "i")

    params = {"a": floats(8, 16, 4), "b": floats(8, 3)}
    found = shardings(Sharded(step, (params, floats(8, 2, 16)), mesh_of(i=8))).collectives
    values = {each.bytes: each.value.partition(" at ")[0] for each in found}
    assert values[12] in ("cos", "mul") and values[16 * 4 * 4] in ("transpose", "dot_general")
