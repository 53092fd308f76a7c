"""The passes: readable names, in pipelines, in files, and on the command line."""

from collections import OrderedDict

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprtool_harvest import CallAndReap, HarvestError, Plant, Reap

import jaxprtool
from jaxprtool import nest, sow
from jaxprtool.cli.main import main
from jaxprtool.errors import PipelineError

W = [np.full((3, 4), 0.1, np.float32), np.full((4, 2), 0.2, np.float32)]
X = np.arange(15, dtype=np.float32).reshape(5, 3)


def layer(w, x):
    x = sow(x @ w, tag="debug", name="pre")
    return sow(jnp.tanh(x), tag="debug", name="act")


def net(params, x, *, scale=1.0):
    for i, w in enumerate(params):
        x = nest(layer, scope=f"layer{i}")(w, x)
    return {"loss": scale * jnp.sum(x)}


@pytest.fixture
def program():
    return jaxprtool.trace(net, W, X, scale=2.0)


def test_reap_gives_the_values_in_place_of_the_results_in_the_order_of_the_program(program):
    after = program.apply("reap(tag='debug')")
    names = [f"reaps['layer{i}']['{name}']" for i in (0, 1) for name in ("pre", "act")]
    assert list(after.out_names) == names
    assert (after.name, after.arg_names) == ("net", program.arg_names)
    reaps = after(W, X, scale=2.0)
    assert isinstance(reaps, OrderedDict) and list(reaps) == ["layer0", "layer1"]
    np.testing.assert_allclose(reaps["layer0"]["pre"], X @ W[0], rtol=1e-6)


def test_reap_leaves_out_what_only_the_results_need(program):
    after = program.apply("reap(tag='debug', allowlist='layer0')")
    assert len(after.jaxpr.eqns) == 1 and after.arg_names == program.arg_names
    assert after.apply("dce").jaxpr is after.jaxpr


def test_call_and_reap_gives_both(program):
    after = program.apply("call_and_reap(tag='debug', blocklist=('pre', 'layer1'))")
    assert after.out_names == ("result['loss']", "reaps['layer0']['act']")
    results, reaps = after(W, X, scale=2.0)
    np.testing.assert_array_equal(results["loss"], program(W, X, scale=2.0)["loss"])
    assert list(reaps) == ["layer0"]


def test_plant_takes_the_values_as_first_argument(program):
    after = program.apply("plant(tag='debug', blocklist='pre')")
    assert after.arg_names == (
        "plants['layer0']['act']",
        "plants['layer1']['act']",
        *program.arg_names,
    )
    plants = {f"layer{i}": {"act": np.ones((5, n), np.float32)} for i, n in ((0, 4), (1, 2))}
    assert after(plants, W, X, scale=2.0)["loss"] == 20.0


def test_plant_takes_what_reap_gives():
    def f(x):
        def step(x, _):
            x = sow(jnp.sin(x), tag="debug", name="z", mode="append")
            return sow((x, x + 1), tag="debug", name="a", mode="append")[1], None

        x = sow(x, tag="debug", name="z", mode="append")
        return lax.scan(step, x, None, length=3)[0]

    program = jaxprtool.trace(f, 0.5)
    reaps = program.apply(Reap("debug"))
    assert list(reaps.out_names)[:2] == ["reaps['z'][0]", "reaps['z'][1]"]
    planted = program.apply(Plant("debug"))
    assert set(planted.arg_names) == {n.replace("reaps", "plants") for n in reaps.out_names} | {"x"}
    assert planted(dict(reaps(0.5)), 9.0) == program(0.5)


def test_the_passes_leave_the_program_as_it_was(program):
    text = str(program)
    for transform in (Reap("debug"), CallAndReap("debug"), Plant("debug")):
        program.apply(transform)
    assert str(program) == text and "sow" in text


def test_passes_follow_each_other(program):
    after = program.apply("call_and_reap(tag='debug', allowlist='layer1'), dce")
    with pytest.raises(HarvestError, match="net sows nothing under the tag 'debug'"):
        after.apply("reap(tag='debug')")


@pytest.mark.parametrize("name", ["reap", "call_and_reap", "plant"])
def test_a_tag_under_which_nothing_is_sown_is_an_error(program, name):
    with pytest.raises(HarvestError, match="net sows nothing under the tag 'debg'") as caught:
        program.apply(f"{name}(tag='debg')")
    assert caught.value.hint == "did you mean 'debug'?"
    with pytest.raises(HarvestError, match="nothing under the tag 'z'") as caught:
        program.apply(f"{name}('z')")
    assert caught.value.hint == "available: 'debug'"
    with pytest.raises(
        HarvestError, match="allowlist and blocklist exclude everything that net sows"
    ):
        program.apply(f"{name}('debug', allowlist=('prr',))")
    with pytest.raises(PipelineError, match="needs option 'tag'"):
        program.apply(name)


MODEL = """
import jax, jax.numpy as jnp
from jaxprtool import sow

def model(x):
    h = sow(jnp.tanh(x), tag="debug", name="hidden")
    return h.sum()

def unrolled(x):
    for _ in range(2):
        x = sow(x, tag="debug", name="x")
    return x
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)


def run(capsys, *args):
    code = main(list(args))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_run_shows_intermediates_by_name(model, capsys):
    passes = ["-p", "reap(tag='debug')"]
    code, out, _ = run(capsys, "run", "model.py:model", "--args", "zeros(f32[3])", *passes)
    assert code == 0 and "reaps['hidden']: f32[3] [0., 0., 0.]" in out and "result" not in out


def test_files_carry_planted_programs(model, capsys):
    args = ["--args", "f32[3]", "-p", "plant(tag='debug')", "-o", "planted.jaxpr"]
    assert run(capsys, "opt", "model.py:model", *args)[0] == 0
    args = ["--args", "{'hidden': ones(f32[3])}, zeros(f32[3])"]
    code, out, _ = run(capsys, "run", "planted.jaxpr", *args)
    assert code == 0 and "result: f32[] 3." in out


def test_a_mistake_is_one_line(model, capsys):
    args = ["--args", "f32[3]", "-p", "reap(tag='debug')"]
    code, _, err = run(capsys, "run", "model.py:unrolled", *args)
    assert code == 2 and "Traceback" not in err
    assert "error: Variable has already been reaped: x (sow at" in err.replace("\n", " ")
    assert "hint: mode='append' keeps all values" in err
