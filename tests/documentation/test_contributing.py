"""CONTRIBUTING.md is true: its places exist, and each recipe works in a copy of the project."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import jax
import pytest

from jaxprtool.jaxcompat import lowering
from tests.share import on_one_release
from tests.test_architecture import FLOORS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def rows(heading):
    """Return the first cells of the table with a heading, as the names in them."""
    table = TEXT.partition(f"| {heading} |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    return [re.findall(r"`([^`]+)`", cell) for cell in cells]


def test_every_named_place_exists():
    named = re.findall(r"`((?:[\w.]+/)+[\w.]*)`", TEXT)
    places = [place for place in named if not re.search("NAME|FOLDER", place)]
    assert len(places) > 40
    for place in places:
        paths = [ROOT / base / place for base in ("", "jaxprtool")]
        assert any(path.exists() or path.with_suffix(".py").exists() for path in paths), place


def test_the_floors_are_those_that_are_tested():
    assert [set(row) for row in rows("floor | what is in it")] == FLOORS


def test_the_map_has_twelve_files():
    files = [name for row in rows("file | what you learn") for name in row]
    assert len(files) == 12 and all((ROOT / "jaxprtool" / name).is_file() for name in files)


def test_a_release_that_is_not_listed_is_reported(monkeypatch):
    assert lowering.untested_version() is None
    monkeypatch.setattr(lowering, "TESTED_VERSIONS", ((0, 9),))
    assert lowering.untested_version() == jax.__version__


# --- a command, with a document that gets another field -------------------------------------------

DECLARATION = """
CENSUS = CommandInfo(
    panel="Look",
    summary="Count the equations by primitive.",
    run="jaxprtool.commands.census.command:census_command",
    documents=("jaxprtool.commands.census.census:Census",),
    tables={
        "jaxprtool.commands.census.census:Census": "jaxprtool.commands.census.table:census_table",
    },
)"""

COMMAND = {
    "jaxprtool/commands/census/census.py": '''
        """How often a program uses each primitive."""

        from __future__ import annotations

        from collections import Counter
        from collections.abc import Mapping
        from dataclasses import dataclass

        from jaxprtool.ir.documents import Printed
        from jaxprtool.ir.equations import equations
        from jaxprtool.ir.program import Program


        @dataclass(frozen=True)
        class Census(Printed):
            """How often a program uses each primitive.

            Attributes:
                name: The name of the program.
                primitives: The number of equations of each primitive, the most frequent first.
            """

            name: str
            primitives: Mapping[str, int]


        def census(program: Program) -> Census:
            """Count the equations of a program by primitive, at every depth."""
            counts = Counter(eqn.primitive.name for eqn in equations(program.jaxpr))
            return Census(program.name, dict(counts.most_common()))
        ''',
    "jaxprtool/commands/census/table.py": '''
        """The table of a census."""

        from __future__ import annotations

        from typing import TYPE_CHECKING

        from jaxprtool.render.terminal.tables import Rendering, drawn
        from jaxprtool.render.views import Column, Table, number_column

        if TYPE_CHECKING:
            from jaxprtool.commands.census.census import Census


        def census_table(census: Census, width: int) -> Rendering:
            """Return the number of equations of each primitive."""
            rows = [[f"{count:,}", primitive] for primitive, count in census.primitives.items()]
            columns = number_column("equations"), Column("primitive")
            return Rendering(drawn(Table(census.name, columns, rows)), width)
        ''',
    "jaxprtool/commands/census/command.py": '''
        """`jaxprtool census`: how often a program uses each primitive."""

        from __future__ import annotations

        from jaxprtool.cli import options, output
        from jaxprtool.cli.session import Session, command, only_program


        @command
        def census_command(session: Session, json: options.Json = False) -> None:
            """Count the equations by primitive.

            [bold]Example[/]

              jaxprtool census samples/transformer.py:loss
            """
            session.start()
            from jaxprtool.commands.census.census import census
            from jaxprtool.commands.census.table import census_table

            result = census(only_program("census takes", session.programs()))
            if json:
                output.write_json(result)
            else:
                output.write_rendered(census_table(result, output.width()))
        ''',
    "tests/commands/census/test_command.py": '''
        """`jaxprtool census` counts equations."""

        import json

        import jaxprtool
        from jaxprtool.commands.census.census import census


        def test_equations_are_counted_by_primitive(cli):
            words = cli("census", "functions.py:wasteful").out.split()
            assert words[-4:] == ["1", "sin", "1", "cos"]


        def test_the_document_has_the_counts(cli):
            document = json.loads(cli("census", "functions.py:wasteful", "--json").out)
            assert document.pop("primitives") == {"sin": 1, "cos": 1}
            assert document == {"schema": 2, "name": "wasteful", "most": "sin"}


        def test_a_result_prints_as_its_table():
            assert "1   mul" in str(census(jaxprtool.trace(lambda x: x * 2.0, 1.0)))
        ''',
    "docs/census.md": """
        # Census

        `jaxprtool census` counts equations.
        """,
}

#: Additions below a line: the file, the line, and what follows it.
COMMAND_LINES = [
    ("pyproject.toml", '[project.entry-points."jaxprtool.commands"]',
     'census = "jaxprtool.commands:CENSUS"'),
    ("jaxprtool/commands/__init__.py", "# --- Look ---", DECLARATION),
    ("docs/index.md", "| [Show](show.md) |", "| [Census](census.md) | equations by primitive |"),
    ("tests/cli/platforms.py", "    backends --json", "    census m.py:f"),
]  # fmt: skip

#: The field of the document, which the copy gets after the command.
FIELD_LINES = [
    ("jaxprtool/commands/census/census.py", "    primitives: Mapping[str, int]",
     '    most: str = ""'),
    ("jaxprtool/commands/census/census.py", "        primitives: The number of",
     "        most: The name of the most frequent primitive."),
]  # fmt: skip

# --- a pass, and a row of simplify ----------------------------------------------------------------

PASS = {
    "jaxprtool/passes/cleanup/doubles.py": '''
        """A value plus itself, as a product."""

        from __future__ import annotations

        from collections.abc import Sequence
        from dataclasses import dataclass
        from typing import Any, ClassVar

        from jax import lax

        from jaxprtool.ir.program import Program
        from jaxprtool.ir.rewrite import RewriteRule, Writer, rewrite
        from jaxprtool.jaxcompat import Atom, JaxprEqn, close_jaxpr
        from jaxprtool.passes import Pass


        @dataclass(frozen=True)
        class Doubles(Pass):
            """Write a value plus itself as twice the value."""

            name: ClassVar[str] = "doubles"
            group: ClassVar[str] = "clean up"

            def __call__(self, program: Program) -> Program:
                return program.replace(jaxpr=close_jaxpr(rewrite(program.jaxpr, _visit)))


        def _visit(writer: Writer) -> RewriteRule:
            def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
                if eqn.primitive.name != "add" or eqn.invars[0] is not eqn.invars[1]:
                    return None
                return writer.trace(_twice, eqn.invars[:1], eqn)

            return rule


        def _twice(x: Any) -> list[Any]:
            return [lax.mul(x, lax.full_like(x, 2))]
        ''',
    "tests/passes/cleanup/test_doubles.py": '''
        """doubles writes a value plus itself as a product, at every depth."""

        import jax.numpy as jnp
        from jax import lax

        from jaxprtool.passes.cleanup.doubles import Doubles
        from tests.programs import Case, prove


        def test_a_sum_of_a_value_and_itself_in_a_loop_is_a_product():
            def doubled(x):
                return lax.scan(lambda c, _: (c + c, None), x, None, length=3)[0]

            before, after, _ = prove(Case("doubled", doubled, (jnp.ones(3),)), Doubles())
            assert "add" in str(before) and "add" not in str(after) and "mul" in str(after)
        ''',
}

PASS_LINES = [
    ("pyproject.toml", '[project.entry-points."jaxprtool.passes"]',
     'doubles = "jaxprtool.passes.cleanup.doubles:Doubles"'),
    ("tests/programs/rewriting.py", '    Rewriter("cse"),', '    Rewriter("doubles"),'),
    ("jaxprtool/passes/cleanup/simplify/__init__.py",
     '    SimplifyRule("shift_left(x, 0)", "x"),',
     '    SimplifyRule("cos(neg(x))", "cos(x)"),'),
    ("tests/passes/cleanup/simplify/examples.py", '    "shift_left(x, 0) → x":',
     '    "cos(neg(x)) → cos(x)": Example(lambda x: lax.cos(-x), "f"),'),
]  # fmt: skip

# --- a lint rule ----------------------------------------------------------------------------------

RULE = {
    "jaxprtool/commands/lint/rules/twice.py": '''
        """Functions that are applied twice."""

        from __future__ import annotations

        from collections.abc import Iterator

        from jaxprtool.commands.lint.graph import LintedProgram
        from jaxprtool.commands.lint.lint import Found, lint_rule

        _BAD = """
            import jax.numpy as jnp
            import jaxprtool


            @jaxprtool.example("f32[64]")
            def f(x):
                y = jnp.tanh(x)
                return jnp.tanh(y)  # JT399
        """

        _GOOD = """
            import jax.numpy as jnp
            import jaxprtool


            @jaxprtool.example("f32[64]")
            def f(x):
                return jnp.tanh(x)
        """


        @lint_rule("JT399", "double-tanh", bad=_BAD, good=_GOOD)
        def tanh_of_tanh(program: LintedProgram) -> Iterator[Found]:
            """A tanh is applied to a tanh. The second one is nearly linear."""
            for node in program.of("tanh"):
                argument = node.ins[0].node
                if argument is not None and argument.name == "tanh":
                    yield Found(node, "tanh of tanh", "drop one", "a line to read")
        ''',
}

_FINDS = "\n".join(f"x f32[{n}] => jnp.tanh(jnp.tanh(x))" for n in range(1, 21))
_MISSES = "\n".join(f"x f32[{n}] => jnp.tanh(jnp.sin(x))" for n in range(1, 21))

RULE_LINES = [
    ("tests/commands/lint/patterns_of_numbers.py", "NUMBERS: dict[str, tuple[str, str]] = {",
     f'    "JT399": ("""{_FINDS}""", """{_MISSES}"""),'),
]  # fmt: skip

# --- a primitive and a loop -----------------------------------------------------------------------

#: The same row as that of a plug-in, in the table itself.
TRAITS = '\nadd_traits("shrug", commutative="f", commutative_bits="f", elementwise=True)\n'

DCE_RULE = """

from jaxprtool.ir.rules import rule

ASKED = []


@rule(dce_rules, "shrug")
def _shrug(used_outputs, live_inputs, eqn):
    ASKED.append(eqn.primitive.name)
    return [True, True], eqn
"""

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
jaxprtool.verify(loop, loop.apply("-O2, doubles"), (jnp.ones((4, 3)), jnp.ones(3)))
"""

# --- the copy -------------------------------------------------------------------------------------

#: The tests that the recipes speak of, in the copy.
TESTS = [
    "tests/commands/census",
    "tests/passes/cleanup/test_doubles.py",
    "tests/passes/cleanup/simplify/test_rows.py::test_every_rule_has_an_example",
    "tests/passes/cleanup/simplify/test_rows.py::test_an_exact_rule_keeps_every_bit[cos(neg(x)) "
    "\\u2192 cos(x) float32]",
    "tests/commands/lint/test_patterns.py::test_every_rule_has_twenty_programs_of_each_kind",
    "tests/commands/lint/test_patterns.py::test_a_rule_finds_its_patterns_and_not_their_near_misses"
    "[JT399-True]",
    "tests/commands/lint/test_rules.py::"
    "test_the_bad_example_is_found_with_its_line_and_the_good_one_is_not[JT399]",
    "tests/cli/test_help.py",
    "tests/cli/test_top.py::test_all_commands_that_list_rows_declare_both_options[census]",
    "tests/commands/test_backends.py::test_each_command_has_a_line",
    "tests/documentation/test_pages.py",
    "tests/test_architecture.py",
]


def write(copy, files):
    for name, text in files.items():
        path = copy / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip())


def insert(copy, lines):
    """Insert each line below the first one that begins with another."""
    for name, above, line in lines:
        text = (copy / name).read_text()
        assert text.count(f"\n{above}") >= 1, f"{name} has no line {above}"
        end = text.index("\n", text.index(f"\n{above}") + 1)
        (copy / name).write_text(f"{text[:end]}\n{line}{text[end:]}")


def replace(copy, name, old, new):
    text = (copy / name).read_text()
    assert old in text, f"{name} has no {old}"
    (copy / name).write_text(text.replace(old, new, 1))


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


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the project in which all recipes were followed."""
    copy = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("__pycache__", ".*_cache")
    for folder in ("jaxprtool", "tests", "docs"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    for name in ("CONTRIBUTING.md", "README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"):
        shutil.copy(ROOT / name, copy)
    for name in ("plugins", "samples", "action.yml", ".github", ".ci", "noxfile.py"):
        (copy / name).symlink_to(ROOT / name)

    for files in (COMMAND, PASS, RULE):
        write(copy, files)
    insert(copy, [*COMMAND_LINES, *PASS_LINES, *FIELD_LINES, *RULE_LINES])
    replace(copy, "tests/test_architecture.py", '"|browse emit', '"|browse census emit')
    counts, most = "dict(counts.most_common())", "counts.most_common(1)[0][0]"
    replace(copy, "jaxprtool/commands/census/census.py", counts, f"{counts}, {most}")

    for name, text in (("ir/traits.py", TRAITS), ("passes/cleanup/dce.py", DCE_RULE)):
        path = copy / "jaxprtool" / name
        path.write_text(path.read_text() + text)
    module, _, view = (
        (ROOT / "tests/programs/repeat.py").read_text().partition("# --- the registration")
    )
    (copy / "repeat.py").write_text(module)
    view = view[view.index("@rule") :].replace("ClassVar[Edges | None]", "ClassVar[Any]")
    path = copy / "jaxprtool/ir/regions.py"
    path.write_text(path.read_text() + "\n\n" + view.replace('@rule("view"', "@rule(views"))
    install(copy)
    return copy


def run(copy, *arguments):
    """Run Python in the copy, and return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTEST_ADDOPTS": ""}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@on_one_release
def test_a_primitive_and_a_loop_are_supported(copy):
    (copy / "program.py").write_text(PROGRAM)
    run(copy, "program.py")


@on_one_release
def test_the_tests_that_the_recipes_name_pass(copy):
    for module in ("json_page", "lint_page"):  # as `nox -s docs`
        run(copy, "-m", f"tests.documentation.{module}")
    written = ("jaxprtool/commands/__init__.py", *COMMAND, *PASS, *RULE)
    run(copy, "-m", "ruff", "check", *written)
    run(copy, "-m", "ruff", "format", "--check", *written)
    run(copy, "-m", "pytest", "-n", "0", "-m", "not proof", *TESTS)
