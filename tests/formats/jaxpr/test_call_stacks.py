"""Tests of the call stacks in the header of a file."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxprtool import jaxcompat
from jaxprtool.errors import ProgramFileError
from jaxprtool.formats.jaxpr.header import DEEPEST
from jaxprtool.formats.jaxpr.read import parse_program
from jaxprtool.formats.jaxpr.write import program_file_text
from jaxprtool.ir.equations import equations
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.scopes import ScopePaths
from jaxprtool.loading.trace import trace

X = jax.ShapeDtypeStruct((4, 4), "float32")


class Linear:
    def __call__(self, x):
        return jnp.tanh(x @ x) + 1.0


class Block:
    def __init__(self):
        self.up, self.down = Linear(), Linear()

    def __call__(self, x):
        y = x - x.mean()
        return x + self.down(jnp.sin(self.up(y)))


def net(x, depth=3):
    for block in [Block() for _ in range(depth)]:
        x = block(x)
    return jnp.sum(x)


def scopes(program):
    jaxpr = jaxcompat.open_jaxpr(program.jaxpr)
    paths = ScopePaths([jaxpr], program.roots)
    return [paths.of([eqn]) for eqn in jaxpr.eqns]


def table(written):
    return written.partition("stacks = {")[2].partition("}")[0]


@pytest.mark.parametrize("f", [net, jax.grad(net)], ids=["net", "grad"])
def test_a_program_read_from_a_file_has_the_layers_of_the_original(f):
    program = trace(f, X)
    assert any("Linear #2" in path for path in scopes(program))
    assert scopes(parse_program(program_file_text(program), "net.jaxpr")) == scopes(program)


def test_layers_in_a_loop_share_their_entries():
    few, many = (program_file_text(trace(partial(net, depth=depth), X)) for depth in (2, 9))
    assert table(few) == table(many) != ""


def test_a_function_without_calls_has_no_table():
    assert table(program_file_text(trace(lambda x: jnp.tanh(x) + 1.0, X))) == ""


def test_a_line_that_is_shown_again_has_its_functions_in_the_table_alone():
    program = trace(net, X)
    written = program_file_text(program)
    lines = [line.partition("# ")[2] for line in written.splitlines() if "tanh" in line]
    assert "(Linear.__call__)" in lines[0] and "(Linear" not in lines[2]
    assert lines[2] == lines[0].replace(" (Linear.__call__)", "")
    read = parse_program(written, "net.jaxpr")
    frames = [frames_now().of(eqn) for eqn in read.jaxpr.eqns if eqn.primitive.name == "tanh"]
    assert [f.function for f in frames[0]] == [f.function for f in frames[2]]
    assert program_file_text(read) == written


def test_a_stack_that_is_too_deep_is_omitted():
    def deep(x, depth):
        return jnp.sin(x) if depth == 0 else deep(x, depth - 1)

    program = trace(lambda x: deep(x, DEEPEST), X)
    written = program_file_text(program)
    assert "stacks = {" not in written
    assert program_file_text(parse_program(written, "deep.jaxpr")) == written


def looped(x):
    def body(carry, row):
        return jax.jit(lambda y: jnp.sin(y) * 2)(carry) + row, jnp.where(row > 0, row, 0.0)

    total, rows = jax.lax.scan(jax.checkpoint(body), x[0], x)
    return jax.lax.cond(total.sum() > 0, lambda y: y.sum(), lambda y: y.prod() + 1, rows)


@pytest.mark.parametrize("f", [net, jax.grad(net), looped, jax.grad(looped)])
def test_each_equation_keeps_its_lines_and_scope_at_every_depth(f):
    program = trace(f, X)
    back = parse_program(program_file_text(program), "f.jaxpr")
    places, places_back = (
        [
            ([frame.line for frame in jaxcompat.user_frames(eqn)], jaxcompat.name_stack(eqn))
            for eqn in equations(jaxcompat.open_jaxpr(p.jaxpr))
        ]
        for p in (program, back)
    )
    assert places == places_back
    assert len(set(map(str, places))) > 3


FILE = """jaxprtool 1
jax = '0.10.2'
name = 'f'
arguments = (('x',), {{}})
results = 'result'
files = {{'a.py': 'a.py'}}
stacks = {{{}}}
{{ lambda ; a:f32[]. let b:f32[] = sin a  # a.py:3:4 (f) from 2
  in (b,) }}
"""


def test_an_equation_has_the_frames_of_its_entry():
    program = parse_program(
        FILE.format("'1': 'a.py:9:2-9:7 (g)', '2': 'a.py:3:4-3:9 (f) from 1'"), "f"
    )
    (eqn,) = jaxcompat.open_jaxpr(program.jaxpr).eqns
    assert [(f.function, f.line, f.column, f.end_column) for f in jaxcompat.user_frames(eqn)] == [
        ("f", 3, 3, 8),
        ("g", 9, 1, 6),
    ]


@pytest.mark.parametrize(
    "stacks, message",
    [
        ("'2': 3", "write stacks as {'2': "),
        ("'2': 'b.py:3:4-3:9 (f)'", "entry '2' of stacks is not a frame of a file: 'b.py"),
        ("'2': 'a.py'", "entry '2' of stacks is not a frame of a file: 'a.py'"),
        ("'2': 'a.py:3:9-3:4 (f)'", "entry '2' of stacks is not a frame of a file: 'a.py:3:9-3:4"),
        ("'2': 'a.py:3:9-2:12 (f)'", "entry '2' of stacks is not a frame of a file: 'a.py:3:9-2:"),
        ("'2': 'a.py:3:0-3:0 (f)'", "entry '2' of stacks is not a frame of a file: 'a.py:3:0-3:"),
        ("'2': 'a.py:3:4 (f) from 2'", "entry '2' of stacks comes before its caller '2'"),
        (
            "'0': 'a.py:1:1 (f)', "
            + ", ".join(f"'{n}': 'a.py:1:1 (f) from {n - 1}'" for n in range(1, DEEPEST + 1)),
            f"entry '{DEEPEST}' of stacks has more than {DEEPEST - 1} callers",
        ),
    ],
)
def test_an_invalid_table_of_frames_is_refused(stacks, message):
    with pytest.raises(ProgramFileError, match=r"^f:7:\d+: ") as raised:
        parse_program(FILE.format(stacks), "f")
    assert message in str(raised.value)


SCRIPT = """
import jax.numpy as jnp, jaxprtool
from jaxprtool.formats.jaxpr.read import parse_program
from jaxprtool.formats.jaxpr.write import program_file_text

def inner(x):
    return jnp.tanh(x) + 1.0

def outer(x):
    return inner(inner(x))

written = program_file_text(jaxprtool.trace(outer, 1.0))
assert "stacks = {" in written and program_file_text(parse_program(written, "f")) == written
"""


@pytest.mark.usefixtures("processes")
def test_code_without_columns_is_written_and_read(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONNODEBUGRANGES": "1"}
    done = subprocess.run(
        [sys.executable, path], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
