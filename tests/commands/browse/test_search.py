"""A search finds rows by primitive, type, path, scope and line, in the order of the program."""

import pytest

from jaxprtool.commands.browse.navigation import matches
from jaxprtool.commands.browse.outline import Kind


def found(shown, query):
    """Return the matches, by primitive or by name."""
    return [
        shown.document.about.arguments[index].name
        if where is Kind.argument
        else shown.document.about.outputs[index].name
        if where is Kind.result
        else where.eqns[index].primitive.name
        for where, index in matches(shown.document, query)
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
        ("", []),
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
    for where, index in matches(shown.document, "f32"):
        if isinstance(where, Kind):
            node = shown.outline.end_row(where, index)
        else:
            node = shown.outline.locate(where, index)
        number = shown.outline.show(node)
        assert shown.outline.rows[number] is node
