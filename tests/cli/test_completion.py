from importlib.metadata import entry_points

import pytest

from jaxprtool.cli.completion import complete_backend, complete_passes, complete_target
from jaxprtool.cli.main import main
from jaxprtool.passes import levels


@pytest.fixture
def tree(folder):
    (folder / "functions.py").unlink()
    package = folder / "models"
    package.mkdir()
    (package / "__init__.py").write_text("entry = make()\n")
    (package / "mlp.py").write_text(
        "import nothing_that_can_be_imported\n"
        "def loss(x): ...\n"
        "def _private(): ...\n"
        "step = jit(loss)\n"
        "SIZE = 3\nTABLE = make()\n"
    )
    (package / "rnn.py").write_text("def forward(): ...\n")
    (folder / "notes.txt").write_text("")
    (folder / "bad.py").write_text("def f(:\n")
    return folder


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("", ["bad.py:", "models/"]),
        ("mo", ["models/mlp.py:", "models/rnn.py:"]),
        ("models/m", ["models/mlp.py:loss", "models/mlp.py:step"]),
        ("models/mlp.py:l", ["models/mlp.py:loss"]),
        ("models/mlp.py:x", []),
        ("models.mlp:s", ["models.mlp:step"]),
        ("models:", ["models:entry"]),
        ("bad.py:", []),
        ("nowhere/x", []),
        ("nowhere.py:f", []),
    ],
)
def test_targets_are_read_from_files_without_importing_them(tree, typed, offered):
    assert complete_target(typed) == offered


def test_every_installed_pass_is_completed():
    names = {point.name for point in entry_points(group="jaxprtool.passes")}
    assert complete_passes("") == [*sorted(names), *(f"-{name}" for name in levels)]


def test_a_broken_package_does_not_prevent_completion(tmp_path, monkeypatch):
    (tmp_path / "broken-1.dist-info").mkdir()
    (tmp_path / "broken-1.dist-info" / "entry_points.txt").write_bytes(b"\xff\xfe[x]\ny = z\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert complete_passes("dc") == ["dce"]


def test_the_last_pass_of_a_pipeline_is_completed():
    assert complete_passes("dc") == ["dce"]
    assert complete_passes("dce, dc") == ["dce, dce"]
    assert complete_passes("dce, -O") == ["dce, -O0", "dce, -O1", "dce, -O2", "dce, -O3"]
    assert complete_passes("nothing") == []
    assert complete_passes("batch(in_axes=(None, d") == []
    assert complete_passes("batch(in_axes=(None, 0)), dc") == ["batch(in_axes=(None, 0)), dce"]


def test_backends_by_name():
    assert complete_backend("c") == ["cpu", "cuda"]


def answers(monkeypatch, capsys, *words):
    monkeypatch.setenv("_JAXPRTOOL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "\n".join(["jaxprtool", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    assert main([]) == 0
    return capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["sh"], ["show", "shapecheck", "shardings"]),
        (["show", "models/m"], ["models/mlp.py:loss", "models/mlp.py:step"]),
        (["show", "models/mlp.py", ":"], ["loss", "step"]),
        (["show", "models/mlp.py", ":", "lo"], ["loss"]),
        (["opt", "models/mlp.py:loss", "-p", "dc"], ["dce"]),
        (["explain", "dc"], ["dce"]),
        (["run", "models/mlp.py:loss", "--back"], ["--backend"]),
        (["vmap", "models/mlp.py:loss", "--axis-"], ["--axis-size", "--axis-name"]),
        (["emit", "models/mlp.py:loss", "--to", "hlo-"], ["hlo-optimized", "hlo-proto"]),
    ],
)
def test_bash_completes_a_command_line(tree, monkeypatch, capsys, words, offered):
    assert answers(monkeypatch, capsys, *words) == offered
