"""The candidates and steps of a reduction, and common helpers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.tree_util import PyTreeDef

from jaxprtool import jaxcompat
from jaxprtool.errors import JaxprToolError
from jaxprtool.ir.dtypes import is_extended, is_wide
from jaxprtool.ir.equations import equations, free_variables, size_of
from jaxprtool.ir.program import Program, type_check
from jaxprtool.ir.regions import (
    NO_OPTIONS,
    Cond,
    Regions,
    Scan,
    ShardMap,
    While,
    map_sub_jaxprs,
    regions,
    run_jaxprs,
    view,
)
from jaxprtool.ir.rewrite import RewriteRule, Writer, narrow, rewrite
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Aval, DropVar, JaxprEqn, Literal, Var
from jaxprtool.passes.cleanup.dce import Dce
from jaxprtool.passes.cleanup.forward import Forward

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


def new_argument_names(program: Program, prefix: str, count: int) -> list[str]:
    """Return `count` names, `prefix` and a number each, that no argument of the program has."""
    taken = set(program.arg_names)
    names = (f"{prefix}{i}" for i in range(len(taken) + count))
    return [name for name in names if name not in taken][:count]


def is_well_typed(candidate: Candidate, original: Program) -> bool:
    """Return True if a candidate is well typed."""
    try:
        type_check(candidate.program, original)
    except JaxprToolError:
        return False
    return True


def equations_left(program: Program) -> int:
    """Return the number of equations, at every depth."""
    return sum(1 for _ in equations(jaxcompat.open_jaxpr(program.jaxpr)))


def simpler(new: Program, old: Program) -> bool:
    """Return True if `new` has fewer equations, or else arguments and results, or else bytes."""
    return _measure(new) < _measure(old)


def _measure(program: Program) -> tuple[int, int, int]:
    jaxpr = program.jaxpr
    variables = [*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    return (
        equations_left(program),
        len(jaxpr.invars) + len(jaxpr.outvars) + len(jaxpr.constvars),
        sum(size_of(v.aval, 0) for v in variables),
    )


def is_variable(atom: Atom) -> bool:
    """Return True if an atom is a variable, not a literal."""
    return type(atom) is not Literal


def can_be_argument(var: Any) -> bool:
    """Return True if a variable can be an argument or result of a program; a ref cannot."""
    aval = var.aval
    return hasattr(aval, "shape") and not isinstance(aval, jaxcompat.AbstractRef)


# --- inside ---------------------------------------------------------------------------------------
# Reduction steps on single equations, at every depth: replace them by something simpler.

#: A function that writes something simpler and returns the new results, or None if it cannot.
_Replacement = Callable[[Writer, JaxprEqn], Sequence[Atom] | None]

#: An equation, identified by its first result, which stays the same when operands are renamed.
_Site: TypeAlias = Var


def _every(program: Program) -> list[JaxprEqn]:
    """Return all equations with results, at every depth."""
    eqns = equations(jaxcompat.open_jaxpr(program.jaxpr))
    return [eqn for eqn in eqns if eqn.outvars]


def _replaced(replacement: _Replacement) -> Callable[[Program, Sequence[_Site]], Candidate | None]:
    """Return an `apply` for a step that replaces the equations at the chosen sites."""

    def apply(program: Program, chosen: Sequence[_Site]) -> Candidate | None:
        sites = set(map(id, chosen))

        def visitor(writer: Writer) -> RewriteRule:
            def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
                wanted = eqn.outvars and id(eqn.outvars[0]) in sites
                return replacement(writer, eqn) if wanted else None

            return rule

        jaxpr = rewrite(program.jaxpr, visitor)
        return None if jaxpr is program.jaxpr else Candidate(with_body(program, jaxpr))

    return apply


# --- calls, branches and loops ----------------------------------------------------------------


def _held(eqn: JaxprEqn) -> Regions | None:
    """Return the regions of an equation; None for `shard_map`, whose body cannot be spliced."""
    inside = regions(eqn)
    return None if inside is None or isinstance(inside.view, ShardMap) else inside


def _calls(program: Program) -> Sequence[_Site]:
    pairs = ((eqn, _held(eqn)) for eqn in _every(program))
    return [eqn.outvars[0] for eqn, inside in pairs if inside is not None and inside.kind == "call"]


def _inlined(writer: Writer, eqn: JaxprEqn) -> Sequence[Atom] | None:
    inside = _held(eqn)
    if inside is None or not writer.can_hold(inside.bodies[0]):
        return None
    return writer.splice(inside.bodies[0], eqn.invars, eqn)


def _loops(program: Program) -> Sequence[_Site]:
    kinds = (Scan, While)
    return [eqn.outvars[0] for eqn in _every(program) if isinstance(view(eqn), kinds)]


def _one_iteration(writer: Writer, eqn: JaxprEqn) -> Sequence[Atom] | None:
    """Replace a loop by its first iteration."""
    loop = view(eqn)
    if not writer.can_hold(loop.body):
        return None
    if isinstance(loop, While):
        return writer.splice(loop.body, [*loop.body_consts, *loop.carry], eqn)
    if not isinstance(loop.length, int) or loop.length == 0:
        return None
    first = loop.length - 1 if loop.reverse else 0

    def rows(*xs: Any) -> list[Any]:
        return [lax.index_in_dim(x, first, keepdims=False) for x in xs]

    def stacks(*ys: Any) -> list[Any]:
        return [jnp.broadcast_to(y[None], (loop.length, *y.shape)) for y in ys]

    xs = writer.trace(rows, loop.xs, eqn) if loop.xs else []
    outs = writer.splice(loop.body, [*loop.consts, *loop.carry, *xs], eqn)
    count = len(loop.carry)
    return [*outs[:count], *(writer.trace(stacks, outs[count:], eqn) if loop.ys else ())]


def _branches(program: Program) -> Sequence[_Site]:
    return [eqn.outvars[0] for eqn in _every(program) if isinstance(view(eqn), Cond)]


def _branch(number: int) -> _Replacement:
    def replacement(writer: Writer, eqn: JaxprEqn) -> Sequence[Atom] | None:
        cond = view(eqn)
        body = cond.branches[number]
        return writer.splice(body, cond.operands, eqn) if writer.can_hold(body) else None

    return replacement


def _tidied(program: Program, chosen: Sequence[int]) -> Candidate | None:
    """Drop operands and results of bodies that are not used."""
    new = with_body(program, Forward()(program).jaxpr)
    return Candidate(new) if simpler(new, program) else None


# --- values -----------------------------------------------------------------------------------


def _with_operands(program: Program) -> Sequence[_Site]:
    """Return the equations that read variables, the last first."""
    return [eqn.outvars[0] for eqn in _every(program) if any(map(is_variable, eqn.invars))][::-1]


def _computed(program: Program) -> Sequence[_Site]:
    """Return the equations of `_with_operands` whose results are all arrays of numbers."""
    numeric = {
        eqn.outvars[0]
        for eqn in _every(program)
        if all(can_be_argument(v) and not is_extended(v.aval.dtype) for v in eqn.outvars)
    }
    return [v for v in _with_operands(program) if v in numeric]


def _operand(writer: Writer, eqn: JaxprEqn) -> Sequence[Atom] | None:
    """Return an operand of the same type for each result, preferring different operands."""
    atoms: list[Atom] = []
    for var in eqn.outvars:
        like = [
            v for v in eqn.invars if is_variable(v) and v.aval.str_short() == var.aval.str_short()
        ]
        if not like and type(var) is not DropVar:
            return None
        new = [v for v in like if v not in atoms]
        atoms.append((new or like or [var])[0])
    return atoms


def _constant(value: int) -> _Replacement:
    def replacement(writer: Writer, eqn: JaxprEqn) -> Sequence[Atom] | None:
        avals = [v.aval for v in eqn.outvars]
        literals = [jaxcompat.as_literal(value, aval) for aval in avals]
        if all(literals):
            return literals  # type: ignore[return-value]

        def full() -> list[Any]:
            return [jnp.full(aval.shape, value, aval.dtype) for aval in avals]

        return writer.trace(full, (), eqn)

    return replacement


def _literals(program: Program) -> Sequence[tuple[Var, int]]:
    return [
        (eqn.outvars[0], i)
        for eqn in _every(program)
        for i, atom in enumerate(eqn.invars)
        if type(atom) is Literal and np.ndim(atom.val) == 0 and atom.val not in (0, 1)
    ]


def _plain_literals(program: Program, chosen: Sequence[tuple[Var, int]]) -> Candidate | None:
    """Replace literals by ones."""
    positions = {(id(var), i) for var, i in chosen}

    def replacement(writer: Writer, eqn: JaxprEqn) -> Sequence[Atom] | None:
        invars = list(eqn.invars)
        for i, atom in enumerate(invars):
            if (id(eqn.outvars[0]), i) in positions:
                invars[i] = jaxcompat.as_literal(1, atom.aval) or atom
        return writer.add(eqn.replace(invars=invars))

    return _replaced(replacement)(program, [var for var, _ in chosen])


def _constants(program: Program) -> Sequence[int]:
    return range(len(program.jaxpr.constvars))


def _constants_as_arguments(program: Program, chosen: Sequence[int]) -> Candidate | None:
    """Turn constants into arguments."""
    jaxpr = program.jaxpr
    new = [jaxpr.constvars[i] for i in chosen]
    left = [i for i in range(len(jaxpr.constvars)) if i not in set(chosen)]
    names = new_argument_names(program, "c", len(new))
    body = jaxcompat.replace_jaxpr(
        jaxpr,
        constvars=[jaxpr.constvars[i] for i in left],
        consts=[jaxpr.consts[i] for i in left],
        invars=[*jaxpr.invars, *new],
    )
    result = with_body(program, body, [*program.arg_names, *names])
    return Candidate(result, program, dict(zip(names, new, strict=True)))


# --- parameters -------------------------------------------------------------------------------


def _options(program: Program) -> Sequence[tuple[Var, str, object]]:
    """Return the parameters that may be replaced, with the replacement."""
    options: list[tuple[Var, str, object]] = []
    for eqn in _every(program):
        for name, value in eqn.params.items():
            plain = _plain(eqn, name, value)
            if plain != value:
                options.append((eqn.outvars[0], name, plain))
    return options


def _plain(eqn: JaxprEqn, name: str, value: object) -> object:
    """Return the simplest value of a parameter, or the value itself if the equation needs it."""
    if isinstance(value, PyTreeDef) or (view(eqn) is None and any(True for _ in run_jaxprs(eqn))):
        return value  # of a Ref's parts; or of a kernel, whose parameters fit each other
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return value if value == 0 else 1
    if isinstance(value, tuple) and name in NO_OPTIONS:
        return (NO_OPTIONS[name],) * len(value)
    is_needed = callable(value) or view(eqn) is not None  # a rule, a callback, or bodies
    return value if is_needed else None


def _without_options(
    program: Program, chosen: Sequence[tuple[Var, str, object]]
) -> Candidate | None:
    plain: dict[int, dict[str, object]] = {}
    for var, name, value in chosen:
        plain.setdefault(id(var), {})[name] = value

    def replacement(writer: Writer, eqn: JaxprEqn) -> Sequence[Atom]:
        params = {**eqn.params, **plain[id(eqn.outvars[0])]}
        return writer.add(eqn.replace(params=params))

    return _replaced(replacement)(program, [var for var, _, _ in chosen])


def _jit(program: Program) -> Sequence[int]:
    return () if program.jit is None else (0,)


def _without_jit(program: Program, chosen: Sequence[int]) -> Candidate:
    return Candidate(program.replace(jit=None))


#: The maximum number of equations of a program in which single parameters and literals are
#: simplified.
_SMALL = 60

CALLS = (
    ReductionStep("dropping the jit", _jit, _without_jit),
    ReductionStep("inlining calls", _calls, _replaced(_inlined)),
)

INSIDE = (
    ReductionStep("taking branches", _branches, _replaced(_branch(0))),
    ReductionStep("taking branches", _branches, _replaced(_branch(-1))),
    ReductionStep("running loops once", _loops, _replaced(_one_iteration)),
    ReductionStep("simplifying bodies", lambda program: (0,), _tidied),
    ReductionStep("replacing results by operands", _with_operands, _replaced(_operand)),
    ReductionStep("replacing values by zeros", _computed, _replaced(_constant(0))),
    ReductionStep("replacing values by ones", _computed, _replaced(_constant(1))),
    ReductionStep("resetting parameters", _options, _without_options, most=_SMALL),
    ReductionStep("turning constants into arguments", _constants, _constants_as_arguments),
    ReductionStep("replacing numbers by ones", _literals, _plain_literals, most=_SMALL),
)


# --- parts ----------------------------------------------------------------------------------------
# Reduction steps that keep a part of the top level: of its results, equations, or loop iterations.
#
# Variables that the part reads and no longer computes become arguments. The search gets their
# values by running the program from which they are cut.


def part(program: Program, kept: Sequence[JaxprEqn]) -> Candidate | None:
    """Return the candidate with only some of the equations; None if it would need a ref argument.

    Its arguments are the free variables of the equations. Its results are those of the program that
    are still computed, and the variables that no equation reads any more.
    """
    jaxpr = program.jaxpr
    defined = {v for eqn in kept for v in eqn.outvars}
    read = {v for eqn in kept for v in eqn.invars if is_variable(v)}
    outs: list[Atom] = [v for v in jaxpr.outvars if is_variable(v) and v in defined]
    ends = [v for eqn in kept for v in eqn.outvars if type(v) is not DropVar and v not in read]
    outs = list(dict.fromkeys([*outs, *(v for v in ends if can_be_argument(v))]))
    arguments = dict(zip(jaxpr.invars, program.arg_names, strict=True))
    free = free_variables(kept, outs)
    new = [v for v in free if v not in arguments and v not in set(jaxpr.constvars)]
    if not all(map(can_be_argument, new)):
        return None
    names = [name for v, name in arguments.items() if v in free]
    names += new_argument_names(program, "v", len(new))
    invars = [*(v for v in arguments if v in free), *new]
    body = with_body(program, narrow(jaxpr, invars, outs, kept), names)
    cut = {name: v for name, v in zip(names, invars, strict=True) if v not in arguments}
    return Candidate(body, program if cut else None, cut)


def _equations(program: Program) -> Sequence[JaxprEqn]:
    return program.jaxpr.eqns if len(program.jaxpr.eqns) > 1 else ()


def _results(program: Program) -> Sequence[int]:
    count = len(program.jaxpr.outvars)
    return range(count) if count > 1 else ()


def _keep_results(program: Program, kept: Sequence[int]) -> Candidate:
    outvars = [program.jaxpr.outvars[i] for i in kept]
    return Candidate(with_body(program, jaxcompat.replace_jaxpr(program.jaxpr, outvars=outvars)))


# --- loops ----------------------------------------------------------------------------------------


def _long_scans(program: Program) -> Sequence[tuple[JaxprEqn, int]]:
    """Return the scans that can be cut in two, each with the half to keep, 0 or 1."""
    scans = [eqn for eqn in program.jaxpr.eqns if eqn.outvars and isinstance(view(eqn), Scan)]
    lengths = [(eqn, view(eqn).length) for eqn in scans]
    return [(eqn, i) for eqn, n in lengths if isinstance(n, int) and n > 1 for i in (0, 1)]


def _half(program: Program, chosen: Sequence[tuple[JaxprEqn, int]]) -> Candidate | None:
    """Cut a scan in two and keep one half; the results of the other become arguments."""
    ((eqn, kept),) = chosen
    halves: list[JaxprEqn] = []

    def visitor(writer: Writer) -> RewriteRule:
        def rule(other: JaxprEqn) -> Sequence[Atom] | None:
            same = other.outvars and other.outvars[0] is eqn.outvars[0]
            return _in_two(writer, view(other), halves) if same else None

        return rule

    whole = program.replace(jaxpr=rewrite(program.jaxpr, visitor, nested=False))
    if len(halves) != 2:
        return None
    dropped = halves[1 - kept]
    return part(whole, [other for other in whole.jaxpr.eqns if other is not dropped])


def _in_two(writer: Writer, scan: Scan, halves: list[JaxprEqn]) -> list[Atom]:
    """Write a scan as two scans, one after the other, and append these to `halves`."""
    middle, n = scan.length // 2, scan.length
    bounds = [(0, middle), (middle, n)]
    carry: tuple[Atom, ...] = scan.carry
    stacks: dict[int, tuple[Var, ...]] = {}
    for start, end in reversed(bounds) if scan.reverse else bounds:

        def rows(*xs: Any, start: int = start, end: int = end) -> list[Any]:
            return [lax.slice_in_dim(x, start, end) for x in xs]

        xs = tuple(writer.trace(rows, scan.xs, scan.eqn)) if scan.xs else ()
        outs = tuple(Var(v.aval) for v in scan.carry_outs)
        ys = tuple(Var(v.aval.update(shape=(end - start, *v.aval.shape[1:]))) for v in scan.ys)
        half = scan.rebuild(carry=carry, xs=xs, carry_outs=outs, ys=ys, length=end - start)
        writer.add(half)
        halves.append(half)
        carry, stacks[start] = outs, ys

    def joined(*parts: Any) -> list[Any]:
        count = len(parts) // 2
        return [lax.concatenate([parts[i], parts[count + i]], 0) for i in range(count)]

    pieces = [*stacks[0], *stacks[middle]]
    return [*carry, *(writer.trace(joined, pieces, scan.eqn) if pieces else ())]


PARTS = (
    ReductionStep("dropping results", _results, _keep_results, keeps=True),
    ReductionStep("dropping equations", _equations, part, keeps=True),
    ReductionStep("splitting loops", _long_scans, _half, alone=True),
)


# --- types ----------------------------------------------------------------------------------------
# Reduction steps on types: smaller sizes and plainer dtypes, everywhere in a program at once.
#
# A size or dtype is replaced in all types and parameters. This is a guess, since 3 may be a size in
# one place and an axis in another; ill-typed candidates are dropped.

#: A function of an aval, a parameter, or the value of a constant.
_Mapped = Callable[[Any], Any]


class _Retyper:
    """A mapping of the avals, parameters and constants of a jaxpr and all jaxprs in it."""

    def __init__(self, aval: _Mapped, param: _Mapped, value: _Mapped):
        self._aval, self._param, self._value = aval, param, value
        self._made: dict[int, tuple[AnyJaxpr, AnyJaxpr]] = {}

    def jaxpr(self, old: AnyJaxpr) -> AnyJaxpr:
        if id(old) not in self._made:
            self._made[id(old)] = old, self._retyped(old)
        return self._made[id(old)][1]

    def _retyped(self, old: AnyJaxpr) -> AnyJaxpr:
        env: dict[Var, Var] = {}

        def new(var: Var) -> Var:
            if type(var) is DropVar:
                return DropVar(self._aval(var.aval))
            env[var] = Var(self._aval(var.aval))
            return env[var]

        def read(atom: Atom) -> Atom:
            if type(atom) is not Literal:
                return env[atom]
            aval = self._aval(atom.aval)
            return jaxcompat.as_literal(atom.val, aval) or atom

        parts: dict[str, Any] = {"constvars": list(map(new, old.constvars))}
        parts["invars"] = list(map(new, old.invars))
        eqns = []
        for eqn in old.eqns:
            params = {k: self._param(v) for k, v in map_sub_jaxprs(self.jaxpr, eqn).items()}
            invars = list(map(read, eqn.invars))
            effects = jaxcompat.renamed_effects(eqn.effects, env) if eqn.effects else eqn.effects
            outvars = list(map(new, eqn.outvars))
            eqns.append(eqn.replace(invars=invars, outvars=outvars, params=params, effects=effects))
        consts = getattr(old, "consts", None)
        if consts is not None:
            parts["consts"] = list(map(self._value, consts))
        return jaxcompat.replace_jaxpr(
            old, **parts, eqns=eqns, outvars=list(map(read, old.outvars))
        )


def _avals(program: Program) -> list[Aval]:
    jaxpr = jaxcompat.open_jaxpr(program.jaxpr)
    values = [*jaxpr.constvars, *jaxpr.invars]
    values += [v for eqn in equations(jaxpr) for v in eqn.outvars]
    return [v.aval for v in values if can_be_argument(v)]


def _sizes(program: Program) -> Sequence[tuple[int, int, bool]]:
    """Return triples: a size, the largest first, a smaller one, and whether to scale multiples."""
    sizes = {n for aval in _avals(program) for n in aval.shape if isinstance(n, int) and n > 1}
    return [
        (n, small, multiples)
        for n in sorted(sizes, reverse=True)
        for small in dict.fromkeys((1, 2, n // 2))
        if small < n
        for multiples in (False, True)
    ]


def _smaller(program: Program, chosen: Sequence[tuple[int, int, bool]]) -> Candidate | None:
    ((old, new, multiples),) = chosen

    def size(n: Any) -> Any:
        if type(n) is not int or n == 0 or n % old or (n != old and not multiples):
            return n
        return n // old * new

    def aval(old: Aval) -> Aval:
        shape = getattr(old, "shape", None)
        if not shape or isinstance(old, jaxcompat.AbstractRef):
            return old
        return old.update(shape=tuple(map(size, shape)))

    def param(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(param, value))
        return size(value)

    def cut(value: Any) -> Any:
        shape = np.shape(value)
        if tuple(map(size, shape)) == shape:
            return value
        return value[tuple(slice(size(n)) for n in shape)]

    return _mapped(program, _Retyper(aval, param, cut), cut)


def _dtypes(program: Program) -> Sequence[tuple[Any, Any]]:
    """Return each dtype that is not a plain one, with its 32-bit replacement."""
    plain = {"f": "float32", "V": "float32", "i": "int32", "u": "uint32"}
    dtypes = dict.fromkeys(aval.dtype for aval in _avals(program) if not is_extended(aval.dtype))
    return [
        (dtype, np.dtype(plain[dtype.kind]))
        for dtype in dtypes
        if dtype.kind in plain and dtype != np.dtype(plain[dtype.kind]) and not _is_float0(dtype)
    ]


def _is_float0(dtype: Any) -> bool:
    return dtype.kind == "V" and dtype.names is not None and not is_wide(dtype)


def _plainer(program: Program, chosen: Sequence[tuple[Any, Any]]) -> Candidate | None:
    dtypes = dict(chosen)

    def aval(old: Aval) -> Aval:
        dtype = getattr(old, "dtype", None)
        return old.update(dtype=dtypes[dtype]) if dtype in dtypes else old

    def param(value: Any) -> Any:
        return dtypes.get(value, value) if isinstance(value, np.dtype) else value

    def cast(value: Any) -> Any:
        dtype = getattr(value, "dtype", None)
        return value.astype(dtypes[dtype]) if dtype in dtypes else value

    return _mapped(program, _Retyper(aval, param, cast), cast)


def _mapped(program: Program, retyping: _Retyper, resize: _Mapped) -> Candidate | None:
    try:
        jaxpr = retyping.jaxpr(program.jaxpr)
    except Exception:  # JAX has no such type
        return None
    return Candidate(with_body(program, jaxpr), resize=resize)


TYPES = (
    ReductionStep("shrinking sizes", _sizes, _smaller, alone=True),
    ReductionStep("simplifying dtypes", _dtypes, _plainer),
)


# --- reduction ------------------------------------------------------------------------------------
# The steps of delta debugging: ways to make a program smaller.
#
# A `ReductionStep` lists the sites of a program where it applies, and builds a candidate by
# simplifying some of them. The search (`commands.reduce.reduction`) keeps a candidate if the check
# still holds; it tries many sites at once first, and single ones at the end. Candidates are well
# typed, but need not compute the same as the program.

#: All steps, in the order in which they are tried. Calls are inlined first, because only equations
#: of the top level can be cut; then come the steps that remove most.
STEPS: tuple[ReductionStep, ...] = (*CALLS, *PARTS, *INSIDE, *TYPES)
