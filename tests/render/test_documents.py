"""The tree, the table, the JSON document and the tables of stats."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool.analysis.stats import stats
from jaxprtool.commands.show.table import stats_tables
from jaxprtool.ir.documents import as_json
from jaxprtool.ir.program import Program
from jaxprtool.loading.trace import trace
from jaxprtool.render.reports import program_document
from jaxprtool.render.terminal.listing import ShowOptions
from jaxprtool.render.terminal.tree import table, tree
from tests.render.programs import PROGRAMS, X, jaxpr_of


def loops():
    return PROGRAMS["deep_nesting"]()


def a_program():
    def f(params, x):
        return {"y": jnp.tanh(x @ params["w"]), "n": 1.0}

    args = ({"w": np.ones((3, 4), np.float32)}, X)
    closed = jax.make_jaxpr(f)(*args)
    return Program(
        "f",
        closed,
        jax.tree.structure((args, {})),
        jax.tree.structure({"n": 0, "y": 0}),
        ("params['w']", "x"),
        ("result['n']", "result['y']"),
    )


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("width", (80, 160))
def test_trees_tables_and_stats_keep_to_the_width(name, width):
    closed = PROGRAMS[name]()
    views = [
        tree(closed, ShowOptions(width=width, source=True, scopes=True)),
        table(closed, ShowOptions(width=width)),
        table(closed, ShowOptions(width=width, source=True)),
        stats_tables(stats(closed), width, None),
    ]
    for view in views:
        assert max(map(len, view.plain().splitlines()), default=0) <= width


def test_tree_shows_the_structure_with_types_and_counts():
    assert tree(loops()).plain().splitlines() == [
        "f (f32[3]) → f32[] f32[3]  11 equations",
        "└── jit <lambda> (f32[3]) → f32[] f32[3]  10 equations",
        "    ├── d:f32[1] = slice[limit_indices=(1,) start_indices=(0,) strides=None] a",
        "    ├── e:f32[] = squeeze[dimensions=(0,)] d",
        "    └── scan (f32[] f32[]) → f32[]  7 equations",
        "        ├── h:bool[] = gt g 0.0:f32[]",
        "        ├── i:i32[] = convert_element_type[new_dtype=int32 weak_type=False] h",
        "        └── cond",
        "            ├── branches[0] (f32[] f32[]) → f32[]  1 equation",
        "            │   └── m:f32[] = sin l",
        "            └── branches[1] (f32[] f32[]) → f32[]  3 equations",
        "                └── scan (f32[] i32[] f32[]) → i32[] f32[]  2 equations",
        "                    ├── u:i32[] = add s 1:i32[]",
        "                    └── v:f32[] = mul t r",
    ]


def test_tree_folds_and_selects():
    assert tree(loops(), ShowOptions(depth=0)).plain().splitlines()[1:] == [
        "└── jit <lambda> (f32[3]) → f32[] f32[3]  10 equations"
    ]
    shown = tree(loops(), ShowOptions(only=["sin"], types=False)).plain()
    assert "… 2 equations" in shown and "m = sin l" in shown and "mul" not in shown


def test_tree_unfolds_a_shared_body_once():
    shown = tree(PROGRAMS["shared_within_shared"]()).plain()
    assert shown.count("i:f32[3] = sin h") == 1
    assert "jit a (f32[3]) → f32[3]  16 equations, shown above" in shown


def test_table_has_a_row_for_each_equation_with_its_location():
    rows = table(loops(), ShowOptions(width=300, source=True)).plain().splitlines()[2:]
    places = " ".join(row.split()[0] for row in rows)
    loop = "0.2.0 0.2.1 0.2.2 0.2.2[0].0 0.2.2[1].0 0.2.2[1].0.0 0.2.2[1].0.1"
    assert places == f"0 0.0 0.1 0.2 {loop}"
    assert re.search(
        r"0\.2\.0 +h:bool\[\] +gt +g 0\.0:f32\[\] +tests/render/programs\.py:\d+$", rows[4]
    )


def test_table_folds_and_selects():
    assert len(table(loops(), ShowOptions(width=160, depth=0)).plain().splitlines()) == 3
    rows = table(loops(), ShowOptions(width=300, only=["sin"])).plain().splitlines()[2:]
    assert [row.split()[0] for row in rows] == [
        "0",
        "0.…",
        "0.2",
        "0.2.…",
        "0.2.2",
        "0.2.2[0].0",
        "0.2.2[1].…",
    ]


@pytest.mark.parametrize("name", PROGRAMS)
def test_documents_are_json_and_hold_every_equation(name):
    closed = PROGRAMS[name]()
    document = json.loads(json.dumps(program_document(closed)))
    written = json.dumps(document["equations"]) + json.dumps(document["shared"])
    for primitive in {eqn.primitive.name for eqn in closed.eqns}:
        assert f'"primitive": "{primitive}"' in written
    json.dumps(as_json(stats(closed)))


def test_document_of_a_program():
    document = program_document(a_program(), ShowOptions(source=False))
    assert document == {
        "name": "f",
        "arguments": [
            {"name": "params['w']", "type": "f32[3,4]", "bytes": 48, "variable": "a"},
            {"name": "x", "type": "f32[3]", "bytes": 12, "variable": "b"},
        ],
        "constants": [],
        "outputs": [
            {"name": "result['n']", "type": "f32[]", "bytes": 4, "literal": "1.0"},
            {"name": "result['y']", "type": "f32[4]", "bytes": 16, "variable": "d"},
        ],
        "effects": [],
        "equations": [
            {
                "primitive": "dot_general",
                "inputs": [{"variable": "b"}, {"variable": "a"}],
                "outputs": [{"variable": "c", "type": "f32[4]"}],
                "parameters": {
                    "dimension_numbers": "(([0], [0]), ([], []))",
                    "preferred_element_type": "float32",
                },
                "bodies": [],
            },
            {
                "primitive": "tanh",
                "inputs": [{"variable": "c"}],
                "outputs": [{"variable": "d", "type": "f32[4]"}],
                "parameters": {},
                "bodies": [],
            },
        ],
        "shared": {},
    }


def test_document_has_shared_bodies_once_and_source_locations():
    document = program_document(PROGRAMS["shared_within_shared"]())
    assert set(document["shared"]) == {"a", "g", "lambda"}
    first = document["equations"][0]
    assert first["bodies"] == [{"parameter": "jaxpr", "shared": "a"}]
    assert first["place"]["path"].endswith("tests/render/programs.py")
    inner = document["shared"]["lambda"]["equations"]
    assert [eqn["primitive"] for eqn in inner] == ["sin"]


def test_document_folds_and_selects():
    folded = program_document(loops(), ShowOptions(depth=0))
    assert folded["equations"][0]["bodies"] == [{"parameter": "jaxpr", "folded": 10}]
    selected = program_document(loops(), ShowOptions(only=["sin"], types=False))
    body = selected["equations"][0]["bodies"][0]["jaxpr"]
    assert body["equations"][0] == {"skipped": 2}
    assert body["arguments"] == [{"variable": "a"}]


def test_document_has_effects():
    document = program_document(PROGRAMS["callbacks_and_prints"]())
    assert document["effects"] and document["equations"][0]["effects"]


def test_stats_tables_name_arguments_and_outputs():
    shown = stats_tables(stats(a_program()), 80, None).plain()
    assert shown.splitlines()[0] == "f: 2 equations"
    assert "2 arguments, 60 bytes" in shown
    assert re.search(r"params\['w'\] +f32\[3,4\] +48\n", shown)
    assert "result['y']" in shown


def test_stats_tables_of_a_symbolic_program_leave_out_bytes_that_depend_on_sizes():
    (n,) = jax.export.symbolic_shape("n")
    counted = stats(trace(jnp.add, jax.ShapeDtypeStruct((n,), jnp.float32), 1))
    shown = stats_tables(counted, 80, None)
    assert "\n2 arguments\n" in shown.plain(), shown.plain()


def test_stats_tables_of_a_deep_program_sum_the_deepest_levels():
    def nest(f):
        return lambda x: jax.jit(lambda y: f(y) + 1)(x)

    f = jnp.sin
    for _ in range(9):
        f = nest(f)
    counted = stats(jaxpr_of(f, X))
    assert counted.by_depth == (1,) + (2,) * 9
    shown = stats_tables(counted, 80, None).plain()
    assert "depth 5+" in shown
    assert re.search(r"in all +19 +1 +2 +2 +2 +2 +10$", shown, re.M)
