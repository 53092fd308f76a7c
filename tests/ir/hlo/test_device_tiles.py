"""The tiles in a module before partitioning agree with JAX's assignment to devices."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxprtool
from jaxprtool.execute.running.backends import compiled_afresh
from jaxprtool.formats.lowering import partitioned
from jaxprtool.ir.hlo.module import message
from jaxprtool.ir.hlo.partitions import MeshAxes, device_tiles, mesh_coordinates
from tests.programs.sharded import floats

#: Specs of an array of shape (8, 16, 24) on a mesh of axes a=2, b=2, c=2.
SPECS = [
    P(), P("a"), P(None, "b"), P("c", "a"), P(("a", "b")), P(("b", "a")), P(("a", "b", "c")),
    P(("c", "a"), "b"), P("b", None, ("c", "a")), P(None, ("c", "b", "a")),
]  # fmt: skip


def meshes():
    devices = np.array(jax.devices("cpu")[:8])
    kinds = (AxisType.Auto,) * 3
    yield Mesh(devices.reshape(2, 2, 2), ("a", "b", "c"), axis_types=kinds)
    yield Mesh(devices[::-1].reshape(2, 2, 2), ("a", "b", "c"), axis_types=kinds)


@pytest.mark.parametrize("mesh", meshes(), ids=["in order", "reversed"])
def test_tiles_agree_with_jax(mesh):
    shardings = tuple(NamedSharding(mesh, spec) for spec in SPECS)
    function = jax.jit(lambda *arrays: sum(each.sum() for each in arrays), in_shardings=shardings)
    shape = (8, 16, 24)
    with compiled_afresh():
        found = partitioned(jaxprtool.trace(function, *[floats(*shape)] * len(SPECS)))
    given = [each for each in found.before.entry.instructions if each.opcode == "parameter"]
    given.sort(key=lambda each: each.parameter_number)
    order = found.compiled.runtime_executable().local_devices()
    for instruction, sharding in zip(given, shardings, strict=True):
        (tiles,) = device_tiles(instruction, 8)
        wanted = sharding.devices_indices_map(shape)
        for place, device in zip(tiles.of_device, order, strict=True):
            sizes = [size // parts for size, parts in zip(shape, tiles.parts, strict=True)]
            starts = [index.start or 0 for index in wanted[device]]
            assert [i * size for i, size in zip(place, sizes, strict=True)] == starts


#: Arguments of shape (8,) on a mesh of axes a=2, b=2, c=2: their unreduced axes, and the term that
#: each device holds. The second is split along `b`.
UNREDUCED = {
    "a": [0, 0, 0, 0, 1, 1, 1, 1],
    "c": [0, 1, 0, 1, 0, 1, 0, 1],
    "ac": [0, 1, 0, 1, 2, 3, 2, 3],
    "abc": list(range(8)),
}


def test_devices_hold_terms_of_an_unreduced_array():
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), (AxisType.Explicit,) * 3)
    specs = [P("b" if axes == "c" else None, unreduced=set(axes)) for axes in UNREDUCED]
    placed = [NamedSharding(mesh, spec) for spec in specs]
    avals = [jax.ShapeDtypeStruct((8,), "float32", sharding=each) for each in placed]
    with jax.set_mesh(mesh), compiled_afresh():
        found = partitioned(jaxprtool.trace(jax.jit(lambda *arrays: arrays), *avals))
    given = [each for each in found.before.entry.instructions if each.opcode == "parameter"]
    given.sort(key=lambda each: each.parameter_number)
    for instruction, (names, terms) in zip(given, UNREDUCED.items(), strict=True):
        (tiles,) = device_tiles(instruction, 8)
        assert tiles.term_of.tolist() == terms
        assert tiles.parts == ((2,) if names == "c" else (1,))
        assert tiles.copies * tiles.terms * tiles.parts[0] == 8
        axes = MeshAxes(mesh.shape)
        assert axes.unreduced(tiles) == tuple(names)
        assert not axes.unreduced(replace(tiles, terms=1, term_of=None))


#: Axes x=2 and y=4, whose devices are the transpose (1, 0, 2) of a range of shape (2, 2, 2).
TRANSPOSED = bytes.fromhex("0a050a017810020a050a017910041a0a0a030202021203010002")


def test_the_devices_of_a_mesh_may_be_a_transposed_range():
    found = mesh_coordinates(message(TRANSPOSED), 8)
    assert [device for device in range(8) if found[device, 0] == 0] == [0, 1, 4, 5]
    assert found[[0, 1, 4, 5], 1].tolist() == [0, 1, 2, 3]
