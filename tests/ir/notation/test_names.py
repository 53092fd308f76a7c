"""The order of names, and which jaxprs get one."""

from itertools import islice

from jaxprtool.ir.notation.signatures import _distinct, fresh_names


def test_names_are_numbers_in_base_26():
    names = list(islice(fresh_names(set()), 26 * 26 + 2))
    assert names[:2] == [" a", " b"]
    assert names[25:28] == [" z", " ba", " bb"]
    assert names[-3:] == [" zz", " baa", " bab"]


def test_names_of_shared_jaxprs_are_skipped():
    assert list(islice(fresh_names({"b", "d"}), 3)) == [" a", " c", " e"]


def test_a_numbered_name_is_not_that_of_another_jaxpr():
    found = _distinct(dict(enumerate(["h", "h", "h1", "h11", "h1", "h"])))
    assert list(found.values()) == ["h", "h1", "h11", "h111", "h12", "h2"]
    assert list(_distinct(dict(enumerate(["f11", "f1", "f1"]))).values()) == ["f11", "f1", "f12"]
