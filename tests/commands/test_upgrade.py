"""`upgrade`: what changes from one environment to another."""

import json
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool.commands.diff.modules import ModuleDiff, ModuleFigures
from jaxprtool.commands.upgrade import Phases, TargetChange, UpgradeDocument, overlap, upgrade_table

FUNCTIONS = """
import jax.numpy as jnp
import jaxprtool

@jaxprtool.example("f32[8,4]")
def step(x):
    return jnp.tanh(x @ x.T).sum()

@jaxprtool.example("f32[8,4]")
def broken(x):
    raise ValueError("no")

def model(scale=2.0):
    return (lambda x: scale * x), (jnp.ones(3),)
"""

OLD = {"python": "3.11.7", "jax": "0.10.2"}
NEW = {"python": "3.11.7", "jax": "0.12.0"}


def change(**more):
    figures = ModuleFigures(kernels=10, bytes=1000), ModuleFigures(kernels=12, bytes=1000)
    return TargetChange(
        "train.py:step",
        "compiled",
        "",
        "within rounding",
        (),
        (Phases(1.0, 1.0, 2.0, 0.1), Phases(1.0, 1.0, 3.0, 0.104)),
        (1000, 1100),
        ModuleDiff(("a", "b"), False, *figures, (), (), True),
        **more,
    )


def test_a_row_has_the_changes_that_are_more_than_noise():
    shown = upgrade_table(UpgradeDocument(OLD, NEW, [change()]), 100).plain()
    assert shown.splitlines()[0] == "python 3.11.7, jax 0.10.2 → 0.12.0"
    row = next(line for line in shown.splitlines() if line.startswith("compiled"))
    assert row.split() == [
        "compiled",
        "within",
        "rounding",
        "·",
        "+50%",
        "·",
        "+20.0%",
        "·",
        "+10.0%",
        "step",
    ]


def test_times_whose_turns_overlap_tell_no_difference():
    assert overlap([1.0, 1.5, 3.0], [2.9, 3.1, 3.2]) and overlap([3.0, 3.2], [1.0, 3.1])
    assert not overlap([1.0, 1.2], [1.3, 1.4]) and not overlap([], [1.0])
    shown = upgrade_table(UpgradeDocument(OLD, NEW, [change(noisy=("compile",))]), 100).plain()
    assert "+50%" not in shown and "+20.0%" in shown


def test_several_targets_are_counted_in_a_line():
    failing = TargetChange("train.py:init", "fails", "JAX 0.12.0: no")
    same = TargetChange("train.py:loss", "", "", "the same bits")
    changes = [failing, replace(change(), values="different"), same]
    shown = upgrade_table(UpgradeDocument(OLD, NEW, changes), 100).plain()
    assert shown.splitlines()[1] == (
        "3 targets: 1 fails, 1 with different values, 1 compiled otherwise, 1 the same"
    )


def test_only_the_worst_targets_have_lines_below_the_table():
    changes = [replace(change(), target=f"train.py:f{number}") for number in range(11)]
    shown = upgrade_table(UpgradeDocument(OLD, NEW, changes), 100).plain().splitlines()
    assert sum("XLA compiles the same module" in line for line in shown) == 8
    assert shown[-1] == "… the lines of 3 more targets: --json"


@pytest.fixture
def written(folder):
    (folder / "upgraded.py").write_text(FUNCTIONS)
    return folder


@pytest.mark.proof
def test_an_environment_and_itself_make_the_same(written, cli):
    python = ["--python", sys.executable]
    found = cli("upgrade", "upgraded.py:step", *python, "--json")
    document = json.loads(found.out)
    (target,) = document["targets"]
    assert found.code == 0 and document["before"] == document["after"]
    assert (target["begins"], target["values"]) == ("", "the same bits")
    made = cli("upgrade", "upgraded.py:model", "--factory", *python)
    assert made.code == 0 and "the same" in made.out
    failing = cli("upgrade", "upgraded.py:broken", *python)
    assert failing.code == 1 and "fails" in failing.out and "no" in failing.err


@pytest.mark.proof
def test_a_run_stands_for_all_of_its_programs(written, cli):
    with jaxprtool.record("here"):
        for function in (jnp.sin, jnp.cos):
            jax.jit(named(function))(jnp.ones(5))
    found = cli("upgrade", "here/", "--python", sys.executable, "--json")
    targets = json.loads(found.out)["targets"]
    assert {target["target"] for target in targets} == {"here/cos", "here/sin"}
    assert {(target["begins"], target["values"]) for target in targets} == {("", "the same bits")}
    # A recorded program is read, not traced.
    assert all(phases["trace"] is None for target in targets for phases in target["phases"])


def named(function):
    def called(x):
        return function(x)

    called.__name__ = function.__name__
    return called


#: Two results, of which one is all rounding, in another order in the other environment.
NAMED = """
import collections
import os
import jax.numpy as jnp

OTHER = "OTHER" in os.environ
Out = collections.namedtuple("Out", ["largest", "total"] if OTHER else ["total", "largest"])

def model():
    def step(x):
        a, b, c = x if not OTHER else x[jnp.array([0, 2, 1])]
        return Out(largest=x.max(), total=(a + b) + c)
    return step, (jnp.array([1e8, 5, -1e8]),)
"""


@pytest.mark.proof
def test_each_result_has_its_own_rounding(folder, cli):
    (folder / "named.py").write_text(NAMED)
    other = folder / "python"
    other.write_text(f'#!/bin/sh\nOTHER=1 exec {sys.executable} "$@"\n')
    other.chmod(0o755)
    python = ["--python", sys.executable, "--python", str(other)]
    (target,) = json.loads(cli("upgrade", "named.py:model", "--factory", *python, "--json").out)[
        "targets"
    ]
    assert (target["begins"], target["values"]) == ("traced", "within rounding")


def test_a_run_without_programs_is_an_error(written, cli):
    with jaxprtool.record("here"):
        pass
    found = cli("upgrade", "here", "--python", sys.executable)
    assert found.code == 2 and "the run 'here' has no programs" in found.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--python", "/no/python"], "cannot run '/no/python' as a Python interpreter"),
        (["--python", sys.executable, "--max-run", "much"], "is not a percentage"),
        (["--python", sys.executable, "--backend", "tpu"], "such as tpu:v5e:2x2"),
        (["--python", "a", "--python", "b", "--python", "c"], "given 3 times"),
    ],
)
def test_a_mistake_is_one_line(written, cli, options, message):
    found = cli("upgrade", "upgraded.py:step", *options)
    assert found.code == 2 and message in found.err and found.out == ""


def test_jaxprs_that_cannot_be_written_are_said_not_to_be_compared():
    shown = upgrade_table(UpgradeDocument(OLD, NEW, [change(unwritten="f cannot be written")]), 100)
    assert "  its jaxprs are not compared: f cannot be written" in shown.plain()
