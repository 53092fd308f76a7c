"""The states of a program before and after passes, with their changes."""

import jaxprtool
from jaxprtool.ir.equations import equations


def marked(state):
    top = state.program.jaxpr
    return {
        eqn.primitive.name: state.marks[id(eqn)]
        for eqn in equations(getattr(top, "jaxpr", top))
        if id(eqn) in state.marks
    }


def test_a_program_that_no_pass_changes_has_one_state(states):
    (state,) = states()
    assert state.label == "traced" and marked(state) == {}
    assert len(states("dce, dce, dce")) == 2


def test_equations_that_a_pass_removes_and_adds_are_marked(states):
    traced, dce, batched = states("dce, batch(axis_size=2)")
    assert [state.label for state in (dce, batched)] == ["dce", "batch(axis_size=2)"]
    assert marked(traced) == {"cos": "-"}
    assert set(marked(dce).values()) == {"-"} and "tanh" in marked(dce)
    assert set(marked(batched).values()) == {"+"}


def test_an_equation_that_is_added_and_removed_again_has_both_marks(states):
    _, batched, _ = states("batch(axis_size=2), batch(axis_size=5)")
    assert marked(batched)["tanh"] == "±"


def test_each_of_several_programs_of_a_pass_is_a_state(states):
    program = jaxprtool.load("samples/mlp_variables.py:net")
    traced, init, apply = states("unzip", program)
    assert [init.label, apply.label] == ["unzip init", "unzip apply"]
    assert init.before is traced and apply.before is traced
    # An equation in one of them is not removed.
    assert set(marked(traced)) == {"jit", "sow"}
    assert set(marked(init)) == set(marked(apply)) == {"jit"}
