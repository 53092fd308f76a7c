"""--args follows the jaxpr's notation. Everything else is refused by name and position."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError, JaxprToolError
from jaxprtool.ir import dtypes
from jaxprtool.loading import Static, argspec
from jaxprtool.loading.argspec import read_args, read_strings


def one(text, module=None):
    (value,), kwargs = read_args(text, module)
    assert kwargs == {}
    return value


def fault(text, module=None):
    with pytest.raises(ArgumentsError) as caught:
        read_args(text, module)
    assert "\n" not in caught.value.message
    return f"{caught.value.message} | {caught.value.hint}"


@pytest.fixture
def module():
    found = types.ModuleType("model")
    found.params = {"w": np.ones((3, 4), np.float32), "layers": [np.zeros(2), np.ones(2)]}
    found.config = types.SimpleNamespace(params=found.params, width=8)
    return found


# --- types


NARROW = [name for name, dtype in dtypes.array_dtypes().items() if not dtypes.needs_x64(dtype)]


@pytest.mark.parametrize("name", NARROW)
def test_every_dtype_is_parsed_as_jax_prints_it(name):
    struct = one(f"{name}[3,2]")
    printed = str(jax.make_jaxpr(lambda x: x)(struct).invars[0].aval.str_short(True))
    assert printed == jaxcompat.short_dtype_name(dtypes.array_dtypes()[name]) + "[3,2]" or (
        name == "float0"
    )
    assert one(f"{name}[]").shape == ()


def test_common_dtype_names_are_known():
    names = """f32 bf16 f16 f8_e4m3fn f8_e5m2 f8_e4m3b11fnuz f8_e8m0fnu f4_e2m1fn f6_e2m3fn i2 i4 i8
    i16 i32 u2 u4 u8 u16 u32 c64 bool float32 bfloat16 int8 complex64"""
    assert set(names.split()) <= set(NARROW)


def test_wide_types_need_x64():
    for name in ["f64", "i64", "u64", "c128", "float64"]:
        assert "--x64" in fault(f"{name}[2]")
    with jax.enable_x64(True):
        assert one("f64[2]").dtype == np.float64
        assert one("arange(3)").dtype == np.int64
        assert one("3000000000") == 3_000_000_000
    assert "--x64" in fault("3000000000")


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_key_types_are_parsed_as_jax_prints_them(impl):
    keys = jax.random.split(jax.random.key(0, impl=impl), 2)
    printed = jax.typeof(keys).str_short(True)
    struct = one(printed)
    assert (struct.shape, struct.dtype) == ((2,), keys.dtype)
    assert one(printed.replace("[2]", "[]")).shape == ()


def test_symbolic_dimensions_are_shared_by_all_arguments():
    (x, y), _ = read_args("f32[n,128], f32[128,2*n-1]")
    jaxpr = jax.make_jaxpr(jnp.matmul)(x, y)
    assert jaxpr.outvars[0].aval.str_short(True) == "f32[n,2*n - 1]"
    same = read_strings(("f32[n]", "f32[n]"))
    assert jax.eval_shape(jnp.add, *same).shape == same[0].shape


@pytest.mark.parametrize(
    ("text", "constraints"),
    [
        ("f32[m,3], f32[n<=64]", ["n <= 64"]),
        ("f32[ 2 <= n <= 64 ], f32[n,m>=2]", ["2 <= n", "n <= 64", "m >= 2"]),
        ("f32[n<=64], f32[n<=64,64>=2*n]", ["n <= 64", "64 >= 2*n"]),
    ],
)
def test_sizes_have_the_bounds_of_types(text, constraints):
    for args in (read_args(text)[0], read_strings(text.split(", "))):
        assert str(args[0].shape[0]) in "mn"
        found = jaxcompat.symbolic_constraints(args[0].shape[0].scope)
        assert [each.text for each in found] == constraints


def test_a_table_may_be_as_long_as_the_maximum_size():
    def positions(tokens):
        return jnp.ones((64, 3))[: tokens.shape[0]] + tokens[:, None]

    (tokens,), _ = read_args("i32[n<=64]")
    assert str(jax.eval_shape(positions, tokens).shape) == "(n, 3)"


def test_claimed_results_do_not_bound_sizes():
    with pytest.raises(ArgumentsError, match="n <= 64 must be declared in the types of arguments"):
        argspec.read_results("f32[n<=64]", {"n": one("f32[n]").shape[0]})


SIZES = """floordiv(n,2) n^2 3*n^2-n*m 2*n^2*m^3 mod(n,2)+1 max(n,1) min(n,max(m,floordiv(n+1,2)))
-2*n+m mod(-n,3) max(3,4) 2^3"""


@pytest.mark.parametrize("size", SIZES.split())
def test_sizes_are_parsed_as_by_jax(size):
    (struct,), _ = read_args(f"f32[{size},n,m]")
    (expected, *_) = export.symbolic_shape(f"{size},n,m")
    assert str(struct.shape[0]) == str(expected)
    (again,), _ = read_args(f"f32[{struct.shape[0]},n,m]")  # as it is printed
    assert str(again.shape[0]) == str(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f32[n^0]", "an exponent must be from 1 to 64 (column 8)"),
        ("f32[2^99999999999]", "an exponent must be from 1 to 64"),
        ("f32[n^m]", "an exponent must be from 1 to 64"),
        ("f32[((9^64)^64)^64]", "an integer has more than 64 bits"),
        ("f32[max(n)]", "a call is not allowed"),
        ("f32[-1]", "a dimension cannot be -1 (column 5)"),
        ("f32[1.5]", "expected an integer, not 1.5 (column 5)"),
        ("f32[:]", "a slice is not allowed in --args (column 5)"),
        ("f32[n//0]", "not a dimension"),
        ("f32[max]", "'max' is not a valid symbol name (column 5)"),
        ("f32[n<65]", "'n<65' is not a bound of a size, such as n<=64 or 2<=n<=64 (column 5)"),
        ("f32[3], f32[n<=m]", "'n<=m' is not a bound of a size"),
        ("f32[_<=3]", "'_<=3' is not a bound of a size"),
        ("f32[2<=3]", "'2<=3' is not a bound of a size"),
        ("f32[3,n=3]", "'n=3' is not a bound of a size, such as n<=64 or 2<=n<=64 (column 7)"),
        ("f32[f(3)]", "a call is not allowed"),
        ("f32[99999999999999999999]", "more than 64 bits"),
        ("f32", "the type f32 needs a shape (column 1) | write f32[] for a scalar"),
        ("f33[2]", "unknown name 'f33' in --args (column 1) | did you mean 'f32'?"),
        ("key<foo>[]", "unknown kind of key 'foo' (column 5) | available: fry"),
        ("key<fry>", "cannot be read"),
    ],
)
def test_invalid_types_are_refused(text, expected):
    assert expected in fault(text)


# --- types on a mesh


def mesh_of(*kinds):
    names = "xyz"[: len(kinds)]
    return jax.sharding.AbstractMesh((2,) * len(kinds), tuple(names), axis_types=kinds)


EXPLICIT, AUTO = jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto


@pytest.mark.parametrize("text", ["f32[8@x]", "bf16[4@(x,y),n]", "f32[3]{U:x}", "key<fry>[2@y]"])
def test_types_on_the_current_mesh_are_parsed_as_jax_prints_them(text):
    with jax.sharding.use_abstract_mesh(mesh_of(EXPLICIT, EXPLICIT)):
        struct = one(text)
    (aval,) = jax.make_jaxpr(lambda x: x)(struct).in_avals
    assert aval.str_short(True) == text


@pytest.mark.parametrize(
    ("kinds", "text", "expected"),
    [
        (
            (),
            "f32[8@x]",
            "the mesh axis 'x', but no mesh is set (column 1) | set one with --mesh x=2",
        ),
        ((EXPLICIT,), "5, f32[8@z]", "the mesh has no axis 'z' (column 4) | it has x"),
        ((AUTO,), "f32[8@x]", "the axis 'x' is Auto"),
        ((EXPLICIT,), "f32[7@x]", "does not evenly divide"),
        ((EXPLICIT,), "f32[8@x,8@x]", "f32[8@x,8@x]: "),
        ((EXPLICIT,), "f32[8]{V:x}", "which is only possible inside shard_map"),
        ((EXPLICIT,), "f32[8]{W:x}", "'W:x' names no axes"),
        ((), "f32<host>[8]", "cannot be put in a memory space"),
    ],
)
def test_types_that_do_not_fit_the_mesh_are_refused(kinds, text, expected):
    with jax.sharding.use_abstract_mesh(mesh_of(*kinds)):
        assert expected in fault(text)


# --- scalars and containers


@pytest.mark.parametrize(
    "text", ["5", "-3", "2.5", "True", "1j", "inf", "[1, (2, None)]", "{'a': 1}"]
)
def test_scalars_and_containers_are_those_of_python(text):
    value = one(text)
    assert value == eval(text, {"inf": float("inf")})
    assert jax.tree.map(type, value) == jax.tree.map(type, eval(text, {"inf": float("inf")}))


def test_scalars_are_weakly_typed():
    assert all(
        aval.weak_type for aval in jax.make_jaxpr(lambda x, y: x)(one("5"), one("2.5")).in_avals
    )


def test_a_pytree_of_types_with_keywords_and_statics():
    args, kwargs = read_args(
        "{'w': f32[3,4], 'b': [f32[4], None]}, bf16[8,3], train=static(False), n=static([1, 'x'])"
    )
    assert args[0]["w"] == jax.ShapeDtypeStruct((3, 4), jnp.float32)
    assert args[0]["b"] == [jax.ShapeDtypeStruct((4,), jnp.float32), None]
    assert args[1].dtype == jnp.bfloat16
    assert kwargs == {"train": Static(False), "n": Static([1, "x"])}
    assert read_args("") == ((), {})


# --- functions


def test_arrays_can_be_made_by_name():
    (zeros, ones, numbers, floats, stepped), _ = read_args(
        "zeros(f32[3]), ones(i4[2]), arange(10), arange(0, 1, 0.25), arange(1, 9, 2, dtype=bf16)"
    )
    for made, expected in [
        (zeros, np.zeros(3, np.float32)),
        (ones, np.ones(2, jnp.int4)),
        (numbers, np.arange(10, dtype=np.int32)),
        (floats, np.arange(0, 1, 0.25, dtype=np.float32)),
        (stepped, np.arange(1, 9, 2).astype(jnp.bfloat16)),
    ]:
        assert made.dtype == expected.dtype
        np.testing.assert_array_equal(made, expected)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f8_e4m3fn", "c64"])
def test_normal_is_reproducible_and_has_its_type(dtype):
    first, again, other = (one(f"normal({dtype}[3,4], seed={seed})") for seed in (1, 1, 2))
    assert first.shape == (3, 4)
    assert first.dtype == dtypes.array_dtypes()[dtype]
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_key_is_a_typed_key():
    assert (jax.random.key_data(one("key(7)")) == jax.random.key_data(jax.random.key(7))).all()
    assert one("key(7, impl='rbg')").dtype == jax.random.key(7, impl="rbg").dtype


def test_ref_is_an_attribute_of_the_targets_module(module):
    assert one("ref('params')", module) is module.params
    assert one("ref('config.params')", module) is module.params
    assert one("ref('params')['layers'][1]", module) is module.params["layers"][1]
    assert one("static(ref('config'))", module) == Static(module.config)


def test_new_ref_has_the_given_contents(module):
    assert one("new_ref(f32[3,n])").is_ref
    assert one("new_ref(f32[3])") == jax.ShapeDtypeStruct((3,), "float32", is_ref=True)
    np.testing.assert_array_equal(one("new_ref(arange(f32[3]))")[...], np.arange(3.0))
    assert one("new_ref(key(0))").dtype == jax.random.key(0).dtype
    assert one("{'n': new_ref(7)}")["n"][...] == 7
    np.testing.assert_array_equal(
        one("new_ref(ref('params')['w'])", module)[...], module.params["w"]
    )


def test_load_and_its_items(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("x.npz", **{"a/b.w": np.arange(3), "c": np.ones(2)})
    assert sorted(one("load('x.npz')")) == ["a/b.w", "c"]
    np.testing.assert_array_equal(one("load('x.npz')['a/b.w']"), np.arange(3))
    assert "load('x.npz') has no item 'a/b.v' (column 1) | did you mean 'a/b.w'?" in fault(
        "load('x.npz')['a/b.v']"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("zeros(f32[n])", "an array with values needs dimensions that are numbers (column 7)"),
        ("zeros(f32[10000000000000])", "GiB is too large (column 7)"),
        ("zeros(3)", "expected a type such as f32[3] (column 7)"),
        ("zeros()", "zeros(...) needs an argument 'type'"),
        ("zeros(f32[3], 2)", "zeros(...) takes at most 1 arguments"),
        ("zeros(shape=f32[3])", "zeros(...) takes no argument 'shape' here"),
        ("zeros(key<fry>[2])", "cannot be filled with numbers"),
        ("zeros(new_ref(f32[3]))", "expected a type such as f32[3] (column 7)"),
        ("new_ref([f32[3]])", "new_ref(...) takes one array, or its type (column 1)"),
        ("new_ref(new_ref(f32[3]))", "new_ref(...) takes one array, or its type (column 1)"),
        ("new_ref(float0[3])", "a Ref cannot hold a float0 (column 1)"),
        (
            "ref(f32[3])",
            "ref(...) takes the name of an attribute (column 5) | write new_ref(f32[3]) for a",
        ),
        ("ones(float0[2])", "cannot be filled with numbers"),
        ("normal(i32[2])", "normal(...) needs a floating or complex type"),
        ("normal(f32[2], seed=-1)", "a seed cannot be negative"),
        ("arange(1, 10, 0)", "the step cannot be 0"),
        ("arange(0, 2, 1e-300)", "GiB is too large"),
        ("arange(inf)", "expected a finite number"),
        (
            "arange(i8[300])",
            "arange(i8[300]) has values from 0 to 299, which int8 cannot represent (column 1)",
        ),
        (
            "arange(300, dtype=u8)",
            "has values from 0 to 299, which uint8 cannot represent (column 1)",
        ),
        (
            "arange(-1, 3, dtype=u8)",
            "has values from -1 to 2, which uint8 cannot represent (column 1)",
        ),
        ("arange(bool[3])", "has values from 0 to 2, which bool cannot represent (column 1)"),
        (
            "arange(f16[70000])",
            "has values from 0 to 69999, which float16 cannot represent (column 1)",
        ),
        (
            "arange(f6_e2m3fn[9])",
            "has values from 0 to 8, which float6_e2m3fn cannot represent (column 1)",
        ),
        (
            "ones(i1[3])",
            "ones(i1[3]) has values from 1.0 to 1.0, which int1 cannot represent (column 1)",
        ),
        ("normal(f8_e8m0fnu[40])", "which float8_e8m0fnu cannot represent (column 1)"),
        ("key('x')", "expected an integer"),
        ("key(18446744073709551615)", "cannot be created"),
        ("key(0, impl='foo')", "cannot be created: unrecognized PRNG implementation"),
        ("load(1)", "expected a string"),
        ("load", "load is a function: write load(...)"),
        ("ref('params')", "ref(...) needs a TARGET with a module"),
        ("static()", "static(...) needs an argument 'value'"),
        ("static(f32[3])", "a subscript is not allowed"),
    ],
)
def test_wrong_uses_of_functions_are_refused(text, expected):
    assert expected in fault(text)


def test_ref_to_a_missing_name_is_refused(module):
    assert "model has no attribute 'parms'" in fault("ref('parms')", module)
    assert "did you mean 'params'?" in fault("ref('parms')", module)
    assert "has no item 'v'" in fault("ref('params')['v']", module)
    assert "has no attribute 'par ams'" in fault("ref('par\\nams')", module)


# --- refusals


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("jnp.float32", "attribute access is not allowed in --args (column 1) | write types"),
        ("__import__('os').system('x')", "attribute access is not allowed in --args (column 1)"),
        ("open('/etc/passwd')", "unknown name 'open' in --args (column 1)"),
        ("[x for x in (1, 2)]", "a comprehension is not allowed in --args (column 1)"),
        ("lambda: 0", "a lambda is not allowed in --args (column 1)"),
        ("f'{1}'", "an f-string is not allowed in --args"),
        ("[*a]", "unpacking with '*' is not allowed in --args (column 2)"),
        ("{**a}", "unpacking with '**' is not allowed in --args (column 1)"),
        ("(a := 1)", "an assignment ':=' is not allowed in --args (column 2)"),
        ("2 ** 10", "arithmetic is not allowed in --args (column 1)"),
        ("1 < 2", "a comparison is not allowed in --args (column 1)"),
        ("foo", "unknown name 'foo' in --args (column 1)"),
        ("1[]", "the literal 1 is not allowed in --args (column 1)"),
        ("foo[3]", "unknown name 'foo' in --args (column 1)"),
        ("zeros(f32[2])[0]", "a subscript is not allowed in --args (column 1)"),
        ("'relu'", "a string is not an array (column 1) | write a Python value that is not traced"),
        ("{1: 2, 'a': 3}", "the keys of a dict must all have one type (column 1)"),
        ("f32[8,128", "'[' in --args is not closed (column 4)"),
        ("f32[8] f32[8]", "Perhaps you forgot a comma? (column 1)"),
        (") + evil(", "')' in --args does not match an opening bracket (column 1)"),
        ("[" * 1000 + "]" * 1000, "nested too deeply"),
        pytest.param("f32[8], " * 2_000_000, "characters long", id="16 MB"),
    ],
)
def test_text_outside_of_the_grammar_is_reported(text, expected):
    assert expected in fault(text)


def test_example_strings_are_parsed_anywhere():
    tree = read_strings(({"w": "f32[3]", "n": [2, "zeros(f32[2])"]}, "static('x')"))
    assert tree[0]["w"] == jax.ShapeDtypeStruct((3,), jnp.float32)
    assert tree[0]["n"][0] == 2
    assert tree[1] == Static("x")
    for bad, expected in [
        ("f32[3], f32[4]", "must be one value"),
        ("f32[3", "is not closed"),
    ]:
        with pytest.raises(ArgumentsError, match=expected):
            read_strings((bad,))


PIECES = """f32[ f32[8] key<fry>[] key( n zeros( ones( i4 arange( load('x ref('params') static(
['w'] normal( seed= 2*n None"""
pieces = st.sampled_from([*"()[]{}'\",.:=*-+<>1 ", *PIECES.split()])


@pytest.mark.proof
@settings(max_examples=300)
@given(st.lists(pieces, max_size=14).map("".join) | st.text(max_size=30))
def test_any_text_raises_only_our_errors(text):
    module = types.ModuleType("model")
    module.params = {"w": 1}
    try:
        args, kwargs = argspec.read_args(text, module)
    except JaxprToolError as error:
        assert "\n" not in error.message
    else:
        assert isinstance(args, tuple) and isinstance(kwargs, dict)


def test_arange_of_a_type_counts_its_elements():
    (args, _) = read_args("arange(f32[2,3]), arange(i8[4])")
    assert [(a.dtype, a.tolist()) for a in args] == [
        ("float32", [[0, 1, 2], [3, 4, 5]]),
        ("int8", [0, 1, 2, 3]),
    ]


@pytest.mark.parametrize(
    ("text", "values", "dtype"),
    [
        ("full(f32[2,2], 2.5)", [[2.5, 2.5], [2.5, 2.5]], "float32"),
        ("full(bf16[2], -1)", [-1, -1], "bfloat16"),
        ("full(f32[2], inf)", [np.inf, np.inf], "float32"),
        ("full(c64[1], 1+2j)", [1 + 2j], "complex64"),
        ("array([inf, 1.0])", [np.inf, 1], "float32"),
        ("array([[1, 2], [3, 4]])", [[1, 2], [3, 4]], "int32"),
        ("array([True, False])", [True, False], "bool"),
        ("array([1, 2], dtype=i8)", [1, 2], "int8"),
    ],
)
def test_arrays_of_given_numbers(text, values, dtype):
    array = one(text)
    assert array.dtype == dtype and array.tolist() == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f32[8,128](2)", "f32[8,128](2): a type is not called (column 1) | write full(f32[8,128]"),
        ("f32[8](-1.0)", "a type is not called (column 1) | write full(f32[8], -1.0) for an array"),
        ("f32[8](x)", "a type is not called (column 1) | write values as zeros(f32[8]), ones("),
        ("f32[8]*2", "arithmetic is not allowed in --args (column 1) | write full(f32[8], 2) for"),
        ("[f32[3]]*3", "not allowed in --args (column 1) | write all items: [f32[3], f32[3], f32"),
        ("np.zeros((3, 4))", "--args cannot call np.zeros (column 1) | write zeros(f32[3,4])"),
        ("jnp.ones(4)", "--args cannot call jnp.ones (column 1) | write ones(f32[4])"),
        ("jnp.full((3,), 2.)", "--args cannot call jnp.full (column 1) | write full(f32[3], 2.)"),
        ("jax.numpy.eye(3)", "cannot call jax.numpy.eye (column 1) | write values as zeros(f32[8"),
        ("full((8,), 2.0)", "expected a type such as f32[3] (column 6) | write f32[8]"),
        ("full(i32[2], 2.5)", "full(i32[2], 2.5) has values that int32 cannot represent"),
        ("full(i8[2], 300)", "has values from 300 to 300, which int8 cannot represent"),
        ("array([inf], f8_e4m3fn)", "has values that float8_e4m3fn cannot represent"),
        ("full(c64[1], 1e60)", "full(c64[1], 1e60) has values that complex64 cannot represent"),
        ("array([1], f32[1])", "unknown name 'f32[1]' in --args (column 12) | did you mean 'f32'?"),
        ("array([[1, 2], [3]])", "the lists in array(...) must have equal lengths (column 7)"),
        ("array(['x'])", "array(...) takes numbers in nested lists (column 1)"),
    ],
)
def test_values_that_are_written_otherwise_are_hinted(text, message):
    assert message in fault(text)
