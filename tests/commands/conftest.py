"""The command line in this process: `cli("show", "bad.py:f")` returns its output and exit code.

Each test runs in a folder of its own, with the module `functions.py`. Every JSON document that a
command prints is checked against the schema of its command in `tests.documentation.documents`.
"""

import gc
import io
import json
import os
import textwrap
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from jaxprtool.cli.main import main
from tests.documentation.documents import command_schema

FUNCTIONS = """
    import jax, jax.numpy as jnp, jaxprtool

    print("imported")
    not_callable = 3

    @jaxprtool.example("f32[3]")
    def double(x):
        print("traced")
        return x * 2

    @jaxprtool.example("f32[3]", "f32[4]")
    def misfit(x, y):
        return inner(x, y)

    def inner(x, y):
        return x + y

    @jaxprtool.example("f32[3]")
    def endless(x):
        return endless(x)

    @jaxprtool.example("f32[2]")
    def wasteful(x):
        unused = jnp.sin(x)
        return jnp.cos(x)

    @jaxprtool.example("f32[2]")
    def prints(x):
        jax.debug.print("the sum is {}", x.sum())
        return x

    @jaxprtool.example("f32[2]")
    def callback(x):
        def fail(value):
            raise ValueError("not today")
        return jax.pure_callback(fail, x, x)

    @jaxprtool.example("f32[2]")
    def debugged(x):
        jax.debug.callback(lambda value: None, x)
        return x * 2

    @jaxprtool.example("i32[4]", "bool[20]", "key<fry>[]")
    def kinds(i, b, k):
        return {"i": i, "b": b, "normal": jax.random.normal(k, (3,), "bfloat16"),
                "bad": jnp.array([jnp.nan, jnp.inf, 1.0]), "none": jnp.zeros((0, 2)), "key": k}

    def doubled():
        return double, (jnp.arange(3.0),)
"""


@dataclass(frozen=True)
class Result:
    """The output of a command line, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """The lines on stderr, without those about written files."""
        return [line for line in self.err.splitlines() if not line.startswith("wrote ")]

    @property
    def result(self) -> str:
        """The text on stdout, unless it is the document of an error."""
        return "" if "error" in self.out[:40] else self.out


class Terminal(io.StringIO):
    """A terminal without colors, of 80 columns."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(folder, monkeypatch):
    """`terminal("show", "f.py:f")` returns what a terminal shows for stdout."""

    def run(*arguments: str, columns: int = 80, lines: int = 24) -> str:
        shown = Terminal()
        monkeypatch.setattr("jaxprtool.cli.output.size", lambda stream: (columns, lines))
        monkeypatch.setenv("NO_COLOR", "1")
        with redirect_stdout(shown):
            assert main(arguments) == 0
        return shown.getvalue()

    return run


@pytest.fixture
def folder(empty_folder, monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "PAGER"):
        monkeypatch.delenv(name, raising=False)
    (empty_folder / "functions.py").write_text(textwrap.dedent(FUNCTIONS))
    return empty_folder


@cache
def validator(command):
    """Return what checks the documents of a command."""
    return Draft202012Validator(command_schema(command))


def check_document(command, document):
    """Raise ValidationError if a document does not have the schema of a command."""
    if error := best_match(validator(command).iter_errors(document)):
        raise error


@pytest.fixture
def cli(folder, capfd, monkeypatch):
    environment = dict(os.environ)
    monkeypatch.setattr(gc, "freeze", lambda: None)  # the objects of a command are not permanent
    monkeypatch.setattr("jaxprtool.cli.output.LINE_SECONDS", 600)  # the machine may be slow

    def run(*arguments: str) -> Result:
        capfd.readouterr()
        code = main(arguments)
        out, err = capfd.readouterr()
        if "--json" in arguments and out and code in (0, 1, 2, 3):
            check_document(arguments[0], json.loads(out))
        return Result(code, out, err)

    yield run
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
