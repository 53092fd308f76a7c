"""Arrays in a file's text and in the constants file are restored bit for bit."""

import ast
import io
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.errors import ProgramFileError
from jaxprtool.formats.jaxpr.constants import (
    MOST_INLINE,
    Constants,
    ConstantWriter,
    constant_digest,
)
from jaxprtool.formats.jaxpr.values import Unreadable
from jaxprtool.formats.jaxpr.write import program_file_text
from jaxprtool.ir.array_files import write_npz
from jaxprtool.ir.dtypes import array_dtypes
from jaxprtool.loading.trace import trace

RANDOM = np.random.RandomState(0)
LARGE = RANDOM.normal(size=(16, 16)).astype(np.float32)


def samples():
    for name, dtype in array_dtypes().items():
        for shape in ((), (3,), (2, 0), (2, 3, 4), (100,)):
            if dtype != jax.dtypes.float0 and len(name) > 3:
                yield np.asarray(RANDOM.uniform(0, 3, shape)).astype(dtype)
    bits = RANDOM.bytes(8 * 8 * 50)
    yield from (np.frombuffer(bits, kind) for kind in ("<f4", "<f8", "<f2", "<u8", "<c8"))
    yield from (np.frombuffer(bits[:64], kind) for kind in ("<f4", "<f8", "<f2", "<c8"))
    yield np.frombuffer(bits[:50], jnp.float8_e5m2)
    yield np.frombuffer(bits, jnp.bfloat16)[::2]
    yield np.asfortranarray(LARGE)
    yield np.array(5.0, np.float32)


def type_of(value):
    return jaxcompat.array_type(value.shape, value.dtype, False)


@pytest.mark.parametrize("inline", [False, True])
def test_arrays_are_restored_bit_for_bit(inline, tmp_path):
    for value in samples():
        writer = ConstantWriter(inline)
        spelled = ast.parse(writer.constant(value, type_of(value)), mode="eval").body
        with open(tmp_path / "x.npz", "wb") as file:
            write_npz(file, writer.stored)
        back = Constants([tmp_path / "x.npz"]).array(spelled, type_of(value))
        assert back.dtype == value.dtype and back.shape == value.shape
        assert back.tobytes() == value.tobytes()
        assert bool(writer.stored) == (value.size > MOST_INLINE and not inline)


def test_keys_and_float0_are_restored():
    writer = ConstantWriter(True)
    keys = jax.random.split(jax.random.key(1, impl="rbg"), (2, 3))
    spelled = ast.parse(writer.constant(keys, jax.typeof(keys)), mode="eval").body
    back = Constants().array(spelled, jax.typeof(keys))
    assert back.dtype == keys.dtype
    assert jnp.array_equal(jax.random.key_data(back), jax.random.key_data(keys))
    aval = jaxcompat.array_type((2,), jax.dtypes.float0, False)
    assert writer.constant(np.zeros(2, jax.dtypes.float0), aval) == "[False, False]"


def test_equal_arrays_are_stored_once():
    first, second = io.BytesIO(), io.BytesIO()
    write_npz(first, {"b": LARGE, "a": LARGE * 2})
    write_npz(second, {"a": LARGE * 2, "b": LARGE.copy(order="F")})
    assert first.getvalue() == second.getvalue()
    assert (
        constant_digest(LARGE)
        == constant_digest(np.asfortranarray(LARGE))
        != constant_digest(LARGE.reshape(256))
    )
    assert constant_digest(LARGE.view(np.int32)) != constant_digest(LARGE)


def program(table=LARGE):
    return trace(lambda x: jnp.asarray(table) @ x + jnp.asarray(table)[0], table[0])


def constants_of(path):
    """Return the only constants file next to a file."""
    (found,) = path.parent.glob(f"{path.name}.*.npz")
    return found


def test_large_constants_are_in_a_separate_file_that_numpy_reads(tmp_path):
    path = tmp_path / "p.jaxpr"
    jaxprtool.write(program(), path)
    assert f"constants = '{constants_of(path).name}'\n" in path.read_text()
    arrays = np.load(constants_of(path), allow_pickle=False)
    assert list(arrays) == [constant_digest(LARGE)]
    assert np.array_equal(arrays[constant_digest(LARGE)], LARGE)
    assert f"=npz('{constant_digest(LARGE)}')" in path.read_text()
    assert jaxprtool.equivalent(jaxprtool.read(path), program())


def test_rewriting_a_program_removes_its_old_constants(tmp_path):
    path = tmp_path / "p.jaxpr"
    jaxprtool.write(program(), path)
    jaxprtool.write(program(LARGE + 1), path)
    assert list(np.load(constants_of(path))) == [constant_digest(LARGE + 1)]
    jaxprtool.write(trace(jnp.sin, 1.0), path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.jaxpr"]


def test_in_a_stream_large_constants_are_in_the_text():
    written = program_file_text(program())
    assert "=base64('" in written and "npz" not in written


def altered(path, change):
    """Change the bytes of each array in an .npz file, which stays valid."""
    with zipfile.ZipFile(path) as archive:
        members = {name: change(bytearray(archive.read(name))) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def flipped(data):
    data[-1] ^= 1
    return bytes(data)


FAULTS = {
    "is missing, because the file": lambda path: path.unlink(),
    r"is missing from .*p\.jaxpr\.\w+\.npz": lambda path: np.savez(path, other=LARGE),
    "was modified": lambda path: altered(path, flipped),
    "modified": lambda path: np.savez(path, **{constant_digest(LARGE): LARGE.astype(np.float64)}),
    " was modified": lambda path: altered(path, lambda data: bytes(data[:-4])),
    "cannot be read": lambda path: path.write_bytes(b"no archive"),
    "npz was modified": lambda path: np.savez(path, **{constant_digest(LARGE): np.array([{}])}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_or_altered_constant_is_named(fault, tmp_path):
    path = tmp_path / "p.jaxpr"
    jaxprtool.write(program(), path)
    FAULTS[fault](constants_of(path))
    with pytest.raises(ProgramFileError, match=fault) as caught:
        jaxprtool.read(path)
    assert constant_digest(LARGE) in caught.value.message
    assert caught.value.message.startswith(f"{path}:")


@pytest.mark.parametrize(
    ("spelled", "fault"),
    [
        ("[1, 2]", "a list of 3"),
        ("[1, 2, 3, 4]", "a list of 3"),
        ("[1, 2, [3]]", "not of dtype int32"),
        ("[1, 2, 3.5]", "not of dtype int32"),
        ("[1, 2, True]", "not of dtype int32"),
        ("[1, 2, 3000000000]", "out of bounds|too large"),
        ("5", "a list of 3"),
        ("npz('sha256:0')", "is in a file, but the program names no file"),
        ("npz()", "string in quotes"),
        ("base64(5)", "string in quotes"),
        ("base64('AAAA', 'AAAA')", "string in quotes"),
        ("base64('AAAA')", "3 bytes, but the type has 12"),
        ("base64('?')", "invalid base64"),
    ],
)
def test_an_invalid_constant_is_reported_with_the_reason(spelled, fault):
    aval = jaxcompat.array_type((3,), np.dtype("int32"), False)
    with pytest.raises(Unreadable, match=fault):
        Constants().array(ast.parse(spelled, mode="eval").body, aval)
