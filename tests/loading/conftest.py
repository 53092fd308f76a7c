"""Modules that a test imports by TARGET are removed from Python when the test ends."""

import sys

import pytest


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An empty current folder. `project(path, text)` writes a file in it and returns its path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = dict(sys.modules)

    def write(path, text=""):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return str(file)

    yield write
    for name in set(sys.modules) - set(before):
        # Modules of the library that a test imported first are kept.
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
