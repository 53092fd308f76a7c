"""Types are written like JAX's, with what JAX omits, and can be read back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxprtool import jaxcompat
from jaxprtool.formats.jaxpr.values import TypeReader, TypeWriter, Unwritable
from jaxprtool.ir.dtypes import array_dtypes

MIXED = AbstractMesh(
    (2, 2, 2), ("x", "y", "i"), (AxisType.Explicit, AxisType.Explicit, AxisType.Manual)
)


def array(*shape, dtype=np.float32, weak=False, **more):
    return jaxcompat.array_type(shape, np.dtype(dtype), weak, **more)


def on_mesh(*partitions, varying=None, **spec):
    sharding = NamedSharding(MIXED, PartitionSpec(*partitions, **spec))
    return array(4, 4, sharding=sharding, varying=varying)


def key(implementation):
    return jax.eval_shape(lambda: jax.random.key(0, impl=implementation)).dtype


TYPES = {
    "f32[]": array(),
    "f32[3,0]": array(3, 0),
    "~i32[]": array(dtype=np.int32, weak=True),
    "bf16[7]": array(7, dtype=jnp.bfloat16),
    "f32<host>[3]": array(3, memory_space=jax.memory.Space.Host),
    "key<fry>[2]": jaxcompat.array_type((2,), key("threefry2x32"), False),
    "key<urbg>[]": jaxcompat.array_type((), key("unsafe_rbg"), False),
    "float0[3]": jaxcompat.array_type((3,), jax.dtypes.float0, False),
    "Tok": jaxcompat.ABSTRACT_TOKEN,
    "Ref{f32[3]}": jaxcompat.AbstractRef(array(3)),
    "f32[4@x,4]@m0": on_mesh("x"),
    "f32[4@(x,y),4]@m0": on_mesh(("x", "y")),
    "f32[4,4]@m0": on_mesh(),
    "f32[4,4]{V:i}@m0": on_mesh(varying={"varying": {"i"}}),
    "f32[4@x,4]{U:y}@m0": on_mesh("x", unreduced={"y"}),
    "f32[4,4]{U:(x,i)}@m0": on_mesh(unreduced={"x"}, varying={"unreduced": {"i"}}),
}


@pytest.mark.parametrize("text", TYPES)
def test_types_round_trip(text):
    writer = TypeWriter()
    assert writer(TYPES[text]) == text
    meshes = {name: mesh for mesh, name in writer.meshes.items()}
    assert TypeReader(meshes)(text) == TYPES[text]


def test_every_dtype_round_trips():
    for dtype in array_dtypes().values():
        aval = jaxcompat.array_type((2,), dtype, False)
        assert TypeReader()(TypeWriter()(aval)) == aval


def test_symbolic_dimensions_share_a_scope():
    n, m = jax.export.symbolic_shape("n, m", constraints=["n >= 8"])
    writer = TypeWriter()
    aval = array(2 * n - 1, n % 3, m, 5)
    text = writer(aval)
    assert text == "f32[2*n - 1,mod(n, 3),m,5]"
    assert TypeReader({}, writer.scope)(text) == aval
    (other,) = jax.export.symbolic_shape("n")
    with pytest.raises(Unwritable, match="two scopes"):
        writer(array(other))


def test_a_mesh_is_written_once():
    writer = TypeWriter()
    assert [writer(on_mesh("x")), writer(on_mesh("y"))] == ["f32[4@x,4]@m0", "f32[4@y,4]@m0"]
    assert writer.meshes == {MIXED: "m0"}


def test_unsupported_types_are_refused():
    with pytest.raises(Unwritable):
        TypeWriter()(object())


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "is not a type"),
        ("f32", "is not a type"),
        ("g32[3]", "unknown dtype 'g32'"),
        ("f32[n]", "not a size"),
        ("f32[-1]", "not a size"),
        ("f32[1.5]", "not a size"),
        ("key<none>[]", "unknown random number generator"),
        ("f32<moon>[]", "unknown memory space"),
        ("f32[4@x]", "must name a mesh"),
        ("f32[4]{V:i}", "must name a mesh"),
        ("f32[4]@m7", "no mesh 'm7'"),
        ("f32[4,4]{Q:i}@m0", "names no axes"),
        ("f32[4@nowhere,4]@m0", "nowhere"),
        ("f32[5@x,4]@m0", "divide"),
        ("Ref{f32}", "is not a type"),
    ],
)
def test_an_invalid_type_is_reported_with_the_reason(text, fault):
    with pytest.raises(ValueError, match=fault):
        TypeReader({"m0": MIXED})(text)


def test_a_dimension_cannot_be_a_program():
    (n,) = jax.export.symbolic_shape("n")
    reader = TypeReader({}, n.scope)
    for text in ("n(n)", "__import__('os')", "n" + "*n" * 2000, "(" * 50 + "n" + ")" * 50):
        with pytest.raises(ValueError):
            reader.dimension(text)
