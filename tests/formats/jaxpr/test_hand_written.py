"""Hand-written and edited files: any layout, names and comments, and omitted types."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from jaxprtool import jaxcompat
from jaxprtool.formats.jaxpr.read import parse_program, read
from jaxprtool.ir import source_text
from jaxprtool.ir.equations import equations
from jaxprtool.ir.program import type_check
from jaxprtool.render.terminal.listing import listing

HEADER = """\
jaxprtool 1
jax = '0.10.2'
name = 'loss'
arguments = (({'b': "params['b']", 'w': "params['w']"}, 'x'), {})
results = 'result'
files = {'model.py': '/home/me/model.py'}
"""

PLAIN = """
{ lambda ; a:f32[4] b:f32[3,4] c:f32[8,3]. let
    d:f32[8,4] = dot_general[dimension_numbers=(([1], [0]), ([], []))] c b
    e:f32[8,4] = broadcast_in_dim[broadcast_dimensions=(1,)] a
    f:f32[8,4] = add d e
    g:f32[8,4] = mul f 2.0:f32[]
  in (g,) }
"""
PLAIN = PLAIN.replace("g:f32[8,4] = mul f 2.0:f32[]", "g:f32[8,4] = mul f f")


def program_of(body: str, header: str = HEADER):
    program = parse_program(header + body, "hand.jaxpr")
    type_check(program)
    return program


def shown(body: str, header: str = HEADER) -> str:
    return listing(program_of(body, header)).plain()


@pytest.mark.proof
def test_a_file_has_the_names_and_trees_of_the_program():
    program = program_of(PLAIN)
    assert program.name == "loss"
    assert program.arg_names == ("params['b']", "params['w']", "x")
    assert program.out_names == ("result",)
    params = {"w": jnp.ones((3, 4)), "b": jnp.arange(4.0)}
    result = program(params, jnp.ones((8, 3)))
    assert jnp.array_equal(result, jnp.full((8, 4), 3 + jnp.arange(4.0)) ** 2)
    assert program.jaxpr.debug_info.func_name == "loss"
    assert program.jaxpr.debug_info.arg_names == program.arg_names


LAYOUTS = {
    "one line": lambda text: " ".join(text.split()),
    "semicolons": lambda text: text.replace("] a\n", "] a;\n").replace(" e\n", " e ; \n"),
    "no indentation": lambda text: re.sub(r"\n +", "\n", text),
    "tabs": lambda text: text.replace("    ", "\t"),
    "a line for every word": lambda text: re.sub(r" (?![^\[(]*[\])])", "\n  ", text),
    "blank lines": lambda text: text.replace("\n", "\n\n\n"),
    "Windows": lambda text: text.replace("\n", "\r\n"),
    "spaces around marks": lambda text: re.sub(r"([a-g]):f32", r"\1 : f32", text),
    "comments": lambda text: re.sub(r"\n(?=.)", " # what's {this\n  # and ) that\n", text),
    "long names": lambda text: re.sub(r"\b([a-g])\b(?=[: ,\n])", r"\1_größe", text),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_comments_and_names_are_free(layout):
    assert shown(LAYOUTS[layout](PLAIN)) == shown(PLAIN)


def test_the_type_of_the_last_result_may_be_omitted():
    bare = re.sub(r"([defg]):f32\[8,4\] =(?! broadcast)", r"\1 =", PLAIN)
    assert bare.count(":f32[8,4]") == 1
    assert shown(bare) == shown(PLAIN)


def test_variables_may_be_named_in_let_and_lambda():
    named = re.sub(r"\bd\b", "in", re.sub(r"\be\b", "let", re.sub(r"\bf\b", "lambda", PLAIN)))
    assert shown(named) == shown(PLAIN)


def test_a_hidden_parameter_may_be_given():
    given = PLAIN.replace("(1,)]", "(1,) shape=(8, 4) sharding=None]")
    assert shown(given) == shown(PLAIN)


def place(eqn) -> tuple:
    frame = jaxcompat.user_frame(eqn)
    assert frame is None or not source_text.lines(frame.file)  # nothing is known of its text
    place = frame and (
        source_text.path(frame.file),
        frame.line,
        frame.column + 1,
        frame.function,
    )
    return place, jaxcompat.name_stack(eqn)


@pytest.mark.parametrize(
    ("comment", "expected"),
    [
        ("", (None, "")),
        (
            "# model.py:12:8 (loss) in layer/dense",
            (("/home/me/model.py", 12, 8, "loss"), "layer/dense"),
        ),
        (
            "# model.py:12:8 (loss.<locals>.f)",
            (("/home/me/model.py", 12, 8, "loss.<locals>.f"), ""),
        ),
        ("# model.py:12", (("/home/me/model.py", 12, 1, "<unknown>"), "")),
        ("# in transpose(jvp(a))/b", (None, "transpose(jvp(a))/b")),
        ("# in 'a long scope/b'", (None, "a long scope/b")),
        ("# in a long scope", (None, "")),
        ("# other.py:12:8 (loss)", (None, "")),
        ("# see model.py:12", (None, "")),
        ("# model.py:99999999999", (None, "")),
        ("# {'", (None, "")),
        ("#", (None, "")),
    ],
)
def test_a_comment_has_the_location_of_an_equation_or_nothing(comment, expected):
    body = PLAIN.replace("add d e", f"add d e {comment}")
    eqns = program_of(body).jaxpr.eqns
    assert place(eqns[2]) == expected
    assert [place(eqn) for i, eqn in enumerate(eqns) if i != 2] == [(None, "")] * 3


def places(comments, version):
    """Return the lines of the equations of a file, each with its comment or None."""
    body = PLAIN
    for operands, comment in zip((" c b", "] a", " d e", " f f"), comments, strict=True):
        body = body.replace(f"{operands}\n", f"{operands}  {comment}\n")
    header = HEADER.replace("jaxprtool 1", f"jaxprtool {version}")
    found = (place(eqn)[0] for eqn in program_of(body, header).jaxpr.eqns)
    return [where and where[1] for where in found]


def test_an_equation_without_a_comment_has_the_place_of_the_equation_before_it():
    three = "# model.py:3:4 (f)"
    assert places(["", three, "", ""], 2) == [None, 3, 3, 3]
    assert places([three, "", "# -", ""], 2) == [3, 3, None, None]
    assert places([three, "# see above", "#", "# model.py:5"], 2) == [3, 3, 3, 5]


def test_in_format_1_each_equation_has_a_comment_of_its_own():
    assert places(["# model.py:3:4 (f)", "", "# model.py:5", "# -"], 1) == [3, None, 5, None]


def test_bodies_take_part_in_the_order_of_equations():
    body = """
    { lambda ; x:f32[]. let
        y:f32[] = jit[  # model.py:3
          name=f
          jaxpr={ lambda ; a:f32[]. let b:f32[] = sin a in (b,) }
        ] x
        z:f32[] = jit[name=g jaxpr={ lambda ; a:f32[]. let
            b:f32[] = sin a  # model.py:5
            c:f32[] = cos b
          in (c,) }] y
        w:f32[] = cos z
      in (w,) }
    """
    header = HEADER.replace("jaxprtool 1", "jaxprtool 2").replace(
        "(({'b': \"params['b']\", 'w': \"params['w']\"}, 'x'), {})", "(('x',), {})"
    )
    found = [place(eqn)[0] for eqn in equations(program_of(body, header).jaxpr)]
    assert sorted(where[1] for where in found) == [3, 3, 3, 5, 5, 5]


def test_the_comment_of_a_long_equation_is_on_its_first_line():
    body = PLAIN.replace("dot_general[", "dot_general[  # model.py:3:4 (f)\n    ")
    assert place(program_of(body).jaxpr.eqns[0])[0] == ("/home/me/model.py", 3, 4, "f")


BRANCHES = """
let double = { lambda ; a:f32[]. let b:f32[] = add a a in (b,) } in
{ lambda ; i:i32[] x:f32[]. let
    y:f32[] = cond[branches=(
        { lambda ; a:f32[]. let b:f32[] = jit[name=double jaxpr=double] a in (b,) }
        double
    )] i x
  in (y,) }
"""
SMALL = HEADER.replace("({'b': \"params['b']\", 'w': \"params['w']\"}, 'x')", "('i', 'x')")


def test_a_shared_body_is_one_object():
    program = program_of(BRANCHES, SMALL)
    first, second = program.jaxpr.eqns[0].params["branches"]
    inner = first.eqns[0].params["jaxpr"]
    assert jaxcompat.open_jaxpr(inner) is jaxcompat.open_jaxpr(second)
    assert program(jnp.int32(0), jnp.float32(3)) == 6
    assert jax.grad(lambda x: program(jnp.int32(1), x))(3.0) == 2


def test_an_unused_body_is_omitted():
    unused = BRANCHES.replace(
        "let double", "let other = { lambda ; . let in (nothing,) } in\nlet double"
    )
    assert shown(unused, SMALL) == shown(BRANCHES, SMALL)


def test_read_takes_a_path(tmp_path):
    path = tmp_path / "loss.jaxpr"
    path.write_text("\ufeff" + HEADER + PLAIN, encoding="utf-8")
    assert listing(read(path)).plain() == shown(PLAIN)


def test_a_sown_value_needs_only_a_tag_and_a_name():
    body = """
    { lambda ; a:f32[4] b:f32[3,4] c:f32[8,3]. let
        d:f32[3,4] = sow[tag=variable name=w] b
        e:f32[3,4] f:f32[4] = sow[name=None tree=tree((leaf, [leaf])) tag=t mode=clobber] d a c
      in (e,) }
    """
    alone, two = (eqn.params for eqn in program_of(body).jaxpr.eqns)
    assert (alone["mode"], alone["tree"]) == ("strict", jax.tree.structure(0))
    assert (two["name"], two["mode"], two["tree"].num_leaves) == (None, "clobber", 2)
    assert "sow[tag=variable name=w] b" in shown(body)
