"""One decorator adds rules to open tables, by the table or its name."""

import pytest

from jaxprtool.errors import PluginError
from jaxprtool.ir.basics.rules import TABLES, RuleTable, rule


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


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_found_by_name(name, monkeypatch):
    marker = object()
    assert rule(name, "test_rules")(marker) is marker
    module = __import__(TABLES[name][0], fromlist=["_"])
    table = getattr(module, TABLES[name][1])
    assert isinstance(table, RuleTable) and table.pop("test_rules") is marker


def test_an_unknown_table_is_refused_with_a_hint():
    with pytest.raises(PluginError, match="unknown table of rules 'pyhton'") as caught:
        rule("pyhton", "sin")
    assert "python" in caught.value.hint
