"""Rows fold, by nesting and by scopes. Their contents are created on demand."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxprtool
from jaxprtool.commands.browse.document import Kind

x = jnp.arange(4.0)


def test_bodies_are_folded_at_first(model):
    assert model().texts == [
        "3 arguments  36 bytes",
        "hidden:f32[3] = jit layer x params['w']  … 3 equations",
        "_:f32[3] = cos hidden",
        "b:f32[3] = scan hidden  … 2 equations",
        "scaled:f32[3] = mul b params['scale']",
        "f:f32[3] = sub scaled hidden",
        "1 result  12 bytes",
    ]


def test_a_row_unfolds_in_place_and_folds_again(model):
    shown = model()
    before = shown.texts
    shown.outline.toggle(1)
    assert [text.strip() for text in shown.texts[2:5]] == [
        "z:f32[3] = mul h w",
        "z_1:f32[3] = add z 1.0:f32[]",
        "a:f32[3] = tanh z_1",
    ]
    shown.outline.toggle(1)
    assert shown.texts == before
    shown.outline.open_all()
    assert len(shown.texts) == len(before) + 5
    shown.outline.close_all()
    assert shown.texts == before


def test_arguments_and_results_have_rows(model):
    shown = model()
    shown.outline.toggle(6)
    shown.outline.toggle(0)
    assert [text.strip() for text in shown.texts[1:4]] == [
        "params['scale']:f32[3]",
        "params['w']:f32[3]",
        "x:f32[3]",
    ]
    assert shown.texts[-1].strip() == "result:f32[3] = f"


def test_with_scopes_consecutive_equations_share_a_row(model):
    shown = model(by_scope=True)
    assert [text for text in shown.texts if "loop" in text] == ["loop  … 4 equations"]
    shown.outline.open_all()
    texts = [text.strip() for text in shown.texts]
    inside = texts.index("loop  … 4 equations")
    assert texts[inside + 1].startswith("b:f32[3] = scan")
    assert "dense  … 2 equations" in texts


def test_chains_of_single_scopes_are_one_row(model):
    def fun(a):
        with jax.named_scope("a"), jax.named_scope("b"):
            a = jnp.sin(jnp.cos(a))
        with jax.named_scope("a"):
            a = jnp.tan(a)
        with jax.named_scope("c"):
            return jnp.exp(a)

    shown = model(program=jaxprtool.trace(fun, x), by_scope=True)
    shown.outline.open_all()
    texts = [text for text in shown.texts if "result" not in text and "argument" not in text]
    names = [re.sub(r"\S+ = ", "", text) for text in texts]
    assert [name.rstrip("ab_012") for name in names] == [
        *("a  … 3 equations", "  b  … 2 equations", "    cos ", "    sin ", "  tan ", "exp ")
    ]


def test_scopes_are_those_of_cost(model):
    def loss(a):
        with jax.named_scope("layer"):
            a = jnp.sin(a) * jnp.cos(a)
        with jax.named_scope("head"):
            return (jnp.tanh(a) * a).sum()

    program = jaxprtool.trace(lambda a: a - jax.grad(loss)(a), x)
    shown = model(program=program, by_scope=True)
    shown.outline.open_all()
    rows = [node.label for node in shown.outline.rows if node.kind is Kind.scope]
    groups = jaxprtool.cost(program, by="scope").groups
    assert set(rows) == {name for group in groups for name in group.path}
    assert any(row.startswith("backward") for row in rows)


def test_several_bodies_have_a_row_each(model):
    def fun(a):
        return lax.cond(a[0] > 0, jnp.sin, lambda b: jnp.cos(b) * 2, a)

    shown = model(program=jaxprtool.trace(fun, x))
    shown.outline.open_all()
    assert [t.strip() for t in shown.texts if "branches" in t] == [
        "branches[0]  … 2 equations",
        "branches[1]  … 1 equation",
    ]
    assert shown.row("branches[1]").path.endswith("].params['branches'][1]")


def test_the_path_of_a_row_leads_to_its_equation(model):
    shown = model(by_scope=True)
    for start in ("z:f32[3] = mul", "hidden", "a:f32[3] = tanh"):
        node = shown.row(start)
        found = eval(node.path, {"eqns": shown.document.top.eqns})
        assert found is node.eqn


@pytest.mark.parametrize("by_scope", [False, True])
def test_exponentially_many_paths_through_shared_bodies_are_fast(model, by_scope):
    f = jnp.sin
    for _ in range(40):
        f = jax.jit(lambda a, f=f: f(f(a)))
    shown = model(program=jaxprtool.trace(f, x), by_scope=by_scope)
    assert shown.document.count > 2**40
    shown.outline.open_all()
    assert len(shown.texts) < 1000
    node = shown.outline.locate((0,) * 79)
    number = shown.outline.show(node)
    assert shown.outline.rows[number] is node


def test_a_program_without_equations_or_arguments(model):
    assert model(program=jaxprtool.trace(lambda: ())).texts == []
    assert model(program=jaxprtool.trace(lambda a: a, x)).texts == [
        "1 argument  16 bytes",
        "1 result  16 bytes",
    ]


def test_unprintable_characters_are_escaped(model):
    def fun(a):
        with jax.named_scope("\x1b[31mred"):
            return jnp.sin(jnp.cos(a))

    shown = model(program=jaxprtool.trace(fun, x), by_scope=True)
    assert all(text.isprintable() for text in shown.texts)
