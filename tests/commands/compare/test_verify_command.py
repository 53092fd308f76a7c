import re
import textwrap

import pytest

PLUGIN = """
    from dataclasses import dataclass
    from typing import ClassVar
    from jax import lax
    from jaxprtool import Pass, Programs, register
    from jaxprtool.ir.rewrite import map_equations

    @dataclass(frozen=True)
    class Wrong(Pass):
        '''Make sines of cosines.'''
        name: ClassVar[str] = "verify_wrong"
        def __call__(self, program):
            def rule(eqn):
                if eqn.primitive.name == "cos":
                    return [eqn.replace(primitive=lax.sin_p)]
            return program.replace(jaxpr=map_equations(program.jaxpr, rule))

    @dataclass(frozen=True)
    class OnPurpose(Wrong):
        '''The same, on purpose.'''
        name: ClassVar[str] = "verify_on_purpose"
        preserves: ClassVar[bool] = False

    @dataclass(frozen=True)
    class Halves(Pass):
        '''Give the program twice.'''
        name: ClassVar[str] = "verify_halves"
        preserves: ClassVar[bool] = False
        def __call__(self, program):
            return Programs({"left": program, "right": program})

    register(Halves)
    register(Wrong)
    register(OnPurpose)
"""


@pytest.fixture
def plugin(folder):
    (folder / "verify_plugin.py").write_text(textwrap.dedent(PLUGIN))
    return "verify_plugin.py"


def test_correct_passes_are_counted(cli):
    result = cli("opt", "functions.py:wasteful", "-p", "dce, dce", "--verify")
    assert result.code == 0
    assert result.lines[-1] == "verified: 2 passes on the same inputs"
    assert "cos" in result.out


def test_non_finite_elements_are_counted(cli, folder):
    source = "import jax.numpy as jnp\ndef masked(x):\n    return jnp.append(-(-x), -jnp.inf)\n"
    (folder / "masked.py").write_text(source)
    result = cli("opt", "masked.py:masked", "--args", "f32[3]", "-p", "-O1", "--verify")
    assert result.lines[-1].endswith("on the same inputs, 1 of 4 elements not finite")


def test_the_first_wrong_pass_and_equation_are_named_and_nothing_is_written(cli, folder, plugin):
    arguments = ("opt", "functions.py:wasteful", "-p", "dce, verify_wrong, dce")
    result = cli(*arguments, "--plugin", plugin, "--verify", "-o", "out.jaxpr")
    assert result.code == 1
    assert result.out == "" and not (folder / "out.jaxpr").exists()
    *_, error = (i for i, line in enumerate(result.lines) if line.startswith("error: "))
    first, *details, hint = result.lines[error:]
    assert first == (
        "error: pass 'verify_wrong': wasteful computes something else: result differs in 2 of 2 "
        "elements"
    )
    found = dict(re.split(r" {2,}", line.strip(), maxsplit=1) for line in details)
    assert found["result"] == "result, float32[2]"
    assert found["differs in"] == "2 of 2 elements, the first at [0]"
    before, after = float(found["before"]), float(found["after"])
    assert before**2 + after**2 == pytest.approx(1.0, abs=1e-5)
    assert re.fullmatch(r"\S+ absolute, \S+ relative", found["largest error"])
    assert re.fullmatch(r"\S+ absolute, \S+ relative, for the first", found["tolerance"])
    assert found["first equation"].startswith("sin at functions.py:26, giving float32[2] [")
    assert found["instead of"].startswith("cos at functions.py:26, giving")
    assert found["inputs"] == "random values, seed 0"
    assert hint == "hint: show the program after the pass with --print-after verify_wrong"
    assert cli(*arguments, "--plugin", plugin, "-o", "out.jaxpr").code == 0


def test_the_passes_of_a_named_pipeline_are_compared_one_by_one(cli, plugin, monkeypatch):
    from jaxprtool.passes import OptimizationLevel, levels

    monkeypatch.setitem(levels, "O1", OptimizationLevel("dce, verify_wrong"))
    result = cli("opt", "functions.py:wasteful", "--plugin", plugin, "-O1", "--verify")
    assert result.code == 1 and "error: pass 'verify_wrong'" in result.err


def test_a_pass_that_changes_the_function_is_not_compared(cli, plugin):
    pipeline = "verify_on_purpose, dce, batch(axis_size=3), dce"
    result = cli("opt", "functions.py:wasteful", "-p", pipeline, "--plugin", plugin, "--verify")
    assert result.code == 0
    notes = [line for line in result.lines if line.startswith("note: ")]
    assert notes == [
        "note: pass 'verify_on_purpose' is not compared: it changes the computation",
        "note: pass 'batch(axis_size=3)' is not compared: it changes the computation",
    ]
    assert result.lines[-1] == "verified: 2 passes on the same inputs"


def test_several_programs_are_each_compared(cli, plugin):
    pipeline = "verify_halves, dce, right.verify_wrong"
    result = cli("opt", "functions.py:wasteful", "-p", pipeline, "--plugin", plugin, "--verify")
    assert result.code == 1 and "error: pass 'right.verify_wrong'" in result.err
    pipeline = "verify_halves, dce"
    result = cli("opt", "functions.py:wasteful", "-p", pipeline, "--plugin", plugin, "--verify")
    assert result.code == 0 and result.lines[-1] == "verified: 1 pass on the same inputs"


def test_a_program_that_no_pass_changes_is_not_run(cli, folder):
    (folder / "never.py").write_text(
        "import jax.numpy as jnp\ndef never(v):\n    return jnp.sqrt(-jnp.abs(v) - 1)\n"
    )
    result = cli("opt", "never.py:never", "--args", "f32[3]", "-p", "dce", "--verify")
    assert result.code == 0 and result.lines[-1] == "verified: 1 pass changed nothing"


def test_axes_bound_by_a_later_pass_cannot_be_run(cli, folder):
    (folder / "named.py").write_text(
        "import jax, jaxprtool\n"
        "@jaxprtool.example('f32[2]')\n"
        "def f(x):\n    return jax.lax.psum(x, 'i')\n"
    )
    pipeline = 'dce, batch(axis_size=3, axis_name="i"), dce'
    result = cli("opt", "named.py:f", "-p", pipeline, "--verify")
    assert result.code == 0
    assert "note: pass 'dce' is not compared: f has free named axes" in result.err
    assert result.lines[-1] == "verified: 1 pass changed nothing"


def test_output_of_the_function_is_not_a_result(cli):
    result = cli("opt", "functions.py:prints", "-p", "dce", "--verify")
    assert result.code == 0 and "the sum is" not in result.err
