"""Names of values in the source, found from the locations of equations."""

import ast
import importlib.util
import inspect
import linecache
import textwrap
import typing

import jax
import jax.numpy as jnp
import pytest

from jaxprtool.ir.equations import equations
from jaxprtool.ir.frames import SourceNames, _SourceExpressions, range_of
from jaxprtool.jaxcompat.source_locations import user_frames

HEADER = """
import jax.numpy as jnp
from types import SimpleNamespace
sin = jnp.sin

def call(*args, **kwargs):
    return args, kwargs

def net(x):
    self, params, ws = SimpleNamespace(), {}, [None]
"""


def sine(path, code):
    """Return the user frames of the only `sin` in a function's body, innermost first."""
    path.write_text(HEADER + textwrap.indent(textwrap.dedent(code), "    "))
    linecache.checkcache(str(path))
    spec = importlib.util.spec_from_file_location("source", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    jaxpr = jax.make_jaxpr(module.net)(jnp.ones(2))
    (eqn,) = (e for e in equations(jaxpr.jaxpr) if e.primitive.name == "sin")
    return [frame for frame in user_frames(eqn) if frame.file == str(path)]


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("w = sin(x)", "w"),
        ("w = 0.1 * sin(x)", "w"),
        ("w: object = sin(x).astype(int)", "w"),
        ("v = w = sin(x)", "w"),
        ("w = (\n    sin(x)\n    .reshape(1, 2)\n)", "w"),
        ("self.kernel = sin(x)", "kernel"),
        ("params['w'] = sin(x)", "w"),
        ("ws[0] = sin(x)", "ws"),
        ("call({'a': x, 'w': sin(x)})", "w"),
        ("params = {'é' 'ü': x, 'w': sin(x)}", "w"),
        ("params = {str(x.ndim): sin(x)}", "params"),
        ("call(w=sin(x))", "w"),
        ("params = dict(w=sin(x))", "w"),
        ("params = call(sin(x))", "params"),
        ("a, (b, w) = x, (x, sin(x))", None),
        ("a, w = x, sin(x)", "w"),
        ("a, w = call(sin(x))", None),
        ("ws = [sin(x), x]", "ws"),
        ("if (w := sin(x)) is None: pass", "w"),
        ("for row in sin(x): pass", "row"),
        ("ws = [row for row in sin(x)]", "row"),
        ("w = sin(x) if x.ndim else x", "w"),
        ("w = (lambda: sin(x))()", None),
        ("def f(w=sin(x)): pass", None),
        ("sin(x)", None),
        ("return sin(x)", None),
    ],
)
def test_a_value_has_the_name_it_is_assigned_to(tmp_path, code, name):
    frame, *_ = sine(tmp_path / "source.py", code)
    assert SourceNames().assigned(frame) == name


def test_an_augmented_assignment_names_its_target(tmp_path):
    path = tmp_path / "source.py"
    path.write_text("def net(x):\n    w = 1 * x\n    w -= 2\n    return w\n")
    spec = importlib.util.spec_from_file_location("source", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    *_, eqn = jax.make_jaxpr(module.net)(jnp.ones(2)).eqns
    assert SourceNames().assigned(user_frames(eqn)[0]) == "w"


def test_a_comprehension_has_the_name_it_is_assigned_to(tmp_path):
    frames = sine(tmp_path / "source.py", "ws = [sin(each) for each in [x]]")
    names = SourceNames()
    assert next(filter(None, map(names.assigned, frames))) == "ws"


def test_a_returned_value_has_the_name_at_the_call(tmp_path):
    code = """
    def init():
        return sin(x)

    w = call(init())
    """
    inner, outer, *_ = sine(tmp_path / "source.py", code)
    names = SourceNames()
    assert names.assigned(inner) is None
    assert names.assigned(outer) == "w"


def test_an_operand_does_not_have_the_name_of_its_result(tmp_path):
    path = tmp_path / "source.py"
    frame, *_ = sine(path, "y = x + 2 * sin(x)")
    lines = path.read_text().splitlines()
    line = lines.index("    y = x + 2 * sin(x)") + 1
    names = SourceNames()
    assert names.assigned(frame) == "y"
    assert names.assigned(frame, {(line, 8, line, 22)}) is None  # x + 2 * sin(x)
    assert names.assigned(frame, {(line, 12, line, 22)}) is None  # 2 * sin(x)
    assert names.assigned(frame, {(line, 8, line, 9)}) == "y"  # x
    assert names.assigned(frame, {range_of(frame)}) is None


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("get('w', x)", "w"),
        ("get(x, name='w')", "w"),
        ("get('layer.w-0', x)", "layer.w-0"),
        ("get('ij,jk->ik', x)", None),
        ("get(x, 'w')", None),
        ("get(x)", None),
    ],
)
def test_a_name_can_be_requested_for_a_call(tmp_path, call, name):
    code = f"""
    def get(*args, **kwargs):
        return sin(x)

    {call}
    """
    _, frame, *_ = sine(tmp_path / "source.py", code)
    assert SourceNames().given(frame) == name


def test_missing_or_changed_source_has_no_names(tmp_path):
    path = tmp_path / "source.py"
    frame, *_ = sine(path, "w = sin(x)")
    for text in "w = 1\n", "def (\n":
        path.write_text(text)
        linecache.checkcache(str(path))
        assert SourceNames().assigned(frame) is None
    path.unlink()
    linecache.checkcache(str(path))
    assert SourceNames().assigned(frame) is None
    assert SourceNames().given(frame) is None


EVERYWHERE = """
@decorated(1)
@decorated(
    2)
class A(base(3)):
    @decorated(4)
    def f(self, x=default(5), *, y: note(6) = 7) -> note(8):
        if (z := test(9)): a = then(10); b = also(11)
        elif test(12): pass
        else: c = otherwise(13)
        try:
            with opened(14) as file, opened(15): d = (
                read(16)
                .strip(17)
            )
        except errors(18) as e:
            raise again(19) from e
        finally:
            last(20)
        for i in over(21): yield i
        else: done(22)
        match subject(23):
            case B(24, x=25) if guard(26): return [g(27) for g in all(28) if only(29)]
            case _: return lambda v=1: body(30)
"""


@pytest.mark.parametrize("source", [EVERYWHERE, inspect.getsource(typing)], ids=["all", "typing"])
def test_expressions_are_found_at_any_position(source):
    tree, file = ast.parse(source), _SourceExpressions(ast.parse(source))
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    in_texts = {node for text in texts for node in ast.walk(text)}  # their positions are unusual
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and node not in in_texts:
            found = file.find((node.lineno, node.col_offset, node.end_lineno, node.end_col_offset))
            assert ast.dump(found) == ast.dump(node)
            assert type(file.parents[found]) is type(parents[node])
