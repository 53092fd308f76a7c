"""One decorator adds rules to open tables."""

from jaxprtool.ir.rules import RuleTable, rule


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
