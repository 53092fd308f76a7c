"""Browsers of `tiny.py:net`, and of other functions."""

from pathlib import Path

import pytest

import jaxprtool
from jaxprtool.commands.browse.app import Browser
from jaxprtool.commands.browse.document import Document, Navigator, ProgramOutline, StateRecorder
from jaxprtool.passes import Pipeline

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in ("NO_COLOR", "EDITOR", "VISUAL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def net():
    return jaxprtool.load(f"{Path(__file__).parent}/tiny.py:net")


@pytest.fixture
def states(net):
    """`states("dce")` returns the states of `net`, or another program, before and after passes."""

    def make(passes="", program=None):
        recorder = StateRecorder(program or net)
        if passes:
            Pipeline.parse(passes).run(program or net, recorder)
        return recorder.states

    return make


@pytest.fixture
def browser(states):
    """`browser("dce")` returns an app that is not running yet."""
    return lambda passes="", program=None, **more: Browser(states(passes, program), **more)


class Model:
    """A program's document and rows, with conversions between them."""

    def __init__(self, state, by_scope=False):
        self.document = Document(state)
        self.outline = ProgramOutline(
            self.document.flow, self.document.scopes if by_scope else None
        )
        self.navigator = Navigator(self.document, self.outline)

    @property
    def texts(self):
        """Return the visible rows, indented."""
        return ["  " * node.depth + "".join(self.document.row(node)) for node in self.outline.rows]

    def row(self, start):
        """Return the row that starts with a text, with everything unfolded."""
        self.outline.open_all()
        for number in reversed(range(len(self.outline.rows))):
            if not self.outline.rows[number].is_open:
                self.outline.toggle(number)
        for node in self.outline.rows:
            if "".join(self.document.row(node)).startswith(start):
                return node
        raise AssertionError(f"no row begins with {start}: {self.texts}")

    def text(self, node):
        return "".join(self.document.row(node))


@pytest.fixture
def model(states):
    """`model()` returns the model of `net`, or of another program."""
    return lambda passes="", program=None, **more: Model(states(passes, program)[-1], **more)
