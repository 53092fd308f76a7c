"""`upgrade`: what changes from one environment to another."""

import json
import sys

import pytest

from jaxprtool.commands.diff.modules import ModuleDiff, ModuleFigures
from jaxprtool.commands.upgrade import Phases, TargetChange, UpgradeDocument, upgrade_table

FUNCTIONS = """
import jax.numpy as jnp
import jaxprtool

@jaxprtool.example("f32[8,4]")
def step(x):
    return jnp.tanh(x @ x.T).sum()

@jaxprtool.example("f32[8,4]")
def broken(x):
    raise ValueError("no")
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
    failing = cli("upgrade", "upgraded.py:broken", *python)
    assert failing.code == 1 and "fails" in failing.out and "no" in failing.err


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
