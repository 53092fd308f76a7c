"""The enumerated programs, and how their values are compared."""

import itertools

import jax
import numpy as np
import pytest
from jax import lax

from jaxprtool import trace
from jaxprtool.jaxcompat import replace_jaxpr
from tests.programs.enumerated.evaluation import Values
from tests.programs.enumerated.families import FAMILIES
from tests.programs.enumerated.graphs import Family
from tests.programs.enumerated.templates import Operation

SCALAR = jax.core.ShapedArray((), np.float32)
OPERATIONS = [Operation("neg", lax.neg, 1), Operation("sub", lax.sub, 2)]


def family(arguments=2, **options):
    return Family("small", OPERATIONS, [SCALAR] * arguments, **options)


def graphs(family):
    for unit in family.units():
        for graph in family.graphs(unit):
            yield graph.equations, graph.results


def texts(family):
    return [family.text(g) for unit in family.units() for g in family.graphs(unit)]


def canonical(equations, results):
    """Return the smallest form of a program, over all orders of its equations."""
    forms = []
    for order in itertools.permutations(range(len(equations))):
        place = {old: new for new, old in enumerate(order)}
        names, form = {}, []
        for old in order:
            number, operands = equations[old]
            if any(kind == "r" and place[n] >= place[old] for kind, n in operands):
                break
            form.append(
                (
                    number,
                    tuple(
                        ("r", place[n]) if kind == "r" else (kind, names.setdefault(n, len(names)))
                        for kind, n in operands
                    ),
                )
            )
        else:
            forms.append((tuple(form), tuple(sorted(place[n] for n in results))))
    return min(forms)


def test_programs_of_two_equations():
    found = texts(family(arguments=1, equations=2, returned=0))
    assert sorted(found) == sorted(
        [
            "small: neg(a0) -> r0",
            "small: sub(a0, a0) -> r0",
            *(
                f"small: {first}; {second} -> {results}"
                for first in ("neg(a0)", "sub(a0, a0)")
                for second, results in (
                    ("neg(a0)", "r0, r1"),
                    ("neg(r0)", "r1"),
                    ("sub(a0, a0)", "r0, r1"),
                    ("sub(a0, r0)", "r1"),
                    ("sub(r0, a0)", "r1"),
                    ("sub(r0, r0)", "r1"),
                )
            ),
        ]
    )


@pytest.mark.parametrize("orders", [True, False])
def test_every_program_is_yielded_up_to_the_order_of_its_equations(orders):
    whole = list(graphs(family(equations=3)))
    assert len(whole) == len(set(whole))
    some = list(graphs(family(equations=3, orders=orders, groups=3)))
    assert {canonical(*each) for each in some} == {canonical(*each) for each in whole}
    assert orders or len(some) < len(whole)


def test_ci_includes_the_programs_that_once_failed():
    found = {text for each in FAMILIES if each.in_ci for text in texts(each)}
    assert "trees: neg(a0); mul(r0, a1); neg(r1); add(r2, a2) -> r3" in found
    assert "transposes: transpose(a0); neg(r0); sub(r1, r1) -> r2" in found


def test_family_limits_literals_and_results():
    two = texts(family(literals=(0.0, -0.0), equations=2, most_literals=2, unread=1, returned=0))
    assert "small: sub(-0.0, a0); neg(r0) -> r1" in two
    assert max(text.count("0.0") for text in two) == 2
    assert not any(", r" in text.partition("->")[2] for text in two)


@pytest.mark.parametrize("values", [(0.0, -0.0), (1.0, np.float32(1.0000001))])
def test_values_are_distinguished_bitwise(values):
    held = Values([np.float32([2.0, np.nan])])
    numbers = [
        held.run(trace(lambda x, v=v: x * v, np.zeros(2, np.float32)).jaxpr)[0] for v in values
    ]
    assert held.bits(numbers[0]) != held.bits(numbers[1])


def test_equal_equations_are_evaluated_once():
    held = Values([np.float32([2.0, 3.0])])
    programs = [trace(lambda x: lax.neg(lax.sin(x)), np.zeros(2, np.float32)) for _ in range(2)]
    assert held.run(programs[0].jaxpr) == held.run(programs[1].jaxpr)


def test_an_undefined_variable_and_a_wrong_type_raise():
    held = Values([np.float32([2.0, 3.0])])
    jaxpr = trace(lambda x: lax.neg(lax.sin(x)), np.zeros(2, np.float32)).jaxpr
    with pytest.raises(KeyError):
        held.run(replace_jaxpr(jaxpr, eqns=jaxpr.eqns[1:]))
    other = trace(lambda x: lax.eq(x, x), np.zeros(2, np.float32)).jaxpr
    wrong = other.eqns[0].replace(outvars=jaxpr.eqns[0].outvars, invars=jaxpr.jaxpr.invars * 2)
    with pytest.raises(AssertionError):
        held.run(replace_jaxpr(jaxpr, eqns=[wrong, jaxpr.eqns[1]]))
