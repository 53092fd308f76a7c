"""The instructions in CONTRIBUTING.md for a new command, pass, rule and loop work in a copy."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.share import on_one_release

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()

COMMAND = '''
"""`jaxprtool greet`."""

from jaxprtool.cli import output
from jaxprtool.cli.session import Session, command, only_program


@command
def greet(session: Session) -> None:
    """Greet a function.

    [bold]Example[/]

      jaxprtool greet samples/mlp.py:loss
    """
    session.start()
    program = only_program("greet is of", session.programs(session.traced()))
    output.write(f"hello {program.name}")
'''

PASS = '''
"""A pass that does nothing."""

from dataclasses import dataclass
from typing import ClassVar

from jaxprtool.ir.program import Program
from jaxprtool.passes.framework.base import Pass


@dataclass(frozen=True)
class Nothing(Pass):
    """Do nothing."""

    name: ClassVar[str] = "nothing"

    def __call__(self, program: Program) -> Program:
        return program
'''

#: The same row as that of a plug-in, in the table itself.
TRAITS = '\nadd_traits("shrug", commutative="f", commutative_bits="f", elementwise=True)\n'

#: A program with the new primitive and the new loop, which the copy must support.
PROGRAM = """
import jax, jax.numpy as jnp
import jaxprtool
from jax.extend.core import Primitive
from jaxprtool.ir.regions import regions
from jaxprtool.passes.cleanup import dce
from repeat import repeat

shrug_p = Primitive("shrug")
shrug_p.def_impl(jnp.add)
shrug_p.def_abstract_eval(lambda x, y: x)
both = jaxprtool.trace(lambda x, y: shrug_p.bind(x, y) * shrug_p.bind(y, x), 1.0, 2.0)
assert [e.primitive.name for e in both.apply("cse").jaxpr.eqns] == ["shrug", "mul"]

both.apply("dce")
assert dce.ASKED == ["shrug", "shrug"]

loop = jaxprtool.trace(
    lambda x, h: repeat(lambda rows, carry, w: ([carry[0] + rows[0]], []), [h], [], [x])[0],
    jnp.ones((4, 3)), jnp.ones(3),
)
eqn = next(e for e in loop.jaxpr.eqns if e.primitive.name == "repeat")
assert regions(eqn).kind == "loop"
jaxprtool.verify(loop, loop.apply("-O2, nothing"), (jnp.ones((4, 3)), jnp.ones(3)))
"""

RULE = """

from jaxprtool.ir.rules import rule

ASKED = []


@rule(dce_rules, "shrug")
def _shrug(used_outputs, live_inputs, eqn):
    ASKED.append(eqn.primitive.name)
    return [True, True], eqn
"""


def append(path, text):
    path.write_text(path.read_text() + text)


def install(copy):
    """Write the metadata that `pip install -e .` generates from pyproject.toml."""
    project = tomllib.loads((copy / "pyproject.toml").read_text())["project"]
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    folder = copy / "jaxprtool-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: jaxprtool\nVersion: 0.1.0\n")
    (folder / "entry_points.txt").write_text("\n".join(lines))


def test_every_named_place_exists():
    named = re.findall(r"`((?:[\w.]+/)+[\w.]*)`", TEXT)
    places = [place for place in named if "NAME" not in place and "*" not in place]
    assert len(places) > 15
    for place in places:
        assert any((ROOT / base / place).exists() for base in ("", "jaxprtool")), place


@on_one_release
def test_additions_at_the_named_places_work(tmp_path):
    shutil.copytree(ROOT / "jaxprtool", tmp_path / "jaxprtool")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    loop = (ROOT / "tests" / "programs" / "repeat.py").read_text()
    module, view = loop.split("# --- the registration")
    (tmp_path / "repeat.py").write_text(module)

    package, project = tmp_path / "jaxprtool", tmp_path / "pyproject.toml"
    (package / "cli/greet.py").write_text(COMMAND)
    app = package / "cli/app.py"
    app.write_text(app.read_text().replace("\nReference\n", "\nReference\ngreet: Hi.\n"))
    (package / "passes/cleanup/nothing.py").write_text(PASS)
    header = '[project.entry-points."jaxprtool.passes"]\n'
    line = 'nothing = "jaxprtool.passes.cleanup.nothing:Nothing"\n'
    project.write_text(project.read_text().replace(header, header + line))
    install(tmp_path)
    append(package / "ir/traits.py", TRAITS)
    view = view[view.index("@rule") :].replace("ClassVar[Edges | None]", "ClassVar[Any]")
    view = view.replace('@rule("view"', "@rule(views")
    append(package / "ir/regions.py", f"\n\n{view}")
    append(package / "passes/cleanup/dce.py", RULE)

    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(*arguments):
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    done = run("program.py")
    assert done.returncode == 0, done.stderr
    done = run("-m", "jaxprtool", "greet", "jax.numpy:sin", "--args", "f32[]")
    assert done.stdout == "hello sin\n", done.stderr
