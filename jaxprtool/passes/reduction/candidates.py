"""A candidate: a program, and where the values of its new arguments come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxprtool import jaxcompat
from jaxprtool.errors import JaxprToolError
from jaxprtool.ir.equations import equations, size_of
from jaxprtool.ir.program import Program, type_check
from jaxprtool.jaxcompat import Atom, Literal, Var
from jaxprtool.passes.dce import Dce

_DCE = Dce(drop_inputs=True)


@dataclass(frozen=True)
class Candidate:
    """A program that may take the place of another.

    Attributes:
        program: The program. An argument that the other has too has the same name.
        origin: The program whose variables have become arguments, which computes what the other
            does; None if no argument is new.
        cut: For each new argument by name, the variable of the origin that it was.
        resize: Makes of the value of an argument one of the type that it has now.
    """

    program: Program
    origin: Program | None = None
    cut: Mapping[str, Var] = field(default_factory=dict)
    resize: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Step:
    """One way to make a program simpler.

    Attributes:
        name: What it does, for the line of progress: "dropping results".
        sites: Where it can be applied in a program.
        apply: Makes a candidate of a program and some of its sites; None if there is none.
        keeps: Whether the sites chosen are those that stay. Then a few are tried to be kept first,
            and each to be dropped in the end.
        most: The most equations that a program may have for it.
        alone: Whether sites are tried one by one only.
    """

    name: str
    sites: Callable[[Program], Sequence[Any]]
    apply: Callable[[Program, Sequence[Any]], Candidate | None]
    keeps: bool = False
    most: int | None = None
    alone: bool = False


def flattened(program: Program) -> Program:
    """Return the program with its arguments flat, and its results as a tuple or a single one."""
    return program.replace(**_flat(program.jaxpr))


def _flat(jaxpr: Any) -> dict[str, Any]:
    """Return the structures of a flat program. That of one result is no tuple, as `grad` needs."""
    count = len(jaxpr.outvars)
    results = ("result",) if count == 1 else tuple(f"result[{i}]" for i in range(count))
    return {
        "in_tree": jax.tree.structure(((0,) * len(jaxpr.invars), {})),
        "out_tree": jax.tree.structure(0 if count == 1 else (0,) * count),
        "out_names": results,
    }


def with_body(program: Program, jaxpr: Any, arg_names: Sequence[str] | None = None) -> Program:
    """Return the program with another jaxpr, flat, and without code and arguments that are dead."""
    names = program.arg_names if arg_names is None else tuple(arg_names)
    return flattened(_DCE(program.replace(jaxpr=jaxpr, arg_names=names, **_flat(jaxpr))))


def checked(candidate: Candidate, before: Program) -> bool:
    """Return whether a candidate is well typed."""
    try:
        type_check(candidate.program, before)
    except JaxprToolError:
        return False
    return True


def count_of(program: Program) -> int:
    """Return the number of equations, at every depth."""
    return sum(1 for _ in equations(jaxcompat.open_jaxpr(program.jaxpr)))


def simpler(new: Program, old: Program) -> bool:
    """Return whether a program is smaller: in equations, then arguments and results, then bytes."""
    return _measure(new) < _measure(old)


def _measure(program: Program) -> tuple[int, int, int]:
    jaxpr = program.jaxpr
    variables = [*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    return (
        count_of(program),
        len(jaxpr.invars) + len(jaxpr.outvars) + len(jaxpr.constvars),
        sum(size_of(v.aval, 0) for v in variables),
    )


def is_variable(atom: Atom) -> bool:
    """Return whether an atom is a variable."""
    return type(atom) is not Literal


def is_array(var: Any) -> bool:
    """Return whether a variable can be an argument of a program, and a result."""
    aval = var.aval
    return hasattr(aval, "shape") and not isinstance(aval, jaxcompat.AbstractRef)
