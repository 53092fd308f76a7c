"""The candidates and steps of a reduction, and common helpers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxprtool import jaxcompat
from jaxprtool.errors import JaxprToolError
from jaxprtool.ir.core.equations import equations, size_of
from jaxprtool.ir.programs.program import Program, type_check
from jaxprtool.jaxcompat import Atom, Literal, Var
from jaxprtool.passes.cleanup.dce import Dce

_DCE = Dce(drop_inputs=True)


@dataclass(frozen=True)
class Candidate:
    """A program that may replace the current one.

    Attributes:
        program: The program. Arguments that the current program has too keep their names.
        origin: A program equivalent to the current one, some of whose variables have become
            arguments of the candidate; None if the candidate has no new arguments.
        cut: The variable of `origin` that each new argument was, by the argument's name.
        resize: A function that converts the value of an argument to its new type; None if the types
            are the same.
    """

    program: Program
    origin: Program | None = None
    cut: Mapping[str, Var] = field(default_factory=dict)
    resize: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class ReductionStep:
    """One way to make a program simpler.

    Attributes:
        name: A description of the step, for the line of progress: "dropping results".
        sites: A function that returns the sites of a program where the step applies.
        apply: A function that builds a candidate from a program and some of its sites; it returns
            None if it cannot.
        keeps: True if the sites passed to `apply` are those to keep, not those to simplify.
        most: The maximum number of equations of a program that the step is tried on; None for any
            number.
        alone: True if the step is tried at single sites only.
    """

    name: str
    sites: Callable[[Program], Sequence[Any]]
    apply: Callable[[Program, Sequence[Any]], Candidate | None]
    keeps: bool = False
    most: int | None = None
    alone: bool = False


def flattened(program: Program) -> Program:
    """Flatten the pytrees of a program. The result becomes an array or a tuple of arrays."""
    return program.replace(**_flat(program.jaxpr))


def _flat(jaxpr: Any) -> dict[str, Any]:
    """Return the pytrees of a flat program. A single result is not in a tuple, as `grad` needs."""
    count = len(jaxpr.outvars)
    results = ("result",) if count == 1 else tuple(f"result[{i}]" for i in range(count))
    return {
        "in_tree": jax.tree.structure(((0,) * len(jaxpr.invars), {})),
        "out_tree": jax.tree.structure(0 if count == 1 else (0,) * count),
        "out_names": results,
    }


def with_body(program: Program, jaxpr: Any, arg_names: Sequence[str] | None = None) -> Program:
    """Replace the jaxpr of a program, flatten the pytrees, and drop dead code and arguments."""
    names = program.arg_names if arg_names is None else tuple(arg_names)
    return flattened(_DCE(program.replace(jaxpr=jaxpr, arg_names=names, **_flat(jaxpr))))


def fresh_names(program: Program, prefix: str, count: int) -> list[str]:
    """Return `count` names, `prefix` and a number each, that no argument of the program has."""
    taken = set(program.arg_names)
    names = (f"{prefix}{i}" for i in range(len(taken) + count))
    return [name for name in names if name not in taken][:count]


def checked(candidate: Candidate, before: Program) -> bool:
    """Return True if a candidate is well typed."""
    try:
        type_check(candidate.program, before)
    except JaxprToolError:
        return False
    return True


def count_of(program: Program) -> int:
    """Return the number of equations, at every depth."""
    return sum(1 for _ in equations(jaxcompat.open_jaxpr(program.jaxpr)))


def simpler(new: Program, old: Program) -> bool:
    """Return True if `new` has fewer equations, or else arguments and results, or else bytes."""
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
    """Return True if an atom is a variable, not a literal."""
    return type(atom) is not Literal


def is_array(var: Any) -> bool:
    """Return True if a variable can be an argument or result of a program; a ref cannot."""
    aval = var.aval
    return hasattr(aval, "shape") and not isinstance(aval, jaxcompat.AbstractRef)
