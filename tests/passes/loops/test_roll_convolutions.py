"""roll makes an iteration with a convolution one call of a unit, which XLA runs faster."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.ir.equations import equations
from jaxprtool.passes.loops.roll import Roll
from tests.programs import Case, interpreter, prove

x = jnp.linspace(-1.0, 1.0, 2 * 5 * 5 * 4).reshape(2, 5, 5, 4)


def kernels(count, channels=4):
    return [
        {"w": jax.random.normal(jax.random.key(i), (3, 3, channels, channels)) / 6, "g": 1 + i / 9}
        for i in range(count)
    ]


def block(h, p):
    y = lax.conv_general_dilated(
        h, p["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    y = (y - y.mean((0, 1, 2))) * lax.rsqrt(y.var((0, 1, 2)) + 1e-5) * p["g"]
    return h + jax.nn.relu(y)


def network(params, h):
    for p in params:
        h = block(h, p)
    return h


def loss(params, h):
    return (network(params, h) ** 2).sum()


def found(program, name):
    """Return the equations of a primitive, at every depth."""
    eqns = equations(jaxcompat.open_jaxpr(program.jaxpr))
    return [eqn for eqn in eqns if eqn.primitive.name == name]


def units(program):
    return [eqn for eqn in found(program, "jit") if jaxcompat.mark_of(eqn) == "unit"]


def rounds(program):
    """Return the equations of the body of each scan."""
    return [jaxcompat.open_jaxpr(scan.params["jaxpr"]).eqns for scan in found(program, "scan")]


def roll(fun, *args):
    """Return the program of `fun` after roll, which computes the same."""
    _, after, _ = prove(Case("fun", fun, args), Roll(), gradients=False)
    return after


def close(a, b):
    """Compare results of XLA, whose rounding error of a sum grows with its terms."""
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        rounding = 8 * np.finfo(np.float32).eps * np.abs(other).max()
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=max(2e-5, rounding))


GRADIENT = jaxprtool.trace(jax.value_and_grad(loss), kernels(4), x)


@pytest.mark.proof
def test_an_iteration_with_a_convolution_is_one_call_of_a_unit():
    after = roll(network, kernels(4), x)
    (body,) = rounds(after)
    assert [eqn.primitive.name for eqn in body] == ["jit"]
    assert jaxcompat.mark_of(body[0]) == "unit"
    assert jaxcompat.marked_name(body[0]) == body[0].params["name"] == "block"


@pytest.mark.proof
def test_each_half_of_a_gradient_is_a_unit_with_its_own_name():
    rolled = GRADIENT.apply("roll")
    assert all(len(body) == 1 for body in rounds(rolled))
    names = {jaxcompat.marked_name(eqn) for eqn in units(rolled)}
    assert len(names) == len(rounds(rolled)) == 2
    args = kernels(4), x
    flat = jax.tree.leaves(args)
    steps = interpreter.evaluate(GRADIENT.jaxpr, flat), interpreter.evaluate(rolled.jaxpr, flat)
    for a, b in zip(*steps, strict=True):
        np.testing.assert_array_equal(a, b)
    close(jax.jit(rolled)(*args), jax.jit(GRADIENT)(*args))


@pytest.mark.proof
def test_an_iteration_without_a_convolution_is_not_a_call():
    def run(ws, h):
        for w in ws:
            h = jnp.tanh(h @ w) * 0.5 + jnp.sin(h)
        return h

    assert not found(roll(run, [jnp.eye(4) * i for i in range(4)], x), "jit")


@pytest.mark.proof
def test_an_iteration_that_calls_a_unit_with_the_convolution_is_not_a_unit_itself():
    def run(stages, h):
        for stage in stages:
            for p in stage:
                h = block(h, p)
            h = jnp.tanh(h * stage[0]["g"]) - jnp.square(h) / (4 + jnp.cos(h))
        return h

    after = roll(run, [kernels(3)] * 4, x)
    assert sorted(scan.params["length"] for scan in found(after, "scan")) == [3, 4]
    assert len(units(after)) == 1


def test_names_of_existing_units_are_not_reused():
    def run(params, h):
        return network(params[:4], jax.jit(block)(h, params[4]))

    program = jaxprtool.trace(run, kernels(5), x)
    (call,) = [eqn for eqn in program.jaxpr.eqns if eqn.params.get("name") == "block"]
    marked = call.replace(ctx=jaxcompat.marked(call.ctx, "unit", "block"))
    eqns = [marked if eqn is call else eqn for eqn in program.jaxpr.eqns]
    program = program.replace(jaxpr=jaxcompat.replace_jaxpr(program.jaxpr, eqns=eqns))
    after = program.apply("roll")
    assert {jaxcompat.marked_name(eqn) for eqn in units(after)} == {"block", "block_1"}


@pytest.mark.proof
def test_pass_through_values_of_an_iteration_are_not_results_of_the_unit():
    @jax.jit
    def step(h, kept, w):
        return block(h, {"w": w, "g": 2.0}), kept

    def run(ws, h, kept):
        for w in ws:
            h, kept = step(h, kept, w)
        return h, kept

    args = [p["w"] for p in kernels(4)], x, x * 2
    program = jaxprtool.trace(run, *args)
    calls = units(program.apply("roll"))
    for call in calls:
        body = jaxcompat.open_jaxpr(call.params["jaxpr"])
        assert not set(body.outvars) & set(body.invars)
        assert len(set(body.outvars)) == len(body.outvars)
    jaxprtool.verify(program, program.apply("roll"), args)
    assert calls


@pytest.mark.parametrize("ordered", [True, False])
def test_effects_happen_in_each_iteration(ordered):
    seen = []

    @jax.jit
    def step(h, w):
        jax.debug.callback(lambda v: seen.append(float(v)), h[0, 0, 0, 0], ordered=ordered)
        return lax.conv(h, w, (1, 1), "SAME")

    def run(ws, h):
        for w in ws:
            h = step(h, w)
        return h

    args = [p["w"].T for p in kernels(4)], x.transpose(0, 3, 1, 2)
    program = jaxprtool.trace(run, *args)
    after = program.apply("roll")
    assert len(units(after)) == 1
    values = []
    for each in (program, after):
        values.append(jax.block_until_ready(jax.jit(each)(*args)))
        jax.effects_barrier()
    close(*values)
    assert sorted(seen[:4]) == sorted(seen[4:]) and (seen[:4] == seen[4:] or not ordered)


# --- other transformations ------------------------------------------------------------------------


@pytest.mark.proof
def test_jax_differentiates_and_batches_units():
    params = kernels(4)
    rolled = jaxprtool.trace(loss, params, x).apply("roll")
    close(jax.jit(jax.grad(rolled))(params, x), jax.jit(jax.grad(loss))(params, x))
    xs = jnp.stack([x, x / 2])
    many = jax.vmap(jax.grad(rolled), in_axes=(None, 0))
    close(jax.jit(many)(params, xs), jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, xs))


@pytest.mark.parametrize("passes", ["grad", "batch(in_axes=(None, 0), axis_size=2)", "-O2"])
def test_passes_keep_the_unit(passes):
    params = kernels(4)
    rolled = jaxprtool.trace(loss, params, x).apply("roll")
    after = rolled.apply(passes)
    assert units(after)
    assert all(len(units_in) for units_in in map(_marked, rounds(after)))


def _marked(eqns):
    return [eqn for eqn in eqns if jaxcompat.mark_of(eqn) == "unit"]


def test_unroll_undoes_roll():
    back = GRADIENT.apply("roll").apply("inline(force=True), unroll, simplify, dce")
    assert jaxprtool.equivalent(back, GRADIENT.apply("inline, simplify, dce"))
    in_other_order = GRADIENT.apply("roll").apply("unroll, inline(force=True), simplify, dce")
    assert jaxprtool.equivalent(in_other_order, back)


def test_a_file_and_emitted_python_keep_the_unit(tmp_path):
    rolled = GRADIENT.apply("roll")
    path = tmp_path / "loss.jaxpr"
    jaxprtool.write(rolled, path)
    read = jaxprtool.read(path)
    assert jaxprtool.equivalent(read, rolled) and len(units(read)) == 2
    text = jaxprtool.to_python(rolled)
    # One each for the forward iteration and the first layer's backward half, two for the backward
    # iteration.
    assert text.count("conv_general_dilated(") == 4
    assert "compilation_unit" in text


@pytest.mark.proof
def test_stacked_arguments_are_passed_to_the_unit_one_row_at_a_time():
    params = kernels(4)
    parts = jaxprtool.trace(loss, params, x).apply("roll(stack='arguments')")
    assert len(units(parts["rolled"])) == 1
    close(jax.jit(parts["rolled"])(parts["stack"](params), x), loss(params, x))
