"""Graphs for Model Explorer: they follow its rules, and their contents."""

import json

import jax
import jax.numpy as jnp
import pytest

from jaxprtool import trace
from jaxprtool.formats.pictures import model_explorer
from tests.formats.test_dot import deep_model
from tests.programs import harness_programs, sample_programs
from tests.programs.corpus import prove_corpus
from tests.programs.outlined import layers
from tests.programs.samples import sample_files


def texts(pairs):
    """Return a list of keys and values as a dict, after a check of its form."""
    assert all(set(pair) == {"key", "value"} for pair in pairs)
    assert all(isinstance(value, str) for pair in pairs for value in pair.values())
    assert len({pair["key"] for pair in pairs}) == len(pairs)
    return {pair["key"]: pair["value"] for pair in pairs}


class Read:
    """A graph parsed by Model Explorer's rules."""

    def __init__(self, graph, ids):
        self.nodes = {node["id"]: node for node in graph["nodes"]}
        assert len(self.nodes) == len(graph["nodes"]) and all(self.nodes)
        self.groups = graph["groupNodeAttributes"]
        self.layers = {node["namespace"] for node in graph["nodes"]}
        for layer in self.layers:
            assert layer == "" or all(step.strip() for step in layer.split("/"))
        for layer, facts in self.groups.items():
            assert all(isinstance(text, str) for pair in facts.items() for text in pair)
            assert layer == "" or any(f"{each}/".startswith(f"{layer}/") for each in self.layers)
        for node in graph["nodes"]:
            assert node["label"] and set(node.get("subgraphIds", ())) <= ids
            texts(node["attrs"])
            outputs = [output["id"] for output in node["outputsMetadata"]]
            assert outputs == [str(i) for i in range(len(outputs))]
            assert all("tensor_shape" in texts(out["attrs"]) for out in node["outputsMetadata"])
            places = [edge["targetNodeInputId"] for edge in node["incomingEdges"]]
            assert len(set(places)) == len(places)
        self.edges = []
        for node in graph["nodes"]:
            for edge in node["incomingEdges"]:
                source = self.nodes[edge["sourceNodeId"]]
                if source["outputsMetadata"]:
                    assert int(edge["sourceNodeOutputId"]) < len(source["outputsMetadata"])
                self.edges.append((self.path(source), self.path(node)))

    def path(self, node):
        return f"{node['namespace']}/{node['label']}".lstrip("/")

    def named(self, path):
        (node,) = [node for node in self.nodes.values() if self.path(node) == path]
        return node


def read(program):
    """Return the graphs of a program."""
    document = json.loads(model_explorer(program))
    assert set(document) == {"label", "graphs"} and document["label"] == program.name
    ids = {graph["id"] for graph in document["graphs"]}
    assert len(ids) == len(document["graphs"])
    return [Read(graph, ids) for graph in document["graphs"]]


def test_layers_are_those_of_the_model():
    (graph,) = read(deep_model(2))
    assert {"block #1", "block #1/attention", "block #2", "block #2/attention"} <= graph.layers
    assert graph.groups["block #1"] == {"equations": "21"}
    assert ("block #1/add", "block #2/attention/dot_general") in graph.edges
    assert ("block #2/add", "result[1]") in [(a, b.split("/")[-1]) for a, b in graph.edges]


def test_arguments_are_in_the_layers_that_read_them():
    (graph,) = read(deep_model(2))
    query = graph.named("block #1/attention/params['blocks'][0]['attention']['query']")
    assert query["outputsMetadata"][0]["attrs"][0] == {"key": "tensor_shape", "value": "f32[4,4]"}
    assert graph.named("x")["namespace"] == ""
    program = trace(lambda p: (jnp.sin(p["a"]) + p["b"], p["a"] * p["b"]), {"a": 1.0, "b": 2.0})
    (graph,) = read(program)
    assert graph.named("arguments/p/p['a']") and graph.named("results/result/result[1]")


def test_an_equation_has_its_operation_and_source():
    def f(x):
        with jax.named_scope("scaled"):
            total = x.sum(axis=1)
            return total * 2.0

    (graph,) = read(trace(f, jnp.ones((2, 3))))
    summed, scaled = graph.named("scaled/reduce_sum"), graph.named("scaled/mul")
    facts = texts(summed["attrs"])
    assert facts["axes"] == "(1,)" and facts["scope"] == "scaled"
    assert facts["source"].startswith("tests/formats/test_model_explorer.py:")
    assert texts(summed["outputsMetadata"][0]["attrs"])["__tensor_tag"] == "total"
    assert texts(scaled["attrs"])["operands"] == "(·, 2.0)"


def test_a_loop_is_a_layer_with_edges_for_its_carry():
    def cumulated(start, xs):
        return jax.lax.scan(lambda total, x: (total + x, jnp.sin(total)), start, xs)

    (graph,) = read(trace(cumulated, 0.0, jnp.ones(10)))
    assert graph.groups["scan length=10"]["length"] == "10"
    into = [source for source, target in graph.edges if target == "scan length=10/carry"]
    assert into == ["start", "scan length=10/add"]
    row = graph.named("scan length=10/x")["outputsMetadata"][0]["attrs"]
    assert texts(row) == {"tensor_shape": "f32[]"}


def test_branches_are_layers():
    def chosen(which, x):
        return jax.lax.switch(which, (jnp.sin, lambda y: y), x)

    (graph,) = read(trace(chosen, 1, 1.0))
    assert ("cond/branch 0/sin", "cond/branch 0/result") in graph.edges
    assert ("cond/branch 1/result", "cond/cond") in graph.edges


def test_a_body_that_is_not_drawn_again_is_a_separate_graph():
    program = layers(3)
    first, *others = read(program)
    leaves = [node for node in first.nodes.values() if node.get("subgraphIds")]
    assert [node["label"] for node in leaves] == ["jit block", "jit layer", "jit layer"]
    assert len(others) == 2 and all(graph.nodes for graph in others)


def test_names_may_contain_anything():
    (graph,) = read(trace(lambda x: x, {"a/b": 1.0, '<b>&"\n': 2.0, "": 3.0}))
    assert len(graph.nodes) == 6


@pytest.mark.parametrize(
    "file",
    [
        file
        if file in ("branches.py", "layers.py")
        else pytest.param(file, marks=pytest.mark.sweep)
        for file in sample_files()
    ],
)
def test_every_sample_follows_the_rules(file):
    for sample in sample_programs(file):
        program = sample.program()
        labels = {node["label"] for node in read(program)[0].nodes.values()}
        assert {*program.arg_names, *program.out_names} <= labels


@pytest.mark.proof
def test_random_programs_follow_the_rules():
    def prove(number, case):
        with case.setting():
            read(case.program())

    prove_corpus(5, prove)


@pytest.mark.parametrize("every", [400, pytest.param(1, marks=pytest.mark.sweep)])
def test_jaxs_programs_follow_the_rules(every):
    for case in harness_programs(every):
        with case.setting():
            read(case.program())
