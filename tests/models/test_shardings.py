"""The collectives in training steps of Flax Linen, Equinox and Flax NNX."""

from collections import Counter

import jax
import pytest

import jaxprtool
from tests.programs import sharded_models
from tests.programs.collectives import collectives as read_from_text
from tests.programs.sharded_models import MODELS

pytestmark = [pytest.mark.models, pytest.mark.xdist_group("shardings")]

HERE = sharded_models.__file__


@pytest.fixture(scope="module")
def found():
    """Return the shardings of the steps, and the text of their compiled modules, by name."""
    return {}


@pytest.fixture(params=MODELS)
def step(request, found):
    pytest.importorskip({"linen": "flax", "nnx": "flax"}.get(request.param, request.param))
    pytest.importorskip("optax")
    if request.param not in found:
        made = MODELS[request.param]()
        with jax.set_mesh(made.mesh):
            program = jaxprtool.trace(made.function, *made.arguments)
            given = jaxprtool.shardings(program, program.in_avals)
        compiled = made.compiled()
        # Equinox wraps the compiled function
        text = getattr(compiled, "compiled", compiled).as_text()
        found[request.param] = request.param, given, text
    return found[request.param]


def test_bytes_agree_with_an_independent_parser(step):
    _, given, text = step
    listed, by_kind = Counter(), Counter()
    for each in given.collectives:
        listed[each.kind] += each.bytes * each.count
    for each, count in read_from_text(text).items():
        by_kind[each.kind] += each.bytes * count
    assert listed == by_kind


def test_each_collective_is_at_a_line_of_the_model(step):
    _, given, _ = step
    for each in given.collectives:
        assert each.source == "partitioner" and each.axes
        assert each.line.startswith("tests/programs/sharded_models.py:")


def test_almost_all_sent_bytes_have_a_reason(step):
    _, given, _ = step
    known = sum(each.sent_bytes for each in given.collectives if each.reason is not None)
    assert known > 0.97 * given.sent_bytes


#: The arrays that the steps gather, and along which axis, determined by hand.
GATHERED = {
    "linen": set(),
    "equinox": set(),
    "nnx": {f"slice of state[0]['blocks']['{name}']['kernel']" for name in
            ("qkv", "out", "up", "down")},
}  # fmt: skip


def test_gathered_weights_are_named(step):
    name, given, _ = step
    gathered = {
        (each.value.removesuffix(".value"), each.count, each.reason.consumer.partition(" ")[0])
        for each in given.collectives
        if each.kind == "all-gather" and each.axes == ("fsdp",) and "state" in each.value
    }
    assert gathered == {(value, 3, "dot_general") for value in GATHERED[name]}


def test_gradients_are_summed_over_the_batch(step):
    name, given, _ = step
    axis = "fsdp" if name == "nnx" else "data"
    summed = [each for each in given.collectives if each.kind == "all-reduce"]
    assert any(each.axes == (axis,) and "dot_general" in each.reason.consumer for each in summed)
    assert {axis for each in summed for axis in each.axes} <= set(given.mesh)


def test_the_state_is_sharded_like_its_partition_spec(step):
    name, given, _ = step
    specs = {
        "linen": ("P(None, 'model')", "params['Block_0']['Dense_0']['kernel']"),
        "equinox": ("P()", "model.layers[0].weight"),
        "nnx": ("P(None, 'fsdp', 'tensor')", "state[0]['blocks']['up']['kernel']"),
    }
    spec, path = specs[name]
    arguments = (each for each in given.values if each.kind == "argument")
    (value,) = (
        each
        for each in arguments
        if each.name.removesuffix(".value").endswith(path) and "opt_state" not in each.name
    )
    assert value.spec == spec
