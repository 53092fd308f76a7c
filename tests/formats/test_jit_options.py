"""Options of `jax.jit` are kept in a function's files, Python source and artifacts."""

import functools
from collections import OrderedDict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxprtool
from jaxprtool.errors import ProgramFileError, UnsupportedError
from jaxprtool.formats.jaxpr.read import parse_program
from jaxprtool.formats.jaxpr.write import program_file_text
from jaxprtool.formats.lowering import exported

X = jnp.arange(1.0, 9.0)
PARAMS = {"w": X, "b": jnp.ones(3)}
MESH = jax.make_mesh((1,), ("d",), (AxisType.Auto,))
PLACE, WHOLE = NamedSharding(MESH, PartitionSpec("d")), NamedSharding(MESH, PartitionSpec())


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


class State(NamedTuple):
    w: Any
    mean: Any


@jax.tree_util.register_pytree_node_class
class Box:
    """A class whose children have no keys."""

    def __init__(self, *parts):
        self.parts = parts

    def tree_flatten(self):
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, _, parts):
        return cls(*parts)


@functools.partial(jax.jit, out_shardings=PLACE)
def placed_state(w, x):
    return State(w - x, w)


@functools.partial(
    jax.jit,
    out_shardings=(State(PLACE, WHOLE), None, [PLACE, None], OrderedDict(b=PLACE, a=None), None),
)
def placed_parts(x):
    return State(x, x * 2), State(x, x), [x, x], OrderedDict(b=x, a=x), None


@functools.partial(jax.jit, donate_argnums=0, in_shardings=(PLACE, None), out_shardings=PLACE)
def boxed(box, x):
    return Box(*(part + x for part in box.parts))


@functools.partial(jax.jit, donate_argnums=0)
def applied(fun, x):
    return fun(x)


@functools.partial(jax.jit, donate_argnames=("P", "int"))
def named_like_roots(x, *, P, int):
    return P * x + int


@functools.partial(jax.jit, in_shardings=({"a": PLACE, "b": None, "c": WHOLE},))
def with_nothing(d):
    return d["a"] + d["c"]


PROGRAMS = {
    "step": (step, (PARAMS, X), {}),
    "various": (various, (X, {"u": X}, X), {"k": X}),
    "plain": (plain, (X,), {}),
    "placed_state": (placed_state, (X, X), {}),
    "placed_parts": (placed_parts, (X,), {}),
    "boxed": (boxed, (Box(X, X), X), {}),
    "applied": (applied, (jax.tree_util.Partial(jnp.add, X), X), {}),
    "named_like_roots": (named_like_roots, (X,), {"P": X, "int": X}),
    "with_nothing": (with_nothing, ({"a": X, "b": None, "c": X},), {}),
}


@pytest.fixture(params=PROGRAMS)
def call(request):
    return PROGRAMS[request.param]


def test_a_file_keeps_the_options(call):
    fun, args, kwargs = call
    program = jaxprtool.trace(fun, *args, **kwargs)
    again = parse_program(program_file_text(program), "again.jaxpr")
    assert again.jit == program.jit is not None
    assert parse_program(program_file_text(program.replace(jit=None)), "again.jaxpr").jit is None


def test_python_source_keeps_the_options(call):
    fun, args, kwargs = call
    program = jaxprtool.trace(fun, *args, **kwargs)
    module = {}
    exec(jaxprtool.to_python(program), module)
    again = jaxprtool.trace(module[program.name], *args, **kwargs)
    assert again.jit_keywords == program.jit_keywords
    # Results of a class are named tuples of its fields.
    assert jaxprtool.equivalent(program, again.replace(out_tree=program.out_tree))


def test_an_artifact_keeps_the_options():
    data = exported(jaxprtool.trace(step, PARAMS, X))
    ours = jax.export.deserialize(bytearray(data))
    theirs = jax.export.export(step)(PARAMS, X)
    assert ours.mlir_module().count("tf.aliasing_output") == 2
    assert theirs.mlir_module().count("tf.aliasing_output") == 2


def test_options_that_jit_cannot_express_are_refused_in_python():
    program = jaxprtool.trace(step, PARAMS, X)
    jit = program.jit
    some = type(jit)(tuple(a for a in jit.arguments if a.name != "params['b']"))
    with pytest.raises(UnsupportedError, match=r"donates a part of an argument \(params\['b'\]"):
        jaxprtool.to_python(program.replace(jit=some))


@pytest.mark.parametrize("what", ["argument", "result"])
def test_several_shardings_for_one_class_are_refused_in_python(what):
    options = {"in_shardings": (Box(PLACE, WHOLE),)} if what == "argument" else {}
    fun = jax.jit(lambda box: box, **options or {"out_shardings": Box(PLACE, WHOLE)})
    with pytest.raises(UnsupportedError, match=f"has several shardings for one {what} of a class"):
        jaxprtool.to_python(jaxprtool.trace(fun, Box(X, X)))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("'donated'", "'donate'", "unknown entry 'donate'"),
        ("('k', ", "('z', ", "jit names 'z'"),
        ("('k', ", "('k', 3, ", "'donated' of jit is not valid"),
    ],
)
def test_a_faulty_entry_is_refused(old, new, message):
    fun, args, kwargs = PROGRAMS["various"]
    written = program_file_text(jaxprtool.trace(fun, *args, **kwargs))
    line = next(line for line in written.splitlines() if "'donated'" in line)
    changed = line.replace('("', "('k', \"", 1) if old.startswith("('k") else line
    changed = changed.replace(old, new)
    with pytest.raises(ProgramFileError, match=message):
        parse_program(written.replace(line, changed), "bad.jaxpr")
