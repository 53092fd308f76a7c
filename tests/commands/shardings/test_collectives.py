"""Collectives are attributed to lines, axes and specs."""

import inspect
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.lax import with_sharding_constraint
from jax.sharding import PartitionSpec as P

import jaxprtool
from jaxprtool.ir.hlo.module import compiled_module
from jaxprtool.ir.hlo.partitions import collectives
from tests.programs import sharded
from tests.programs.collectives import collectives as read_from_text
from tests.programs.sharded import MISTAKES, SHARDED, Sharded, floats, mesh_of, under_jit
from tests.share import shared_proofs

PROGRAMS = {**SHARDED, **MISTAKES}


def shardings(made: Sharded):
    with jax.set_mesh(made.mesh):
        program = jaxprtool.trace(made.function, *made.arguments)
        return jaxprtool.shardings(program, program.in_avals)


def totals(found, made: Sharded):
    """Return the listed bytes by kind, and those of an independent parser."""
    by_kind = Counter[str]()
    for each, count in read_from_text(made.compiled().as_text()).items():
        by_kind[each.kind] += each.bytes * count
    listed = Counter[str]()
    for each in found.collectives:
        listed[each.kind] += each.bytes * (1 if each.count is None else each.count)
    return listed, by_kind


class _Found(dict):
    """The shardings of each program, computed when they are first wanted."""

    def __missing__(self, name):
        self[name] = shardings(PROGRAMS[name]())
        return self[name]


@pytest.fixture(scope="module")
def found():
    return _Found()


@pytest.mark.parametrize("name", shared_proofs(PROGRAMS))
def test_bytes_agree_with_an_independent_parser(found, name):
    listed, by_kind = totals(found[name], PROGRAMS[name]())
    assert listed == by_kind


#: The collectives of each program, and their axes, determined by hand.
EXPECTED = {
    "data": {("all-reduce", "data", "partitioner")},
    "tensor": {("all-reduce", "model", "partitioner")},
    "fsdp": {("all-gather", "fsdp", "partitioner"), ("all-reduce", "fsdp", "partitioner")},
    "scanned": {("all-gather", "fsdp", "partitioner"), ("all-reduce", "fsdp", "partitioner")},
    "sequence": {("all-gather", "seq", "partitioner"), ("all-to-all", "seq", "partitioner")},
    "expert": {("all-to-all", "expert", "program"), ("all-reduce", "expert", "partitioner")},
    "pipeline": {("collective-permute", "stage", "program"), ("all-reduce", "stage", "program")},
    "uneven": {("all-reduce", "data", "partitioner"), ("all-gather", "data", "partitioner")},
    "explicit": {("all-reduce", "model", "partitioner"), ("all-gather", "data", "partitioner")},
    "partly_manual": {("all-reduce", "model", "partitioner"), ("all-reduce", "data", "program")},
}


@pytest.mark.parametrize("name", SHARDED)
def test_kinds_axes_and_sources_are_those_of_the_program(found, name):
    listed = {(e.kind, *e.axes, e.source) for e in found[name].collectives}
    assert listed == EXPECTED[name]


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_collective_of_the_partitioner_has_two_different_specs(found, name):
    for each in found[name].collectives:
        assert (each.reason is None) == (each.source == "program")
        if each.reason is not None:
            assert each.reason.operand_spec != each.reason.consumer_spec
            assert any(axis in each.reason.operand_spec for axis in each.axes)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_the_first_row(found, name):
    lines, _ = inspect.getsourcelines(sharded)
    first = found[name].collectives[0]
    assert first.source == "partitioner"
    number = int(first.line.rpartition(":")[2])
    assert lines[number - 1].rstrip().endswith("# mistake")


def test_collectives_in_a_loop_count_each_iteration(found):
    (gathered, summed) = found["gathered_in_loop"].collectives
    assert (gathered.kind, gathered.count, gathered.bytes) == ("all-gather", 12, 64 * 32 * 4)
    assert (summed.kind, summed.count) == ("all-reduce", 1)


def test_merged_values_have_their_own_lines_and_bytes(found):
    listed = found["replicated_embedding"].collectives
    assert [each.bytes for each in listed] == [4096 * 32 * 4, 32 * 32 * 4, 4]
    assert {each.merged for each in listed} == {3}
    assert len({each.operation for each in listed}) == 1
    assert [each.reason.consumer.split(" ")[0] for each in listed] == [
        "scatter-add",
        "dot_general",
        "reduce_sum",
    ]


def test_equal_layers_are_distinguished_by_the_arguments_that_they_gather(found):
    gathered = [each.value for each in found["fsdp"].collectives if each.kind == "all-gather"]
    assert sorted(gathered) == [
        f"params[{i}]['{name}']" for i in range(2) for name in ("in", "out")
    ]


def test_sums_of_equal_layers_have_the_same_operand_in_each():
    mesh = mesh_of(data=2, model=4)

    def forward(layers, x):
        for up, down in layers:
            x = with_sharding_constraint(x + jnp.tanh(x @ up) @ down, P("data"))
        return x

    specs = [(P(None, "model"), P("model"))] * 3
    function = under_jit(forward, mesh, specs, P("data"))
    layers = [(floats(16, 64), floats(64, 16))] * 3
    found = shardings(Sharded(function, (layers, floats(32, 16)), mesh))
    assert [each.value.partition(" ")[0] for each in found.collectives] == ["tanh"] * 3


def test_the_sum_of_a_gradient_is_distinguished_from_one_of_the_same_size():
    """The product with the weights has the bytes of their gradient and a similar operand."""
    mesh = mesh_of(fsdp=4, tensor=2)

    def loss(weights, x):
        hidden = with_sharding_constraint(x, P("fsdp", "tensor"))
        return jnp.square(with_sharding_constraint(hidden @ weights, P("fsdp"))).mean()

    function = under_jit(jax.grad(loss, (1, 0)), mesh, P("tensor", "fsdp"), P("fsdp", "tensor"))
    made = Sharded(function, (floats(128, 64), floats(256, 128)), mesh)
    summed = [e for e in shardings(made).collectives if e.kind == "all-reduce"]
    (gradient,) = (e for e in summed if e.axes == ("fsdp",))
    assert gradient.bytes == 64 * 64 * 4
    assert gradient.reason.operand_spec in ("P('fsdp')", "P('fsdp', 'tensor')")


def test_a_constraint_is_the_reason_for_a_gather_before_the_operations_it_affects():
    mesh = mesh_of(data=8)

    def forward(weights, x):
        hidden = jnp.tanh(x @ weights)
        scaled = jnp.exp(hidden) * 2.0
        return with_sharding_constraint(scaled, P())

    found = shardings(
        Sharded(under_jit(forward, mesh, P(), P("data")), (floats(32, 32), floats(64, 32)), mesh)
    )
    (only,) = found.collectives
    assert only.reason.consumer.startswith("sharding_constraint at ")
    code, first = inspect.getsourcelines(forward)
    asked = next(i for i, line in enumerate(code) if "with_sharding_constraint" in line)
    assert only.line.endswith(f":{first + asked}")


def test_a_result_that_is_gathered_is_named():
    mesh = mesh_of(data=8)
    function = jax.jit(
        lambda x: jnp.tanh(x),
        in_shardings=jax.NamedSharding(mesh, P("data")),
        out_shardings=jax.NamedSharding(mesh, P()),
    )
    (only,) = shardings(Sharded(function, (floats(64),), mesh)).collectives
    assert only.kind == "all-gather" and only.reason is not None
    assert (only.reason.operand_spec, only.reason.consumer_spec) == ("P('data')", "P()")


def test_a_gather_of_more_than_needed_names_the_intermediate_spec(found):
    (gathered,) = (e for e in found["explicit"].collectives if e.kind == "all-gather")
    reason = gathered.reason
    assert (reason.operand_spec, reason.consumer_spec) == ("P('data')", "P(None, 'model')")
    assert reason.way_spec == "P()" and gathered.bytes == 32 * 16 * 4
    others = [e.reason for name in PROGRAMS for e in found[name].collectives if e.reason]
    assert [each for each in others if each.way_spec] == [reason]


def test_groups_along_no_axis_are_counted():
    mesh = mesh_of(x=8)

    def body(x):
        return jax.lax.psum(x, "x", axis_index_groups=[[0, 3], [1, 2], [4, 7], [5, 6]])

    over = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    (only,) = shardings(Sharded(jax.jit(over), (floats(64),), mesh)).collectives
    assert only.axes is None and only.devices == 2 and only.source == "program"


@pytest.mark.proof
def test_sources_agree_with_those_written_by_xla(found):
    """JAX 0.12 marks what the partitioner added. JAX 0.10 marks nothing."""
    marks = Counter()
    for name, make in PROGRAMS.items():
        module = compiled_module(make().compiled())
        marked = Counter(
            b"is_spmd_generated" in b"".join(each.instruction.fields[68])
            for each in collectives(module)
        )
        listed = {each.operation: each.source for each in found[name].collectives}
        sources = Counter(source == "partitioner" for source in listed.values())
        marks += marked
        assert marked == sources or jax.__version_info__ < (0, 12)
    assert bool(marks[True]) == (jax.__version_info__ >= (0, 12))
