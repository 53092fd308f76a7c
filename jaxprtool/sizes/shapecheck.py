"""`shapecheck`, formerly in JAX: claims about result types of a function, which are checked.

    @jaxprtool.shapecheck("f32[n,m], f32[m]", "f32[n]")
    def matvec(a, b):
        return a @ b

The claim is checked when the function is defined: it is traced once for all sizes, without creating
arrays.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax

from jaxprtool import Program
from jaxprtool.errors import ArgumentsError, CheckError
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
from jaxprtool.extend.programs import (
    DefUse,
    bind_arguments,
    function_name,
    paths,
    read_args,
    read_results,
    read_strings,
    require_sequence,
    trace_call,
)

F = TypeVar("F", bound=Callable[..., Any])


def shapecheck(in_types: Any, out_types: Any) -> Callable[[F], F]:
    """Return a decorator that checks the result types of a function for given argument types.

    Args:
        in_types: The types of the arguments in the notation of the option `--args`, such as
            `"f32[n,d], i32[n]"`. Or a sequence with one entry per argument: a text, a
            `jax.ShapeDtypeStruct`, or a pytree of these. A size `_` is distinct from all others.
        out_types: The types of the results, `"f32[n]"` or `"f32[n], f32[]"`; or a pytree. Their
            symbols are those of the arguments, and `_` matches any size.

    Returns:
        A decorator that returns the function unchanged. It raises CheckError if a result has
        another type, which names the equation to blame; ArgumentsError for types that cannot be
        read; and UserFunctionError if the function raises during tracing.
    """

    def check(fun: F) -> F:
        check_claim(traced_at_types(fun, in_types), out_types)
        return fun

    return check


def traced_at_types(fun: Callable, in_types: Any) -> Program:
    """Return the program of a function for arguments of given types; see `shapecheck`."""
    kwargs: dict[str, Any] = {}
    if isinstance(in_types, str):
        args, kwargs = read_args(in_types)
    else:
        require_sequence(in_types)
        args = tuple(read_strings(list(in_types)))
    call = replace(bind_arguments(fun, args, kwargs), shared=None)
    return trace_call(function_name(fun), fun, call)


def check_claim(program: Program, out_types: Any) -> None:
    """Raise CheckError unless the results of a program are of these types; see `shapecheck`."""
    claimed = read_results(out_types, program.symbols)
    for leaf in jax.tree.leaves(claimed):
        if not hasattr(leaf, "shape"):
            raise ArgumentsError(f"{leaf!r} is not a type of a result: write types as 'f32[n,128]'")
    fault = other_structure(program, claimed)
    if fault is not None:
        raise CheckError(fault)
    wrong = wrong_results(program, claimed)
    if wrong:
        first, more = wrong[0], len(wrong) - 1
        raise CheckError(
            f"{first.name} of {program.name} is {first.type}, not {first.claimed}: {first.origin}",
            f"{more} more {'result has' if more == 1 else 'results have'} a different type"
            if more
            else None,
        )


# --- claimed types --------------------------------------------------------------------------------
# Comparison of result types with types claimed by a user, and the equation to blame.
#
# The origin of a wrong type is found by going back from the result to the equation that created it:
# through equations that keep the shape and dtype of an operand, and into calls and loops.

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
    wrong = []
    wanted = [jax.core.ShapedArray(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(claimed)]
    results = zip(program.results, program.jaxpr.outvars, wanted, strict=True)
    for (name, aval), atom, want in results:
        if not _alike(aval, _filled(want, aval, program.symbols)):
            claim = _IN_TYPE.sub("_", type_of(want))
            wrong.append(WrongResult(name, type_of(aval), claim, _origin(program, atom)))
    return wrong


def _filled(claimed: Aval, aval: Aval, symbols: Mapping[str, Any]) -> Aval:
    """Return a claimed type with unknown symbols replaced by the result's sizes."""
    shape = getattr(aval, "shape", ())
    if len(shape) != len(claimed.shape):
        return claimed
    pairs = zip(claimed.shape, shape, strict=True)
    return claimed.update(
        shape=tuple(
            size if _UNNAMED.fullmatch(str(want)) and str(want) not in symbols else want
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
        source = inner
        if source is None and _keeps_type(eqn):
            source = next((v for v in eqn.invars if _alike(v.aval, atom.aval)), None)
        if source is None:
            return eqn, atom
        atom = source
    return None, atom


def _keeps_type(eqn: JaxprEqn) -> bool:
    """Return False if an operand has the result's type only by chance, as in a product."""
    like = traits(eqn)
    return not like.expensive and like.gives not in ("layout", "part")


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
