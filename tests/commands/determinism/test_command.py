"""`jaxprtool determinism` reports what differs between two runs of a function."""

import json
import textwrap

import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool.ir.source_text import Place
from tests.share import on_one_release

COUNTER = """
    import itertools
    import jax, jax.numpy as jnp, jaxprtool, numpy as np

    counted = itertools.count()

    @jaxprtool.example("f32[8]")
    def counter(x):
        drawn = jax.pure_callback(
            lambda: np.float32(next(counted)), jax.ShapeDtypeStruct((), np.float32)
        )
        return {"sum": x + drawn, "sin": jnp.sin(x)}

"""

SETS = """
    import jax.numpy as jnp, jaxprtool

    @jaxprtool.example("f32[8]")
    def in_any_order(x):
        parts = {"alpha": jnp.sin, "beta": jnp.cos, "gamma": jnp.tanh}
        for name in {"alpha", "beta", "gamma"}:
            x = parts[name](x)
        return x

    @jaxprtool.example("f32[8]")
    def pure(x):
        return 2 * x
"""


@pytest.fixture(autouse=True)
def impure(folder):
    (folder / "counter.py").write_text(textwrap.dedent(COUNTER))
    (folder / "sets.py").write_text(textwrap.dedent(SETS))
    jaxprtool.write(jaxprtool.trace(jnp.sin, 1.0), folder / "pure.jaxpr")


@on_one_release
def test_a_program_that_depends_on_the_order_of_a_set_differs_between_processes(cli):
    found = cli("determinism", "sets.py:in_any_order", "--threads", "")
    assert found.code == 1 and found.err == ""
    lines = found.out.splitlines()
    assert lines[0].startswith("in_any_order on cpu:0, random values, seed 0: ")
    assert any(line.split() == ["traced", "again", "identical"] for line in lines)
    assert "another program: " in found.out and "sets.py:8" in found.out
    assert max(map(len, lines)) <= 80


@on_one_release
def test_a_callback_is_reported_with_its_line_as_a_risk(cli):
    found = cli("determinism", "counter.py:counter", "--threads", "1", "--json")
    document = json.loads(found.out)
    assert found.code == 1 and not document["equal"]
    (cause,) = document["causes"]
    assert cause["divergence"]["primitive"] == "pure_callback"
    assert Place.from_json(cause["divergence"]["place"]) == "counter.py:9"
    assert [list(map(Place.from_json, each["places"])) for each in document["risks"]] == [
        ["counter.py:9"]
    ]
    by_name = {each["name"]: each for each in document["repetitions"]}
    fresh = by_name["another process, hash seed 1"]
    assert not fresh["error"] and len(fresh["results"]) == 2
    assert any("cannot be written to a file" in each for each in document["not_tried"])


def test_a_program_in_a_file_is_not_traced_again(cli):
    found = cli("determinism", "pure.jaxpr", "--threads", "")
    assert found.code == 0
    assert "the same bits in all runs" in found.out
    assert "not tried: tracing again, because pure.jaxpr is a stored program" in found.out


@pytest.mark.parametrize(
    "options, message",
    [
        (["--xla-options", "xla_nosuch=1"], "has no option 'xla_nosuch'"),
        (["--xla-options", "fast"], "'fast' is not NAME=VALUE, nor `default`"),
        (["--threads", "0"], "a number of threads must be at least 1, not 0"),
        (["--threads", "two"], "'two' is not a list of numbers"),
    ],
)
def test_mistakes_are_one_line_errors(cli, options, message):
    found = cli("determinism", "sets.py:pure", *options)
    assert found.code == 2 and message in found.err and found.out == ""
