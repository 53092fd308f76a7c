"""Every kind of value is written so that it can be read back, and nothing else can be read."""

import ast
import enum
import math
from collections import OrderedDict
from dataclasses import dataclass
from types import FunctionType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.layout import Format, Layout
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from jaxprtool import jaxcompat
from jaxprtool.formats.jaxpr import values
from jaxprtool.formats.jaxpr.values import Unreadable, Unwritable, decode, encode
from jaxprtool.ir.dtypes import array_dtypes

P = PartitionSpec
POLICIES = jax.checkpoint_policies


def mesh() -> Mesh:
    return jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))


def read(text, names=None):
    return decode(ast.parse(text, mode="eval").body, names)


def alike(a, b) -> bool:
    """Return True if two values are equal, NaN bitwise, functions by their contents."""
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple | list) and not isinstance(a, P):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, np.generic):
        return a.tobytes() == b.tobytes()
    if isinstance(a, float | complex):
        return alike(np.complex128(a), np.complex128(b))
    if isinstance(a, FunctionType):
        return jaxcompat.live_key(a) == jaxcompat.live_key(b)
    if isinstance(a, lax.Tolerance):
        return vars(a) == vars(b)
    return a == b


PLAIN = [
    *(None, True, False, 0, -1, 10**30, 1.5, -0.0, 5e-324, math.inf, -math.inf, math.nan),
    *(1 + 2j, complex(-0.0, math.inf), complex(math.nan, 1)),
    *("relu", "float32", "None", "nan", "two words", "lambda", "ü", "'\"\n\\", "", "a.b"),
    *(b"\0a", ..., slice(0, None, 2), (), (1,), (1, 2), ("i",), [1, [2.5]], [], {}),
    {"a": 1, 2: (None,), (3, "b"): []},
    OrderedDict(b=1, a=2),
    *(frozenset(), frozenset({"b", "a"}), jaxcompat.FrozenDict({"a": True})),
    *(np.int64(4), np.bool_(True), np.float32(0.1), np.float32("-inf"), np.float64(0.1)),
    *(np.complex64(-0.0 + 1j), np.dtype(jnp.bfloat16).type(1.1), np.dtype(jnp.int4).type(-3)),
    *np.array([0x7FC00000, 0xFFC00000, 0x7F800001], np.uint32).view(np.float32),
    np.array([0x7FF8000000000001], np.uint64).view(np.complex64)[0],
    *array_dtypes().values(),
    *(np.float32, np.bool_, np.int64, jnp.float32, jnp.bfloat16, jnp.int4),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_values_round_trip(value):
    back = read(encode(value))
    assert alike(back, value)


def of_jax():
    spec = P("x", None, ("y", "z"), unreduced={"w"})
    return [
        *(jax.random.key(0, impl=impl).dtype for impl in ("threefry2x32", "rbg", "unsafe_rbg")),
        *(jaxcompat.key_implementations()[tag] for tag in ("fry", "rbg", "urbg")),
        *(m for e in (lax.Precision, lax.FftType, lax.GatherScatterMode, AxisType) for m in e),
        *(m for e in (lax.RoundingMethod, lax.RandomAlgorithm, lax.AccuracyMode) for m in e),
        *(m for e in (lax.DotAlgorithmPreset, jax.memory.Space) for m in e),
        *jaxcompat.ArrayCopySemantics,
        lax.Tolerance(1e-3, 0.0, 2),
        lax.DotAlgorithm(np.float32, jnp.bfloat16, np.dtype("float32")),
        lax.ConvDimensionNumbers((0, 1), (0, 1), (1, 0)),
        lax.GatherDimensionNumbers((1,), (0,), (0,), (), ()),
        lax.ScatterDimensionNumbers((1,), (0,), (0,)),
        lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0]),
        jaxcompat.LinearSolveTuple(1, 2, 3, 4),
        jaxcompat.UNSPECIFIED,
        *(P(), P(None), P("x"), spec, P(P.UNCONSTRAINED, "x")),
        *(mesh(), mesh().abstract_mesh, jaxcompat.EMPTY_MESH, AbstractMesh((), ())),
        AbstractMesh((2, 3), ("a", "b"), (AxisType.Auto, AxisType.Explicit)),
        *(NamedSharding(mesh(), P("x")), NamedSharding(mesh(), P("x"), memory_kind="device")),
        *(jax.devices()[1], SingleDeviceSharding(jax.devices()[0])),
        Format(Layout((1, 0), tiling=((8, 128),)), NamedSharding(mesh(), P("x"))),
        Layout.AUTO,
        jax.tree.structure((1, [2, None], {"a": {}, "b": OrderedDict(c=3)})),
        POLICIES.everything_saveable,
        POLICIES.dots_saveable,
        POLICIES.dots_with_no_batch_dims_saveable,
        POLICIES.save_only_these_names("b", "a"),
        POLICIES.save_any_names_but_these("a"),
        POLICIES.save_anything_except_these_names("a"),
        POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host"),
        POLICIES.save_and_offload_only_these_names(
            names_which_can_be_saved=["a"],
            names_which_can_be_offloaded=["b", "c"],
            offload_src="device",
            offload_dst="pinned_host",
        ),
        POLICIES.save_from_both_policies(
            POLICIES.dots_saveable, POLICIES.save_only_these_names("a")
        ),
    ]


def test_values_of_jax_round_trip():
    for value in of_jax():
        text = encode(value)
        assert alike(read(text), value), text
        assert alike(read(encode((value, [value]))), (value, [value])), text


def test_words_are_unquoted_as_in_jax_unless_ambiguous():
    assert encode("relu") == "relu" and encode(("relu",)) == "('relu',)"
    assert encode("bool") == "'bool'" and encode("fry") == "'fry'"
    assert encode(np.dtype(bool)) == "bool"


def test_sets_are_sorted():
    assert encode(frozenset("cab")) == "frozenset({'a', 'b', 'c'})"


def test_a_mesh_of_unavailable_devices_is_read_as_an_abstract_one():
    text = encode(mesh())
    there = text.replace("devices=(0, 1)", "devices=(640, 641)")
    assert read(there) == mesh().abstract_mesh
    with pytest.raises(Unreadable, match="no such device"):
        read("device('cpu', 640)")


def test_live_objects_are_refused():
    for value in (
        lambda x: x,
        print,
        object(),
        POLICIES,
        math,
        jnp.ones(3),
        {1: [test_plain_values_round_trip]},
    ):
        with pytest.raises(Unwritable):
            encode(value)
    with pytest.raises(Unwritable, match=r"a Python function \(.*<lambda>\)"):
        encode((1, lambda: 0))


def test_a_tuple_of_an_unknown_class_is_not_a_plain_tuple():
    class Pair(tuple):
        pass

    with pytest.raises(Unwritable, match="Pair"):
        encode(Pair((1, 2)))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("(1, unknown)", "unknown name 'unknown'"),
        ("unknown()", "unknown constructor 'unknown"),
        ("lax.Precision", "unknown name 'lax.Precision'"),
        ("__import__('os')", "unknown constructor '__import__"),
        ("().__class__", "must begin with a name"),
        ("(lambda: 1)()", "must begin with a name"),
        ("1 + 1", "arithmetic is not allowed in a value"),
        ("f'{1}'", "an f-string is not allowed in a value"),
        ("[*(1, 2)]", r"unpacking with '\*' is not allowed in a value"),
        ("[x for x in ()]", "a comprehension is not allowed in a value"),
        ("not True", "an operator is not allowed in a value"),
        ("-True", "an operator is not allowed in a value"),
        ("{[]: 1}", "a dict's key cannot be a list or a dict"),
        ("{[]}", "unhashable"),
        ("{**{}}", r"unpacking with '\*\*' is not allowed in a value"),
        ("P('x', P(), a=1)", "cannot be created"),
        ("P(**{})", "without a name"),
        ("np.int8(300)", "cannot be created"),
        ("np.int8(1.5)", "not of dtype int8"),
        ("np.float32(bits(1 << 40))", "arithmetic"),
        ("np.float32(bits(99999999999))", "cannot be created"),
        ("key('none')", "cannot be created"),
        ("frozenset('abc')", "takes a set"),
        ("NamedSharding(1, 2)", "cannot be created"),
    ],
)
def test_an_invalid_value_is_reported_with_its_location(text, fault):
    with pytest.raises(Unreadable, match=fault) as caught:
        read(text)
    assert caught.value.node.lineno == 1


def test_names_of_the_file_take_precedence_over_those_of_the_table():
    names = {"float32": 1, "twice": lambda x: 2 * x}
    assert read("(float32, twice(3), int32)", names) == (1, 6, np.dtype("int32"))
    assert read("float32", names) == 1


def test_plugins_add_their_own():
    class Color(enum.Enum):
        RED = 1

    @dataclass(frozen=True)
    class Brush:
        color: Color
        width: float = 1.0

    before = dict(values.ENCODERS), dict(values.CONSTRUCTORS), dict(values.NAMES)
    try:
        values.add_enum(Color)
        values.add_record(Brush)
        text = encode([Brush(Color.RED)])
        assert text == "[Brush(color=Color.RED, width=1.0)]"
        assert read(text) == [Brush(Color.RED)]
    finally:
        for table, old in zip(
            (values.ENCODERS, values.CONSTRUCTORS, values.NAMES), before, strict=True
        ):
            table.clear()
            table.update(old)
