"""A TARGET is a function, a program in a file, or one on stdin; arguments fit what it takes."""

import io
import sys
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.errors import ArgumentsError, TargetError
from jaxprtool.targets import ProgramEntry, find, fitted

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


def test_a_program_file_is_a_target_with_arguments_of_its_own_types(program, file):
    entry = find(file)
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
    assert jaxprtool.equivalent(find("-").trace(), program)


def test_a_program_file_is_known_by_its_first_line_whatever_its_name(file, program, tmp_path):
    renamed = tmp_path / "program.txt"
    (tmp_path / "scaled.jaxpr").rename(renamed)
    assert jaxprtool.equivalent(find(str(renamed)).trace(), program)


def test_an_exported_artifact_is_a_target(program, tmp_path):
    from jaxprtool.formats.exported import exported

    path = tmp_path / "scaled.bin"
    path.write_bytes(exported(program))
    args = {"w": jnp.arange(3.0)}, jnp.ones(3)
    np.testing.assert_array_equal(
        find(str(path)).trace()(*args, factor=2.0), scaled(*args, factor=2.0)
    )


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("no.jaxpr", None, "cannot read 'no.jaxpr': No such file"),
        ("notes.txt", b"some notes", "'notes.txt' holds neither a program"),
        ("empty", b"", "'empty' holds neither a program"),
    ],
)
def test_a_file_that_holds_no_program_is_refused(name, data, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(TargetError, match=message):
        find(name)


@pytest.mark.parametrize(
    "options", [{"factory": True}, {"static_argnums": 0}, {"static_argnames": "x"}]
)
def test_options_for_functions_are_refused_for_a_program(file, options):
    with pytest.raises(TargetError, match="neither a factory nor static arguments"):
        find(file, **options)


def test_a_program_of_64_bits_asks_for_them(tmp_path):
    path = str(tmp_path / "wide.jaxpr")
    with jax.enable_x64(True):
        wide = jaxprtool.trace(
            lambda x: x.astype("float64").sum(), jax.ShapeDtypeStruct((2,), "f4")
        )
        jaxprtool.write(wide, path)
        assert jaxprtool.equivalent(find(path).trace(), wide)
    with pytest.raises(TargetError, match="has 64-bit types, which are not enabled") as caught:
        find(path)
    assert "--x64" in caught.value.hint


# --- arguments --------------------------------------------------------------------------------


def test_arguments_that_fit_are_given_flat(file):
    entry = find(file, "{'w': ones(f32[3])}, f32[3], factor=4")
    w, x, factor = entry.arguments()
    assert isinstance(x, jax.ShapeDtypeStruct)
    assert np.array_equal(w, np.ones(3)) and factor == np.float32(4)
    assert factor.dtype == np.float32


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("f32[3]", "scaled takes arguments of structure .* not"),
        ("{'v': f32[3]}, f32[3], factor=1.0", "structure"),
        ("{'w': f32[3]}, f32[3], scale=1.0", "structure"),
        ("{'w': f32[4]}, f32[3], factor=1.0", r"argument 'params\['w'\]' is f32\[4\], .* f32\[3\]"),
        ("{'w': i32[3]}, f32[3], factor=1.0", r"is i32\[3\]"),
        ("{'w': f32[3]}, f32[3], factor=1j", r"argument 'factor' is c64\[\], .* f32\[\]"),
        ("{'w': f32[3]}, f32[3], factor=static(1)", "no static arguments left"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(file, args, message):
    with pytest.raises(ArgumentsError, match=message):
        find(file, args)


def test_any_container_will_do_in_place_of_one_of_a_custom_type(tmp_path):
    path = str(tmp_path / "pair.jaxpr")
    jaxprtool.write(jaxprtool.trace(lambda p: p.first + p.second, Pair(1.0, 2.0)), path)
    read = jaxprtool.read(path)
    assert fitted(read, ((1.0, 2.0),), {}) == fitted(read, ([1.0, 2.0],), {})
    with pytest.raises(ArgumentsError, match="structure"):
        fitted(read, ((1.0, 2.0, 3.0),), {})


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
    ],
)
def test_a_python_scalar_stands_for_values_of_its_kind_and_wider_ones(value, dtype, fits):
    program = jaxprtool.trace(lambda x: x, jax.ShapeDtypeStruct((), dtype))
    if not fits:
        with pytest.raises(ArgumentsError, match="argument 'x' is"):
            fitted(program, (value,), {})
        return
    (array,) = fitted(program, (value,), {})
    assert array.dtype == dtype and array == value
