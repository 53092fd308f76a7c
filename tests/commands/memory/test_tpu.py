"""The memory of sharded programs on a TPU that this machine lacks is what its compiler reports."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxprtool import compiled_memory, trace
from jaxprtool.commands.memory.compiled import module_peak
from jaxprtool.commands.memory.table import peak_facts
from jaxprtool.errors import UnsupportedError
from jaxprtool.formats import lowering
from jaxprtool.formats.hlo import StoredModule
from jaxprtool.ir.hlo.buffers import read_assignment
from jaxprtool.ir.hlo.module import compiled_module, read_module
from jaxprtool.jaxcompat.lowering import parsed_hlo
from tests.programs.modules import TILED

DEVICES = 8

#: The rows of `lines` that name no line, argument, result or constant.
UNNAMED = ("unused", "no line", "pointers")


def mesh(*names):
    sizes = (DEVICES,) if len(names) == 1 else (2, DEVICES // 2)
    return jax.sharding.Mesh(np.array(jax.devices()[:DEVICES]).reshape(sizes), names)


def sharded(function, names, *arguments, donate=()):
    """Return a function with the shardings of its arguments, and these: a shape, and its axes."""
    there = mesh(*names)
    shardings = tuple(NamedSharding(there, P(*axes)) for _, axes in arguments)
    values = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape, _ in arguments]
    return jax.jit(function, in_shardings=shardings, donate_argnums=donate), values


def mapped(function, specs, results, *shapes, names=("d",)):
    """Return a function under `shard_map`, and its arguments."""
    there = mesh(*names)
    body = jax.shard_map(function, mesh=there, in_specs=specs, out_specs=results, check_vma=False)
    return body, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def step(up, down, x, y):
    """One step of gradient descent."""

    def loss(up, down):
        return jnp.mean((jnp.tanh(x @ up) @ down - y) ** 2)

    first, second = jax.grad(loss, (0, 1))(up, down)
    return up - 0.1 * first, down - 0.1 * second


def data_parallel():
    batch = (65536, 1024), ("d",)
    weights = ((1024, 2048), ()), ((2048, 1024), ())
    return sharded(step, ("d",), *weights, batch, batch, donate=(0, 1))


def tensor_parallel():
    batch = (16384, 2048), ("d",)
    weights = ((2048, 8192), (None, "m")), ((8192, 2048), ("m",))
    return sharded(step, ("d", "m"), *weights, batch, batch)


def fully_sharded():
    batch = (32768, 2048), ("d",)
    weights = ((2048, 4096), ("d",)), ((4096, 2048), ("d",))
    return sharded(step, ("d",), *weights, batch, batch, donate=(0, 1))


def turn(x):
    return lax.ppermute(x, "d", [(i, (i + 1) % DEVICES) for i in range(DEVICES)])


def pipeline():
    def run(weights, batches):
        place = lax.axis_index("d")

        def tick(carry, time):
            state, done = carry
            fresh = batches[jnp.minimum(time, len(batches) - 1)]
            value = jnp.tanh(jnp.where(place == 0, fresh, state) @ weights[0])
            done = done.at[jnp.maximum(time - DEVICES + 1, 0)].set(value)
            return (turn(value), done), None

        start = jnp.zeros_like(batches[0]), jnp.zeros_like(batches)
        (_, done), _ = lax.scan(tick, start, jnp.arange(len(batches) + DEVICES - 1))
        return lax.psum(jnp.where(place == DEVICES - 1, done, 0), "d")

    return mapped(run, (P("d"), P()), P(), (DEVICES, 1024, 1024), (32, 1024, 1024))


def ring_attention():
    def ring(q, k, v):
        def turned(carry, _):
            k, v, total, weight = carry
            scores = jnp.exp(jnp.einsum("qhd,khd->hqk", q, k) / 8)
            total += jnp.einsum("hqk,khd->qhd", scores, v)
            return (turn(k), turn(v), total, weight + scores.sum(-1).T), None

        zero = jnp.zeros_like(q), jnp.zeros(q.shape[:2])
        (_, _, total, weight), _ = lax.scan(turned, (k, v, *zero), None, length=DEVICES)
        return total / weight[..., None]

    attention, arguments = mapped(ring, (P("d"),) * 3, P("d"), *[(16384, 8, 64)] * 3)
    return jax.grad(lambda q, k, v: attention(q, k, v).sum(), (0, 1, 2)), arguments


def all_to_all():
    def experts(x, up, down):
        x = lax.all_to_all(x.reshape(DEVICES, -1, 512), "d", 0, 0)
        return lax.all_to_all(jax.nn.gelu(x @ up[0]) @ down[0], "d", 0, 0)

    shapes = (262144, 512), (DEVICES, 512, 2048), (DEVICES, 2048, 512)
    return mapped(experts, (P("d"),) * 3, P("d"), *shapes)


def shard_map():
    def second_moments(x, w):
        return lax.psum(x.T @ jnp.tanh(x @ w), "d")

    return mapped(second_moments, (P("d"), P()), P(), (262144, 1024), (1024, 1024))


def psum_scatter():
    def scattered(x, w):
        return lax.psum_scatter(jax.nn.relu(x @ w), "d", tiled=True)

    shapes = (16384, 4096), (4096, 4096)
    return mapped(scattered, (P(None, "d"), P("d")), P("d"), *shapes)


def sharded_scan():
    def loss(weights, x):
        return jnp.mean(lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, weights)[0] ** 2)

    return sharded(jax.grad(loss), ("d",), ((8, 1024, 1024), ()), ((65536, 1024), ("d",)))


def sharded_embedding():
    def loss(table, x):
        rows = table[(x[:, 0] * 1000).astype(int)]
        return jnp.mean(jax.nn.logsumexp(rows @ table.T, -1))

    return sharded(jax.grad(loss), ("d",), ((32768, 512), ("d",)), ((8192, 1), ()))


PROGRAMS = (
    *(data_parallel, tensor_parallel, fully_sharded, pipeline, ring_attention),
    *(all_to_all, shard_map, psum_scatter, sharded_scan, sharded_embedding),
)


@pytest.fixture
def executables(monkeypatch):
    """Compile as users do, and return a list that the executables get into."""
    seen = []
    monkeypatch.setattr(
        lowering, "compiled_module", lambda each: seen.append(each) or compiled_module(each)
    )
    was = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield seen
    jax.config.update("jax_disable_most_optimizations", was)


def require_same(function, arguments, backend, executables):
    """Require that the peak is XLA's to the byte, and that lines cover it."""
    found = compiled_memory(trace(function, *arguments), backend=backend)
    (executable,) = executables
    xla = executable.memory_analysis()
    assert not found.by_schedule
    assert found.reported_bytes == xla.peak_memory_in_bytes
    if hasattr(xla, "total_allocation_bytes"):  # JAX 0.12
        assert found.peak_bytes == xla.total_allocation_bytes
    used = found.peak_bytes - found.unused_bytes
    assert used == found.reported_bytes or found.reported_memory
    named = sum(line.bytes for line in found.lines if line.line not in UNNAMED)
    assert sum(buffer.bytes for buffer in found.buffers) == found.peak_bytes
    assert named >= 0.95 * used
    return found


def test_a_small_program_has_the_figures_of_xla(executables):
    pytest.importorskip("libtpu", reason="needs the package libtpu")
    weights, batch = (((128, 256), ()), ((256, 128), ())), ((1024, 128), ("d",))
    function, arguments = sharded(step, ("d",), *weights, batch, batch)
    require_same(function, arguments, "tpu:v5e:2x4", executables)


def test_a_program_that_does_not_fit_names_the_lines_that_need_most_memory():
    pytest.importorskip("libtpu", reason="needs the package libtpu")
    shape = jax.ShapeDtypeStruct((65536, 65536), jnp.float32)
    with pytest.raises(UnsupportedError, match="RESOURCE_EXHAUSTED") as error:
        compiled_memory(trace(lambda x: x @ x, shape), backend="tpu:v5e:2x2")
    assert "GiB at its peak: " in error.value.hint and "16.0 GiB arguments" in error.value.hint


def test_a_mesh_in_the_shardings_of_jit_is_that_of_the_devices_compiled_for():
    function, arguments = sharded(step, ("d",), *[((8, 8), ())] * 2, *[((64, 8), ("d",))] * 2)
    assert compiled_memory(trace(function, *arguments), backend="cpu").devices == DEVICES


def field(number, value):
    """Return a field of a protocol buffer: an integer, or the bytes of a message."""
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    return varint(number << 3) + varint(value)


def varint(value):
    more, last = value >> 7, value & 0x7F
    return bytes([last | 0x80]) + varint(more) if more else bytes([last])


def entry(**fields):
    """Return a message, from the numbers of its fields: `_3=4`."""
    return b"".join(field(int(name[1:]), value) for name, value in fields.items())


def assigned_on_a_tpu():
    """Return the tiled module with buffers as the compiler for TPUs assigns them in two heaps."""
    module = read_module(parsed_hlo(TILED))
    numbers = {op.name: op.id for op in module.entry.instructions}
    names, spaces = ("x", "near", "y", "z", "both"), (0, 1, 0, 0, 0)
    sizes = (4096, 65536, 4096, 4096, 512)
    assigned = b"".join(
        field(1, entry(_1=i, _2=sizes[i], _3=entry(_4=numbers[name]), _4=spaces[i]))
        for i, name in enumerate(names)
    )
    for i, size in enumerate((4096, 65536, 8192, 4096, 512)):
        kind = {0: {"_5": 1, "_6": 0}, 3: {"_7": 1}, 4: {"_7": 1}}.get(i, {})
        place = entry(_1=i, _2=0, _3=sizes[i])
        assigned += field(3, entry(_1=i, _2=size, **kind, _8=spaces[i], _9=place))
    for number in (1, 2):  # gets its place, and leaves it
        events = (field(1, entry(_1=kind, _2=number)) for kind in (0, 1))
        assigned += field(4, b"".join(events) + field(3, number))
    return StoredModule(module, read_assignment(assigned, module))


def test_the_memory_on_the_chip_is_not_counted_but_reported():
    peak = module_peak(assigned_on_a_tpu())
    assert (peak.temporary_bytes, peak.unused_bytes) == (8192, 4096)
    assert peak.peak_bytes == 4096 + 8192 + 4096 + 512
    assert (peak.reported_memory, peak.reported_bytes) == (1, 4096 + 65536 + 4096 + 512)
    (fact,) = (fact for fact in peak_facts(peak) if "peak_memory_in_bytes" in fact)
    assert "72.5 KiB" in fact and "memory 1" in fact


@pytest.mark.sweep
@pytest.mark.parametrize("program", PROGRAMS)
def test_sharded_programs_have_the_figures_of_xla(program, executables):
    pytest.importorskip("libtpu", reason="needs the package libtpu")
    require_same(*program(), "tpu:v5e:2x4", executables)
