"""Times follow from the figures of an interconnect and a device."""

import jax
import pytest

import jaxprtool
from jaxprtool.analysis.devices import DEVICES, interconnect_named
from jaxprtool.commands.shardings.partitions import with_link_times
from tests.programs.sharded import MISTAKES


@pytest.fixture(scope="module")
def found():
    made = MISTAKES["gathered_in_loop"]()
    with jax.set_mesh(made.mesh):
        return jaxprtool.shardings(jaxprtool.trace(made.function, *made.arguments))


def test_a_gather_in_a_loop_has_the_time_of_all_iterations(found):
    gathered = with_link_times(found, interconnect_named("1e6"), None).collectives[0]
    assert gathered.seconds == pytest.approx(12 * 8192 * 7 / 8 / 1e6)
    assert gathered.overlap_seconds is None


def test_products_have_the_time_of_the_device(found):
    made = with_link_times(found, None, DEVICES["h100"])
    assert made.compute_seconds == pytest.approx(12 * 2 * 8 * 32 * 32 / 494.7e12)
    assert all(each.seconds is None for each in made.collectives)


def test_overlap_is_at_most_the_time_of_the_collective(found):
    made = with_link_times(found, interconnect_named("nvlink4"), DEVICES["h100"])
    for each in made.collectives:
        assert 0 <= each.overlap_seconds <= each.seconds
