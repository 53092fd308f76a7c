"""Dataflow graphs: contents, well-formedness, and conversion to pictures."""

import re
import stat
import subprocess

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool import trace
from jaxprtool.errors import OutputError
from jaxprtool.formats.pictures import MOST_BOXES, dot, graph_picture
from tests.external import missing
from tests.programs import harness_programs, sample_programs
from tests.programs.corpus import prove_corpus
from tests.programs.outlined import layers
from tests.programs.samples import sample_files
from tests.share import first_and_proofs

NODE = re.compile(r"^ *(n\d+) \[label=<(.*)>, fillcolor=\"(#\w+)\", color=\"#\w+\"\];$")
EDGE = re.compile(r"^  (n\d+) -> (n\d+) \[(.*)\];$")
FRAME = re.compile(r"^ *subgraph cluster_\d+ \{$")
TITLE = re.compile(r"^ *label=<<b>(.*)</b>>; fontsize=10;.*;$")


class Read:
    """A parsed graph: nodes with their rows of text, edges with their types, titles of frames."""

    def __init__(self, text):
        self.nodes, self.edges, self.titles = {}, [], []
        head, *lines, last = text.splitlines()
        assert head.startswith('digraph "') and last == "}"
        depth = 1
        self.frame_of = {}
        open_titles = []
        for line in lines[5:]:
            if node := NODE.match(line):
                rows = re.findall(r"<tr><td>(.*?)</td></tr>", node[2])
                assert node[2].count("<td>") == len(rows)
                self.nodes[node[1]] = [re.sub(r"<.*?>", "", row) for row in rows]
                self.frame_of[node[1]] = tuple(open_titles)
            elif edge := EDGE.match(line):
                label = re.fullmatch(r'label=" (.*)"', edge[3])
                self.edges.append((edge[1], edge[2], label[1] if label else edge[3]))
            elif title := TITLE.match(line):
                self.titles.append(title[1])
                open_titles.append(title[1])
            elif FRAME.match(line):
                depth += 1
            else:
                assert line.strip() == "}", line
                open_titles.pop()
                depth -= 1
        assert depth == 1 and not open_titles
        assert {end for edge in self.edges for end in edge[:2]} <= set(self.nodes)

    def named(self, title):
        (name,) = [name for name, rows in self.nodes.items() if rows[0] == title]
        return name

    def into(self, title):
        """Return the sources of edges into the node of this title, and the labels of the edges."""
        to = self.named(title)
        return [(self.nodes[a][0], label) for a, b, label in self.edges if b == to]


def test_a_small_graph_has_this_text():
    program = trace(lambda x: jnp.sin(x) * 2.0, jnp.ones(3))
    lines = dot(program.replace(name="small")).splitlines()
    assert lines[0] == 'digraph "small" {'
    nodes = [line for line in lines if NODE.match(line)]
    assert [Read("\n".join(lines)).nodes[f"n{i}"] for i in range(4)] == [
        ["x", "f32[3]"],
        ["sin"],
        ["mul", "(·, 2.0)"],
        ["result", "f32[3]"],
    ]
    assert len({NODE.match(line)[3] for line in nodes}) == 3  # arguments, results, equations
    assert [EDGE.match(line).groups() for line in lines if EDGE.match(line)] == [
        ("n0", "n1", 'label=" f32[3]"'),
        ("n1", "n2", 'label=" f32[3]"'),
        ("n2", "n3", 'label=" f32[3]"'),
    ]


def test_a_call_is_a_frame_with_edges_through_it():
    inner = jax.jit(lambda y: jnp.cos(y), inline=False)
    graph = Read(dot(trace(lambda x: jnp.exp(inner(jnp.sin(x))), 1.0)))
    assert graph.titles == ["jit &lt;lambda&gt;"]
    assert graph.into("cos") == [("sin", "f32[]")] and graph.into("exp") == [("cos", "f32[]")]
    assert graph.frame_of[graph.named("cos")] == ("jit &lt;lambda&gt;",)
    assert graph.frame_of[graph.named("sin")] == ()


def test_a_scan_has_edges_for_its_carries():
    def cumulated(start, xs):
        return jax.lax.scan(lambda total, x: (total + x, jnp.sin(total)), start, xs)

    graph = Read(dot(trace(cumulated, 0.0, jnp.ones(10))))
    assert graph.titles == ["scan length=10"]
    assert graph.into("carry") == [("start", "f32[]"), ("add", "style=dashed, constraint=false")]
    assert graph.into("x") == [("xs", "f32[10]")]
    assert graph.into("result[0]") == [("add", "f32[]")]
    assert graph.into("result[1]") == [("sin", "f32[10]")]
    assert graph.frame_of[graph.named("start")] == ()


def test_a_while_shows_its_condition_and_its_body():
    program = trace(lambda x: jax.lax.while_loop(lambda y: y < 9.0, jnp.exp, x), 1.0)
    graph = Read(dot(program))
    assert graph.titles == ["while", "condition", "body"]
    assert graph.into("predicate") == [("lt", "")]
    assert graph.into("carry") == [("x", "f32[]"), ("exp", "style=dashed, constraint=false")]
    assert graph.into("result") == [("carry", "f32[]")]


def test_a_cond_selects_among_the_results_of_its_branches():
    def chosen(which, x):
        return jax.lax.switch(which, (jnp.sin, lambda y: y, lambda y: 0.0), x)

    graph = Read(dot(trace(chosen, 1, 1.0)))
    assert graph.titles == ["cond", "branch 0", "branch 1", "branch 2"]
    assert [source for source, _ in graph.into("cond")][1:] == ["result"] * 3
    ends = {(graph.nodes[a][0], graph.frame_of[b][1:]) for a, b, _ in graph.edges}
    assert {("sin", ("branch 0",)), ("x", ("branch 1",)), ("0.0", ("branch 2",))} <= ends


def test_shards_reductions_and_constants_are_shown():
    table = jnp.arange(5.0)
    graph = Read(dot(trace(lambda i: table[i], 2)))
    assert any(rows == ["constant[0]", "f32[5]"] for rows in graph.nodes.values())
    mesh = jax.make_mesh((2,), ("rows",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec("rows")
    halves = jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)
    assert Read(dot(trace(halves, jnp.ones(4)))).titles == ["shard_map rows=2"]
    solve = trace(lambda a, b: jnp.linalg.solve(a, b), jnp.eye(3), jnp.ones(3))
    assert "custom_linear_solve" in str(Read(dot(solve)).titles)


def test_relevant_parameters_are_shown():
    rows = Read(dot(trace(lambda x: x.sum(axis=1).astype("bfloat16"), jnp.ones((2, 3))))).nodes
    assert ["reduce_sum", "axes=(1,)"] in rows.values()
    assert ["convert_element_type", "new_dtype=bfloat16"] in rows.values()


def test_a_sown_value_has_its_name_and_a_scope_is_a_frame():
    def f(x):
        return jaxprtool.nest(lambda x: jaxprtool.variable(x, name="w"), scope="layer")(x)

    graph = Read(dot(trace(f, 1.0)))
    assert graph.nodes[graph.named("sow")] == ["sow", "tag=variable", "name=w"]
    assert graph.titles == ["jit nest:layer"]


def test_names_may_contain_anything():
    program = trace(lambda x: x, {'<b>&"\\\n': 1.0}).replace(name='a "quoted\\ <name>\n')
    text = dot(program)
    assert text.startswith('digraph "a \\"quoted\\\\ <name>?" {')
    assert "&lt;b&gt;&amp;" in text and len(Read(text).nodes) == 2


def test_in_huge_programs_shared_jaxprs_are_drawn_once():
    function = jnp.sin
    for level in range(40):
        inner = jax.jit(function)

        def function(x, inner=inner):
            return inner(x) + inner(2 * x)

        function.__name__ = f"level{level}"
    program = trace(function, jnp.float32(1))
    drawn = dot(program, full=True)
    Read(drawn)
    assert drawn.count("<b>jit level7</b>") == 2
    assert drawn.count("subgraph") == 40
    assert len(Read(dot(program)).nodes) <= 2 * MOST_BOXES


def test_bodies_shared_by_marked_calls_are_drawn_once():
    drawn = dot(layers(12), full=True)
    Read(drawn)
    assert drawn.count("<b>jit layer</b>") == 12 and drawn.count("<b>tanh</b>") == 1


# --- folding ------------------------------------------------------------------------------------


def attention(x, w):
    scores = x @ w["query"] @ (x @ w["key"]).T
    for _ in range(6):
        scores = scores - jnp.tanh(scores)
    return scores @ x


def block(x, w):
    x = x + attention(x, w["attention"])
    return x + jnp.maximum(x @ w["up"], 0.0)


def model(params, x):
    for w in params["blocks"]:
        x = block(x, w)
    return jnp.sin(x @ params["head"]), x


def deep_model(blocks):
    weights = {"attention": {"query": jnp.ones((4, 4)), "key": jnp.ones((4, 4))}}
    params = {"blocks": [{**weights, "up": jnp.ones((4, 4))}] * blocks, "head": jnp.ones((4, 4))}
    return trace(model, params, jnp.ones((3, 4)))


def test_one_layer_of_each_kind_is_open_in_a_large_model():
    graph = Read(dot(deep_model(5)))
    assert graph.titles == ["block #1", "attention"]
    boxes = [rows for rows in graph.nodes.values() if rows[0].startswith("block")]
    assert boxes == [[f"block #{i}", "21 equations", "like block #1"] for i in (2, 3, 4, 5)]
    assert ("block #2", "f32[3,4]") in graph.into("block #3")
    assert ("params['blocks'][2]", "3 arrays, 192 bytes") in graph.into("block #3")
    assert graph.nodes[graph.named("params['blocks'][2]")][1] == "3 arrays, 192 bytes"
    assert graph.into("result[1]") == [("block #5", "f32[3,4]")]


def test_many_equal_layers_are_one_box():
    graph = Read(dot(deep_model(12)))
    box = graph.named("block #2 … block #12")
    assert graph.nodes[box][1:] == ["231 equations", "11, all like block #1"]
    assert graph.into("block #2 … block #12") == [
        ("add", "f32[3,4]"),
        ("params['blocks']", "33 arrays, 2.1 KiB"),
    ]
    assert len(Read(dot(deep_model(12), depth=0)).into("block #12")) == 2


def test_depth_sets_how_deep_a_picture_is_open():
    program = deep_model(5)
    assert Read(dot(program, depth=0)).titles == []
    assert Read(dot(program, depth=1)).titles == [f"block #{i}" for i in range(1, 6)]
    titles = Read(dot(program, full=True)).titles
    assert titles == [t for i in range(1, 6) for t in (f"block #{i}", "attention")]
    assert Read(dot(program, depth=2)).titles == titles


def test_a_small_program_is_drawn_in_full():
    graph = Read(dot(deep_model(1)))
    assert not any("equations" in row for rows in graph.nodes.values() for row in rows)
    assert graph.titles == ["block", "attention"]


def test_layers_are_equal_only_if_they_compute_the_same():
    def step(x, factor, other):
        y = jnp.sin(x) * factor
        for _ in range(4):
            y = jnp.cos(y) + x
        return y * (y if other else x)

    def steps(x):
        for factor, other in ((1.0, False), (2.0, False), (2.0, False), (2.0, True)):
            x = step(x, factor, other)
        return x

    nodes = Read(dot(trace(steps, jnp.ones(3)), depth=0)).nodes.values()
    likes = [rows[2:] for rows in nodes if rows[0].startswith("step")]
    assert likes == [[], [], ["like step #2"], []]


def test_edges_between_boxes_are_merged_for_each_value():
    def first(x):
        return jnp.sin(x) * 2.0, jnp.cos(x)

    def second(y, z):
        return (y * z + y) * z

    def both(x):
        y, z = first(x)
        return second(y, z)

    graph = Read(dot(trace(both, jnp.ones(3)), depth=0))
    assert graph.into("second") == [("first", "2 arrays, 24 bytes")]
    assert graph.into("first") == [("x", "f32[3]")] and graph.into("result")[0][0] == "second"


def test_a_folded_loop_has_no_edge_to_itself():
    def looped(x):
        return jax.lax.scan(lambda c, _: (jnp.sin(c) * c, c), x, None, length=3)

    graph = Read(dot(trace(looped, 1.0), depth=0))
    assert graph.nodes[graph.named("scan length=3")][1] == "3 equations"
    assert [(graph.nodes[a][0], graph.nodes[b][0]) for a, b, _ in graph.edges] == [
        ("x", "scan length=3"),
        ("scan length=3", "result"),
    ]


def test_a_literal_in_an_open_frame_stays_there():
    def chosen(which, x):
        return jax.lax.switch(which, (lambda y: jnp.sin(jnp.cos(y)), lambda y: 0.5), x)

    graph = Read(dot(trace(chosen, 1, 1.0), depth=2))
    assert graph.frame_of[graph.named("0.5")] == ("cond", "branch 1")
    assert [a for a, _, _ in graph.edges].count(graph.named("0.5")) == 1


def test_an_unused_argument_is_shown():
    program = trace(lambda tree, x: x + 1.0, {"a": 1.0, "b": 2.0}, 3.0)
    graph = Read(dot(program, depth=0))
    assert graph.nodes[graph.named("tree")] == ["tree", "2 arrays, 8 bytes"]


@pytest.mark.parametrize("file", first_and_proofs(sample_files()))
def test_every_sample_is_drawn(file):
    for sample in sample_programs(file):
        program = sample.program()
        graph = Read(dot(program, full=True))
        for name in (*program.arg_names, *program.out_names):
            assert any(name == rows[0] for rows in graph.nodes.values())
        Read(dot(program))


@pytest.mark.proof
def test_random_programs_are_drawn():
    def prove(number, case):
        with case.setting():
            Read(dot(case.program()))

    prove_corpus(10, prove)


@pytest.mark.proof
@pytest.mark.parametrize("every", [100, pytest.param(1, marks=pytest.mark.sweep)])
def test_jaxs_programs_are_drawn(every):
    texts = []
    for case in harness_programs(every):
        with case.setting():
            texts.append(dot(case.program()))
            Read(texts[-1])
    if every == 1 and not missing("dot"):
        command = ["dot", "-Tcanon"]
        read = subprocess.run(command, input="\n".join(texts).encode(), capture_output=True)
        assert (read.returncode, read.stderr) == (0, b"")


# --- pictures ---------------------------------------------------------------------------------


@pytest.fixture
def graphviz(tmp_path, monkeypatch):
    """Make a `dot` program from this shell script, the only program on the PATH."""

    def install(script):
        program = tmp_path / "bin" / "dot"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{program.parent}:/bin:/usr/bin")

    return install


def test_the_picture_is_the_output_of_dot(graphviz):
    graphviz('echo "$1"; cat')
    assert graph_picture("digraph {}", "svg", "x.svg") == b"-Tsvg\ndigraph {}"


def test_without_dot_the_error_explains_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OutputError, match=r"cannot draw 'x\.png': Graphviz's program") as caught:
        graph_picture("digraph {}", "png", "x.png")
    assert "apt-get install graphviz" in caught.value.hint


def test_errors_of_dot_are_reported(graphviz):
    graphviz("echo 'Error: syntax error in line 1' >&2; exit 1")
    with pytest.raises(OutputError, match="dot exited with 1: Error: syntax error in line 1"):
        graph_picture("digraph", "pdf", "x.pdf")
