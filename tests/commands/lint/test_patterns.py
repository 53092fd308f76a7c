"""Each rule finds something in twenty programs, and nothing in twenty near misses.

The programs are patterns of public code. A run takes a tenth of them, another one on each JAX
release; `pytest -m sweep tests/commands/lint` takes all.
"""

import re
import textwrap

import jax
import pytest

import jaxprtool
from jaxprtool.commands.lint.lint import all_rules, lint
from tests.commands.lint.patterns_of_numbers import NUMBERS
from tests.commands.lint.patterns_of_structure import STRUCTURE
from tests.share import HALF

PATTERNS = STRUCTURE | NUMBERS

#: Every so manyth program is traced by default.
SHARE = 10

HEAD = """\
import functools
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

BIG = np.ones((512, 512), np.float32)

"""

#: The name of an argument, after a star if it is donated or a plus if the function is only jitted,
#: and its type.
_ARGUMENT = re.compile(r"([*+]?)(\w+) (\{[^}]*\}|\w+(?:<\w+>)?(?:\[[^\]]*\]|\([^)]*\)))")


def programs(text):
    """Return the head, the arguments and the statements of each program of a table."""
    return [
        (head, _ARGUMENT.findall(head), body)
        for head, _, body in (
            part.partition(" =>") for part in re.split(r"\n(?=\S)", textwrap.dedent(text).strip())
        )
    ]


def function(number, arguments, body):
    """Return the text of a function."""
    donated = [i for i, (mark, _, _) in enumerate(arguments) if mark == "*"]
    is_jitted = any(mark for mark, _, _ in arguments)
    head = f"@functools.partial(jax.jit, donate_argnums={donated})\n" * is_jitted
    names = ", ".join(name for _, name, _ in arguments)
    one, _, rest = body.partition("\n")
    lines = textwrap.dedent(rest) if rest else f"return {one.strip()}"
    return f"{head}def f{number}({names}):\n{textwrap.indent(lines, '    ')}\n\n"


def wrong(code, finds, text, folder, share):
    """Return the programs in which a rule finds nothing, or something, against expectation."""
    cases = list(enumerate(programs(text)))
    path = folder / f"{code.lower()}_{finds}.py".lower()
    path.write_text(HEAD + "".join(function(i, args, body) for i, (_, args, body) in cases))
    found = []
    for number, (head, arguments, body) in cases[2 * HALF :: SHARE] if share else cases:
        types = ", ".join(kind for _, _, kind in arguments)
        program = jaxprtool.load(f"{path}:f{number}", types or None)
        findings = lint(program, select=code)
        if bool(findings.findings) != finds:
            found.append(f"{head} =>{body}")
    return found


@pytest.fixture
def setting(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    before = jax.config.jax_enable_x64
    yield lambda code: jax.config.update("jax_enable_x64", code == "JT201")
    jax.config.update("jax_enable_x64", before)


def test_every_rule_has_twenty_programs_of_each_kind():
    codes = {rule.code for rule in all_rules() if re.match("JT[1-8]", rule.code)}
    assert PATTERNS.keys() == codes  # those of kernels are in `test_kernels.py`
    for finds, misses in PATTERNS.values():
        for text in (finds, misses):
            assert len({str(program) for program in programs(text)}) >= 20


@pytest.mark.parametrize("share", [True, pytest.param(False, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("code", PATTERNS)
def test_a_rule_finds_its_patterns_and_not_their_near_misses(code, share, tmp_path, setting):
    setting(code)
    finds, misses = PATTERNS[code]
    missed = wrong(code, True, finds, tmp_path, share)
    alarms = wrong(code, False, misses, tmp_path, share)
    assert not missed + alarms, "\n".join(["missed:", *missed, "false alarms:", *alarms])
