"""Tutorials are run, from their first block to the last, and print what they show.

A page whose figures are those of JAX 0.12 says so, and is run there; the others are run with 0.10.
"""

import re
import shutil

import jax
import pytest

from tests.documentation import stories
from tests.documentation.blocks import PAGES, ROOT
from tests.documentation.conftest import forget

TUTORIALS = [page for page in PAGES if page.startswith("docs/tutorials/")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The path of the folder, one for all, which `forget` can tell from others."""
    return tmp_path_factory.mktemp("tutorial")


@pytest.mark.parametrize("page", TUTORIALS)
def test_a_tutorial_prints_what_it_shows(page, place, monkeypatch):
    release = re.search(r"figures are those\sof\sJAX (\d+\.\d+)\.\s", PAGES[page])
    if not jax.__version__.startswith(f"{release[1] if release else '0.10'}."):
        pytest.skip("shown as on another JAX release")
    shutil.rmtree(place)
    place.mkdir()
    (place / "samples").symlink_to(ROOT / "samples")
    monkeypatch.chdir(place)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    for name in ("FORCE_COLOR", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    steps = stories.steps(PAGES[page])
    assert any(step.kind == "console" for step in steps)
    for step in steps:
        if step.kind != "console":
            stories.write(step)
            continue
        forget(place)
        code, printed = stories.run(step.text)
        assert code in ((2,) if step.output.startswith("error:") else (0, 1)), printed
        if not stories.matches(step.output, printed):
            assert printed == step.output, step.text  # fails, and shows where they differ
