"""Functions under `jax.jit` are traced by their own `trace`, and keep their options."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxprtool
from jaxprtool.errors import ArgumentsError, UserFunctionError
from jaxprtool.execute.running.run import run
from jaxprtool.formats import lowering

x = jnp.arange(1.0, 9.0)
PARAMS = {"w": x, "b": jnp.ones(3)}
PLACE = NamedSharding(jax.make_mesh((1,), ("d",), (AxisType.Auto,)), PartitionSpec("d"))


@functools.partial(
    jax.jit,
    static_argnames="power",
    donate_argnums=0,
    in_shardings=({"w": PLACE, "b": None}, PLACE),
    out_shardings=({"w": PLACE, "b": None}, None),
    keep_unused=True,
    compiler_options={"xla_cpu_enable_fast_math": True},
)
def step(params, x, power=2):
    loss = (x * params["w"] ** power).sum()
    return {"w": params["w"] + loss, "b": 2 * params["b"]}, loss


class Model:
    def __init__(self):
        self.weights = x

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def static_self(self, y, n):
        return self.weights * y**2 + n

    @functools.partial(jax.jit, donate_argnums=1, static_argnames="n")
    def unbound(weights, y, n):
        return weights * y**n


def test_the_program_is_the_body_and_has_the_options():
    program = jaxprtool.trace(step, PARAMS, x)
    assert str(program) == str(step.trace(PARAMS, x).jaxpr)
    assert program.arg_names == ("params['b']", "params['w']", "x")
    keywords = program.jit_keywords
    assert keywords["donate_argnums"] == (0, 1) and keywords["keep_unused"]
    assert keywords["in_shardings"] == (None, PLACE, PLACE)
    assert keywords["out_shardings"] == [None, PLACE, None]
    assert keywords["compiler_options"] == {"xla_cpu_enable_fast_math": True}
    assert jaxprtool.trace(step.__wrapped__, PARAMS, x).jit is None


def test_its_static_arguments_need_not_be_named_again():
    assert "integer_pow[y=3]" in str(jaxprtool.trace(step, PARAMS, x, 3))


def test_static_positions_count_from_the_end_and_in_calls_by_name():
    fun = jax.jit(lambda x, n: x * n, static_argnums=-1)
    assert "mul a 3.0" in str(jaxprtool.trace(fun, x, 3))
    named = jax.jit(lambda x, n: x * n, static_argnames="n")
    assert "mul a 3.0" in str(jaxprtool.trace(named, x, 3))
    assert "mul a 3.0" in str(jaxprtool.trace(named, n=3, x=x))


@pytest.mark.proof
def test_values_bound_by_methods_and_partials_are_constants():
    model = Model()
    program = jaxprtool.trace(model.static_self, x, 1.0)
    assert program.arg_names == ("y", "n") and len(program.jaxpr.consts) == 1
    bound = jaxprtool.trace(functools.partial(Model.unbound, x, n=3), x)
    free = jaxprtool.trace(functools.partial(Model.unbound, x), x, 3)
    for each in (program, bound, free):
        assert each.jit_keywords["donate_argnums"] == (0,)
    np.testing.assert_array_equal(bound(x + 0), x**4)
    np.testing.assert_array_equal(free(x + 0), x**4)
    np.testing.assert_array_equal(program(x + 0, 1.0), x**3 + 1)
    static = jaxprtool.trace(Model.unbound, jaxprtool.static(2.5), x, n=2)
    np.testing.assert_allclose(static(x + 0), 2.5 * x**2)


@pytest.mark.proof
def test_a_call_donates_and_places_like_the_function():
    program = jaxprtool.trace(step, PARAMS, x)
    given = jax.tree.map(jnp.copy, PARAMS)
    new, loss = program(given, x)
    expected, wanted = step(jax.tree.map(jnp.copy, PARAMS), x)
    assert given["b"].is_deleted() and new["w"].sharding == expected["w"].sharding
    np.testing.assert_array_equal(loss, wanted)
    given = jax.tree.map(jnp.copy, PARAMS)
    with jax.debug_nans(True):
        program(given, x)
    assert not given["b"].is_deleted()


def test_run_keeps_the_arguments_that_it_needs_again():
    program = jaxprtool.trace(step, PARAMS, x)
    given = [*jax.tree.leaves(PARAMS), x]
    report = run(program, given, repeat=2)
    assert not any(value.is_deleted() for value in given)
    np.testing.assert_array_equal(report.outputs[0].value, 2 * PARAMS["b"])


def test_the_program_is_lowered_like_by_jax():
    program = jaxprtool.trace(step, PARAMS, x)
    lowered = step.lower(PARAMS, x)
    assert lowering.stablehlo(program) == lowered.as_text()
    assert "input_output_alias" in lowering.hlo(program)
    assert lowering.stablehlo(program.apply("cse, dce")) == lowered.as_text()


def test_passes_keep_the_options_of_remaining_arguments():
    @functools.partial(
        jax.jit, donate_argnums=(0, 1), in_shardings=(PLACE, PLACE), out_shardings=(PLACE, PLACE)
    )
    def f(x, y):
        return y * 2, x + 1

    program = jaxprtool.trace(f, x, x)
    mapped = program.apply("batch((0, None), axis_size=2, out_axes=(None, 0))")
    keywords = mapped.jit_keywords
    assert keywords["donate_argnums"] == (1,)
    assert keywords["in_shardings"] == (None, PLACE) and keywords["out_shardings"] == [PLACE, None]
    unused = jaxprtool.trace(jax.jit(lambda x, y: y * 2, donate_argnums=(0, 1)), x, x)
    dropped = unused.apply("dce(drop_inputs=True)")
    assert dropped.jit_keywords["donate_argnums"] == (0,)


def test_jit_with_passes_keeps_the_options_of_a_jitted_function():
    ours = jaxprtool.jit(step)
    assert ours.lower(PARAMS, x).as_text().count("tf.aliasing_output") == 2
    assert "integer_pow[y=3]" in str(ours.trace(PARAMS, x, 3).jaxpr)
    kept = jaxprtool.jit(step, donate_argnums=())
    assert "tf.aliasing_output" not in kept.lower(PARAMS, x).as_text()


def test_mistakes_are_reported_as_for_any_function():
    with pytest.raises(ArgumentsError, match="do not fit step"):
        jaxprtool.trace(step, PARAMS)
    with pytest.raises(UserFunctionError, match="step raised"):
        jaxprtool.trace(step, {"w": x, "b": x}, jnp.ones(3))
