"""Every command on every model. `sweep` marks the slow models."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.models

NAMES = sorted(p.stem for p in (Path(__file__).parent / "zoo").glob("[!_]*.py"))

#: Models that are traced and compiled in a few seconds.
QUICK = frozenset({"jraph_network", "distrax_flow", "penzai_mlp", "equinox_vit"})


def _model(name):
    marks = [pytest.mark.xdist_group(name)]
    return pytest.param(name, marks=marks if name in QUICK else [*marks, pytest.mark.sweep])


@pytest.fixture(scope="module")
def made():
    """Return the models that were made in this process."""
    return {}


COLUMNS = ["show", "stats", "opt", "run", "vmap", "unzip", "file", "Python", "StableHLO"]
ASKED = ["cost", "memory", "residuals", "source", "why", "report", "nans"]
IN_A_ROW = ["steps", "pmapped", "vmapped, run"]


@pytest.mark.parametrize("command", COLUMNS + ASKED + IN_A_ROW)
@pytest.mark.parametrize("name", list(map(_model, NAMES)))
def test_the_command_works_on_the_model(name, command, made, tmp_path):
    from tests.models.commands import COMMANDS, Model
    from tests.models.questions import QUESTIONS
    from tests.models.steps import ROWS

    assert [*COMMANDS, *QUESTIONS, *ROWS] == COLUMNS + ASKED + IN_A_ROW
    model = made.setdefault(name, Model(name))
    model.prepare()
    (COMMANDS | QUESTIONS | ROWS)[command](model, tmp_path)
