"""Passes come from entry points, plug-in files and modules. A broken one does not affect others."""

import subprocess
import sys
import warnings
from dataclasses import dataclass
from typing import ClassVar

import pytest

import jaxprtool
from jaxprtool import passes as framework
from jaxprtool.errors import PipelineError, PluginError, PluginWarning
from jaxprtool.passes import Pass, Pipeline, available, find_pass, load_plugin

PLUGIN = """
from dataclasses import dataclass
from typing import ClassVar
from jaxprtool import Pass

@dataclass(frozen=True)
class Mine(Pass):
    "Do nothing, well."
    name: ClassVar[str] = "{name}"

    def __call__(self, program):
        return program
"""


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    monkeypatch.setattr(framework, "_registered", {})


def distribution(folder, name, entry, value):
    """A minimal installed distribution with one entry point."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[jaxprtool.passes]\n{entry} = {value}\n")


def test_our_own_passes_are_entry_points():
    assert available()["dce"].origin == "jaxprtool"
    assert find_pass("dce").name == "dce"


def test_a_plug_in_file_adds_its_passes(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN.format(name="mine"))
    load_plugin(str(path))
    assert available()["mine"].origin == str(path)
    assert find_pass("mine").__doc__ == "Do nothing, well."


def test_a_plug_in_module_adds_its_passes(tmp_path, monkeypatch):
    (tmp_path / "plugged_module.py").write_text(PLUGIN.format(name="mine"))
    monkeypatch.syspath_prepend(tmp_path)
    load_plugin("plugged_module")
    assert available()["mine"].origin == "plugged_module"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        ("1/0", "ZeroDivisionError"),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_plug_in_that_raises_is_one_warning_that_names_it(tmp_path, text, reason):
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.warns(PluginWarning) as caught:
        load_plugin(str(path))
    (warning,) = caught
    message = str(warning.message)
    assert str(path) in message and reason in message and "\n" not in message


@pytest.mark.parametrize("where", ["no/such/file.py", "no_such_module_at_all"])
def test_a_missing_plug_in_is_a_warning(where):
    with pytest.warns(PluginWarning, match=r"is ignored"):
        load_plugin(where)


def test_a_name_that_is_already_registered_is_a_warning(tmp_path):
    path = tmp_path / "clash.py"
    path.write_text(PLUGIN.format(name="dce"))
    with pytest.warns(PluginWarning, match=r"pass 'dce' of .*clash.py is ignored: jaxprtool has"):
        load_plugin(str(path))
    assert find_pass("dce").__module__ == "jaxprtool.passes.cleanup.dce"


def test_two_distributions_with_one_name_are_a_warning_and_ours_wins(tmp_path, monkeypatch):
    distribution(tmp_path, "aaa-clash", "dce", "aaa_clash:Dce")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(PluginWarning, match=r"pass 'dce' of aaa-clash is ignored: jaxprtool has"):
        assert available()["dce"].origin == "jaxprtool"


def test_an_entry_point_is_imported_only_when_its_pass_is_named(tmp_path, monkeypatch):
    distribution(tmp_path, "lazy-plugin", "lazy", "lazy_plugin:Mine")
    distribution(tmp_path, "broken-plugin", "broken", "broken_plugin:Mine")
    (tmp_path / "lazy_plugin.py").write_text(PLUGIN.format(name="lazy"))
    (tmp_path / "broken_plugin.py").write_text("raise ImportError('no luck')")
    monkeypatch.syspath_prepend(tmp_path)
    assert {"lazy", "broken"} <= set(available())
    assert "lazy_plugin" not in sys.modules
    assert find_pass("lazy").name == "lazy"
    with pytest.raises(PluginError, match=r"'broken' of broken-plugin cannot be .*no luck"):
        find_pass("broken")


def test_an_entry_point_that_is_not_a_pass_is_refused(tmp_path, monkeypatch):
    distribution(tmp_path, "odd-plugin", "odd", "math:pi")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match=r"is not a subclass of jaxprtool.Pass"):
        find_pass("odd")


def test_register_again_replaces_and_refuses_other_objects():
    @dataclass(frozen=True)
    class First(Pass):
        name: ClassVar[str] = "again"

    @dataclass(frozen=True)
    class Second(Pass):
        name: ClassVar[str] = "again"

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jaxprtool.register(First)
        assert jaxprtool.register(Second) is Second
    assert find_pass("again") is Second
    with pytest.raises(TypeError, match=r"subclass of jaxprtool.Pass with a name"):
        jaxprtool.register(Pass)


def test_an_unknown_pass_gets_the_nearest_name():
    with pytest.raises(PipelineError) as caught:
        find_pass("dse")
    assert caught.value.hint == "did you mean 'dce'?"


def test_listing_passes_does_not_import_jax():
    code = "import sys; from jaxprtool.passes import available; available(); "
    code += "sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_installed_packages_are_read_once(monkeypatch):
    read, entry_points = [], framework.entry_points

    def counted(**selection):
        read.append(selection)
        return entry_points(**selection)

    monkeypatch.setattr(framework, "entry_points", counted)
    framework._installed.cache_clear()
    for text in ("dce, cse", "-O2", "dce"):
        Pipeline.parse(text)
    assert len(read) == 1


def test_packages_installed_and_passes_registered_later_are_found(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PipelineError, match="unknown pass 'late'"):
        find_pass("late")
    (tmp_path / "late_plugin.py").write_text(PLUGIN.format(name="late"))
    distribution(tmp_path, "late-plugin", "late", "late_plugin:Mine")
    assert find_pass("late").__module__ == "late_plugin"
    (tmp_path / "file.py").write_text(PLUGIN.format(name="later"))
    load_plugin(str(tmp_path / "file.py"))
    assert find_pass("later").name == "later"
    assert {"late", "later", "dce"} <= set(available())
