"""Files are replaced atomically. Links, devices and pipes are written through and kept."""

import os
import stat
import subprocess
import sys
import threading

import pytest

from jaxprtool.errors import OutputError
from jaxprtool.files import (
    SUPERVISED,
    file_written_whole,
    is_stream,
    opened_plain,
    remove_unfinished,
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path, data=b"new"):
    with file_written_whole(str(path)) as file:
        file.write(data)


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_kept_and_its_target_is_replaced(folder, there):
    (folder / "elsewhere").mkdir()
    target = folder / "elsewhere" / "real"
    if there:
        target.write_bytes(b"old")
    (folder / "second").symlink_to("elsewhere/real")
    (folder / "first").symlink_to("second")
    with file_written_whole("first") as file:
        file.write(b"new")
        file.flush()
        assert target.exists() == there and (not there or target.read_bytes() == b"old")
    assert os.readlink("first") == "second" and os.readlink("second") == "elsewhere/real"
    assert target.read_bytes() == b"new" and not target.is_symlink()
    assert os.listdir("elsewhere") == ["real"]


def test_a_circular_link_is_refused():
    os.symlink("b", "a")
    os.symlink("a", "b")
    with pytest.raises(OutputError, match="cannot write 'a': Too many levels"):
        write("a")
    assert sorted(os.listdir()) == ["a", "b"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
@pytest.mark.parametrize("link", [False, True])
def test_a_device_is_written_to(link):
    try:
        os.mknod("null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        with open("null", "wb"):
            pass
    except OSError:
        pytest.skip("no devices can be made here")
    if link:
        os.symlink("null", "link")
    write("link" if link else "null")
    assert stat.S_ISCHR(os.stat("null").st_mode)
    assert sorted(os.listdir()) == ["link", "null"][not link :]


def test_the_null_device_is_a_stream():
    assert is_stream(os.devnull)
    if os.geteuid() != 0:  # protects the real device when run as root
        write(os.devnull)


def test_a_pipe_receives_the_text():
    os.mkfifo("pipe")
    got = []

    def reader():
        with open("pipe", "rb") as file:
            got.append(file.read())

    thread = threading.Thread(target=reader)
    thread.start()
    write("pipe")
    thread.join()
    assert got == [b"new"] and stat.S_ISFIFO(os.stat("pipe").st_mode) and os.listdir() == ["pipe"]


@pytest.mark.parametrize("path", ["/dev/stdout", "/dev/fd/1"])
def test_stdout_by_its_path_is_appended_to(path):
    code = f"""
from jaxprtool.files import file_written_whole
print("before")
with file_written_whole({path!r}) as file:
    file.write(b"new\\n")
print("after")
"""
    with open("log", "wb") as log:
        log.write(b"there\n")
        log.flush()
        subprocess.run([sys.executable, "-c", code], stdout=log, check=True)
    with open("log") as log:
        assert log.read().split() == ["there", "before", "new", "after"]


def test_a_new_file_has_the_default_mode():
    before = os.umask(0o027)
    try:
        write("file")
    finally:
        os.umask(before)
    assert mode("file") == 0o640


@pytest.mark.parametrize("kept", [0o600, 0o755, 0o666])
def test_a_replaced_file_keeps_its_mode(folder, kept):
    (folder / "file").write_bytes(b"old")
    os.chmod("file", kept)
    with file_written_whole("file") as file:
        (temporary,) = set(os.listdir()) - {"file"}
        assert mode(temporary) == kept  # before it has any contents
        file.write(b"new")
    assert mode("file") == kept and (folder / "file").read_bytes() == b"new"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_a_replaced_file_keeps_its_owner():
    write("file")
    os.chown("file", 1234, 1235)
    write("file")
    status = os.stat("file")
    assert (status.st_uid, status.st_gid) == (1234, 1235)


def test_a_path_with_a_nul_is_a_one_line_error():
    with pytest.raises(
        OutputError, match=r"^cannot write 'a\\x00b': a path cannot contain NUL characters$"
    ):
        write("a\0b")


def test_a_name_of_maximum_length_can_be_written():
    name = "n" * 255
    write(name)
    assert os.listdir() == [name]


@pytest.mark.parametrize("path", ["/dev/zero", "pipe", "folder"])
def test_only_regular_files_are_read(path):
    os.mkfifo("pipe")
    os.mkdir("folder")
    with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
        opened_plain(path)


def test_a_link_to_a_regular_file_is_read():
    write("file")
    os.symlink("file", "link")
    with opened_plain("link") as file:
        assert file.read() == b"new"


def test_files_left_by_killed_processes_are_removed_and_their_targets_are_kept(folder, monkeypatch):
    for name in (".jaxprtool-out", ".jaxprtool-out.orbax-checkpoint-tmp", ".jaxprtool-out-old"):
        (folder / name).mkdir()
        (folder / name / "file").write_text(name)
    monkeypatch.setenv(SUPERVISED, "mark")
    with pytest.raises(KeyboardInterrupt), file_written_whole("out.npz"):
        (written,) = folder.glob(".jaxprtool-mark*")
        os.link(written, folder / ".jaxprtool-mark1")  # as if this process were killed
        raise KeyboardInterrupt
    (folder / ".jaxprtool-other").write_text("of another process")
    remove_unfinished("out", "mark")
    assert sorted(os.listdir(folder)) == [".jaxprtool-other", "out"]
    assert (folder / "out" / "file").read_text() == ".jaxprtool-out-old"
    remove_unfinished("missing/out", "mark")
