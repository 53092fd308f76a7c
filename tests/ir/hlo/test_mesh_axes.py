"""Mesh axes are inferred from devices only: of specs, of groups, and of permutations."""

from itertools import combinations, pairwise, permutations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxprtool.ir.hlo.partitions import DeviceTiles, MeshAxes, spec_text

SHAPE = {"a": 2, "b": 2, "c": 2}


def every_spec(rank):
    """Yield every assignment of axes, in every order, to the dimensions of an array."""
    for count in range(len(SHAPE) + 1):
        for axes in permutations(SHAPE, count):
            for cuts in combinations(range(count + rank - 1), rank - 1):
                ends = [-1, *cuts, count + rank - 1]
                parts = [
                    axes[start + 1 - i : end - i] for i, (start, end) in enumerate(pairwise(ends))
                ]
                yield tuple(parts)


def tiles_of(spec, mesh, order):
    """Return JAX's tiles for devices in the module's `order`."""
    shape = (24,) * len(spec)
    indices = NamedSharding(mesh, P(*spec)).devices_indices_map(shape)
    parts = [int(np.prod([mesh.shape[axis] for axis in axes], initial=1)) for axes in spec]
    rows = [
        [(cut.start or 0) * p // 24 for cut, p in zip(indices[device], parts, strict=True)]
        for device in order
    ]
    return DeviceTiles(tuple(parts), np.array(rows))


@pytest.mark.parametrize("reverse", [False, True])
def test_every_spec_is_inferred_from_jaxs_tiles(reverse):
    devices = jax.devices("cpu")[:8]
    mesh = Mesh(np.array(devices[::-1] if reverse else devices).reshape(2, 2, 2), tuple(SHAPE))
    axes = MeshAxes(SHAPE, range(7, -1, -1) if reverse else None)
    specs = list(every_spec(2))
    assert len(specs) == 1 + 3 * 2 + 6 * 3 + 6 * 4
    for spec in specs:
        assert axes.spec(tiles_of(spec, mesh, devices)) == spec


@pytest.mark.parametrize("count", range(4))
def test_groups_of_devices_are_along_the_axes_in_which_they_differ(count):
    places = np.arange(8).reshape(2, 2, 2)
    for along in combinations(range(3), count):
        rest = [axis for axis in range(3) if axis not in along]
        groups = places.transpose(*rest, *along).reshape(-1, 2**count).tolist()
        assert MeshAxes(SHAPE).of_groups(groups) == tuple("abc"[axis] for axis in along)


def test_groups_that_match_no_axes_have_none():
    assert MeshAxes(SHAPE).of_groups([(0, 3), (1, 2), (4, 7), (5, 6)]) is None
    assert MeshAxes(SHAPE).of_groups([(0, 1, 2), (3, 4, 5, 6, 7)]) is None


def test_a_part_of_an_axis_is_written_as_in_shardy():
    axes = MeshAxes({"x": 8})
    assert axes.of_groups([(0, 1), (2, 3), (4, 5), (6, 7)]) == ("x:(4)2",)
    assert axes.of_groups([(0, 4), (1, 5), (2, 6), (3, 7)]) == ("x:(1)2",)
    halves = DeviceTiles((2,), np.array([[0]] * 4 + [[1]] * 4))
    assert axes.spec(halves) == (("x:(1)2",),)


def test_tiles_that_match_no_axes_have_no_spec():
    assert MeshAxes({"x": 4}).spec(DeviceTiles((2,), np.array([[0], [1], [1], [0]]))) is None
    assert MeshAxes({"x": 4}).spec(DeviceTiles((2,), np.array([[0], [1]]))) is None


def test_a_permutation_is_along_the_axes_in_which_its_pairs_differ():
    axes = MeshAxes({"data": 2, "model": 4})
    assert axes.of_pairs([(i, (i + 1) % 4) for i in range(4)]) == ("model",)
    assert axes.of_pairs([(0, 4), (4, 0)]) == ("data",)
    assert axes.of_pairs([(3, 4)]) == ("data", "model")
    assert axes.of_pairs([]) == ()


def test_axes_of_size_one_and_of_non_powers_of_two():
    axes = MeshAxes({"one": 1, "three": 3, "two": 2})
    assert axes.of_groups([(0, 2, 4), (1, 3, 5)]) == ("three",)
    assert axes.of_groups([tuple(range(6))]) == ("three", "two")
    assert axes.of_groups([(i,) for i in range(6)]) == ()


def test_specs_are_written_as_in_jax():
    assert spec_text(()) == spec_text(((), ())) == "P()"
    assert spec_text((("x",), (), ("y", "z"), ())) == "P('x', None, ('y', 'z'))"
    assert spec_text(((),), unreduced=("x",), reduced=()) == "P(None, unreduced={'x'})"
    assert spec_text((), unreduced=("x", "y")) == "P(unreduced={'x', 'y'})"
