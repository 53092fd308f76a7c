"""Every text finds its constants: during writes, after killed writers, and through links.

The programs are `x * t`, of two tables `t`, so that the result identifies the program.
"""

import os
import pickle
import runpy
import shutil
import subprocess
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.errors import JaxprToolError, OutputError
from jaxprtool.formats.jaxpr.write import write_program_files
from jaxprtool.formats.python.emit import write_python
from jaxprtool.loading.trace import trace

TABLES = [np.full(1000, n, np.float32) for n in (1, 2, 3)]
WRITERS = {".jaxpr": jaxprtool.write, ".py": write_python}
ONE = np.float32(1)


def program(number):
    def scaled(x):
        return x * jnp.asarray(TABLES[number])

    return trace(scaled, ONE)


def which(path):
    """Return which of the programs a file contains, by its constant."""
    if path.suffix == ".py":
        constant = runpy.run_path(str(path))["CONSTANT"]
    else:
        (constant,) = jaxprtool.read(path).jaxpr.consts
    (value,) = set(np.asarray(constant).tolist())
    return int(value) - 1


def beside(path):
    return sorted(p.name for p in path.parent.iterdir() if p.suffix == ".npz")


@pytest.fixture(params=WRITERS)
def texts(request, tmp_path, monkeypatch):
    """A path, and a Python script with `write(number)`, which does not need JAX."""
    write, suffix, caught = WRITERS[request.param], request.param, []
    folder, pickled = tmp_path / "folder", tmp_path / "pickled"
    folder.mkdir()
    path = folder / f"p{suffix}"
    with monkeypatch.context() as patch:
        catch = lambda *args, **kwargs: caught.append((args, kwargs))  # noqa: E731
        patch.setattr(sys.modules[write.__module__], "write_texts", catch)
        write(program(0), path)
        write(program(1), path)
    pickled.write_bytes(pickle.dumps(caught))
    write(program(0), path)
    script = f"""
import os, pickle, signal
from jaxprtool.ir.array_files import write_texts
folder, pickled = {str(folder)!r}, {str(pickled)!r}
texts = pickle.load(open(pickled, "rb"))
def write(number):
    args, kwargs = texts[number]
    write_texts(*args, **kwargs)
"""
    return path, [sys.executable, "-c", script]


# --- killed writers -------------------------------------------------------------------------------

KILLED = """
import shutil
def counted(step):
    def call(*args, **kwargs):
        global steps
        steps += 1
        if steps == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(*args, **kwargs)
    return call
replace, unlink, code, at = os.replace, os.unlink, None, 0
while code != 0:
    write(0)
    steps, at = 0, at + 1
    if (child := os.fork()) == 0:
        os.replace, os.unlink = counted(os.replace), counted(os.unlink)
        write(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    shutil.copytree(folder, f"{folder}-{at}")
"""


@pytest.mark.proof
def test_a_writer_killed_at_any_step_leaves_one_program_whole(texts):
    path, (*command, script) = texts
    subprocess.run([*command, script + KILLED], check=True)
    folder = path.parent
    copies = [folder.with_name(f"{folder.name}-{at}") for at in range(1, 10)]
    left = [which(copy / path.name) for copy in copies if copy.exists()]
    # Five steps: the constants get their name, then the text gets its own, and the old ones are
    # removed.
    assert left[:4] == [0, 0, 0, 1] and set(left[4:]) == {1} and 5 <= len(left) < 9
    for number in (0, 1, 0):  # files left by killed writers are removed
        WRITERS[path.suffix](program(number), path)
    assert len(beside(path)) == (1 if path.suffix == ".jaxpr" else 2)


# --- readers during writes ------------------------------------------------------------------------

ENDLESS = """
while True:
    write(0)
    write(1)
"""


@pytest.mark.proof
@pytest.mark.parametrize("reads", [5, pytest.param(70, marks=pytest.mark.sweep)])
def test_readers_during_two_writes_get_one_of_the_programs(texts, reads):
    path, (*command, script) = texts
    writers = [subprocess.Popen([*command, script + ENDLESS]) for _ in "ab"]
    try:
        while which(path) == 0:
            time.sleep(0.01)
        assert {which(path) for _ in range(reads)} <= {0, 1}
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()


# --- what is kept and what is removed -------------------------------------------------------------


def test_unused_constants_are_removed(tmp_path):
    path = tmp_path / "p.jaxpr"
    for number in (0, 1, 0):
        jaxprtool.write(program(number), path)
        assert len(beside(path)) == 1 and which(path) == number
    jaxprtool.write(trace(jnp.sin, ONE), path)
    assert beside(path) == []


def test_a_module_keeps_the_constants_of_the_previous_one(tmp_path):
    path = tmp_path / "p.py"
    write_python(program(0), path)
    first = beside(path)
    write_python(program(1), path)
    assert len(beside(path)) == 2 and which(path) == 1
    write_python(program(1), path)
    assert len(beside(path)) == 2 and set(first) < set(beside(path))
    write_python(program(2), path)
    assert len(beside(path)) == 2 and not set(first) & set(beside(path)) and which(path) == 2


def test_constants_of_a_copy_are_kept(tmp_path):
    path, copy = tmp_path / "p.jaxpr", tmp_path / "p.jaxpr.bak"
    jaxprtool.write(program(0), path)
    shutil.copy(path, copy)
    jaxprtool.write(program(1), path)
    assert (which(path), which(copy)) == (1, 0)
    os.replace(copy, path)
    jaxprtool.write(program(1), path)
    assert which(path) == 1 and len(beside(path)) == 1


def test_a_program_may_be_renamed_and_folders_moved(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    jaxprtool.write(program(1), folder / "it's p.jaxpr")
    os.replace(folder / "it's p.jaxpr", folder / "q")
    folder.rename(tmp_path / "moved")
    assert which(tmp_path / "moved" / "q") == 1
    jaxprtool.write(program(0), tmp_path / "moved" / "q")
    assert which(tmp_path / "moved" / "q") == 0 and len(beside(tmp_path / "moved" / "q")) == 1


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_link_leads_to_the_program_and_its_constants(suffix, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    link, target = tmp_path / f"link{suffix}", tmp_path / "elsewhere" / f"real 'one'{suffix}"
    link.symlink_to(target)
    WRITERS[suffix](program(1), link)
    assert which(link) == which(target) == 1 and link.is_symlink()
    assert beside(link) == [] and len(beside(target)) == 1


def test_an_old_file_without_the_name_of_its_constants_is_read(tmp_path):
    path = tmp_path / "p.jaxpr"
    jaxprtool.write(program(1), path)
    (tmp_path / beside(path)[0]).rename(tmp_path / "p.jaxpr.npz")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith("constants")))
    assert which(path) == 1


@pytest.mark.parametrize("suffix", WRITERS)
def test_in_a_pipe_constants_are_in_the_text(suffix, tmp_path):
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    thread = threading.Thread(target=lambda: got.append(pipe.read_text()))
    thread.start()
    WRITERS[suffix](program(1), pipe)
    thread.join()
    assert os.listdir(tmp_path) == ["pipe"]
    copy = tmp_path / f"copy{suffix}"
    copy.write_text(got[0])
    assert which(copy) == 1


def test_a_failed_write_of_constants_leaves_the_old_program(tmp_path, monkeypatch):
    path = tmp_path / "p.jaxpr"
    jaxprtool.write(program(0), path)
    there = beside(path)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxprtool.ir.array_files.write_npz", full)
    with pytest.raises(OutputError, match=r"cannot write .*npz': No space left on device"):
        write_program_files([(program(1), path), (program(1), tmp_path / "q.jaxpr")])
    assert which(path) == 0 and sorted(os.listdir(tmp_path)) == ["p.jaxpr", *there]


@pytest.mark.parametrize("write", [*WRITERS.values(), jaxprtool.read])
def test_a_path_with_a_nul_is_a_one_line_error(write):
    arguments = ("a\0b",) if write is jaxprtool.read else (program(0), "a\0b")
    with pytest.raises(JaxprToolError, match=r"NUL|null byte"):
        write(*arguments)
