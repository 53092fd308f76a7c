"""The order of names, and which jaxprs get one."""

from itertools import islice

from jaxprtool.ir.notation.names import fresh_names


def test_names_are_numbers_in_base_26():
    names = list(islice(fresh_names(set()), 26 * 26 + 2))
    assert names[:2] == [" a", " b"]
    assert names[25:28] == [" z", " ba", " bb"]
    assert names[-3:] == [" zz", " baa", " bab"]


def test_names_of_shared_jaxprs_are_left_out():
    assert list(islice(fresh_names({"b", "d"}), 3)) == [" a", " c", " e"]
