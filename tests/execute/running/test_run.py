import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, io_callback
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxprtool
from jaxprtool.errors import BackendError, OutOfMemoryError, UnsupportedError, UserFunctionError
from jaxprtool.execute.running.arrays import fill_arguments, random_array, summarize
from jaxprtool.execute.running.run import call_form, choose_device, own_devices, run
from tests.execute.programs import program

X = np.arange(3, dtype=np.float32)


def test_outputs_have_names_types_and_the_values_of_the_function():
    def f(x, y):
        return {"sum": (x + y).sum(), "both": x * y}

    report = run(program(f, X, X), [X, X])
    assert [(o.name, o.type) for o in report.outputs] == [
        ("result[0]", "f32[3]"),
        ("result[1]", "f32[]"),
    ]
    np.testing.assert_array_equal(report.outputs[0].value, X * X)
    assert report.outputs[1].value == 6
    assert report.devices == (jax.local_devices()[0],)


def test_there_are_as_many_times_as_calls():
    calls = []

    def f(x):
        return jax.pure_callback(lambda v: calls.append(1) or v, x, x)

    report = run(program(f, X), [X], repeat=4)
    assert len(calls) == 5 and report.times.repeats == 4
    times = report.times
    assert min(times.lower, times.compile, times.first_call, times.repeat) > 0


def test_effects_happen_once_unless_repeats_are_requested(capfd):
    def f(x):
        jax.debug.print("sum {}", x.sum(), ordered=True)
        return x

    report = run(program(f, X), [X])
    assert capfd.readouterr().out == "sum 3.0\n"
    assert report.times.repeats == 0 and report.times.repeat is None
    run(program(f, X), [X], repeat=2)
    assert capfd.readouterr().out == "sum 3.0\n" * 3


def test_an_interrupt_in_a_callback_is_an_interrupt():
    def interrupted(value):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(program(lambda x: jax.pure_callback(interrupted, x, x), X), [X])


@pytest.mark.parametrize("kind", ["pure", "debug", "io", "ordered io"])
def test_an_error_in_a_callback_is_the_users_own_error(kind, capfd, caplog):
    def fail(value):
        raise ValueError(f"bad value {value[0]}\nmore")

    def f(x):
        if kind == "pure":
            return jax.pure_callback(fail, x, x)
        if kind == "debug":
            jax.debug.callback(fail, x)
        else:
            io_callback(fail, None, x, ordered=kind == "ordered io")
        return x

    with pytest.raises(UserFunctionError) as error:
        run(program(f, X), [X])
    assert error.value.message == "f raised ValueError: bad value 0.0"
    assert isinstance(error.value.__cause__, ValueError)
    frames = []
    trace = error.value.__cause__.__traceback__
    while trace:
        frames.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert frames[-1] == "fail"
    assert caplog.text == "" and "Traceback" not in capfd.readouterr().err


def test_checks_run_and_a_failed_one_is_the_users_own_error():
    def f(x):
        checkify.check(x.sum() > 2, "sum {} is too small", x.sum())
        return x * 2

    checked = program(f, X)
    np.testing.assert_array_equal(run(checked, [X]).outputs[0].value, X * 2)
    with pytest.raises(UserFunctionError, match=r"sum 0\.3.* is too small"):
        run(checked, [X / 10])


def test_a_program_that_cannot_be_compiled_is_unsupported():
    primitive = jax.extend.core.Primitive("nothing_lowers_this")
    primitive.def_abstract_eval(lambda x: x)
    with pytest.raises(UnsupportedError, match=r"f cannot be compiled: .*nothing_lowers_this"):

        def f(x):
            return primitive.bind(x)

        run(program(f, X), [X])


def test_running_out_of_memory_is_the_devices_error():
    def f(x):
        return jnp.broadcast_to(x[0], (1 << 22, 1 << 22))

    with pytest.raises(OutOfMemoryError, match="f failed while it ran: RESOURCE_EXHAUSTED"):
        run(program(f, X), [X])


def test_programs_without_arguments_or_results():
    assert run(program(lambda: jnp.ones(2)), []).outputs[0].value.tolist() == [1, 1]
    assert run(program(lambda x: None, X), [X]).outputs == ()


def test_donated_arguments_can_be_passed_again():
    donating = jax.jit(lambda x: x + 1, donate_argnums=0)
    given = jnp.asarray(X)
    report = run(program(lambda x: donating(x), X), [given], repeat=3)
    np.testing.assert_array_equal(report.outputs[0].value, X + 1)
    np.testing.assert_array_equal(given, X)


@pytest.mark.proof
def test_scalars_and_keys_are_arguments_too():
    def f(scale, key):
        return scale * jax.random.normal(key, (2,)), jax.random.split(key)

    key = jax.random.key(0)
    report = run(program(f, 2.0, key), [2.0, key])
    assert report.outputs[1].type == "key<fry>[2]"
    np.testing.assert_array_equal(report.outputs[0].value, f(2.0, key)[0])


def test_a_single_device_program_names_no_device_and_runs_on_any():
    traced = program(lambda x: x + 1, X)
    assert own_devices(traced) == ()
    assert choose_device(traced, None, None) is None
    assert choose_device(traced, "cpu", None) == jax.local_devices(backend="cpu")[0]


def test_a_program_moves_to_another_device_with_its_constants():
    devices = jax.devices("cpu")
    constant = jax.device_put(X, devices[0])
    report = run(program(lambda x: x + constant, X), [X], devices[3])
    assert report.devices == (devices[3],) and report.outputs[0].value.device == devices[3]
    np.testing.assert_array_equal(report.outputs[0].value, X + X)
    assert run(program(lambda: constant * 2), [], devices[2]).devices == (devices[2],)


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices("cpu")[:4]), ("i",))


def test_a_program_with_a_mesh_runs_on_all_of_it(mesh):
    x = np.arange(8, dtype=np.float32)
    total = jax.shard_map(lambda x: jax.lax.psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
    sharded = program(jax.jit(total), x)
    assert own_devices(sharded) == tuple(mesh.devices)
    assert choose_device(sharded, None, None) is None
    assert choose_device(sharded, "cpu", None) is None
    with pytest.raises(BackendError, match="runs on the devices of its own mesh"):
        choose_device(sharded, None, 1)
    report = run(sharded, [x])
    assert report.devices == tuple(mesh.devices)
    np.testing.assert_array_equal(report.outputs[0].value, x.reshape(4, 2).sum(0))


def test_shardings_in_the_program_and_of_the_arguments_are_kept(mesh):
    x = np.arange(8, dtype=np.float32)
    sharding = NamedSharding(mesh, P("i"))
    constrained = program(lambda x: jax.lax.with_sharding_constraint(x * 2, sharding), x)
    assert own_devices(constrained) == tuple(mesh.devices)
    given = jax.device_put(x, sharding)
    assert run(program(lambda x: x * 2, x), [given]).devices == tuple(mesh.devices)


def test_a_nan_that_jax_config_forbids_is_the_users_own_error():
    def f(x):
        return jnp.log(x - 5.0), x

    with jax.debug_nans(True), pytest.raises(UserFunctionError) as error:
        run(program(f, X), [X])
    assert error.value.message.startswith("result[0] of f has a NaN, from log at ")


def test_a_transfer_guard_applies_to_the_users_code_only():
    traced = program(lambda x, key: x + 2 + jax.random.normal(key, (3,)), X, jax.random.key(0))
    with jax.transfer_guard("disallow"):
        report = run(traced, [X, random_array(traced.in_avals[1], (0, 0))])
        assert summarize(report.outputs[0].value).value.shape == (3,)


@pytest.mark.proof
def test_keys_are_results_under_disable_jit():
    traced = program(lambda key: jax.random.split(key)[0], jax.random.key(0))
    with jax.disable_jit():
        report = run(traced, [jax.random.key(0)])
        found = summarize(report.outputs[0].value).value
    expected = jax.random.key_data(jax.random.split(jax.random.key(0))[0])
    np.testing.assert_array_equal(found, expected)


def test_under_disable_jit_equations_run_one_by_one():
    def below(limit):
        def f(x):
            checkify.check(x.sum() < limit, "too large")
            return jax.lax.fori_loop(0, 3, lambda i, c: c * 2, x)

        return program(f, X)

    fine, failing = below(10), below(1)
    with jax.disable_jit():
        report = run(fine, [X])
        with pytest.raises(UserFunctionError, match="too large"):
            run(failing, [X])
    np.testing.assert_array_equal(report.outputs[0].value, X * 8)
    assert report.times.lower is None and report.times.compile is None


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_arguments_are_put_where_their_types_require(kind):
    count = len(jax.devices())
    mesh = jax.make_mesh((count,), ("d",), (kind,))
    given = jax.ShapeDtypeStruct((2 * count,), np.float32, sharding=NamedSharding(mesh, P("d")))
    traced = program(lambda x: x * 2, given)
    for arguments in (
        fill_arguments(traced, {"a0": given}).arguments,
        [np.ones(2 * count, np.float32)],
    ):
        report = run(traced, arguments)
        assert report.devices == tuple(jax.devices())
    report = run(traced, fill_arguments(traced, {"a0": given}).arguments)
    assert report.outputs[0].value.sharding.spec == P("d")


def test_a_mesh_needs_its_devices():
    count = 2 * len(jax.devices())
    mesh = jax.sharding.AbstractMesh((count,), ("d",), (AxisType.Explicit,))
    given = jax.ShapeDtypeStruct((count,), np.float32, sharding=NamedSharding(mesh, P("d")))
    traced = program(lambda x: x * 2, given)
    with pytest.raises(BackendError, match=rf"f runs on a mesh of {count} devices \(d={count}\)"):
        run(traced.replace(name="f"), [np.ones(count, np.float32)])
    with pytest.raises(BackendError, match=f"mesh of {count} devices, so it cannot run on"):
        choose_device(traced, None, 0)


DONATING = {
    "nothing": {},
    "an argument": {"donate_argnums": 0},
    "an option of the compiler": {"compiler_options": {"xla_cpu_enable_fast_math": True}},
    "a sharding": {"in_shardings": (jax.sharding.SingleDeviceSharding(jax.devices()[0]), None)},
}


@pytest.mark.parametrize("options", DONATING.values(), ids=DONATING)
def test_a_program_is_compiled_once_for_all_calls(options):
    def f(params, x):
        return {name: value + x for name, value in params.items()}, x

    compiled = []

    def heard(event, seconds, **_):
        if "backend_compile" in event:
            compiled.append(event)

    given = {"w": jnp.asarray(X), "b": jnp.asarray(X)}, jnp.asarray(X)
    traced = jaxprtool.trace(jax.jit(f, **options), *given)
    run(traced, jax.tree.leaves(given))  # compiles the copy of donated arguments
    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        report = run(traced, jax.tree.leaves(given), repeat=3)
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
    assert len(compiled) == 1
    assert [out.name for out in report.outputs] == list(traced.out_names)
    np.testing.assert_array_equal(report.outputs[0].value, X + X)


def test_calls_receive_the_containers_of_the_traced_function():
    def f(params, *, scale):
        return [params["w"] * scale]

    form = call_form(jaxprtool.trace(f, {"w": X, "b": X}, scale=2.0))
    params, scale = form.nested([X, X, 2.0])
    assert set(params) == {"w", "b"} and scale == 2.0
    (result,) = form.fun(params, scale)
    np.testing.assert_array_equal(result, X * 2)


@pytest.mark.parametrize(
    ("fun", "args", "names"),
    [
        (lambda params, x: params["w"] * x, ({"w": X}, X), ["params['w']", "x"]),
        (lambda *rest: rest[0] * rest[1], (X, X), ["args[0]", "args[1]"]),
        (lambda nothing, x: x, (None, X), ["args[1]"]),
    ],
)
def test_arguments_have_their_names_in_the_module(fun, args, names):
    form = call_form(jaxprtool.trace(fun, *args))
    module = jax.jit(form.fun).lower(*args).as_text(debug_info=True)
    assert re.findall(r'%arg\d+: .*? loc\("(.*?)"\)', module)[: len(names)] == names


def test_a_partly_donated_argument_is_passed_flat():
    traced = jaxprtool.trace(jax.jit(lambda both: both[0] + both[1], donate_argnums=0), (X, X))
    whole = call_form(traced)
    assert whole.donated == {0, 1} and whole.keywords["donate_argnums"] == (0,)
    asked = traced.jit.arguments[:1]
    part = call_form(replace(traced, jit=replace(traced.jit, arguments=asked)))
    assert part.donated == {0} and part.groups is None
    (first, second) = part.calls([jnp.asarray(X), X], 2)
    assert first[0] is not second[0] and first[1] is second[1] is X


class Node:
    """A container whose data allow or forbid other children than vectors."""

    def __init__(self, x, data):
        if data == "vectors":
            assert x.ndim == 1
        self.x, self.data = x, data


jax.tree_util.register_pytree_node(Node, lambda n: ((n.x,), n.data), lambda d, c: Node(c[0], d))


@pytest.mark.parametrize(
    ("data", "flat"),
    [("any", False), ("vectors", True), ([1], False)],
)
def test_arguments_whose_class_jax_jit_could_not_take_are_passed_flat(data, flat):
    traced = jaxprtool.trace(lambda node: Node(node.x * 2, data), Node(jnp.asarray(X), data))
    assert (call_form(traced).groups is None) == flat
    np.testing.assert_array_equal(run(traced, [X]).outputs[0].value, X * 2)
