"""A search finds rows by primitive, type, path, scope and line, in the order of the program."""

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool.commands.browse.document import matches, matches_of_line


def found(shown, query):
    """Return the matches, by primitive or by name."""
    matching = matches(shown.document, query)
    nodes = [shown.outline.locate(matching.at(i)) for i in range(matching.total)]
    return [
        shown.document.ends(node.kind)[node.index].name
        if node.eqn is None
        else node.eqn.primitive.name
        for node in nodes
    ]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("tanh", ["tanh"]),
        ("s*n", ["scan", "sin"]),
        ("layer", ["jit"]),
        ("dense", ["mul", "add"]),
        ("loop", ["scan", "mul"]),
        ("mul loop", ["mul"]),
        ("params['w']", ["params['w']", "jit"]),
        ("tiny.py:12", ["mul"]),
        ("commands/browse/tiny.py:13", ["add"]),
        (":20", ["cos"]),
        (":2100", []),
        ("f64", []),
        ("TANH", []),
    ],
)
def test_matches_of_a_query(model, query, expected):
    assert found(model(), query) == expected


def test_queries_of_types_dtypes_and_shapes(model):
    shown = model()
    everything = shown.document.count + len(shown.document.about.arguments) + 1
    for query in ("f32[3]", "f32", "[3]"):
        assert len(found(shown, query)) == everything
    assert found(shown, "f32[]") == ["add", "mul"]  # the literals


def test_every_match_has_a_row(model):
    shown = model()
    matching = matches(shown.document, "f32")
    for number in range(matching.total):
        node = shown.outline.locate(matching.at(number))
        assert node.place == matching.at(number) and matching.before(node.place) == number
        row = shown.outline.show(node)
        assert shown.outline.rows[row] is node


def calls_of_silu(x):
    for _ in range(3):
        x = jax.nn.silu(x @ x)
    return x.sum()


def test_a_shared_body_matches_at_each_of_its_calls(model):
    shown = model(program=jaxprtool.trace(calls_of_silu, jnp.ones((2, 2))))
    matching = matches(shown.document, "logistic")
    assert matching.total == 3
    assert [matching.at(i) for i in range(3)] == [(1, 0, 0), (3, 0, 0), (5, 0, 0)]
    assert [matching.next((3, 0, 0), by) for by in (0, 1, -1)] == [1, 2, 0]
    assert (3, 0, 0) in matching and (3, 0, 1) not in matching and () not in matching


def test_a_body_without_user_code_has_the_lines_of_its_calls(model):
    def fun(x):
        return calls_of_silu(x) + jax.nn.silu(x).sum()

    shown = model(program=jaxprtool.trace(fun, jnp.ones((2, 2))))
    line = calls_of_silu.__code__.co_firstlineno + 2
    assert found(shown, f":{line} logistic") == ["logistic"] * 3
    last = fun.__code__.co_firstlineno + 1
    assert found(shown, f"test_search.py:{last} logistic") == ["logistic"] * 4
    node = shown.outline.locate((1, 0, 0))
    assert shown.document.all_frames(node)[0].line == line
    assert matches_of_line(shown.document, (__file__, line)).total == 3 * (2 + 2)


def test_exponentially_many_matches_are_counted(model):
    f = jnp.sin
    for _ in range(70):
        f = jax.jit(lambda a, f=f: f(f(a)))
    shown = model(program=jaxprtool.trace(f, 1.0))
    matching = matches(shown.document, "sin")
    assert matching.total == 2**70
    assert shown.outline.locate(matching.at(2**70 - 1)).eqn.primitive.name == "sin"
