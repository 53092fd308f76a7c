"""Arrays are read from files unchanged. Damaged and hostile files are one-line errors."""

import json
import os
import pickle
import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxprtool.errors import ArgumentsError
from jaxprtool.loading.argspec import Arrays, load_arrays


def safetensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.fixture
def file(tmp_path):
    def write(name, data):
        path = tmp_path / name
        path.write_bytes(data)
        return str(path)

    return write


def fault(path):
    with pytest.raises(ArgumentsError) as caught:
        load_arrays(path)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_npy_and_npz(tmp_path):
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    np.save(tmp_path / "x.npy", array)
    np.savez_compressed(tmp_path / "x.npz", **{"a.b/c": array, "d": np.float32(2)})
    np.testing.assert_array_equal(load_arrays(str(tmp_path / "x.npy")), array)
    loaded = load_arrays(str(tmp_path / "x.npz"))
    assert list(loaded) == ["a.b/c", "d"]
    np.testing.assert_array_equal(loaded["a.b/c"], array)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("F32", np.float32),
        ("BF16", ml_dtypes.bfloat16),
        ("F8_E4M3", ml_dtypes.float8_e4m3fn),
        ("I64", np.int64),
        ("BOOL", np.bool_),
    ],
)
def test_safetensors(file, kind, dtype):
    array = np.array([[0, 1], [1, 1], [0, 0]]).astype(dtype)
    size = array.nbytes
    header = {
        "__metadata__": {"format": "pt"},
        "w": entry(kind, (3, 2), (0, size)),
        "empty": entry(kind, (0, 4), (size, size)),
    }
    loaded = load_arrays(file("x.safetensors", safetensors(header, array.tobytes())))
    assert list(loaded) == ["w", "empty"]
    assert loaded["w"].dtype == dtype
    np.testing.assert_array_equal(loaded["w"], array)
    assert loaded["empty"].shape == (0, 4)


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


def test_nothing_is_ever_unpickled(file, tmp_path):
    assert "numpy.save" in fault(file("x.npy", pickle.dumps(Evil())))
    np.save(tmp_path / "o.npy", np.array([Evil()], dtype=object), allow_pickle=True)
    assert "Object arrays cannot be loaded" in fault(str(tmp_path / "o.npy"))
    np.savez(tmp_path / "o.npz", a=np.array([Evil()], dtype=object))
    assert "Object arrays cannot be loaded" in fault(str(tmp_path / "o.npz"))


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("x.pkl", b"", "only .npy, .npz and .safetensors files, and checkpoints"),
        ("x.npy", b"", "not a file written by numpy.save"),
        ("x.npy", b"\x93NUMPY\x01\x00", "cannot load"),
        ("x.npz", b"PK\x03\x04 and no more", "cannot load"),
        ("x.safetensors", b"", "its header is truncated"),
        ("x.safetensors", b"\xff" * 8, "its header is truncated"),
        ("x.safetensors", (2**62).to_bytes(8, "little") + b"{}", "its header is truncated"),
        ("x.safetensors", safetensors(b"{"), "its header is damaged"),
        ("x.safetensors", safetensors(b"[" * 100_000), "its header is damaged"),
        ("x.safetensors", safetensors([]), "its header is damaged"),
        ("x.safetensors", safetensors({"w": 1}), "its entry for 'w' is damaged"),
        ("x.safetensors", safetensors({"w": entry(shape=[-2])}), "its entry for 'w' is damaged"),
        ("x.safetensors", safetensors({"w": entry(shape=[1.0])}), "its entry for 'w' is damaged"),
        ("x.safetensors", safetensors({"w": entry("F3")}), "'w' has dtype F3"),
        ("x.safetensors", safetensors({"w": entry()}, b"123"), "its data for 'w' is truncated"),
        ("x.safetensors", safetensors({"w": entry(shape=[3])}, b"1" * 8), "truncated"),
        ("x.safetensors", safetensors({"w": entry(offsets=[8, 0])}, b"1" * 8), "truncated"),
    ],
)
def test_damaged_files(file, name, data, expected):
    assert expected in fault(file(name, data))


def test_a_missing_file_or_a_folder_is_an_error(tmp_path):
    assert fault(str(tmp_path / "x.npz")).endswith("No such file or directory")
    (tmp_path / "y.npz").mkdir()
    assert fault(str(tmp_path / "y.npz")).endswith("the folder is not an Orbax checkpoint")
    assert "null byte" in fault("a\0.npy")


@given(st.binary(max_size=60), st.sampled_from([".npy", ".npz", ".safetensors"]))
def test_random_bytes_raise_our_error(tmp_path_factory, data, suffix):
    path = tmp_path_factory.getbasetemp() / f"random{suffix}"
    path.write_bytes(data)
    fault(str(path))


def test_arrays_are_found_by_a_prefix_of_their_paths():
    names = "result[0]", "result[1]['m.py:3 sin']", "result[1].mu['a/b'][2]", "layers/0/w", "w2"
    arrays = Arrays({name: np.asarray(i) for i, name in enumerate(names)})
    assert arrays.at("w2") is arrays["w2"] and arrays.at("result[0]") is arrays["result[0]"]
    assert arrays.at("result[1]") == {"m.py:3 sin": 1, "mu/a/b/2": 2}
    assert arrays.at("result") == {"0": 0, "1/m.py:3 sin": 1, "1/mu/a/b/2": 2}
    assert arrays.at("result").at("1").at("mu") == {"a/b/2": 2}
    assert arrays.at("layers").at("0") == {"w": 3}
    for path in "resul", "w", "0", "":
        with pytest.raises(KeyError):
            arrays.at(path)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
@pytest.mark.parametrize("kind", ["a pipe", "a device"])
def test_endless_files_are_refused_at_once(tmp_path, suffix, kind):
    path = tmp_path / f"x{suffix}"
    if kind == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    expected = f"cannot load {str(path)!r}: it is a device or a pipe, not a regular file"
    assert fault(str(path)) == expected


def test_arrays_larger_than_memory_are_refused_before_they_are_read(tmp_path, monkeypatch):
    path = str(tmp_path / "x.npz")
    np.savez_compressed(path, a=np.zeros(1000, np.int8), b=np.zeros(10**6, np.int8))
    assert len(load_arrays(path)["b"]) == 10**6
    monkeypatch.setattr(os, "sysconf", lambda name: 999)
    assert re.search(r"it holds 1,001,\d+ bytes of arrays, but this mach.*998,001", fault(path))


def test_a_header_that_claims_more_than_the_file_has(file):
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000000,)}"
    start = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little")
    assert "cannot load" in fault(file("x.npy", start + header + bytes(100)))
