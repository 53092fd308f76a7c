"""What `jax.jit` was told of a function is in its files, its Python source and its artifacts."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxprtool
from jaxprtool.errors import ProgramFileError, UnsupportedError
from jaxprtool.formats.exported import exported
from jaxprtool.formats.jaxpr.read import parse
from jaxprtool.formats.jaxpr.write import text

X = jnp.arange(1.0, 9.0)
PARAMS = {"w": X, "b": jnp.ones(3)}
PLACE = NamedSharding(jax.make_mesh((1,), ("d",), (AxisType.Auto,)), PartitionSpec("d"))


@functools.partial(
    jax.jit,
    donate_argnums=0,
    in_shardings=({"w": PLACE, "b": None}, PLACE),
    out_shardings=({"w": PLACE, "b": None}, None),
    keep_unused=True,
    inline=True,
    compiler_options={"xla_cpu_enable_fast_math": True},
)
def step(params, x):
    loss = (x * params["w"]).sum()
    return {"w": params["w"] + loss, "b": 2 * params["b"]}, loss


@functools.partial(jax.jit, donate_argnums=1, donate_argnames="k")
def various(a, *rest, k):
    return a + rest[0]["u"] + rest[1] + k


@jax.jit
def plain(x):
    return x * 2


PROGRAMS = {
    "step": (step, (PARAMS, X), {}),
    "various": (various, (X, {"u": X}, X), {"k": X}),
    "plain": (plain, (X,), {}),
}


@pytest.fixture(params=PROGRAMS)
def call(request):
    return PROGRAMS[request.param]


def test_a_file_has_it(call):
    fun, args, kwargs = call
    program = jaxprtool.trace(fun, *args, **kwargs)
    again = parse(text(program), "again.jaxpr")
    assert again.jit == program.jit is not None
    assert parse(text(program.replace(jit=None)), "again.jaxpr").jit is None


def test_python_source_has_it(call):
    fun, args, kwargs = call
    program = jaxprtool.trace(fun, *args, **kwargs)
    module = {}
    exec(jaxprtool.to_python(program), module)
    again = jaxprtool.trace(module[program.name], *args, **kwargs)
    assert again.jit == program.jit and jaxprtool.equivalent(program, again)


def test_an_artifact_has_it():
    data = exported(jaxprtool.trace(step, PARAMS, X))
    ours = jax.export.deserialize(bytearray(data))
    theirs = jax.export.export(step)(PARAMS, X)
    assert ours.mlir_module().count("tf.aliasing_output") == 2
    assert theirs.mlir_module().count("tf.aliasing_output") == 2


def test_python_refuses_what_jit_cannot_be_told():
    program = jaxprtool.trace(step, PARAMS, X)
    jit = program.jit
    some = type(jit)(tuple(a for a in jit.arguments if a.name != "params['b']"))
    with pytest.raises(UnsupportedError, match=r"donates a part of an argument \(params\['b'\]"):
        jaxprtool.to_python(program.replace(jit=some))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("'donated'", "'donate'", "jit is told nothing of 'donate'"),
        ("('k', ", "('z', ", "jit is told of 'z'"),
        ("('k', ", "('k', 3, ", "'donated' of jit is not well formed"),
    ],
)
def test_a_faulty_entry_is_refused(old, new, message):
    fun, args, kwargs = PROGRAMS["various"]
    written = text(jaxprtool.trace(fun, *args, **kwargs))
    line = next(line for line in written.splitlines() if "'donated'" in line)
    changed = line.replace('("', "('k', \"", 1) if old.startswith("('k") else line
    changed = changed.replace(old, new)
    with pytest.raises(ProgramFileError, match=message):
        parse(written.replace(line, changed), "bad.jaxpr")
