"""The table of repeated code fits the terminal."""

from jaxprtool.commands.outline.table import repetition_table
from jaxprtool.ir.repetition import RepeatedBody, Repetition, SourceRange

SOURCE = SourceRange("/python/site-packages/models/attention.py", 10, 20)


def body(name, copies=2):
    return RepeatedBody(name, copies, 30, copies * 0.03, SOURCE, ())


def shown(found, width=100, top=None):
    return repetition_table(found, width, top).plain().splitlines()


def test_a_path_is_shortened_to_fit():
    found = Repetition("loss", 1000, 1000, 500, 100, (body("layer", 12),))
    assert shown(found, 100)[3].endswith(" models/attention.py:10-20")
    assert shown(found, 66)[3].endswith("  attention.py:10-20")


def test_a_body_of_one_line_has_one_line_number():
    one = RepeatedBody("layer", 2, 30, 0.5, SourceRange("model.py", 7, 7), ())
    assert shown(Repetition("loss", 100, 100, 50, 10, (one,)))[3].endswith(" model.py:7")
    unknown = RepeatedBody("layer", 2, 30, 0.5, None, ())
    assert shown(Repetition("loss", 100, 100, 50, 10, (unknown,)))[3].endswith("50.0%")


def test_only_the_largest_of_small_bodies_are_shown():
    small = tuple(body(f"layer_{i}") for i in range(8))
    lines = shown(Repetition("loss", 1000, 1000, 1000, 1000, (), small), top=5)
    assert lines[0] == "loss: 1,000 equations, too little repetition to outline"
    assert [line.split()[0] for line in lines[3:8]] == [f"layer_{i}" for i in range(5)]
    assert lines[8] == "… 3 more: --all"


def test_a_line_names_the_largest_bodies():
    few = Repetition("loss", 1000, 1000, 500, 100, (body("layer", 12), body("norm")))
    assert few.line == ("loss has layer 12 times, norm 2 times: 500 of 1,000 equations to compile")
    many = Repetition("loss", 1000, 1000, 500, 100, tuple(body(f"layer_{i}") for i in range(4)))
    assert "layer_2 2 times, …: 500 of" in many.line
