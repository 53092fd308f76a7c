"""HLO modules in the browser: rows, navigation, details, and the keys that do not apply."""

import pytest

from jaxprtool.commands.browse.app import Browser
from jaxprtool.commands.browse.document import Navigator, PassState, ProgramOutline, matches
from jaxprtool.commands.browse.panes import document_of, info
from jaxprtool.extend.listing import ModuleJaxpr
from jaxprtool.extend.programs import Start, backward_slice, forward_slice
from jaxprtool.formats.hlo import stored_module
from tests.commands.browse.conftest import Model
from tests.commands.browse.test_app import browsed
from tests.programs.modules import LOOP

SOURCE = "def step(x):\n    h = tanh(x * x)\n    return cond(h)\n"


@pytest.fixture
def state(tmp_path):
    """Return the state of `LOOP`."""
    (tmp_path / "step.py").write_text(SOURCE)
    (tmp_path / "step.hlo").write_text(LOOP % ((tmp_path / "step.py",) * 2))
    module = ModuleJaxpr(stored_module(str(tmp_path / "step.hlo")).module)
    return PassState("module", module.jaxpr, module=module)


@pytest.fixture
def model(state):
    """Return the document and the rows of `LOOP`."""
    made = Model(state)
    made.document = document_of(state)
    made.outline = ProgramOutline(made.document.flow)
    made.navigator = Navigator(made.document, made.outline)
    return made


def test_rows_are_instructions_in_xlas_terms_and_computations_fold(model):
    assert model.texts == [
        "1 argument  16 bytes",
        "while.1:(s32[], f32[4]) = while[10 times] 0:s32[] params['x']  … 5 instructions",
        "which:s32[] = custom-call choose while.1",
        "branch:f32[4] = conditional which while.1[1] params['x']  … 2 instructions",
        "1 result  16 bytes",
    ]
    model.outline.open_all()
    assert model.texts[2:9] == [
        "  body body  … 4 instructions",
        "    next:s32[] = add carry[0] 1:s32[]",
        "    fusion.1:f32[4] = fusion[multiply, tanh] carry[1] carry[1]  … 2 instructions",
        "      m:f32[4] = multiply p q",
        "      t:f32[4] = tanh m",
        "  condition condition  … 1 instruction",
        "    goes:pred[] = compare[direction=LT] carry.1[0] 10:s32[]",
    ]
    assert model.texts[10:15] == [
        "branch:f32[4] = conditional which while.1[1] params['x']  … 2 instructions",
        "  positive  … 1 instruction",
        "    negated:f32[4] = negate a",
        "  other  … 1 instruction",
        "    copied:f32[4] = copy b",
    ]


@pytest.mark.parametrize(
    ("row", "definitions", "uses"),
    [
        ("m:", "params['x'] fusion.1", "t"),
        ("t:", "m", "fusion.1"),
        ("negated:", "while.1", "branch result"),
        ("copied:", "params['x']", "branch result"),
        ("which:", "while.1", "branch"),
    ],
)
def test_definitions_and_uses_pass_through_fusions_loops_and_branches(
    model, row, definitions, uses
):
    node = model.row(row)
    found = model.navigator.definitions(node), model.navigator.uses(node)
    starts = [" ".join(model.text(way.node).split(":")[0] for way in ways) for ways in found]
    assert starts == [definitions, uses]


def test_slices_follow_a_value_through_a_loop_and_a_branch(model, state):
    def names(ids):
        outline = model.outline
        outline.open_all()
        return {
            state.module.instruction(node.eqn).name
            for node in outline.rows
            if node.eqn is not None and id(node.eqn) in ids
        }

    start = Start(model.document.values(model.row("m:")))
    after = names(forward_slice(model.document.top, start).members())
    assert after == {"m", "t", "fusion.1", "while.1", "which", "branch", "negated"}
    start = Start(model.document.values(model.row("copied:")))
    before = names(backward_slice(model.document.top, start).members())
    assert {"copied", "branch", "which", "while.1"} <= before and "negated" not in before


@pytest.mark.parametrize(
    ("query", "count"),
    [("tanh", 1), ("fusion.1", 1), ("params['x']", 3), ("pred[]", 1), ("step.py:2", 3), ("zip", 0)],
)
def test_a_search_finds_opcodes_names_arguments_types_and_lines(model, query, count):
    assert matches(model.document, query).total == count


def test_details_have_the_attributes_scope_and_path(model):
    rows = [f"{label} {text}" for label, text in details(model, model.row("t:"))]
    assert "scope block" in rows and "path while.1/fusion.1/t" in rows
    assert "with op_name=jit(step)/block/tanh" in rows and " shape=f32[4]{0}" in rows
    assert any(row.endswith("step.py:2") and row.startswith("line") for row in rows)


def details(model, node):
    _, table = info(model.document, model.navigator, node).renderables
    labels, texts = (column._cells for column in table.columns)
    return [(label, str(text)) for label, text in zip(labels, texts, strict=True)]


def test_keys_without_a_meaning_for_modules_say_so(state):
    async def use(screen):
        assert screen.top.split() == ["jit_step", "10", "instructions"]
        for key in ("left_square_bracket", "s", "c", "C"):
            await screen.press(key)
            assert screen.status == "an HLO module has one state: passes do not apply to it"
        await screen.press("v")
        assert screen.status == "an HLO module has the names of XLA only"
        await screen.press("t", "t", "G", "g", "down", "m", "m", "u")
        assert screen.row.startswith("while.1:")

    browsed(Browser([state]), use)
