"""One decorator adds rules to open tables; primitives are described without markup."""

from jax.extend.core import primitives

from jaxprtool.ir.rules import RuleTable, rule, summary


def test_a_rule_is_registered_for_several_primitives_and_replaces_an_older_one():
    table = RuleTable()

    @rule(table, "first", "second")
    def older(eqn):
        return "older"

    @rule(table, "second")
    def newer(eqn):
        return "newer"

    assert table.get("first") is older and table.get("second") is newer
    assert table.get("third") is None


def test_summaries_of_primitives_have_no_latex():
    assert summary("logistic") == "Elementwise logistic (sigmoid) function: 1 / (1 + e^-x)."
    assert summary("atan2") == "Elementwise two-term arc tangent: atan(x / y)."
    assert summary("ceil") == "Elementwise ceiling: \N{LEFT CEILING} x \N{RIGHT CEILING}."
    names = [getattr(value, "name", "") for value in vars(primitives).values()]
    texts = [text for text in map(summary, filter(None, names)) if text]
    assert len(texts) > 100
    assert [text for text in texts if set("\\{}") & set(text)] == []
