"""The copies of JT506 are in the compiled modules, and the modules of its near misses have none."""

import jax
import pytest

import jaxprtool
from jaxprtool.commands.lint.lint import lint
from jaxprtool.commands.lint.rules.loops import COPIES, LEAST_CARRY_BYTES
from jaxprtool.commands.memory.compiled import compiled_peak
from jaxprtool.formats.lowering import compiled_with_memory
from tests.commands.lint.patterns_of_structure import STRUCTURE
from tests.commands.lint.test_patterns import HEAD, function, programs

FINDS, MISSES = map(programs, STRUCTURE["JT506"])


@pytest.fixture(autouse=True)
def optimized():
    """Compile as users do: the tests disable most of XLA's optimizations."""
    was = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", was)


def in_loops(number, case, folder):
    """Return the program of a pattern, and the bytes that its module copies again and again."""
    _, arguments, body = case
    path = folder / "carries.py"
    path.write_text(HEAD + function(number, arguments, body))
    types = ", ".join(kind for _, _, kind in arguments)
    program = jaxprtool.load(f"{path}:f{number}", types)
    peak = compiled_peak(program, compiled_with_memory(program), jaxprtool.memory(program))
    copies = [copy for copy in peak.copies if copy.bytes >= LEAST_CARRY_BYTES * copy.runs]
    return program, sum(copy.bytes for copy in copies if copy.runs > copy.count)


@pytest.mark.parametrize("number", range(len(FINDS)))
def test_xla_copies_what_the_rule_says(number, tmp_path):
    program, copied = in_loops(number, FINDS[number], tmp_path)
    (finding,) = lint(program, select="JT506").findings
    (_, arguments, _), of_one = FINDS[number], COPIES * 100 * 10_000
    size = {"f16": 2}.get(arguments[0][2].partition("[")[0], 4)
    assert finding.code == "JT506" and copied >= of_one * size


@pytest.mark.parametrize("number", range(len(MISSES)))
def test_xla_copies_nothing_in_the_near_misses(number, tmp_path):
    _, copied = in_loops(number, MISSES[number], tmp_path)
    assert copied == 0
