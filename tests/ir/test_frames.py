"""The owner of a frame, and the names of files, from any working directory."""

import jax
import jax.numpy as jnp
import pytest

from jaxprtool import jaxcompat, trace
from jaxprtool.ir import frames
from jaxprtool.ir.frames import Frames, Root, own_frame, short_paths
from jaxprtool.jaxcompat.source_locations import UserFrame, is_users_file, source_infos, user_frames

PACKAGES = "/home/me/work/.venv/lib/python3.12/site-packages"
LAYERS = f"{PACKAGES}/flax/linen/linear.py"


def root(folder, base=None):
    return Root(folder, base or folder)


def frame(file, line=1):
    return UserFrame(file, line, "f", 0, line, 0)


def equation(*files):
    """Return an equation made in the last of some files, each called by the previous one."""
    eqn = jax.make_jaxpr(jnp.sin)(1.0).eqns[0]
    stack = [frame(file, number) for number, file in enumerate(files, 1)]
    (info,) = source_infos([(stack, "")])
    return eqn.replace(source_info=info)


@pytest.mark.parametrize(
    "roots, file, is_own, path",
    [
        ([root("/home/me/work")], "/home/me/work/net/model.py", True, "net/model.py"),
        ([root("/home/me/work")], "/home/me/workshop/model.py", False, "model.py"),
        ([root("/home/me/work")], LAYERS, False, "flax/linen/linear.py"),
        ([root("/")], LAYERS, False, "flax/linen/linear.py"),
        ([root("/")], "/home/me/model.py", True, "home/me/model.py"),
        ([root(PACKAGES + "/flax", PACKAGES)], LAYERS, True, "flax/linen/linear.py"),
        ([root(PACKAGES + "/flax", PACKAGES)], f"{PACKAGES}/optax/a.py", False, "optax/a.py"),
        ([root("/work/net", "/work")], "/work/net/model.py", True, "net/model.py"),
        ([root("/a"), root("/a/b/c")], "/a/b/c/d.py", True, "b/c/d.py"),
        ([], "/usr/lib/python3/dist-packages/lib/a.py", False, "lib/a.py"),
        ([], "model.py", True, "model.py"),
        ([], "site-packages/flax/linen/linear.py", False, "flax/linen/linear.py"),
        ([], "<stdin>", True, "<stdin>"),
    ],
)
def test_a_file_under_a_users_folder_is_the_users(roots, file, is_own, path):
    frames = Frames(tuple(roots))
    assert (frames.is_own(file), frames.path(file)) == (is_own, path)


def test_a_file_of_a_package_elsewhere_has_the_name_of_its_package(tmp_path):
    package = tmp_path / "checkout" / "flaxen" / "nn"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    assert Frames().path(str(package / "linear.py")) == "flaxen/nn/linear.py"


@pytest.mark.parametrize(
    "files, own, library",
    [
        (["/w/model.py", LAYERS], "/w/model.py", LAYERS),
        (["/w/train.py", "/w/model.py"], "/w/model.py", None),
        (["/w/model.py", "/lib/a.py", LAYERS], "/w/model.py", LAYERS),
        (["/w/model.py", LAYERS, "/w/rule.py"], "/w/rule.py", None),
        (["/elsewhere/model.py", LAYERS], "/elsewhere/model.py", LAYERS),
        ([f"{PACKAGES}/optax/a.py", LAYERS], LAYERS, None),
    ],
)
def test_the_innermost_user_frame_is_named_before_the_librarys(files, own, library):
    eqn = equation(*files)
    location = Frames((root("/w"),)).location(eqn)
    assert location.frame.file == own
    assert (location.library.file if location.library else None) == library
    everything = [location.frame.file, *(f.file for f in location.behind)]
    assert everything == files[files.index(own) :]


def test_files_with_the_same_path_are_distinguished_by_their_folders():
    known = Frames((root("/w"),))
    files = ["/a/net/model.py", "/b/net/model.py", "/c/net/model.py", "/w/net/model.py", "model.py"]
    expected = ["model.py", "net/model.py", "c/net/model.py", "w/net/model.py", "model.py"]
    assert [known.path(file) for file in files] == expected
    assert known.path("/b/net/model.py") == "net/model.py"


def test_without_frames_there_is_no_location():
    assert Frames().location(equation()) is None and Frames().texts(equation()) == ()


def test_locations_for_passes_do_not_depend_on_the_working_directory(monkeypatch):
    eqn = equation("/a/train.py", "/b/model.py", LAYERS)
    monkeypatch.chdir("/")
    assert own_frame(eqn).file == "/b/model.py"
    assert own_frame(equation(f"{PACKAGES}/optax/a.py", LAYERS)).file == LAYERS
    assert own_frame(equation()) is None


def test_a_removed_folder_is_not_the_users(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert frames.source_place(equation("/elsewhere/model.py")) == "model.py:1"


def test_the_caller_of_trace_is_not_among_a_functions_frames():
    def inner(x):
        return jnp.sin(x)

    def outer(x):
        return inner(x)

    (eqn,) = trace(outer, 1.0).jaxpr.eqns
    names = [each.function.rpartition(".")[2] for each in user_frames(eqn)]
    assert names == ["inner", "outer"]
    (eqn,) = trace(jnp.negative, 1.0).jaxpr.eqns
    assert jaxcompat.user_frame(eqn) is None
    (theirs,) = jax.make_jaxpr(inner)(1.0).eqns
    assert user_frames(theirs)[0].function.endswith(".inner")


def test_packages_below_pythons_own_library_are_libraries(monkeypatch):
    """As without a virtual environment, where JAX does not record the files of packages."""
    python = "/opt/conda/lib/python3.12"
    jax_hides = [python, f"{python}/site-packages/jax/"]
    monkeypatch.setattr("sysconfig.get_path", lambda name: python)
    monkeypatch.setattr("jax._src.source_info_util._exclude_paths", jax_hides)
    monkeypatch.setattr(
        "jax._src.source_info_util.is_user_filename",
        lambda file: not file.startswith(tuple(jax_hides)),
    )
    is_users_file.cache_clear()
    try:
        assert is_users_file(f"{python}/site-packages/flax/linen/linear.py")
        assert not is_users_file(f"{python}/site-packages/jax/_src/lax.py")
        assert not is_users_file(f"{python}/functools.py")
        assert is_users_file("/home/me/model.py")
    finally:
        is_users_file.cache_clear()


def test_frames_of_a_long_function_have_the_lines_of_its_equations():
    """For many frames in one function, its instructions are listed once, not one by one."""
    lines = "".join(f"    x = g(x)  # {i}\n" for i in range(150))
    scope = {}
    text = f"def f(x):\n{lines}    return x\ndef g(x):\n    return x + 1.0\n"
    exec(compile(text, "/w/long.py", "exec"), scope)
    reader = jaxcompat.source_locations.FrameReader()
    found = [reader.frames(eqn) for eqn in trace(scope["f"], 1.0).jaxpr.eqns]
    assert [each[1].line for each in found] == list(range(2, 152))
    assert {each[1][3:4] + each[1][5:] for each in found} == {(8, 12)}
    assert {each[0].function for each in found} == {"g"}


def test_files_of_one_name_keep_the_folders_that_distinguish_them():
    for locations, expected in (
        (["a/model.py:3", "b/net.py:4"], ["model.py:3", "net.py:4"]),
        (["x/a/m.py:3", "x/b/m.py:4", "x/b/m.py:9"], ["a/m.py:3", "b/m.py:4", "b/m.py:9"]),
        (["x/a/m.py:3", "y/a/m.py:3"], ["x/a/m.py:3", "y/a/m.py:3"]),
        (["m.py:3", "a/m.py:4", "unknown line"], ["m.py:3", "a/m.py:4", "unknown line"]),
    ):
        assert short_paths(locations) == expected
