"""A TARGET is a function, or a program in a file or on stdin; arguments match its types."""

import io
import os
import sys
from collections import namedtuple
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.api.targets import ProgramEntry, find_entry
from jaxprtool.errors import ArgumentsError, ProgramFileError, TargetError
from jaxprtool.loading import argspec
from jaxprtool.sizes.buckets import converted_arguments

Pair = namedtuple("Pair", "first second")


def scaled(params, x, *, factor):
    return params["w"] * x * factor


@pytest.fixture
def program():
    types = {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}
    return jaxprtool.trace(scaled, types, jnp.ones((3,)), factor=2.0)


@pytest.fixture
def file(program, tmp_path):
    path = str(tmp_path / "scaled.jaxpr")
    jaxprtool.write(program, path)
    return path


def test_a_program_file_is_a_target_with_its_own_argument_types(program, file):
    entry = find_entry(file)
    assert isinstance(entry, ProgramEntry)
    assert jaxprtool.equivalent(entry.trace(), program)
    assert [(a.shape, a.dtype) for a in entry.arguments()] == [
        (a.shape, a.dtype) for a in program.in_avals
    ]
    assert jaxprtool.equivalent(jaxprtool.load(file), program)


def test_a_program_comes_from_stdin(file, program, monkeypatch):
    with open(file, "rb") as opened:
        data = opened.read()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert jaxprtool.equivalent(find_entry("-").trace(), program)


def test_a_device_as_stdin_is_refused_at_once(monkeypatch):
    with open("/dev/zero") as zeros:
        monkeypatch.setattr(sys, "stdin", zeros)
        with pytest.raises(TargetError, match="stdin: it is a device"):
            find_entry("-")


def test_a_program_file_is_recognized_by_its_first_line(file, program, tmp_path):
    renamed = tmp_path / "program.txt"
    (tmp_path / "scaled.jaxpr").rename(renamed)
    assert jaxprtool.equivalent(find_entry(str(renamed)).trace(), program)


def test_an_exported_artifact_is_a_target(program, tmp_path):
    from jaxprtool.formats.lowering import exported

    path = tmp_path / "scaled.bin"
    path.write_bytes(exported(program))
    args = {"w": jnp.arange(3.0)}, jnp.ones(3)
    np.testing.assert_array_equal(
        find_entry(str(path)).trace()(*args, factor=2.0), scaled(*args, factor=2.0)
    )


def test_an_exported_object_names_its_call_or_its_file(tmp_path):
    artifact = jax.export.export(jax.jit(jnp.sin))(jax.ShapeDtypeStruct((3,), jnp.float32))
    for use, hint in (
        (lambda: jaxprtool.trace(artifact, jnp.ones(3)), "trace its .call"),
        (lambda: jaxprtool.load(artifact), "jaxprtool.trace traces its .call"),
    ):
        with pytest.raises(ArgumentsError, match="type Exported") as error:
            use()
        assert error.value.hint == hint
    path = tmp_path / "sin.bin"
    path.write_bytes(artifact.serialize())
    with pytest.raises(ProgramFileError, match="is an artifact of") as error:
        jaxprtool.read(path)
    assert error.value.hint == f"jaxprtool.load('{path}') returns its program"
    (tmp_path / "held.py").write_text(
        "import jax\n"
        "sin = jax.export.export(jax.jit(jax.numpy.sin))(jax.ShapeDtypeStruct((3,), 'float32'))\n"
        "def made():\n    return sin, ()\n"
    )
    for target, hint in (("sin", f"write {tmp_path}/held.py:sin.call"), ("made()", "its .call")):
        with pytest.raises(TargetError) as error:
            find_entry(f"{tmp_path}/held.py:{target}")
        assert hint in error.value.hint


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("no.jaxpr", None, "cannot read 'no.jaxpr': No such file"),
        ("notes.txt", b"some notes", "'notes.txt' is neither a program"),
        ("empty", b"", "'empty' is empty"),
        ("step.hlo", b"// dumped\n", "'step.hlo' is neither .* HLO, or an artifact"),
    ],
)
def test_a_file_without_a_program_is_refused(name, data, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(TargetError, match=message):
        find_entry(name)


@pytest.mark.parametrize(
    "options", [{"factory": True}, {"static_argnums": 0}, {"static_argnames": "x"}]
)
def test_options_for_functions_are_refused_for_a_program(file, options):
    with pytest.raises(TargetError, match="--factory and static arguments do not apply"):
        find_entry(file, **options)


def test_a_program_of_64_bits_needs_x64(tmp_path):
    path = str(tmp_path / "wide.jaxpr")
    with jax.enable_x64(True):
        wide = jaxprtool.trace(
            lambda x: x.astype("float64").sum(), jax.ShapeDtypeStruct((2,), "f4")
        )
        jaxprtool.write(wide, path)
        assert jaxprtool.equivalent(find_entry(path).trace(), wide)
    with pytest.raises(TargetError, match="has 64-bit types, which are not enabled") as caught:
        find_entry(path)
    assert "--x64" in caught.value.hint


# --- arguments --------------------------------------------------------------------------------


def test_matching_arguments_are_flattened(file):
    entry = find_entry(file, "{'w': ones(f32[3])}, f32[3], factor=4")
    w, x, factor = entry.arguments()
    assert isinstance(x, jax.ShapeDtypeStruct)
    assert np.array_equal(w, np.ones(3)) and factor == np.float32(4)
    assert factor.dtype == np.float32


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            "f32[3]",
            "the arguments do not fit scaled: the program takes 2 positional arguments, not 1",
        ),
        ("{'v': f32[3]}, f32[3], factor=1.0", "'params' lacks 'w', and has 'v', which scaled does"),
        ("{'w': f32[3]}, f32[3], scale=1.0", "the keyword argument 'factor' is missing"),
        ("{'w': f32[4]}, f32[3], factor=1.0", r"argument 'params\['w'\]' is f32\[4\], .* f32\[3\]"),
        ("{'w': i32[3]}, f32[3], factor=1.0", r"is i32\[3\]"),
        ("{'w': f32[3]}, f32[3], factor=1j", r"argument 'factor' is c64\[\], .* f32\[\]"),
        ("{'w': f32[3]}, f32[3], factor=static(1)", "factor must be an array, not 1"),
    ],
)
def test_mismatched_arguments_are_refused(file, args, message):
    with pytest.raises(ArgumentsError, match=message):
        find_entry(file, args)


def test_any_container_can_replace_a_custom_type(tmp_path):
    path = str(tmp_path / "pair.jaxpr")
    jaxprtool.write(jaxprtool.trace(lambda p: p.first + p.second, Pair(1.0, 2.0)), path)
    read = jaxprtool.read(path)
    assert converted_arguments(read, ((1.0, 2.0),), {}) == converted_arguments(
        read, ([1.0, 2.0],), {}
    )
    assert converted_arguments(read, ({"second": 2.0, "first": 1.0},), {}) == (1.0, 2.0)
    with pytest.raises(ArgumentsError, match="p must have 2 entries, not 3"):
        converted_arguments(read, ((1.0, 2.0, 3.0),), {})


@pytest.mark.parametrize(
    ("value", "dtype", "fits"),
    [
        (True, jnp.bool_, True),
        (True, jnp.float32, True),
        (3, jnp.uint8, True),
        (3, jnp.bfloat16, True),
        (3, jnp.bool_, False),
        (2.5, jnp.int32, False),
        (2.5, jnp.complex64, True),
        (300, jnp.uint8, False),
        (-1, jnp.uint8, False),
        (7, jnp.int4, True),
        (100, jnp.int4, False),
        (-1, jnp.uint4, False),
        (10**40, jnp.bfloat16, False),
        (10**40, jnp.int32, False),
        (np.array("a"), jnp.bfloat16, False),
        (np.array("a"), jnp.float32, False),
        (np.array(None), jnp.bfloat16, False),
    ],
)
def test_a_python_scalar_matches_its_kind_and_wider_ones(value, dtype, fits):
    program = jaxprtool.trace(lambda x: x, jax.ShapeDtypeStruct((), dtype))
    if not fits:
        with pytest.raises(ArgumentsError, match="argument 'x' is"):
            converted_arguments(program, (value,), {})
        return
    (array,) = converted_arguments(program, (value,), {})
    assert array.dtype == dtype and array == value


# --- arrays by name ---------------------------------------------------------------------------


class Layer(NamedTuple):
    w: Any
    b: Any


def many(params, x, *, scale):
    first, (second, key) = params["first"], params["rest"]
    noise = jax.random.normal(key, (3,))
    return first.w * x + first.b + second["w/0"].astype(jnp.float32) * noise, scale["a"]["b"]


STRUCTURE = (
    {"first": Layer("f32[3]", "f32[]"), "rest": [{"w/0": "bf16[3]"}, "key<fry>[]"]},
    "f32[3]",
)
NAMES = ("first/w", "first/b", "rest/0/w/0", "rest/1")


@pytest.fixture
def many_file(tmp_path):
    types = argspec.read_strings(STRUCTURE)
    path = str(tmp_path / "many.jaxpr")
    jaxprtool.write(jaxprtool.trace(many, *types, scale={"a": {"b": 2.0}}), path)
    return path


@pytest.fixture
def arrays(tmp_path, monkeypatch):
    """Return the arrays of `params.npz`, written to the current folder as NumPy saves them."""
    monkeypatch.chdir(tmp_path)
    values = np.ones(3, np.float32), np.float32(2), np.array([0.5, np.nan, -3.0], np.float32)
    found = dict(zip(NAMES, (*values, np.array([3, 4], np.uint32)), strict=True))
    np.savez("params.npz", **found)
    return found


CALL = "load('params.npz'), ones(f32[3]), scale={'a': {'b': 2.0}}"


def test_arrays_of_a_file_match_a_structure_by_their_path_names(many_file, arrays):
    entry = find_entry(many_file, CALL)
    leaves = dict(zip(entry.program.arg_names, entry.arguments(), strict=True))
    assert np.array_equal(leaves["params['first'].w"], np.ones(3))
    assert leaves["params['first'].b"] == 2
    narrow = leaves["params['rest'][0]['w/0']"]
    assert narrow.dtype == jnp.bfloat16
    assert np.array_equal(narrow.astype(np.float32), arrays["rest/0/w/0"], equal_nan=True)
    assert np.array_equal(jax.random.key_data(leaves["params['rest'][1]"]), [3, 4])


def test_arrays_by_name_may_be_any_argument(many_file, arrays):
    np.savez("scale.npz", **{"a/b": np.float32(5)})
    entry = find_entry(many_file, CALL.replace("{'a': {'b': 2.0}}", "load('scale.npz')"))
    assert entry.arguments()[-1] == 5


def test_a_flat_dict_stays_flat_if_the_function_takes_one(tmp_path):
    program = jaxprtool.trace(lambda p: p["a/b"] + p["c"], {"a/b": 1.0, "c": 2.0})
    values = {"c": np.float32(1), "a/b": np.float32(2)}
    assert converted_arguments(program, (values,), {}) == (2, 1)


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"first/w": None}, "argument 'params' lacks 'first/w'$", "it takes 'first/w', 'first/b',"),
        ({"extra": 1.0}, "argument 'params' has 'extra', which many does not take$", "it takes"),
        (
            {"first/w": None, "frist/w": 1.0},
            "lacks 'first/w', and has 'frist/w', which",
            "it takes",
        ),
        ({f"x{i}": 1.0 for i in range(9)}, "has 'x0', .*'x5' and 3 more, which many", "it takes"),
        (dict.fromkeys(NAMES), "lacks 'first/w', 'first/b', 'rest/0/w/0', 'rest/1'$", "it takes"),
        ({"first/w": np.ones(4)}, r"'params\['first'\].w' is f32\[4\], but the program", None),
        ({"rest/0/w/0": np.full(3, 0.1, np.float32)}, r"is f32\[3\], .* takes bf16\[3\]", None),
    ],
)
def test_arrays_with_unknown_names_are_reported(many_file, arrays, changes, message, hint):
    changed = {name: value for name, value in (arrays | changes).items() if value is not None}
    np.savez("params.npz", **changed)
    with pytest.raises(ArgumentsError, match=message) as caught:
        find_entry(many_file, CALL)
    assert hint is None or caught.value.hint.startswith(hint)


def test_arrays_of_a_function_keep_their_names(arrays, tmp_path):
    (tmp_path / "f.py").write_text("def f(params): return sorted(params)[0], params['rest/1']\n")
    entry = find_entry("f.py:f", "load('params.npz')")
    assert set(entry.args[0]) == set(NAMES)


# --- positions --------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "position"), [(0, 0), (2, 1), (-1, 1), (-3, 0)])
def test_positions_in_messages_exclude_static_arguments(number, position, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f.py").write_text("def f(x, n, y): return x * n + y\n")
    entry = find_entry("f.py:f", "1.0, static(2), 3.0")
    assert entry.position(number) == position
    with pytest.raises(ArgumentsError, match="argument 1 is static"):
        entry.position(1)
    with pytest.raises(ArgumentsError, match="no positional argument 3 is given; the call has 3"):
        entry.position(3)


def test_positions_in_a_program_file(file):
    entry = find_entry(file)
    assert [entry.position(n) for n in (0, 1, -1, -2)] == [0, 1, 1, 0]
    with pytest.raises(ArgumentsError, match="no positional argument 2 is given; the call has 2"):
        entry.position(2)


@pytest.mark.proof
def test_arrays_are_converted_to_the_types_of_a_file(tmp_path):
    path = str(tmp_path / "program.jaxpr")
    types = jax.random.key(0), jax.random.split(jax.random.key(0, impl="rbg"), 2)
    jaxprtool.write(jaxprtool.trace(lambda *given: given, *types, jnp.ones(2, "bfloat16")), path)
    given = "zeros(u32[2]), zeros(u32[2,4]), ones(f32[2])"
    values = find_entry(path, given).arguments()
    assert [v.dtype for v in values] == [types[0].dtype, types[1].dtype, jnp.bfloat16]
    with pytest.raises(ArgumentsError, match=r"is u32\[3\], but the program takes key<fry>"):
        find_entry(path, given.replace("u32[2])", "u32[3])")).arguments()
    with pytest.raises(ArgumentsError, match=r"is f32\[2\], but the program takes bf16"):
        find_entry(path, given.replace("ones(f32[2])", "normal(f32[2])")).arguments()


def test_an_endless_or_invalid_target_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.jaxpr")
    os.symlink("/dev/zero", "device.jaxpr")
    for target, fault in (
        ("pipe.jaxpr", "it is a device or a pipe"),
        ("device.jaxpr", "it is a device or a pipe"),
        ("a\0b.jaxpr", "null byte"),
    ):
        with pytest.raises(TargetError, match=fault):
            find_entry(target)
