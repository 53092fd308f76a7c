"""Arrays in `.npz` files can be read by NumPy, and are memory-mapped where possible."""

import io
import mmap
import os
import pickle
import zipfile

import ml_dtypes
import numpy as np
import pytest

from jaxprtool.ir.array_files import NpzReader, write_npz

ARRAYS = {
    "a": np.arange(100, dtype=np.float32).reshape(4, 25),
    "längerer Name/b": np.arange(7, dtype=np.complex128),
    "half": np.arange(33).astype(ml_dtypes.bfloat16),
    "none": np.zeros((3, 0), np.int16),
    "scalar": np.array(True),
    "unpickled": pickle.loads(pickle.dumps(np.arange(9.0))),
}


def read(path, name, dtype, shape):
    pieces = []
    reader = NpzReader(path)
    found = reader.array(name, np.dtype(dtype), shape, lambda piece: pieces.append(bytes(piece)))
    reader.close()
    return found, b"".join(pieces)


def is_mapped(array):
    while isinstance(array, np.ndarray | memoryview):
        array = array.obj if isinstance(array, memoryview) else array.base
    return isinstance(array, mmap.mmap)


def test_numpy_reads_written_files(tmp_path):
    with open(tmp_path / "x.npz", "wb") as file:
        write_npz(file, ARRAYS)
    loaded = np.load(tmp_path / "x.npz")
    assert sorted(loaded) == sorted(ARRAYS)
    for name, array in ARRAYS.items():
        assert loaded[name].tobytes() == array.tobytes() and loaded[name].shape == array.shape


def test_written_arrays_are_mapped_and_aligned(tmp_path):
    with open(tmp_path / "x.npz", "wb") as file:
        file.write(b"")
        write_npz(file, ARRAYS)
    for name, array in ARRAYS.items():
        found, seen = read(tmp_path / "x.npz", name, array.dtype, array.shape)
        assert found.dtype == array.dtype and found.shape == array.shape
        assert found.tobytes() == seen == array.tobytes()
        assert is_mapped(found) == bool(array.size)
        assert found.ctypes.data % 64 == 0 or not array.size


def test_an_npz_can_be_written_to_a_pipe(tmp_path):
    reader, writer = os.pipe()
    with open(writer, "wb") as file:
        write_npz(file, ARRAYS)
    with open(reader, "rb") as file:
        data = file.read()
    assert np.array_equal(np.load(io.BytesIO(data))["a"], ARRAYS["a"])


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_files_written_by_numpy_can_be_read(save, tmp_path):
    save(tmp_path / "x.npz", a=ARRAYS["a"])
    found, seen = read(tmp_path / "x.npz", "a", np.float32, (4, 25))
    assert found.tobytes() == seen == ARRAYS["a"].tobytes()


def test_unexpected_files_are_none_or_an_error(tmp_path):
    path = tmp_path / "x.npz"
    np.savez(path, a=ARRAYS["a"], f=np.asfortranarray(ARRAYS["a"]))
    assert read(path, "a", np.float32, (25, 4))[0] is None
    assert read(path, "a", np.int32, (4, 25))[0] is None
    assert read(path, "f", np.float32, (4, 25))[0] is None
    with pytest.raises(KeyError):
        read(path, "b", np.float32, (4, 25))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(zipfile.BadZipFile):
        read(path, "a", np.float32, (4, 25))


@pytest.mark.parametrize("path", ["/dev/zero", "fifo", "."])
def test_endless_files_are_not_read(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    with pytest.raises(OSError, match=r"regular file|Is a directory"):
        NpzReader(path)
