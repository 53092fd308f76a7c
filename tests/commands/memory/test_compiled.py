"""compiled_memory: XLA's buffers at its peak, with the user's lines and names."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxprtool
from jaxprtool import compiled_memory, trace
from jaxprtool.errors import ArgumentsError, UnsupportedError

N = 128
W, X = jnp.ones((N, N)), jnp.ones((4 * N, N))
HERE = "test_compiled.py:"


@pytest.fixture(autouse=True)
def optimized():
    """Compile as users do: the tests disable most of XLA's optimizations."""
    was = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", was)


def found(function, *args):
    """Return the memory of a function, after a check that its parts, buffers and lines add up."""
    each = compiled_memory(trace(function, *args))
    parts = each.argument_bytes + each.result_bytes + each.constant_bytes + each.temporary_bytes
    assert each.peak_bytes == parts - each.donated_bytes
    assert each.peak_bytes == sum(buffer.bytes for buffer in each.buffers)
    assert each.peak_bytes == sum(line.bytes for line in each.lines)
    assert each.estimate_bytes == sum(line.estimate_bytes for line in each.lines)
    sizes = [buffer.bytes for buffer in each.buffers]
    assert sizes == sorted(sizes, reverse=True) and min(sizes) > 0
    for line in each.lines:
        assert line.bytes == sum(buffer.bytes for buffer in line.buffers)
    return each


def of_kind(each, kind):
    return [buffer for buffer in each.buffers if buffer.kind == kind]


def line(function, below):
    return f"tests/commands/memory/{HERE}{function.__code__.co_firstlineno + below}"


def mlp(params, x):
    hidden = jnp.tanh(x @ params["up"])
    return jnp.sort(hidden @ params["down"], axis=0)


PARAMS = {"up": jnp.ones((N, 4 * N)), "down": jnp.ones((4 * N, N)), "unused": jnp.ones(3)}


def test_arguments_and_results_have_names_and_values_have_lines():
    each = found(lambda params, x: {"out": mlp(params, x)}, PARAMS, X)
    arguments = {buffer.what: buffer.bytes for buffer in of_kind(each, "argument")}
    # jax.jit drops an argument that is not used.
    assert arguments == {"params['up']": 4 * W.nbytes, "params['down']": 4 * W.nbytes,
                         "x": X.nbytes}  # fmt: skip
    names = [buffer.what for buffer in of_kind(each, "result")]
    held = [buffer.shares for buffer in of_kind(each, "value")]
    assert names == ["result['out']"] or "in the memory of result['out']" in held
    values = of_kind(each, "value")
    assert {buffer.line for buffer in values if buffer.bytes >= X.nbytes} <= {
        line(mlp, 1), line(mlp, 2)
    }  # fmt: skip
    hidden = next(buffer for buffer in values if buffer.line == line(mlp, 1))
    assert hidden.what in ("tanh", "dot_general") and hidden.bytes == 4 * X.nbytes
    assert hidden.type == "f32[512,512]" and hidden.operation
    assert hidden.until in (f"tanh at {line(mlp, 1)}", f"dot_general at {line(mlp, 2)}")
    assert hidden.frames[0].function == "mlp" and each.at.startswith(line(mlp, 1))


def test_lines_have_the_estimate_too():
    each = found(mlp, PARAMS, X)
    lines = {row.line: (row.bytes, row.estimate_bytes) for row in each.lines}
    # The estimate counts the argument that jax.jit drops.
    assert lines["arguments"] == (8 * W.nbytes + X.nbytes, 8 * W.nbytes + X.nbytes + 12)
    xla, estimate = lines[line(mlp, 1)]
    assert xla == estimate == 4 * X.nbytes
    assert each.estimate_bytes == jaxprtool.memory(trace(mlp, PARAMS, X)).peak_bytes


def test_a_donated_argument_names_the_result_that_reuses_it():
    def step(w, x):
        return w + 1, x.sum()

    kept, donated = (found(jax.jit(step, donate_argnums=n), W, X) for n in ((), 0))
    assert donated.donated_bytes == W.nbytes and kept.donated_bytes == 0
    (reused,) = [buffer for buffer in donated.buffers if buffer.what == "w"]
    assert reused.shares == "reused for result[0]"
    assert donated.peak_bytes == kept.peak_bytes - W.nbytes


def test_a_copy_of_a_donated_argument_is_named_after_it():
    def swap(a, b):  # each result is written to the other argument: XLA copies them
        return b, a

    each = found(jax.jit(swap, donate_argnums=(0, 1)), W, W)
    copies = of_kind(each, "value")
    assert copies and {copy.what for copy in copies} <= {"copy of a", "copy of b"}
    shares = {buffer.what: buffer.shares for buffer in of_kind(each, "argument")}
    assert shares == {"a": "reused for result[0]", "b": "reused for result[1]"}


def layers(w, x):
    def layer(x, _):
        y = jnp.sin(x @ w)
        return y @ w, None

    return lax.scan(layer, x, None, length=6)[0].sum()


@pytest.mark.proof
def test_stacked_results_of_a_loop_have_the_line_that_computes_them():
    each = found(jax.grad(layers), W, X)
    stacked = [buffer for buffer in each.buffers if buffer.type == "f32[6,512,128]"]
    assert stacked and {buffer.line for buffer in stacked} <= {line(layers, 2), line(layers, 3)}
    assert all(buffer.what not in ("while", "dynamic_update_slice") for buffer in stacked)
    biggest = each.lines[0]
    assert biggest.line == line(layers, 2) and biggest.bytes >= 6 * X.nbytes


@pytest.mark.proof
def test_values_without_a_line_have_that_of_their_reader():
    kernel, images = jnp.ones((3, 3, 4, 8)), jnp.ones((4, 16, 16, 4))

    def loss(kernel):
        dimensions = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=dimensions)
        return lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID").sum()

    each = found(jax.grad(loss), kernel)
    assert all(buffer.line for buffer in of_kind(each, "value"))


def test_effects_and_repeated_results_keep_the_names():
    def noisy(x):
        y = jnp.sort(x, axis=0)
        jax.debug.print("{}", y[0, 0], ordered=True)
        return {"first": y, "second": y, "third": x, "fourth": jnp.cos(x)}

    each = found(noisy, X)
    assert {name for buffer in of_kind(each, "result") for name in buffer.what.split(", ")} == {
        f"result['{name}']" for name in ("first", "second", "third", "fourth")
    }


@pytest.mark.proof
def test_constants_count():
    table = jax.random.normal(jax.random.key(0), (N, N))
    each = found(lambda x: x @ table, X)
    assert each.constant_bytes >= table.nbytes
    assert of_kind(each, "constant")[0].type == "f32[128,128]"


def test_sizes_on_a_mesh_are_those_of_a_device():
    mesh = jax.make_mesh((8,), ("rows",), (jax.sharding.AxisType.Auto,))
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("rows")))
    program = trace(lambda w, x: jnp.sin(x @ w), W, x)
    each = compiled_memory(program, (W, x))
    assert each.devices == 8 and each.estimate_is_whole
    sizes = {buffer.what: buffer.bytes for buffer in of_kind(each, "argument")}
    assert sizes == {"w": W.nbytes, "x": X.nbytes // 8} and each.result_bytes == X.nbytes // 8
    with pytest.raises(ArgumentsError, match="lambda was traced with x on several devices"):
        compiled_memory(program)


def test_symbolic_sizes_are_refused():
    program = jaxprtool.load("jax.numpy:sin", "f32[n]")
    with pytest.raises(UnsupportedError):
        compiled_memory(program)


def test_refs_have_the_names_of_their_arguments():
    def add(total, x):
        total[...] = total[...] + x
        return x.sum()

    each = found(add, jax.new_ref(W), W)
    assert {buffer.what for buffer in of_kind(each, "argument")} == {"total", "x"}
    results = [buffer.what for buffer in of_kind(each, "result")]
    assert len(results) == 2 and "result" in results
