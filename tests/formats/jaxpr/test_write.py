"""The contents of a written file: the exact listing, its header and comments, and refusals."""

from __future__ import annotations

import linecache
import os
import re
import subprocess
import sys
from collections import Counter, OrderedDict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import mlir

import jaxprtool
from jaxprtool import jaxcompat, variable
from jaxprtool.errors import OutputError, UnsupportedError, UserFunctionError
from jaxprtool.formats.jaxpr.read import parse_program
from jaxprtool.formats.jaxpr.syntax import MAX_DEPTH
from jaxprtool.formats.jaxpr.write import program_file_text, write, write_program_files
from jaxprtool.ir.equivalence import structural_difference
from jaxprtool.ir.program import Program, type_check
from jaxprtool.loading.trace import trace
from jaxprtool.render.terminal.listing import ShowOptions, listing
from tests.benchmarks.models import synthetic
from tests.formats.jaxpr.programs import PROGRAMS
from tests.programs import harness_programs

X = np.arange(3, dtype=np.float32)


def back(program: Program) -> Program:
    """Return the program after writing and reading. It must be the same and be written the same."""
    written = program_file_text(program)
    again = parse_program(written, "p.jaxpr")
    type_check(again)
    assert structural_difference(program, again) is None
    assert program_file_text(again) == written
    return again


def body(written: str) -> str:
    return written.partition("\n\n")[2]


def without_comments(written: str) -> str:
    return re.sub(r" +# .*", "", written)


# --- programs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_features_of_users_programs_round_trip(name):
    program = PROGRAMS[name]()
    with jax.enable_x64(jax.config.jax_enable_x64):
        again = back(program)
    assert (again.name, again.arg_names, again.out_names) == (
        program.name,
        program.arg_names,
        program.out_names,
    )


def as_shown(written: str) -> str:
    """Return a file's body without additions to JAX's listing: marks of types, values, quotes."""
    shown = without_comments(body(written)).replace("~", "")
    constant = r"\](?:=(?:\[.*?\]|npz\('[^']*'\)|base64\('[^']*'\)|[-\w.]+))(?=;| \w+:)"
    shown = re.sub(r"name='([^']*)'", r"name=\1", re.sub(constant, "]", shown))
    return " ".join(shown.split())


@pytest.mark.proof
def test_a_file_has_the_listing_that_is_shown():
    outcomes: Counter[str] = Counter()
    for case in harness_programs(10):
        program = case.program()
        same = as_shown(program_file_text(program)) == " ".join(listing(program).plain().split())
        outcomes["same" if same else case.name.split("_")[0]] += 1
    assert outcomes.pop("same") > 580
    # Enumerations that JAX shows by number, functions, devices, complex zeros, and jaxprs in
    # records, which JAX shows individually.
    dropped = {"fft", "round", "rng", "reduce", "device", "custom", "eigh", "approx"}
    assert set(outcomes) <= dropped, outcomes


def test_nothing_is_added_if_nothing_is_omitted():
    program = trace(lambda x, y: {"a": jnp.sin(x) @ y, "b": jax.jit(jnp.cos)(y)}, X, X)
    assert without_comments(body(program_file_text(program))) == listing(program).plain() + "\n"


@pytest.mark.proof
def test_variables_are_distinguished_from_numbers_and_from_each_other():
    program = trace(lambda x: x, X)
    many = program.replace(jaxpr=synthetic(9000), in_tree=program.in_tree)
    written = program_file_text(many)
    assert not re.search(r"\b(inf|nan):", written)
    assert " in:f32" in written  # which is not a number, and which JAX also uses
    assert structural_difference(many, parse_program(written, "p.jaxpr")) is None
    unused = trace(lambda x: jax.jit(lambda y: (y, y + 1, y * 2))(x)[0], X)
    back(unused)


def test_rules_are_written_once_and_may_call_their_function():
    @jax.custom_jvp
    def cube(x):
        return x**3

    @cube.defjvp
    def _(primals, tangents):
        (x,), (t,) = primals, tangents
        return cube(x), 3 * jnp.sqrt(cube(x)) * t

    program = trace(lambda x: cube(cube(x)).sum(), X)
    written = program_file_text(program)
    assert written.count("sqrt") == 1
    gradients = [jax.grad(p)(X + 1) for p in (program, back(program))]
    assert jnp.array_equal(*gradients)


@pytest.mark.parametrize("divisors", [(0, 1), (1, 0)])
def test_two_rules_of_which_one_raises_are_written_as_rules_that_raise(divisors):
    function, (forward, backward) = jax.custom_vjp(jnp.sin), divisors
    function.defvjp(lambda x: (x * (1 // forward), x), lambda x, t: (t * (1 // backward),))
    program = trace(lambda x: function(x) + 1, X)
    again = back(program)
    for read, x in ((again, X), (again.apply("batch(axis_size=2)"), jnp.stack([X, X]))):
        assert jnp.array_equal(read(x), jnp.sin(x) + 1)
        with pytest.raises(UserFunctionError, match="raised ZeroDivisionError"):
            jax.grad(lambda x, read=read: read(x).sum())(x)
    source = jaxprtool.to_python(program)
    assert source.count("raise ZeroDivisionError") == 2 and "(*primals)" in source


several = Primitive("test_several")
several.multiple_results = True
several.def_abstract_eval(lambda *avals, bodies, options: [avals[0]])
mlir.register_lowering(several, lambda context, *operands, bodies, options: operands[:1])


def test_jaxprs_in_any_parameter_of_a_plugin_round_trip():
    closed = jax.make_jaxpr(lambda x: jnp.sin(x) + 1)(X)
    opened = jaxcompat.open_jaxpr(jax.make_jaxpr(lambda x: [jnp.cos(x)])(X))

    def f(x):
        return several.bind(x, bodies=(closed, ("a", (opened, 1))), options=(closed, closed))

    program = trace(f, X)
    (equation,) = back(program).jaxpr.eqns
    kept = equation.params["bodies"][1][1][0]
    assert type(kept) is type(opened)
    assert equation.params["options"][0] is equation.params["options"][1]


# --- the header -----------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: object
    right: object


@jax.tree_util.register_pytree_node_class
class Scaled:
    def __init__(self, value, scale):
        self.value, self.scale = value, scale

    def tree_flatten(self):
        return (self.value,), self.scale

    @classmethod
    def tree_unflatten(cls, scale, children):
        return cls(*children, scale)


def test_structures_have_names_at_their_leaves():
    def f(pair, *, options):
        return {"out": [pair.left, None], "more": ((), pair.right.value)}

    program = trace(f, Pair(X, Scaled(X, "it's 2")), options=OrderedDict(b=1.0, a=[X]))
    written = program_file_text(program)
    assert "Scaled', ['pair.right[<flat index 0>]'], '\"it\\'s 2\"')" in written
    assert "OrderedDict({'b': \"options['b']\", 'a': [\"options['a'][0]\"]})" in written
    again = back(program)
    assert again.arg_names == program.arg_names
    result = jax.tree.unflatten(again.in_tree, [X, X + 1, 2.0, X])
    assert jnp.array_equal(again(*result[0], **result[1])["more"][1], X + 1)


ODD = ["two words", "quote'\"s", "new\nline", "ünï", "a # b", "{ lambda ; }", "\\", "", "\ud800"]


@pytest.mark.parametrize("name", ODD)
def test_unusual_names_round_trip(name):
    program = trace(lambda p: {"x": p[name]}, {name: X}).replace(name=name, out_names=(name,))
    again = back(program.replace(arg_names=(f"p[{name!r}]",)))
    assert again.name == name and again.out_names == (name,)
    assert program_file_text(program).isascii() or name == "ünï"


def test_long_structures_span_several_lines():
    shapes = [{"weights": X, "bias": X}] * 20
    program = trace(lambda layers: layers[3]["bias"], shapes)
    lines = program_file_text(program).splitlines()
    assert max(map(len, lines)) < 300
    assert (
        "            {'bias': \"layers[0]['bias']\", 'weights': \"layers[0]['weights']\"}," in lines
    )
    back(program)


# --- comments -------------------------------------------------------------------------------------


def test_source_lines_and_scopes_are_comments():
    def f(x):
        with jax.named_scope("outer"), jax.named_scope("with space"):
            return jnp.sin(x)

    line = f.__code__.co_firstlineno + 2
    written = program_file_text(trace(f, X))
    function = f.__qualname__
    comment = rf"# test_write\.py:{line}:20 \({re.escape(function)}\) in 'outer/with space'"
    assert re.search(comment, written), written
    assert "files = {'test_write.py': 'tests/formats/jaxpr/test_write.py'}" in written


def test_files_of_one_name_are_distinguished(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    functions = []
    for folder in ("a", "b c", "d(e"):
        path = tmp_path / folder / "model.py"
        path.parent.mkdir()
        scope: dict = {"jnp": jnp}
        exec(compile("def f(x):\n    return jnp.sin(x)\n", str(path), "exec"), scope)
        functions.append(scope["f"])
    program = trace(lambda x: [f(x) for f in functions], X)
    written = program_file_text(program)
    names = re.findall(r"# (\S+):2:12 \(f\)", written)
    assert names == ["model.py", "b_c/model.py", "d_e/model.py"]
    assert "'b_c/model.py': 'b c/model.py'" in written
    assert program_file_text(back(program)) == written


def test_files_with_equal_names_are_distinguished(tmp_path):
    functions = []
    for folder in ("a", "b"):
        path = tmp_path / folder / "model.py"
        scope: dict = {"jnp": jnp}
        exec(compile("def f(x):\n    return jnp.sin(x)\n", str(path), "exec"), scope)
        functions.append(scope["f"])
    written = (
        program_file_text(trace(functions[0], X).replace(name="f")),
        program_file_text(trace(functions[1], X)),
    )
    assert written[0] == written[1] and "files = {'model.py': 'model.py'}" in written[0]
    both = program_file_text(trace(lambda x: functions[1](functions[0](x)), X))
    assert "'model.py': 'site-packages/model.py'" in both
    assert "'b/model.py': 'site-packages/b/model.py'" in both
    assert str(tmp_path) not in both


# --- errors ---------------------------------------------------------------------------------------


def with_callback(x):
    return jax.pure_callback(lambda y: y, x, x)


def with_io(x):
    return io_callback(lambda y: None, None, x, ordered=True)


@custom_vmap
def batched(x):
    return x * 2


batched.def_vmap(lambda size, batched, x: (x, True))


def endless(count):
    function = jax.custom_jvp(lambda x: x * count)
    function.defjvp(lambda primals, tangents: (endless(count + 1)(*primals), tangents[0]))
    return function


def with_policy(x):
    return jax.grad(jax.checkpoint(lambda y: jnp.sin(y), policy=lambda *_, **__: True))(x)


def test_callbacks_are_written_as_stubs_of_the_same_type(tmp_path):
    def f(x):
        jax.debug.callback(lambda v: None, x, ordered=True)
        return jax.jit(with_callback)(x) + io_callback(np.sin, x, x)

    program, path = trace(f, jnp.float32(1.0)), tmp_path / "p.jaxpr"
    jaxprtool.write(program, path, callbacks="stub")
    again = jaxprtool.read(path)
    assert "callback=stub('numpy.sin')" in path.read_text()
    assert again.out_avals == program.out_avals
    assert again.jaxpr.effects == program.jaxpr.effects
    jaxprtool.write(again, path)
    assert jaxprtool.equivalent(again, jaxprtool.read(path))
    with pytest.raises(RuntimeError, match="was omitted"):
        jax.block_until_ready(again(jnp.float32(1.0)))


def within(depth):
    """Return a program of `depth` nested jaxprs."""
    program = trace(jnp.sin, jnp.float32(1.0))
    for _ in range(depth - 1):
        body = jaxcompat.jaxpr_as_fun(program.jaxpr)
        program = trace(lambda x, body=body: jax.jit(lambda y: body(y)[0])(x), jnp.float32(1.0))
    return program


def test_written_files_can_be_read_at_any_depth(tmp_path):
    path = tmp_path / "p.jaxpr"
    jaxprtool.write(within(MAX_DEPTH), path)
    assert len(jaxprtool.read(path).jaxpr.eqns) == 1
    with pytest.raises(UnsupportedError, match=f"jaxprs are nested more than {MAX_DEPTH} deep"):
        jaxprtool.write(within(MAX_DEPTH + 1), path)


def test_a_file_may_share_jaxprs_that_would_unfold_without_bounds():
    function = jnp.sin
    for _ in range(60):
        inner = jax.jit(function)

        def function(x, inner=inner):
            return inner(x) + inner(2 * x)

    program = trace(function, jnp.float32(1.0))
    assert (
        structural_difference(parse_program(program_file_text(program), "p.jaxpr"), program) is None
    )


REFUSED = {
    "pure_callback": (with_callback, "its parameter callback holds"),
    "io_callback": (with_io, "its parameter callback holds"),
    "custom_vmap_call": (lambda x: batched(x), "the batching rule .*<lambda>, a Python function"),
    "custom_jvp_call": (endless(0), "custom rules never end"),
    "remat2": (with_policy, r"its parameter policy holds a Python function \(.*<lambda>\)"),
}


@pytest.mark.parametrize("primitive", REFUSED)
def test_live_objects_are_refused_with_the_equation_and_its_line(primitive, tmp_path):
    function, fault = REFUSED[primitive]
    path = tmp_path / "p.jaxpr"
    with pytest.raises(UnsupportedError, match=fault) as caught:
        jaxprtool.write(trace(function, jnp.float32(1.0)), path)
    assert primitive in caught.value.message
    assert re.search(r"test_write\.py:\d+", caught.value.message)
    assert not list(tmp_path.iterdir())


def test_a_batching_rule_is_omitted_or_written_as_one_that_raises():
    function = jax.custom_vjp(batched)
    function.defvjp(lambda x: (batched(x), x), lambda x, ct: (ct * x,))
    plain = trace(lambda x: batched(x), jnp.float32(1.5))
    with pytest.raises(UnsupportedError, match="the batching rule") as caught:
        program_file_text(plain)
    hinted = re.search(r"inline\(.*?\)\)", caught.value.hint)[0]
    assert jax.vmap(back(plain.apply(hinted)))(jnp.float32([1.5])) == 3.0
    pushed = trace(lambda x: jax.jvp(batched, (x,), (x,)), jnp.float32(1.5))
    for program in (plain, pushed, trace(lambda x: function(x), jnp.float32(1.5))):
        again = parse_program(program_file_text(program, "stub"), "p.jaxpr")
        assert jax.tree.leaves(again(jnp.float32(1.5)))[0] == 3.0
        assert jaxprtool.equivalent(
            again, parse_program(program_file_text(again, "stub"), "p.jaxpr")
        )
        with pytest.raises(RuntimeError, match=r"function .*<lambda> was omitted"):
            jax.vmap(lambda x, f=again: jax.jvp(f, (x,), (x,)))(jnp.float32([1.5]))
        with pytest.raises(UnsupportedError, match=r"function .*<lambda> was omitted"):
            again.apply("batch(axis_size=2)")
    assert jax.grad(again)(jnp.float32(1.5)) == 1.5


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_a_rule_that_closes_over_a_traced_value_is_refused_with_its_equation(kind):
    def f(x):
        if kind == "jvp":
            g = jax.custom_jvp(jnp.sin)
            g.defjvp(lambda primals, tangents: (g(*primals), tangents[0] * x))
        else:
            g = jax.custom_vjp(jnp.sin)
            g.defvjp(lambda y: (jnp.sin(y), None), lambda _, ct: (ct * x,))
        return g(x * 2)

    place = rf"^custom_{kind}_call at .*test_write\.py:\d+ cannot be written to a file: its"
    with pytest.raises(UnsupportedError, match=rf"{place} parameter \w+ holds a traced value"):
        program_file_text(trace(f, X))


def test_live_types_and_constants_are_refused():
    def with_kind(x):
        return jax.new_ref(x, kind="mine")[...]

    with pytest.raises(
        UnsupportedError, match=r"new_ref at .*test_write\.py:\d+ .* it holds a type"
    ):
        program_file_text(trace(with_kind, X))
    outside = jax.new_ref(jnp.asarray(X))
    with pytest.raises(UnsupportedError, match="it holds a constant of the type"):
        program_file_text(trace(lambda: outside[...] * 2))


def test_refusals_are_found_fast_however_often_a_function_is_called():
    def function(x):
        return jax.new_ref(x, kind="mine")[...]

    for _ in range(40):
        function = jax.jit(lambda x, inner=function: inner(x) + inner(1.5 * x))
    with pytest.raises(UnsupportedError, match="it holds a type"):
        program_file_text(trace(function, X))


# --- files ----------------------------------------------------------------------------------------


def test_a_file_is_written_and_read_by_its_path(tmp_path):
    program = trace(jnp.sin, X)
    jaxprtool.write(program, tmp_path / "p.jaxpr")
    jaxprtool.write(program, os.path.join(tmp_path, "q.jaxpr"))
    assert (
        (tmp_path / "p.jaxpr").read_text()
        == program_file_text(program)
        == (tmp_path / "q.jaxpr").read_text()
    )
    assert jaxprtool.equivalent(jaxprtool.read(tmp_path / "p.jaxpr"), program)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "p.jaxpr"
    table = np.ones((30, 30), np.float32)
    jaxprtool.write(trace(lambda x: jnp.asarray(table) @ x, table[0]), path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(UnsupportedError):
        jaxprtool.write(trace(with_callback, jnp.float32(1.0)), path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    with pytest.raises(OutputError, match="cannot write"):
        jaxprtool.write(trace(jnp.sin, X), tmp_path / "nowhere" / "p.jaxpr")
    with pytest.raises(OutputError, match="it is a folder"):
        jaxprtool.write(trace(jnp.sin, X), tmp_path)


class Layer(NamedTuple):
    w: Any
    b: Any


def test_a_sown_value_may_have_nodes_of_classes_that_a_reader_lacks():
    program = trace(lambda x: variable({"layer": Layer(x, [x])}, name="params"), X)
    assert (
        "tree=tree({'layer': Node('tests.formats.jaxpr.test_write.Layer', {'.w'"
        in program_file_text(program)
    )
    again = back(program)
    assert again.jaxpr.eqns[0].params["tree"].num_leaves == 2


@pytest.mark.usefixtures("processes")
def test_sown_values_are_read_in_a_process_that_has_sown_nothing(tmp_path):
    write(trace(lambda x: variable(x, name="w"), X), tmp_path / "p.jaxpr")
    code = "from jaxprtool.formats.jaxpr.read import read; print(read('p.jaxpr').jaxpr)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "sow[tag=variable name=w] a" in done.stdout


def test_several_programs_are_written_together_or_not_at_all(tmp_path):
    table = np.arange(100.0, dtype=np.float32)
    good = trace(lambda x: jnp.asarray(table) * x, np.float32(1))
    bad = trace(lambda x: jax.pure_callback(np.sin, x, x), np.float32(1))
    with pytest.raises(UnsupportedError):
        write_program_files([(good, tmp_path / "good.jaxpr"), (bad, tmp_path / "bad.jaxpr")])
    assert os.listdir(tmp_path) == []
    write_program_files([(good, tmp_path / "a.jaxpr"), (good, tmp_path / "b.jaxpr")])
    names = [re.sub(r"\.\w{16}\.npz$", ".npz", name) for name in sorted(os.listdir(tmp_path))]
    assert sorted(names) == [f"{n}.jaxpr{end}" for n in "ab" for end in ("", ".npz")]


def test_values_have_the_users_names_even_if_the_source_is_missing_or_changed(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.py"
    lines = [
        "import jax.numpy as jnp",
        "def f(x):",
        "    with jax.named_scope('two words'):",
        "        hidden = jnp.tanh(x * 2)",
        "    low, high = jnp.split(hidden, [1])",
        "    unread = low + 1",
        "    return jnp.sin(high) * low",
    ]
    path.write_text("\n".join(lines))
    scope: dict = {"jax": jax}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    program = trace(scope["f"], X)
    linecache.checkcache()
    written, bare = program_file_text(program), program_file_text(program, source=False)
    assert "as hidden\n" in written and "(f) as low, high\n" in written
    assert "unread" not in written and " as " not in bare
    for source in (None, "\n".join(["other = g(1)", *lines])):
        path.unlink() if source is None else path.write_text(source)
        linecache.checkcache()
        read = parse_program(written, "p.jaxpr")
        assert program_file_text(read) == written
        shown = listing(read, ShowOptions(names=True)).plain()
        assert "hidden:f32[" in shown and " low:f32[1] high:f32[" in shown
        shown = listing(parse_program(bare, "p.jaxpr"), ShowOptions(names=True)).plain()
        assert "hidden" not in shown and "low" not in shown


def test_names_survive_passes_and_another_file():
    def f(x):
        hidden = jnp.tanh(x)
        unread = hidden + 1  # noqa: F841
        return hidden * 2

    read = parse_program(program_file_text(trace(f, X)), "p.jaxpr")
    assert "as hidden\n" in program_file_text(read.apply("dce, batch(axis_size=2)"))
