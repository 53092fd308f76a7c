"""Comparison of result types with types claimed by a user, and the equation to blame.

The origin of a wrong type is found by going back from the result to the equation that created it:
through equations that keep the shape and dtype of an operand, and into calls and loops.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxprtool import Program
from jaxprtool.extend import (
    Atom,
    Aval,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    bodies,
    named,
    top_jaxpr,
    traits,
    type_of,
)
from jaxprtool.extend.analysis import DefUse
from jaxprtool.extend.trees import paths

#: A symbol that was created for `_`, and one that is a whole dimension in a type.
_UNNAMED = re.compile(r"_\d+")
_IN_TYPE = re.compile(r"(?<=[\[,])_\d+(?=[\],])")


@dataclass(frozen=True)
class WrongResult:
    """A result without the claimed type, and the origin of its type.

    Attributes:
        name: The result's name.
        type: Its type.
        claimed: The claimed type.
        origin: A description of the equation or value from which the type comes.
    """

    name: str
    type: str
    claimed: str
    origin: str


def other_structure(program: Program, claimed: Any) -> str | None:
    """Describe the difference of the results' structure from the claimed one; None if equal."""
    wanted = jax.tree.structure(claimed)
    if wanted == program.out_tree:
        return None
    names = paths("result", claimed)
    for name in names:
        if name not in program.out_names:
            return f"{program.name} does not return {name}; it returns {_types(program)}"
    for name in program.out_names:
        if name not in names:
            return f"{program.name} also returns {name}; it returns {_types(program)}"
    return f"{program.name} returns {program.out_tree}, not {wanted}"


def _types(program: Program) -> str:
    return ", ".join(f"{name} {type_of(aval)}" for name, aval in program.results) or "nothing"


def wrong_results(program: Program, claimed: Any) -> list[WrongResult]:
    """Return the results whose types differ from the claimed ones.

    Args:
        program: The program.
        claimed: The types, in the structure of the results. A symbol created for `_`, such as `_1`,
            that the program does not have matches any size.
    """
    found = []
    wanted = [jax.core.ShapedArray(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(claimed)]
    results = zip(program.results, program.jaxpr.outvars, wanted, strict=True)
    for (name, aval), atom, want in results:
        if not _alike(aval, _filled(want, aval, program.symbols)):
            claim = _IN_TYPE.sub("_", type_of(want))
            found.append(WrongResult(name, type_of(aval), claim, _origin(program, atom)))
    return found


def _filled(claimed: Aval, aval: Aval, known: Mapping[str, Any]) -> Aval:
    """Return a claimed type with unknown symbols replaced by the result's sizes."""
    shape = getattr(aval, "shape", ())
    if len(shape) != len(claimed.shape):
        return claimed
    pairs = zip(claimed.shape, shape, strict=True)
    return claimed.update(
        shape=tuple(
            size if _UNNAMED.fullmatch(str(want)) and str(want) not in known else want
            for want, size in pairs
        )
    )


def _alike(first: Aval, second: Aval) -> bool:
    """Return True if two types have the same dtype and, as far as JAX can tell, shape."""
    same = getattr(first, "shape", None) == getattr(second, "shape", None)
    return same and getattr(first, "dtype", None) == getattr(second, "dtype", None)


def _origin(program: Program, atom: Atom) -> str:
    """Return a description of the origin of a result's type."""
    top = top_jaxpr(program)
    eqn, source = _definition(top, atom)
    if eqn is not None:
        return f"caused by {named(eqn)}"
    if isinstance(source, Var) and source in top.invars:
        return f"it has the type of the argument {program.arg_names[top.invars.index(source)]}"
    return "it is a constant"


def _definition(jaxpr: Jaxpr, atom: Atom) -> tuple[JaxprEqn | None, Atom]:
    """Return the equation that created a value of an atom's type, or else the initial atom."""
    defined = DefUse(jaxpr.eqns)
    while isinstance(atom, Var) and (eqn := defined.equation(atom)) is not None:
        inner = _inside(eqn, atom)
        if isinstance(inner, JaxprEqn):
            return inner, atom
        before = inner
        if before is None and _keeps_type(eqn):
            before = next((v for v in eqn.invars if _alike(v.aval, atom.aval)), None)
        if before is None:
            return eqn, atom
        atom = before
    return None, atom


def _keeps_type(eqn: JaxprEqn) -> bool:
    """Return False if an operand has the result's type only by chance, as in a product."""
    found = traits(eqn)
    return not found.expensive and found.gives not in ("layout", "part")


def _inside(eqn: JaxprEqn, result: Var) -> JaxprEqn | Atom | None:
    """Return the origin of a result in an equation's body: an inner equation or an operand."""
    position = eqn.outvars.index(result)
    for _, body in bodies(eqn):
        if len(body.outvars) != len(eqn.outvars):
            continue
        atom = body.outvars[position]
        if not _alike(atom.aval, result.aval) or isinstance(atom, Literal):
            continue
        definition, source = _definition(body, atom)
        if definition is not None:
            return definition
        if source in body.invars and len(body.invars) == len(eqn.invars):
            return eqn.invars[body.invars.index(source)]
    return None
