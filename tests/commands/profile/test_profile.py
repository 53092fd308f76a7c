"""A profile finds the line that takes the time, and reports the share that it explains."""

import inspect
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.commands.profile.lines import Peaks, with_cost
from jaxprtool.commands.profile.profile import peaks_of
from jaxprtool.commands.profile.table import time_icicle
from jaxprtool.errors import UnsupportedError
from jaxprtool.execute.running.backends import compiled_afresh
from jaxprtool.render.page import SourceLink
from tests.share import shared_proofs


def sorts(x):
    y = jnp.tanh(x)
    y = jnp.sort(y, axis=0)  # planted
    return y * 2 + 1


def gathers_columns(x, at):
    y = x * 2
    y = y[:, at]  # planted
    return y.sum()


def upcasts(x):
    y = x.astype(jnp.float32) @ jnp.ones((600, 8), jnp.float32)
    z = x.astype(jnp.float64) @ x.astype(jnp.float64)  # planted
    return y.sum() + z.sum()


def loops(x):
    y = jnp.exp(x) + 1
    y = jax.lax.fori_loop(0, 3000, lambda i, y: jnp.roll(y, 1, 0) + i, y)  # planted
    return y.sum()


def transposes(x):
    y = jnp.sin(x[:4]).sum()
    z = jnp.transpose(x, (2, 1, 0))  # planted
    return y, z


def matrix(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


PLANTED = {
    sorts: lambda: (matrix(1500, 300),),
    gathers_columns: lambda: (matrix(300, 3000), np.arange(0, 90_000, 7) % 3000),
    upcasts: lambda: (matrix(600, 600),),
    loops: lambda: (matrix(40, 40),),
    transposes: lambda: (matrix(100, 150, 200),),
}


def line_in(function, mark="# planted"):
    """Return the name of the line of a function that ends with a mark."""
    lines, first = inspect.getsourcelines(function)
    at = next(i for i, line in enumerate(lines) if line.rstrip().endswith(mark))
    return f"tests/commands/profile/test_profile.py:{first + at}"


@pytest.mark.parametrize("function", shared_proofs(PLANTED), ids=lambda function: function.__name__)
def test_the_most_expensive_line_is_the_planted_one(function):
    args = PLANTED[function]()
    with jax.enable_x64(function is upcasts):
        found = jaxprtool.profile(jaxprtool.trace(function, *args), args, calls=4)
    assert found.lines[0].name == line_in(function)
    graph = time_icicle(found, lambda name: SourceLink(name, "", name))
    assert graph.root.amount == pytest.approx(found.wall_seconds)
    for line in found.lines:
        assert graph.lines[line.name] == pytest.approx(line.seconds)


@pytest.fixture(scope="module")
def gradient_program():
    def loss(w, x):
        y = jnp.tanh(x @ w)
        return jnp.square(jnp.sort(y, axis=0)).sum()

    return jaxprtool.trace(jax.grad(loss), matrix(200, 200), matrix(300, 200))


@pytest.fixture(scope="module")
def gradient(gradient_program):
    return jaxprtool.profile(gradient_program, (matrix(200, 200), matrix(300, 200)))


@pytest.mark.proof
def test_lines_and_the_remainder_add_up_to_the_wall_time(gradient):
    lines = sum(each.seconds for each in gradient.lines)
    assert lines == pytest.approx(gradient.explained * gradient.wall_seconds)
    waits = ("between operations", "dispatch", "compiling", "idle")
    rest = sum(each.seconds for each in gradient.own if each.kind in waits)
    assert lines + rest == pytest.approx(gradient.wall_seconds)
    operations = sum(each.seconds for each in gradient.operations)
    assert operations == pytest.approx(lines)


def test_forward_and_backward_are_separate(gradient):
    for line in gradient.lines:
        assert line.forward_seconds + line.backward_seconds == pytest.approx(line.seconds)
    product, sort = sorted(gradient.lines, key=lambda each: each.name)[-2:]
    assert product.backward_seconds > 0 and sort.forward_seconds > 0


def test_rates_are_the_estimated_work_divided_by_the_time(gradient, gradient_program):
    assert gradient.peaks.flops_per_second > 0 and gradient.peaks.bytes_per_second > 0
    lines = with_cost(gradient, jaxprtool.cost(gradient_program), None).lines
    product = max(lines, key=lambda line: (line.flops_per_second or 0) * line.seconds)
    flops = 2 * 2 * 200 * 200 * 300  # of the product, and of its part of the gradient
    assert product.flops_per_second * product.seconds == pytest.approx(flops, rel=0.2)


def rated(profile, program, flops_per_second):
    peaks = Peaks("a device", flops_per_second, 1e9, "measured here")
    return with_cost(profile, jaxprtool.cost(program), peaks)


@pytest.mark.proof
def test_no_rate_above_the_peak_is_shown():
    def product(x):
        return x @ x

    program = jaxprtool.trace(product, matrix(200, 200))
    profile = jaxprtool.profile(program, (matrix(200, 200),), calls=1)
    achieved = 2 * 200**3 / profile.wall_seconds
    fast = rated(profile, program, 1e6 * achieved)
    assert fast.flops_per_second == pytest.approx(achieved, rel=0.01)
    assert "GFLOP/s of " in str(fast) and not fast.is_above_peak
    slow = rated(profile, program, achieved / 10)
    assert slow.is_above_peak and slow.flops_per_second is None
    assert all(line.flops_per_second is None for line in slow.lines)
    text = " ".join(str(slow).split())
    assert "the work that `cost` estimates would take longer at the peak rate" in text
    assert "FLOP/s of" not in text


def test_a_peak_below_the_achieved_rate_is_measured_again(monkeypatch):
    measured = iter([(1e9, 2e9), (3e9, 1e9), (5e9, 1e9)])
    monkeypatch.setattr(
        "jaxprtool.commands.profile.profile.measured_peaks", lambda device: next(measured)
    )
    peaks = peaks_of(jax.devices()[0], achieved=4e9)
    assert (peaks.flops_per_second, peaks.bytes_per_second) == (5e9, 2e9)


def test_the_peak_of_a_gpu_is_that_of_the_precision_of_the_products():
    class Gpu:
        platform, device_kind = "gpu", "NVIDIA H100 80GB HBM3"

    assert peaks_of(Gpu()).flops_per_second == 494.7e12
    assert peaks_of(Gpu(), products=("bf16",)).flops_per_second == 989.4e12


@pytest.mark.proof
def test_a_callbacks_time_is_attributed_to_python():
    def reports(x):
        y = jnp.sin(x)
        jax.debug.callback(lambda _: time.sleep(0.05), y)  # planted
        return y

    found = jaxprtool.profile(jaxprtool.trace(reports, 1.0))
    own = {each.kind: each for each in found.own}
    assert own["Python callbacks"].seconds >= 0.04
    assert own["Python callbacks"].lines == (line_in(reports),)
    assert found.lines[0].name == line_in(reports)


def test_effects_happen_once_to_warm_up_and_once_per_measured_call():
    seen = []

    def reports(x):
        jax.debug.callback(lambda v: seen.append(float(v)), x)
        return x

    jaxprtool.profile(jaxprtool.trace(reports, 1.0), (2.0,), calls=2)
    assert seen == [2.0] * 3


def test_a_block_has_the_lines_of_eager_operations_and_of_jitted_functions():
    @jax.jit
    def step(x):
        return jnp.sort(x, axis=0)  # jitted

    x = matrix(1000, 200)
    # A program from JAX's cache has the lines of the source that it was compiled from.
    with compiled_afresh(), jaxprtool.profiling() as found:
        y = step(x)
        z = jnp.cumsum(y, axis=1)  # eager
        time.sleep(0.05)
    names = [each.name for each in found.profile.lines]
    here = test_a_block_has_the_lines_of_eager_operations_and_of_jitted_functions
    assert {line_in(here, "# jitted"), line_in(here, "# eager")} <= set(names)
    assert {each.kind for each in found.profile.own} >= {"idle", "compiling"}
    assert found.profile.wall_seconds >= 0.05 and z.shape == x.shape


def test_two_profiles_at_once_are_refused():
    with pytest.raises(UnsupportedError, match="running already"):  # noqa: SIM117
        with jaxprtool.profiling():
            jnp.ones(3) + 1
            jaxprtool.profile(jaxprtool.trace(jnp.sin, 1.0))


def test_a_block_without_operations_is_refused():
    with pytest.raises(UnsupportedError, match="no operations"), jaxprtool.profiling():
        pass


MESH = """
import jax, jax.numpy as jnp, jaxprtool
from jax.sharding import PartitionSpec as P
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
f = jax.jit(jax.shard_map(lambda x: jnp.sort(x, 0), mesh=mesh, in_specs=P("x"), out_specs=P("x")))
x = jnp.ones((400, 300))
found = jaxprtool.profile(jaxprtool.trace(f, x), (x,), calls=2)
print(found.lines[0].name, found.explained <= 1)
"""


@pytest.mark.usefixtures("processes")
def test_a_program_on_a_mesh_of_several_devices_is_profiled(tmp_path):
    (tmp_path / "mesh.py").write_text(MESH)
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "mesh.py"],
        cwd=tmp_path,
        env={**os.environ, **devices},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "mesh.py:5 True\n"


def test_an_array_that_could_not_be_made_before_does_not_end_the_profile_of_a_block():
    failed = jax.jit(lambda x: jnp.sort(jnp.sin(x[:, None] * x), 0)[0])(jnp.ones(400_000))
    with jaxprtool.profiling() as profile:
        jax.jit(jnp.sin)(jnp.ones(1000)).block_until_ready()
    assert profile.profile.lines
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        failed.block_until_ready()
