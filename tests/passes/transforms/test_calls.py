"""checkpoint, jit, pmap, named_call and disable_jit: results, options and errors."""

import inspect
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import pytest

from jaxprtool import Pipeline, nest, trace, variable
from jaxprtool.commands.memory.estimate import memory
from jaxprtool.errors import ArgumentsError, PipelineError, UnsupportedError
from jaxprtool.formats.lowering import stablehlo
from jaxprtool.ir.equations import equations
from jaxprtool.ir.equivalence import structural_difference
from jaxprtool.ir.program import type_check
from jaxprtool.jaxcompat import name_stack, open_jaxpr
from jaxprtool.passes.mapping.batch.axes import BatchError
from jaxprtool.passes.transforms.calls import Checkpoint, Jit, NamedCall, Pmap

X = jnp.ones((2, 3))
policies = jax.checkpoint_policies


def model(x, y=2.0, *, scale=1.0):
    return scale * jax.nn.gelu(jnp.where(x > 0, x, y)).sum()


def primitives(program):
    return {eqn.primitive.name for eqn in equations(open_jaxpr(program.jaxpr))}


POLICIES = {
    "jax.checkpoint_policies.dots_saveable": policies.dots_saveable,
    "dots_saveable": policies.dots_saveable,
    "checkpoint_policies.nothing_saveable": policies.nothing_saveable,
    "save_only_these_names('a', 'b')": policies.save_only_these_names("a", "b"),
    "offload_dot_with_no_batch_dims('device', 'pinned_host')": (
        policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    ),
    "save_from_both_policies(dots_saveable, save_any_names_but_these('a'))": (
        policies.save_from_both_policies(
            policies.dots_saveable, policies.save_any_names_but_these("a")
        )
    ),
}


@pytest.mark.parametrize("quote", ['"', ""])
@pytest.mark.parametrize("text", POLICIES)
def test_checkpoint_takes_jaxs_policies_with_or_without_quotes(text, quote):
    policy = f"{quote}{text}{quote}"
    program = trace(model, X).apply(f"checkpoint(policy={policy}, prevent_cse=False)")
    direct = jax.checkpoint(model, policy=POLICIES[text], prevent_cse=False)
    assert structural_difference(program, trace(direct, X)) is None


def test_checkpoint_takes_a_policy_object():
    program = trace(model, X).apply(Checkpoint(policies.dots_saveable))
    assert program.jaxpr.eqns[0].params["policy"] is policies.dots_saveable
    assert program.out_names == ("result",)


def test_a_checkpointed_program_recomputes_in_its_gradient():
    program = trace(model, X).apply("checkpoint, grad")
    assert structural_difference(program, trace(jax.grad(jax.checkpoint(model)), X)) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dots", "no checkpoint policy 'dots'"),
        ("dot_saveable", "no checkpoint policy"),
        ("save_only_these_names", "takes arguments"),
        ("dots_saveable(1)", "takes no arguments"),
        ("save_from_both_policies(1)", "no checkpoint policy '1'"),
        ("offload_dot_with_no_batch_dims()", "cannot be created"),
        ("a, b", "a policy must be one of"),
    ],
)
def test_an_unknown_policy_is_reported(text, says):
    with pytest.raises(PipelineError, match=says):
        trace(model, X).apply(f'checkpoint(policy="{text}")')


def test_an_invalid_policy_without_quotes_is_reported():
    with pytest.raises(PipelineError, match="no checkpoint policy 'dots'"):
        trace(model, X).apply("checkpoint(policy=dots)")
    with pytest.raises(PipelineError, match="arithmetic is not allowed"):
        trace(model, X).apply("checkpoint(policy=dots_saveable + dots_saveable)")


@pytest.mark.parametrize(
    "options",
    [{}, {"donate_argnums": (0, 1)}, {"donate_argnames": "scale"}, {"keep_unused": True}],
)
def test_jit_makes_one_call_with_jaxs_options(options):
    program = Jit(**options)(trace(model, X, 3.0, scale=2.0))
    jitted = jax.jit(model, **options)
    direct = trace(lambda *args, **kwargs: jitted(*args, **kwargs), X, 3.0, scale=2.0)
    assert structural_difference(program.jaxpr, direct.jaxpr) is None
    (call,) = program.jaxpr.eqns
    assert call.params["name"] == "model"


def test_jit_and_named_call_have_an_option_called_name():
    program = trace(model, X).apply("jit(name='train_step')")
    assert program.jaxpr.eqns[0].params["name"] == "train_step"
    assert program.name == "model"
    program = trace(model, X).apply("named_call(name='head')")
    assert {name_stack(eqn).split("/")[0] for eqn in program.jaxpr.eqns} == {"head"}


def test_the_text_of_such_a_pass_has_its_given_name():
    for text in ("jit(name='a', donate_argnums=1)", "jit", "named_call(name='b')", "named_call"):
        assert str(Pipeline.parse(text)) == text
    assert (Jit.name, NamedCall.name) == ("jit", "named_call")


def test_jit_is_inlined_where_jax_inlines_it():
    inlined = jax.jit(model, inline=True)
    direct = trace(lambda x: inlined(x), X)
    assert (
        structural_difference(trace(model, X).apply("jit(inline=True)").jaxpr, direct.jaxpr) is None
    )


@pytest.mark.parametrize(
    ("pipeline", "says"),
    [
        ("jit(donate_argnums=7)", "no positional argument 7 for donate_argnums"),
        ("jit(donate_argnames='scal')", "no argument 'scal' for donate_argnames"),
    ],
)
def test_invalid_donation_is_reported(pipeline, says):
    with pytest.raises(ArgumentsError, match=says):
        trace(model, X, scale=1.0).apply(pipeline)


def summed(x):
    return x / jax.lax.psum(x, "i")


def test_pmap_maps_over_devices_and_binds_its_axis():
    pipeline = Pipeline.parse("pmap(axis_name='i', axis_size=1)")
    assert pipeline.bound_axes == (("i", 1),)
    program = pipeline(trace(summed, jnp.ones(3), axis_env=pipeline.bound_axes))
    assert program.axis_env == ()
    assert program.in_avals[0].shape == (1, 3)
    x = jnp.arange(1.0, 4.0)[None]
    assert jnp.array_equal(program(x), jax.pmap(summed, axis_name="i")(x))


def test_pmap_leaves_unmapped_arguments_alone():
    program = trace(lambda x, w: x * w, X, X).apply("pmap(in_axes=(0, None))")
    devices = jax.local_device_count()
    assert [a.shape for a in program.in_avals] == [(devices, 2, 3), (2, 3)]


def test_pmap_reports_missing_devices_and_axes():
    with pytest.raises(UnsupportedError, match="needs 4096 devices, but this machine has"):
        trace(model, X).apply("pmap(axis_size=4096)")
    with pytest.raises(BatchError):
        trace(model, X).apply("pmap(in_axes=(0, 0, 0), axis_size=1)")


def test_disable_jit_returns_what_jax_traces_without_jit():
    with jax.disable_jit():
        direct = trace(model, X, X)
    program = trace(model, X, X)
    assert structural_difference(program.apply("disable_jit"), direct) is None
    assert (
        structural_difference(program.apply("jit(donate_argnums=0), disable_jit"), direct) is None
    )


def test_disable_jit_applies_inside_loops_branches_and_custom_rules():
    inner = jax.jit(lambda x: jnp.sin(x) * 2.0)

    @jax.custom_jvp
    def custom(x):
        return inner(x)

    custom.defjvp(lambda primals, tangents: (custom(*primals), tangents[0]))

    def fun(x):
        x = jax.lax.scan(lambda c, _: (inner(c), None), x, length=2)[0]
        x = jax.lax.cond(x.sum() > 0, inner, lambda x: x, x)
        return custom(jax.checkpoint(lambda x: jax.jit(jnp.cos)(x))(x))

    before = trace(fun, jnp.ones(3))
    after = before.apply("disable_jit")
    assert "jit" in primitives(before)
    assert "jit" not in primitives(after)
    assert {"scan", "cond", "custom_jvp_call"} <= primitives(after)
    assert jnp.array_equal(before(jnp.ones(3)), after(jnp.ones(3)))


def test_disable_jit_keeps_scopes_with_a_sown_value():
    def fun(key):
        with_variable = nest(lambda k: variable(jax.random.normal(k), name="w"), scope="a")
        return nest(lambda x: jnp.sin(x), scope="b")(with_variable(key))

    program = trace(fun, jax.random.key(0)).apply("disable_jit")
    names = [
        e.params["name"] for e in equations(open_jaxpr(program.jaxpr)) if e.primitive.name == "jit"
    ]
    assert names == ["nest:a"]
    assert list(program.apply("unzip")) == ["init", "apply"]


def test_disable_jit_of_a_program_without_calls_is_that_program():
    program = trace(lambda x: x + 1, X)
    assert program.apply("disable_jit") is program
    type_check(program)


def test_arguments_donated_by_jit_are_donated_when_compiled():
    def step(state, batch, *, scale, unused):
        return {"w": state["w"] + batch}, batch * scale

    x = jnp.ones(8)
    program = trace(step, {"w": x}, x, scale=x, unused=x)
    passes = "jit(donate_argnums=0, donate_argnames='scale', keep_unused=True)"
    applied = program.apply(passes)
    options = {"donate_argnums": 0, "donate_argnames": "scale", "keep_unused": True}
    as_jax = trace(jax.jit(step, **options), {"w": x}, x, scale=x, unused=x)
    assert applied.jit.arguments == as_jax.jit.arguments and applied.jit.keep_unused
    assert program.apply("jit").jit is None and as_jax.apply("jit").jit == as_jax.jit
    assert memory(applied).donated_bytes == memory(as_jax).donated_bytes == 64
    assert stablehlo(applied).count("tf.aliasing_output") == 2
    by_name = "jit(donate_argnames=('state', 'scale'), keep_unused=True)"
    assert program.apply(by_name).jit == applied.jit
    twice = program.apply("jit(donate_argnums=0), jit(donate_argnames='scale', keep_unused=True)")
    assert twice.jit == applied.jit


@pytest.fixture
def auto_mesh():
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


def test_jit_shards_and_compiles_like_jax(auto_mesh):
    def product(w, x):
        return x @ w

    w, x = jax.ShapeDtypeStruct((16, 32), "float32"), jax.ShapeDtypeStruct((8, 16), "float32")
    p = jax.sharding.PartitionSpec
    specs, options = (p(None, "y"), p("x")), {"xla_cpu_enable_fast_math": True}
    as_jax = jax.jit(
        product, in_shardings=specs, out_shardings=p("x", "y"), compiler_options=options
    )
    program = trace(product, w, x)
    applied = program.apply(
        "jit(in_shardings=(P(None, 'y'), P('x')), out_shardings=P('x', 'y'), "
        "compiler_options={'xla_cpu_enable_fast_math': True})"
    )
    expected = trace(as_jax, w, x).jit
    # JAX has changed the default of `inline`
    assert applied.jit == replace(expected, inline=applied.jit.inline)
    assert "sharding" in stablehlo(applied) and "sharding" not in stablehlo(program)


def test_invalid_specs_of_jit_are_refused_by_the_names_of_its_options(auto_mesh):
    program = trace(jnp.sin, X)
    with pytest.raises(ArgumentsError, match=r"in_shardings: .* names the axis 'z'"):
        program.apply("jit(in_shardings=P('z'))")


def test_specs_of_jit_need_a_mesh():
    with pytest.raises(ArgumentsError, match="in_shardings and out_shardings need a mesh"):
        trace(jnp.sin, X).apply("jit(out_shardings=P('x'))")


def test_pmap_donates_and_runs_on_the_given_devices():
    def step(state, batch):
        return state + batch

    program = trace(step, jnp.ones(3), jnp.ones(3))
    applied = program.apply("pmap(donate_argnums=0, devices=(3, 1))")
    state = jnp.ones((2, 3))
    result = applied(state, jnp.ones((2, 3)))
    assert {device.id for device in result.devices()} == {3, 1}
    assert [each.donated for each in applied.jit.of_arguments(applied.arguments)] == [True, False]
    with pytest.raises(UnsupportedError, match="there is no device 99"):
        program.apply("pmap(devices=(99,))")


#: The options of JAX's functions that their passes do not take, as docs/passes.md says.
NOT_TAKEN = {"static_argnums", "static_argnames", "static_broadcasted_argnums", "backend", "device",
             "concrete"}  # fmt: skip


@pytest.mark.parametrize("kind", [Checkpoint, Jit, Pmap, NamedCall])
def test_the_options_are_those_of_jax(kind):
    options = set(inspect.signature(getattr(jax, kind.name)).parameters) - {"fun"}
    assert options - {each.name for each in fields(kind)} <= NOT_TAKEN


@pytest.mark.parametrize("between", ["", "batch(axis_size=1), "])
def test_pmap_of_a_program_that_maps_over_devices_is_refused(between):
    with pytest.raises(UnsupportedError, match=r"pmap cannot be nested: .* by shard_map"):
        trace(jnp.sin, 1.0).apply(f"pmap(axis_size=1), {between}pmap(axis_size=1)")
    with pytest.raises(UnsupportedError, match="pmap cannot be nested"):
        trace(jax.pmap(jnp.sin), jnp.ones((1,))).apply("pmap(axis_size=1)")
