"""The text of documents: their version, and a budget of bytes."""

import json
from typing import NamedTuple

import pytest

from jaxprtool.errors import ArgumentsError
from jaxprtool.render.documents import SCHEMA, document_text


class Row(NamedTuple):
    name: str
    shape: tuple[int, ...] = (3, 4)
    parts: tuple["Row", ...] = ()


class Document(NamedTuple):
    title: str
    rows: list[Row]


def document(rows: int, parts: int = 0) -> Document:
    inner = tuple(Row(f"part {i}") for i in range(parts))
    return Document("a ← b", [Row(f"row {i}", parts=inner) for i in range(rows)])


def test_a_document_begins_with_its_version():
    text = document_text(document(2))
    assert text.startswith(f'{{\n  "schema": {SCHEMA},\n  "title"')
    whole = json.loads(document_text(document(2), 10_000))
    assert whole == json.loads(text)


@pytest.mark.parametrize("most", [220, 500, 1000, 2000, 4000])
def test_the_last_entries_of_lists_are_left_out_to_fit(most):
    whole = json.loads(document_text(document(30, 5)))
    text = document_text(document(30, 5), most)
    cut = json.loads(text)
    assert len(text.encode()) < most and cut["schema"] == SCHEMA
    count = len(cut["rows"])
    kept = [{**row, "parts": row["parts"][:count]} for row in whole["rows"][:count]]
    assert cut["rows"] == kept  # first entries, and no shape is cut
    assert cut["omitted"]["rows"] == 30 - count
    assert cut["omitted"].get("rows.parts", 0) == count * max(5 - count, 0)
    more = document_text(document(30, 5), most * 2)
    assert len(json.loads(more)["rows"]) > count


def test_a_budget_below_the_frame_is_an_error():
    with pytest.raises(ArgumentsError, match="takes 65 bytes"):
        document_text(document(3), 60)
