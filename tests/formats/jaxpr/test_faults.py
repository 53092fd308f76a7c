"""Every fault of a file is one line with its location and a description."""

from __future__ import annotations

import re

import pytest

from jaxprtool.errors import ProgramFileError
from jaxprtool.formats.jaxpr.read import parse_program

GOOD = """\
jaxprtool 1
jax = '0.10.2'
name = 'f'
arguments = (('x', 'y'), {})
results = ('result[0]', 'result[1]')

let twice = { lambda ; a:f32[3]. let b:f32[3] = add a a in (b,) } in
{ lambda ; x:f32[3] y:f32[]. let
    z:f32[3] = sin[accuracy=None] x
    u:f32[3] = jit[name=twice jaxpr=twice] z
    w:f32[3] = mul u 2.0:f32[]
    s:f32[] = reduce_sum[axes=(0,) out_sharding=None] u
    t:f32[] = while[
      body_jaxpr={ lambda ; a:f32[]. let b:f32[] = add a 1.0:f32[] in (b,) }
      body_nconsts=0
      cond_jaxpr={ lambda ; a:f32[]. let b:bool[] = lt a 9.0:f32[] in (b,) }
      cond_nconsts=0
    ] y
  in (w, t) }
"""
GOOD = GOOD.replace("mul u 2.0:f32[]", "mul u u")


def test_the_valid_file_is_accepted():
    parse_program(GOOD, "f.jaxpr")


#: The replacement in the valid file, and the location and description of the fault.
FAULTS = [
    # the first line and the header
    (
        "jaxprtool 1",
        "jaxprtool 3",
        "1:11",
        "the file has format 3, but this jaxprtool reads formats 1 to 2",
    ),
    ("jaxprtool 1", "{ lambda }", "1:1", "does not begin with 'jaxprtool 2'"),
    ("jax = '0.10.2'\n", "", "4:37", "the header has no entry 'jax'"),
    ("name =", "nam =", "3:7", "unknown header entry 'nam'; did you mean 'name'?"),
    ("name = 'f'", "name = 'f'\nname = 'g'", "4:1", "'name' is given twice"),
    ("name = 'f'", "name = 7", "3:8", "expected a string in quotes"),
    ("name = 'f'", "name = 'f", "3:8", "a string is not closed"),
    ("name = 'f'", "name =", "3:7", "expected a value"),
    ("name = 'f'", "name = 'f' 'g'", "3:12", "expected a new line after the value of 'name'"),
    ("(('x', 'y'), {})", "('x', 'y')", "4:13", "write arguments as ((positional, ...), "),
    ("('x', 'y')", "('x',)", "4:13", "1 arguments are named here, but the program has 2"),
    ("('x', 'y')", "('x', 2)", "4:13", "the value's name, in quotes"),
    (
        "('result[0]', 'result[1]')",
        "'r'",
        "5:11",
        "1 results are named here, but the program has 2",
    ),
    ("(('x', 'y'), {})", "(('x', 'y'), {}", "4:13", "'(' is not closed"),
    ("(('x', 'y'), {})", "(('x', 'y'], {})", "4:23", "']' does not close the '(' at 4:14"),
    ("results =", "files = {'a': 1}\nresults =", "5:9", "write files as {'name in comments': "),
    ("results =", "axis_env = (('i', 0),)\nresults =", "5:12", "write an axis environment"),
    ("results =", "bounds = {'y': -1}\nresults =", "5:10", "write bounds as {'n': 512, "),
    ("results =", "bounds = {'y': 8}\nresults =", "5:10", "'y' is not an argument that is a size"),
    ("results =", "bounds = {'n': 8}\nresults =", "5:10", "'n' is not an argument that is a size"),
    # jaxprs
    ("{ lambda ; x", "{ lambd ; x", "8:1", "expected '{ lambda', not '{'"),
    ("lambda ; x", "lambda x", "8:26", "expected a variable with its type, or ';'"),
    (
        "y:f32[]. let",
        "y:f32[] let",
        "8:29",
        "expected a variable with its type, or '. let', not 'let'",
    ),
    ("x:f32[3] y", "x y", "8:12", "expected a variable with its type, or '. let', not 'x'"),
    ("y:f32[]. let", "x:f32[]. let", "8:21", "'x' is already bound"),
    ("y:f32[]. let", "y:f32[]=1.0 . let", "8:21", "only a constant, before the ';',"),
    ("in (w, t) }", "in (w, t)", "20:1", "expected '}', not the end of the file"),
    ("in (w, t) }", "in (w, t", "20:1", "the jaxpr that begins on line 8 is not closed"),
    ("in (w, t) }", "in (w t) }", "19:9", "expected ',' or ')', not 't)'"),
    ("in (w, t) }", "", "20:1", "not the end of the file"),
    ("in (w, t) }", "in (w, t) } }", "19:15", "'}' after the end of the program"),
    ("in (w, t) }", "in (w, q) }", "19:10", "no variable 'q' here"),
    ("(b,) } in\n", "(b,) }\n", "8:1", "expected 'in', not '{'"),
    (
        "let twice",
        "let thrice",
        "10:37",
        "no jaxpr 'twice' in this file; did you mean 'thrice'?",
    ),
    ("= add a a in", "= jit[name=twice jaxpr=twice] a in", "7:13", "'twice' contains itself"),
    ("{ lambda ; x", GOOD.splitlines()[6] + "\n{ lambda ; x", "8:5", "'twice' is defined twice"),
    # equations
    ("= mul u u", "= mull u u", "11:16", "unknown primitive 'mull'; did you mean 'mul'?"),
    ("= mul u u", "= mul u v", "11:22", "no variable 'v' here"),
    ("= mul u u", "= mul u", "11:5", "mul: "),
    ("= mul u u", "= mul u u u", "11:5", "mul: "),
    ("= mul u u", "= sow[tag=t] u", "11:5", "sow: the parameter 'name' is missing"),
    ("= mul u u", "= sow[tag=3 name=n] u", "11:5", "sow: tag and name must be strings"),
    ("= mul u u", "= sow[tag=t name=n mode=no] u", "11:5", "mode must be one of strict, append, "),
    ("= mul u u", "= sow[tag=t name=n tree=2] u", "11:5", "tree must be the structure of a value"),
    ("= mul u u", "= sow[tag=t name=n key=u] u", "11:5", "unknown parameter 'key'"),
    (
        "= mul u u",
        "= sow[tag=t name=n tree=tree(Node(1))] u",
        "11:43",
        "Node(...) cannot be created",
    ),
    ("w:f32[3] = mul", "z:f32[3] = mul", "11:5", "'z' is already bound"),
    ("w:f32[3] = mul", "w:f32[4] = mul", "11:5", "declared f32[4], but mul returns f32[3]"),
    ("w:f32[3] = mul", "w:f33[3] = mul", "11:5", "unknown dtype 'f33'"),
    ("w:f32[3] = mul", "w:f32[3] k:f32[3] = mul", "11:5", "mul returns 1 results, not 2"),
    ("w:f32[3] = mul", "w:f32[3] mul", "11:14", "expected a variable with its type, or '='"),
    (
        "w:f32[3] = mul u u",
        "w:f32[3] =",
        "12:6",
        "expected a variable with its type, a primitive, or 'in'",
    ),
    (
        "w:f32[3] = mul u u",
        "nan:f32[3] = mul u u",
        "11:16",
        "nan, inf, True, False and None are values",
    ),
    ("jaxpr=twice] z", "jaxpr=twice] y", "10:5", "jit: the body takes f32[3], not f32[]"),
    ("jaxpr=twice] z", "jaxpr=twice] z z", "10:5", "jit: the body takes 1 values, not 2"),
    ("body_nconsts=0", "body_nconsts=1", "13:5", "while: "),
    (
        "b:bool[] = lt a 9.0:f32[]",
        "b:f32[] = neg a",
        "13:5",
        "cond_jaxpr returns f32[], not a bool",
    ),
    (
        "b:f32[] = add a 1.0:f32[]",
        "b:i32[] = sign 1:i32[]",
        "13:5",
        "body_jaxpr returns i32[], not f32[]",
    ),
    ("lt a 9.0:f32[]", "lt a 9:i32[]", "16:42", "lt: "),
    # parameters
    ("axes=(0,) out", "axes=(1,) out", "12:5", "reduce_sum: "),
    ("axes=(0,) out", "axis=(0,) out", "12:5", "reduce_sum: missing: 'axes'"),
    ("name=twice ", "name=twice inlin=True ", "10:5", "jit: unknown parameter 'inlin'"),
    ("name=twice ", "", "10:5", "jit: the parameter 'name' is missing"),
    ("axes=(0,) out", "axes=(0,), out", "12:35", "expected a parameter, as in axis=0, or ']'"),
    ("axes=(0,) out", "axes=(0,) axes=(0,) out", "12:36", "'axes' is given twice"),
    ("axes=(0,) out", "axes=(0, out", "12:52", "']' does not close the '(' at 12:31"),
    ("axes=(0,) out", "axes= out", "12:44", "expected a parameter"),
    ("axes=(0,) out", "axes=eval('f') out", "12:31", "unknown constructor 'eval(...)'"),
    ("axes=(0,) out", "axes=(1 + 1,) out", "12:32", "arithmetic is not allowed in a value"),
    ("axes=(0,) out", "axes=(0,,) out", "12:34", "invalid value: "),
    ("cond_nconsts=0\n", "", "13:5", "while: the parameter 'cond_nconsts' is missing"),
]


def located(error: ProgramFileError) -> tuple[str, str]:
    match = re.fullmatch(r"f\.jaxpr:(\d+:\d+): (.*)", error.message)
    assert match, error.message
    return match[1], match[2] + (f"; {error.hint}" if error.hint else "")


@pytest.mark.parametrize(("old", "new", "where", "what"), FAULTS)
def test_a_fault_is_located_and_described(old, new, where, what):
    assert old in GOOD
    with pytest.raises(ProgramFileError) as caught:
        parse_program(GOOD.replace(old, new, 1), "f.jaxpr")
    place, message = located(caught.value)
    assert what in message and "\n" not in message
    assert place == where, message


@pytest.mark.parametrize("mesh", ["(0,), ('d',)", "(2,), ('d',)", "(1, 0), ('d', 'e')"])
def test_a_mesh_without_the_devices_of_its_axes_is_refused(mesh):
    types = ", ".join(["AxisType.Auto"] * (mesh.count("'") // 2))
    device = "AbstractDevice(device_kind='cpu', num_cores=None, platform='cpu')"
    mesh = f"Mesh({mesh}, axis_types=({types},), abstract_device={device}, devices=())"
    told = f"jit = {{'in': {{'x': NamedSharding(mesh={mesh}, spec=P('d'), memory_kind='device')}}}}"
    with pytest.raises(ProgramFileError, match="0 devices do not fill a mesh of"):
        parse_program(GOOD.replace("results =", f"{told}\nresults ="), "f.jaxpr")


HEADER = """\
jaxprtool 1
jax = '0.10.2'
name = 'f'
arguments = (('x',), {})
results = 'result'

"""
JVP = """\
{ lambda ; x:f32[3]. let
    y:f32[3] = custom_jvp_call[
      name=f
      call_jaxpr={ lambda ; a:f32[3]. let b:f32[3] = sin a in (b,) }
      jvp=rule { lambda ; a:f32[3] t:f32[3]. let b:f32[3] = mul a t in (a, b) }
      symbolic_zeros=False
    ] x
  in (y,) }
"""
VJP = """\
{ lambda ; x:f32[3]. let
    y:f32[3] = custom_vjp_call[
      name=f
      bwd=back { lambda ; r:f32[3] t:f32[3]. let b:f32[3] = mul r t in (b,) }
      call_jaxpr={ lambda ; a:f32[3]. let b:f32[3] = sin a in (b,) }
      fwd=forth { lambda ; a:f32[3]. let b:f32[3] = cos a in (b, a) }
      symbolic_zeros=False
    ] x
  in (y,) }
"""
MUL_A_T = "a:f32[3] t:f32[3]. let b:f32[3] = mul a t"
MUL_R_T = "r:f32[3] t:f32[3]. let b:f32[3] = mul r t"
COS_A = "a:f32[3]. let b:f32[3] = cos a in (b, a)"
#: A rule that does not fit its call: the replacement, and the fault.
RULE_FAULTS = [
    (JVP, "jvp=rule {", "jvp=rule raises='no' {", "a rule that raises needs two strings"),
    (JVP, "symbolic", "raises='no' symbolic", "a rule must be a jaxpr, or"),
    (JVP, "symbolic", "perturbed=(True, True) symbolic", "perturbed must have one entry for each"),
    (JVP, "symbolic", "out_zeros=7 symbolic", "out_zeros must have one entry for each of 1 values"),
    (JVP, "symbolic", "out_zeros=(True,) symbolic", "jvp returns 2 values, not 1"),
    (JVP, "symbolic", "zeros=() symbolic", "unknown parameter 'zeros'"),
    (JVP, MUL_A_T, "a:f32[3]. let b:f32[3] = sin a", "jvp takes"),
    (JVP, "t:f32[3]. let b:f32[3] = mul a t", "t:f32[]. let b:f32[3] = sin a", "f32[], not f32[3]"),
    (JVP, "(a, b)", "(a,)", "jvp returns 1 values, not 2"),
    (VJP, "symbolic", "raises='no' symbolic", "a rule must be a jaxpr, or"),
    (VJP, "symbolic", "in_zeros=(True,) symbolic", "bwd returns 1 values, not 0"),
    (
        VJP,
        "symbolic",
        "perturbed=() symbolic",
        "perturbed must have one entry for each of 1 values",
    ),
    (VJP, "symbolic", "forwarded=(0, None) symbolic", "not residuals and cotangents"),
    (VJP, "symbolic", "forwarded=(0,) symbolic", "numbers of residuals of fwd and bwd differ"),
    (VJP, "(b, a)", "(b,)", "numbers of residuals of fwd and bwd differ"),
    (VJP, MUL_R_T, "r:f32[3]. let b:f32[3] = sin r", "residuals"),
    (VJP, MUL_R_T, "r:f32[] t:f32[3]. let b:f32[3] = sin t", "bwd takes"),
    (VJP, "in (b,) }\n      call", "in (b, t) }\n      call", "bwd returns 2 values, not 1"),
    (VJP, COS_A, ". let in (0.0:f32[], 0.0:f32[])", "fwd takes 0 values, not 1"),
]


@pytest.mark.parametrize(("good", "old", "new", "what"), RULE_FAULTS)
def test_a_rule_that_does_not_fit_its_call_is_refused(good, old, new, what):
    parse_program(HEADER + good, "f.jaxpr")
    assert old in good
    with pytest.raises(ProgramFileError) as caught:
        parse_program(HEADER + good.replace(old, new, 1), "f.jaxpr")
    place, message = located(caught.value)
    assert what in message and int(place.partition(":")[0]) >= 8
