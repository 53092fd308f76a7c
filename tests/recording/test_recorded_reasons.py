"""Reasons in a real run: `jaxprtool.record`, from the hook to the folder and back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

import jaxprtool
from jaxprtool.commands.record.record import record


def reasons_of(recording):
    """Return each reason of a recording, by the program."""
    return {
        name: [(each.kind, each.path, each.before, each.after) for each in reasons]
        for name, reasons in recording.reasons.items()
    }


@pytest.mark.proof
def test_planted_causes_are_found(tmp_path):
    @functools.partial(jax.jit, static_argnames="training")
    def step(batch, rate, training=True):
        return jax.tree.map(lambda x: x * rate + training, batch)

    def batch(size):
        return {"x": np.ones((size, 4), np.float32), "y": np.ones(size, np.float32)}

    with record(tmp_path / "run") as recording:
        step(batch(8), 0.1)
        step(batch(8), 0.2)
        step(batch(3), 0.1)
        step(batch(8), jnp.float32(0.1))
        step(batch(8), 0.1, training=False)
        with jax.default_matmul_precision("highest"):
            step(batch(8), 0.1)
        step.clear_cache()  # jax.clear_caches() would free what all tests have cached
        step(batch(8), 0.1)
        for i in range(2):
            jax.jit(lambda x: x * i)(batch(8)["x"])  # noqa: B023
    assert reasons_of(recording) == {
        "step@2": [("shape", "batch", "[8,…]", "[3,…] (2 arrays)")],
        "step@3": [("weak_type", "rate", "~f32[]", "f32[]")],
        "step@4": [("static", "training", "True (default)", "False")],
        "step@5": [("context", "default_matmul_precision", "None", "highest")],
        "step@6": [("cache", "", "compiled", "JAX's cache was cleared")],
        "lambda@2": [("closure", "i", "0", "1")],
    }
    assert all(
        "test_recorded_reasons.py:" in each.line
        for reasons in recording.reasons.values()
        for each in reasons
    )


def test_equinox_modules_have_the_users_names(tmp_path):
    eqx = pytest.importorskip("equinox")

    with record(tmp_path / "run", calls=True) as recording:

        @eqx.filter_jit
        def evaluate(model, x, scale):
            return jax.vmap(model)(x) * scale

        model = eqx.nn.Linear(4, 2, key=jax.random.key(0))
        for scale in (1.0, 1.0, 2.0):
            evaluate(model, np.ones((3, 4), np.float32), scale)
    assert reasons_of(recording) == {"evaluate@2": [("static", "scale", "1.0", "2.0")]}
    program = recording.programs["evaluate"]
    assert program.arg_names == ("model.weight", "model.bias", "x")
    assert program.out_names == ("marker", "result")
    functions = {each.name: each for each in recording.run.functions}
    assert functions["evaluate"].calls.count == 3


def test_functions_of_equinox_that_are_transformed_have_the_users_lines(tmp_path):
    eqx = pytest.importorskip("equinox")

    @eqx.filter_jit
    def sample(x):
        return x * 2.0

    @eqx.filter_jit
    def loss(x):
        return jax.numpy.sin(x)

    with record(tmp_path / "run") as recording:
        jax.vmap(sample)(np.ones(3, np.float32))
        jax.grad(loss)(1.0)
    found = {each.name: each for each in recording.run.functions}
    assert found["sample"].line.endswith(f":{sample.__wrapped__.__code__.co_firstlineno}")
    assert found["loss"].line.endswith(f":{loss.__wrapped__.__code__.co_firstlineno}")
    assert len(found["loss"].compilations) == 2  # the forward pass and the backward pass


@pytest.mark.models
def test_modules_updated_by_nnx_jit_have_their_outer_names(tmp_path):
    nnx = pytest.importorskip("flax.nnx")

    @nnx.jit
    def step(model, x, *, tape=None):
        model.up.kernel[...] -= 0.1
        if tape is not None:
            tape.kernel[...] += 1.0
        return {"loss": model.up(x).sum(), "model": model.up}

    class Net(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(2, 3, rngs=nnx.Rngs(0))

    with record(tmp_path / "run") as recording:
        step(Net(), np.ones((1, 2), np.float32))
        step(Net(), np.ones((1, 2), np.float32), tape=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    first, second = (set(recording.programs[name].out_names) for name in ("step", "step@2"))
    assert {"updated.model.up.kernel", "result['loss']"} <= first
    assert second - first == {"updated.tape.bias", "updated.tape.kernel"}
    assert not any("states" in name for name in first | second)


@pytest.mark.models
def test_each_module_of_a_variadic_parameter_has_its_number(tmp_path):
    nnx = pytest.importorskip("flax.nnx")

    @nnx.jit
    def double(x, *models):
        for model in models:
            model.kernel[...] *= 2.0
        return models[0](x)

    models = [nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(n)) for n in range(2)]
    with record(tmp_path / "run") as recording:
        double(np.ones((1, 2), np.float32), *models)
    names = ("updated.models[0].kernel", "updated.models[1].kernel", "result")
    assert recording.programs["double"].out_names == names


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_functions_under_pmap_have_the_users_names(tmp_path):
    def update(state, scale, *, rate):
        return {"w": state["w"] * scale * rate}

    with record(tmp_path / "run", calls=True) as recording:
        mapped = jax.pmap(update, static_broadcasted_argnums=1)
        rate = np.ones(1, np.float32)
        for size, scale in ((3, 2), (3, 2), (4, 2), (4, 3)):
            mapped({"w": np.ones((1, size), np.float32)}, scale, rate=rate)
    assert reasons_of(recording) == {
        "update@2": [("shape", "state['w']", "f32[1,3]", "f32[1,4]")],
        "update@3": [("static", "scale", "2", "3")],
    }
    (function,) = recording.run.functions
    assert function.line.endswith(f":{update.__code__.co_firstlineno}")
    assert function.calls.count == 4
    program = recording.programs["update@3"]
    assert program.name == "update"
    assert program.arg_names == ("state['w']", "rate")
    np.testing.assert_array_equal(program(np.ones((1, 4), np.float32), rate)["w"], 3.0)


def test_a_function_wrapped_again_has_the_reason_of_pmap(tmp_path):
    with record(tmp_path / "run") as recording:
        for _ in range(2):
            jax.pmap(lambda x: x + 1)(np.ones(1, np.float32))
    ((reason,),) = recording.reasons.values()
    assert reason.kind == "function"
    assert reason.advice == "make the function and call jax.pmap once, and keep the result"


def test_arguments_added_by_jaxprtool_are_not_transfers(tmp_path):
    with record(tmp_path / "run") as recording:
        total = jaxprtool.jit(lambda x: x.sum(), types="f32[n]", shapes={"n": 4})
        for size in (4, 3):
            assert total(np.ones(size, np.float32)) == size
    copied = [each.path for each in recording.run.transfers if each.kind == "to_device"]
    assert copied == ["lambda: args[0]"]


def test_a_primitive_of_a_package_is_not_masked(tmp_path):
    doubled_p = Primitive("doubled")
    doubled_p.def_abstract_eval(lambda x: x)
    mlir.register_lowering(doubled_p, mlir.lower_fun(lambda x: x * 2, multiple_results=False))

    def doubled(x):
        return doubled_p.bind(x) + 1

    with record(tmp_path / "run") as recording:
        for n in (4, 3):
            jax.jit(doubled)(np.ones(n, np.float32))
    [reason] = recording.reasons["doubled@2"]
    assert reason.advice == "pad x to 4"
