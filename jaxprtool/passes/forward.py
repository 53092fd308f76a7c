"""Forwarding: the borders of loops, branches and calls made as narrow as they can be.

What a body merely hands on need not go through it:

*   a result that is an operand, a scalar or a constant of the body is, outside, that very value;
    results that are always equal become one;
*   an operand that is given twice is given once, and scalars are put inside the body, where `fold`
    and `simplify` can see them;
*   a carry of a scan or while that never changes becomes a constant of the loop, and its result
    the value that it started with; carries that start equal and stay equal become one. Which ones
    do is found as the coarsest stable partition of the carries (they form the graph of a function,
    so sequences are compared by doubling; compare J. E. Hopcroft, "An n log n algorithm for
    minimizing states in a finite automaton", 1971);
*   an operand that a scan slices and that only repeats one value becomes a constant of it.

What nobody uses is left to `dce`. What stays as it is: operands that are donated, of a sharding or
layout that was asked for, or refs; the results of `shard_map`, whose specifications are shardings,
but for equal ones; the results of a differentiated `remat`, behind its optimization barrier. Past
custom derivatives nothing is forwarded, since the user's rule may give it any derivative: only
their bodies are rewritten. An array that a call in the same body donates gets no second name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.ir.program import Program
from jaxprtool.ir.rewrite import Rule, Writer, rewrite
from jaxprtool.ir.structured import (
    UNASKED,
    Call,
    Cond,
    CustomJVP,
    CustomVJP,
    Scan,
    ShardMap,
    While,
    keep,
)
from jaxprtool.jaxcompat import Atom, DropVar, JaxprEqn, Literal, Var
from jaxprtool.passes.base import Pass


@dataclass(frozen=True)
class Forward(Pass):
    """Let no loop, branch or call take or give what it only hands on, or twice."""

    name: ClassVar[str] = "forward"

    def __call__(self, program: Program) -> Program:
        jaxpr, before = program.jaxpr, None
        # What has come out of one body, or gone into it, may go on through the next.
        while jaxpr is not before:
            jaxpr, before = rewrite(jaxpr, _Visitor()), jaxpr
        return program.replace(jaxpr=jaxpr)


class _Visitor:
    """One walk over a program; it remembers the bodies it made, so that shared ones stay shared."""

    def __init__(self) -> None:
        self.made: dict[Hashable, Any] = {}

    def __call__(self, writer: Writer) -> Rule:
        forwarding = _Forwarding(writer, self.made)

        def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
            known = _RULES.get(eqn.primitive.name)
            return None if known is None else known(forwarding, eqn)

        return rule


class _Given:
    """The operands that bodies are still given, each once, and what the others are inside.

    There are as many `names` and `variables` as bodies: one, or the branches of a cond.
    """

    def __init__(self, writer: Writer, bodies: int = 1):
        self._writer = writer
        self._first: dict[tuple[Atom, Hashable], Sequence[Var]] = {}
        self.atoms: list[Atom] = []
        self.variables: list[list[Var]] = [[] for _ in range(bodies)]
        self.names: list[dict[Var, Atom]] = [{} for _ in range(bodies)]

    def give(
        self, atom: Atom, inside: Sequence[Var], *, scalars: bool = True, kind: Hashable = None
    ) -> bool:
        """Give an operand to bodies that know it as `inside`; False if it need not be given.

        Only operands of one `kind` are taken for the same, and scalars go inside unless told.
        """
        if isinstance(atom.aval, jaxcompat.AbstractRef):
            return self._add(atom, inside)
        if scalars:
            literals = [_scalar(self._writer, atom, var.aval) for var in inside]
            if None not in literals:
                return self._call(inside, literals)
        if type(atom) is Literal:
            return self._add(atom, inside)
        known = self._first.setdefault((atom, kind), inside)
        if known is inside or any(a.aval != b.aval for a, b in zip(known, inside, strict=True)):
            return self._add(atom, inside)
        return self._call(inside, known)

    def _add(self, atom: Atom, inside: Sequence[Var]) -> bool:
        self.atoms.append(atom)
        for variables, var in zip(self.variables, inside, strict=True):
            variables.append(var)
        return True

    def _call(self, inside: Sequence[Var], atoms: Sequence[Any]) -> bool:
        for names, var, atom in zip(self.names, inside, atoms, strict=True):
            names[var] = atom
        return False


class _Forwarding:
    """What is done to the loops, branches and calls of one body; a method for each view."""

    def __init__(self, writer: Writer, made: dict[Hashable, Any]):
        self.writer = writer
        self._made = made

    # --- calls and branches --------------------------------------------------------------------

    def call(self, eqn: JaxprEqn) -> Sequence[Atom] | None:
        call = Call.of(eqn)
        jaxpr = jaxcompat.open_jaxpr(call.body)
        plain = _plain(call.operand_params, len(call.operands))
        barrier = call.operand_params.get("prevent_cse", (True,) * len(call.operands))
        given = _Given(self.writer)
        stay = []
        for atom, var, free, kind in zip(call.operands, jaxpr.invars, plain, barrier, strict=True):
            stay.append(not free or given.give(atom, (var,), kind=kind))
        outside = dict(zip(keep(jaxpr.invars, plain), keep(call.operands, plain), strict=True))
        names = given.names[0]
        inner = [v if type(v) is Literal else names.get(v, v) for v in jaxpr.outvars]
        candidates: list[Atom | None] = [None] * len(inner)
        keys = [_key(v) for v in inner]
        for i, free in enumerate(_plain(call.out_params, len(inner))):
            if not free:
                keys[i] = i  # equal to no other
            elif not eqn.params.get("differentiated"):
                candidates[i] = self._outside(inner[i], outside, call, call.outs[i].aval)
        answer, wanted = self._results(call.outs, keys, candidates)
        if all(stay) and all(wanted):
            return None
        body = self._narrowed(call.body, names, keep(jaxpr.invars, stay), wanted)
        self.writer.add(call.filtered(stay, wanted, body))
        return answer

    def _outside(self, inner: Atom, outside: dict[Var, Atom], call: Call, aval: Any) -> Atom | None:
        """What a body's result, outside of type `aval`, is there, if that is known."""
        if type(inner) is Literal:
            return inner
        if inner in outside:
            return outside[inner]
        for var, value in zip(call.body.constvars, call.body.consts, strict=True):
            if var is inner and var.aval == aval:
                literal = jaxcompat.as_literal(value, var.aval)
                can_hold = literal is None and self.writer.holds_constants
                return self.writer.constant(value, var.aval) if can_hold else literal
        return None

    def cond(self, eqn: JaxprEqn) -> Sequence[Atom] | None:
        cond = Cond.of(eqn)
        jaxprs = [jaxcompat.open_jaxpr(branch) for branch in cond.branches]
        given = _Given(self.writer, len(jaxprs))
        columns = list(zip(*(jaxpr.invars for jaxpr in jaxprs), strict=True))
        stay = [given.give(a, inside) for a, inside in zip(cond.operands, columns, strict=True)]
        known = [dict(zip(jaxpr.invars, cond.operands, strict=True)) for jaxpr in jaxprs]
        candidates: list[Atom | None] = []
        keys: list[Hashable] = []
        for column in zip(*(jaxpr.outvars for jaxpr in jaxprs), strict=True):
            pairs = list(zip(column, given.names, strict=True))
            inner = [v if type(v) is Literal else names.get(v, v) for v, names in pairs]
            outer = [
                v if type(v) is Literal else operands.get(v)
                for v, operands in zip(inner, known, strict=True)
            ]
            same = None not in outer and len(set(map(_key, outer))) == 1
            candidates.append(outer[0] if same else None)
            keys.append(tuple(map(_key, inner)))
        answer, wanted = self._results(cond.outs, keys, candidates)
        if all(stay) and all(wanted):
            return None
        branches = tuple(
            self._narrowed(branch, names, variables, wanted)
            for branch, names, variables in zip(
                cond.branches, given.names, given.variables, strict=True
            )
        )
        outs = keep(cond.outs, wanted)
        self.writer.add(cond.rebuild(operands=tuple(given.atoms), outs=outs, branches=branches))
        return answer

    def custom(self, eqn: JaxprEqn) -> Sequence[Atom] | None:
        cls = CustomJVP if eqn.primitive.name in CustomJVP.primitives else CustomVJP
        call = cls.of(eqn)
        jaxpr = jaxcompat.open_jaxpr(call.body)
        given = _Given(self.writer)
        for atom, var in zip(call.operands, jaxpr.invars, strict=True):
            given.give(atom, (var,))
        names = given.names[0]
        everything = [True] * len(call.outs)
        if not names or names.keys().isdisjoint(_read(jaxpr, everything)):
            return None
        body = self._narrowed(call.body, names, jaxpr.invars, everything)
        return self.writer.add(call.rebuild(body=body))

    def shard_map(self, eqn: JaxprEqn) -> Sequence[Atom] | None:
        call = ShardMap.of(eqn)
        jaxpr = jaxcompat.open_jaxpr(call.body)
        given = _Given(self.writer)
        stay = [
            given.give(atom, (var,), scalars=False, kind=spec)
            for atom, var, spec in zip(call.operands, jaxpr.invars, call.in_specs, strict=True)
        ]
        names = given.names[0]
        inner = [v if type(v) is Literal else names.get(v, v) for v in jaxpr.outvars]
        keys = [(_key(v), spec) for v, spec in zip(inner, call.out_specs, strict=True)]
        answer, wanted = self._results(call.outs, keys, [None] * len(keys))
        if all(stay) and all(wanted):
            return None
        self.writer.add(
            call.rebuild(
                operands=tuple(given.atoms),
                outs=keep(call.outs, wanted),
                body=self._narrowed(call.body, names, given.variables[0], wanted),
                in_specs=keep(call.in_specs, stay),
                out_specs=keep(call.out_specs, wanted),
            )
        )
        return answer

    # --- loops ---------------------------------------------------------------------------------

    def scan(self, eqn: JaxprEqn) -> Sequence[Atom] | None:
        scan = Scan.of(eqn)
        jaxpr = jaxcompat.open_jaxpr(scan.body)
        n, k = len(scan.consts), len(scan.carry)
        fixed, carried, sliced = jaxpr.invars[:n], jaxpr.invars[n : n + k], jaxpr.invars[n + k :]
        kinds = self._carries(
            list(zip(scan.consts, fixed, strict=True)),
            scan.carry,
            carried,
            jaxpr.outvars[:k],
            scan.carry_outs,
        )
        carry_wanted = [kind == i for i, kind in enumerate(kinds)]
        given, slices = _Given(self.writer), _Given(self.writer)
        for atom, var in zip(scan.consts, fixed, strict=True):
            given.give(atom, (var,))
        _give_unchanging(
            given, kinds, scan.carry, carried, jaxpr, [*carry_wanted, *[True] * len(scan.ys)]
        )
        for atom, var in zip(scan.xs, sliced, strict=True):
            repeated = self._repeated(atom, var)
            if repeated is None:
                slices.give(atom, (var,), scalars=False)
            else:
                given.give(repeated, (var,))
        names = {**given.names[0], **slices.names[0], **_merged(kinds, carried)}
        stacks = dict(zip(sliced, scan.xs, strict=True))
        results = jaxpr.outvars[k:]
        candidates = [None if type(v) is Literal else stacks.get(v) for v in results]
        keys = [_key(v if type(v) is Literal else names.get(v, v)) for v in results]
        ys, ys_wanted = self._results(scan.ys, keys, candidates)
        wanted = [*carry_wanted, *ys_wanted]
        if all(wanted) and not names and len(slices.atoms) == len(scan.xs):
            return None
        variables = *given.variables[0], *keep(carried, carry_wanted), *slices.variables[0]
        self.writer.add(
            scan.rebuild(
                consts=tuple(given.atoms),
                carry=keep(scan.carry, carry_wanted),
                xs=tuple(slices.atoms),
                carry_outs=keep(scan.carry_outs, carry_wanted),
                ys=keep(scan.ys, ys_wanted),
                body=self._narrowed(scan.body, names, variables, wanted),
            )
        )
        return [*_carry_results(kinds, scan.carry, scan.carry_outs), *ys]

    def _repeated(self, atom: Atom, inside: Var) -> Atom | None:
        """The value that every slice of an operand is, if it was made by repeating one."""
        eqn = self.writer.defined_by(atom, "broadcast_in_dim")
        if eqn is None or len(eqn.invars) != 1:
            return None
        value, dimensions = eqn.invars[0], eqn.params["broadcast_dimensions"]
        if tuple(dimensions) != tuple(range(1, len(atom.aval.shape))):
            return None
        return value if value.aval.strip_weak_type() == inside.aval.strip_weak_type() else None

    def while_(self, eqn: JaxprEqn) -> Sequence[Atom] | None:
        loop = While.of(eqn)
        cond, body = jaxcompat.open_jaxpr(loop.cond), jaxcompat.open_jaxpr(loop.body)
        b = len(loop.body_consts)
        kinds = self._carries(
            list(zip(loop.body_consts, body.invars[:b], strict=True)),
            loop.carry,
            body.invars[b:],
            body.outvars,
            loop.outs,
        )
        wanted = [kind == i for i, kind in enumerate(kinds)]
        halves = []
        for held, jaxpr, consts, outs in (
            (loop.cond, cond, loop.cond_consts, [True]),
            (loop.body, body, loop.body_consts, wanted),
        ):
            fixed, carried = jaxpr.invars[: len(consts)], jaxpr.invars[len(consts) :]
            given = _Given(self.writer)
            for atom, var in zip(consts, fixed, strict=True):
                given.give(atom, (var,))
            _give_unchanging(given, kinds, loop.carry, carried, jaxpr, outs)
            names = {**given.names[0], **_merged(kinds, carried)}
            halves.append((held, given, names, keep(carried, wanted), outs))
        (_, cond_given, cond_names, *_), (_, body_given, body_names, *_) = halves
        if all(wanted) and not cond_names and not body_names:
            return None
        new_cond, new_body = (
            self._narrowed(held, names, (*given.variables[0], *carried), outs)
            for held, given, names, carried, outs in halves
        )
        self.writer.add(
            loop.rebuild(
                cond_consts=tuple(cond_given.atoms),
                body_consts=tuple(body_given.atoms),
                carry=keep(loop.carry, wanted),
                outs=keep(loop.outs, wanted),
                cond=new_cond,
                body=new_body,
            )
        )
        return _carry_results(kinds, loop.carry, loop.outs)

    def _carries(
        self,
        fixed: Sequence[tuple[Atom, Var]],
        starts: Sequence[Atom],
        carried: Sequence[Var],
        nexts: Sequence[Atom],
        outs: Sequence[Var],
    ) -> list[int | None]:
        """For each carry the one that always has its value; None if it is always what it starts as.

        `fixed` are the loop's constants, outside and inside; `carried` and `nexts` are the carries
        at the beginning and the end of a round. Of equal ones the first whose result is read is
        taken, or the first, and itself it has its own number.
        """
        nodes: dict[Hashable, int] = {}
        # What a value is known by at first: by what it starts as, or, computed inside, by itself.
        labels: list[Hashable] = []
        step: list[int] = []  # which value it is in the next round

        def node(key: Hashable, label: Hashable) -> int:
            if key not in nodes:
                nodes[key] = len(labels)
                step.append(len(labels))
                labels.append(label)
            return nodes[key]

        for atom, var in fixed:
            node(var, self._start(atom, var))
        loose = []
        for atom, var, out in zip(starts, carried, outs, strict=True):
            same_types = var.aval == out.aval == atom.aval and not self._donates(atom, out)
            label = self._start(atom, var) if same_types else var
            loose.append(label is not var)
            node(var, label)
        for var, atom in zip(carried, nexts, strict=True):
            key = _key(atom)
            step[nodes[var]] = node(key, (key, atom.aval) if type(atom) is Literal else atom)
        classes = _stable_classes(labels, step)
        kinds: list[int | None] = []
        for i, var in enumerate(carried):
            at = nodes[var]
            fixed_value = loose[i] and classes[at] == classes[step[at]]
            kinds.append(None if fixed_value else i)
        chosen: dict[int, int] = {}
        for i in sorted(range(len(outs)), key=lambda i: isinstance(outs[i], DropVar)):
            if kinds[i] is not None:
                kinds[i] = chosen.setdefault(classes[nodes[carried[i]]], i)
        return kinds

    def _start(self, atom: Atom, inside: Var) -> Hashable:
        """What a loop's operand starts as; its own variable for what nothing else may stand for."""
        if isinstance(atom.aval, jaxcompat.AbstractRef):
            return inside
        literal = _scalar(self.writer, atom, inside.aval)
        return _key(atom if literal is None else literal), inside.aval

    # --- common ground -------------------------------------------------------------------------

    def _results(
        self,
        outs: Sequence[Var],
        keys: Sequence[Hashable],
        candidates: Sequence[Atom | None],
    ) -> tuple[list[Atom], list[bool]]:
        """What results are outside, and which are still wanted: not those that are something else.

        A result is its candidate, or another result with an equal key.
        """
        answer: list[Atom] = list(outs)
        wanted = [True] * len(outs)
        first: dict[Hashable, Atom] = {}
        # A result that nobody reads cannot stand for one that somebody does.
        for i in sorted(range(len(outs)), key=lambda i: isinstance(outs[i], DropVar)):
            other = candidates[i]
            if other is None:
                other = first.setdefault(keys[i], outs[i])
            out = outs[i]
            if other is out or isinstance(out.aval, jaxcompat.AbstractRef):
                continue
            if other.aval == out.aval and not self._donates(other, out):
                answer[i], wanted[i] = other, False
        return answer, wanted

    def _donates(self, *atoms: Atom) -> bool:
        """Whether a call in this body donates one of these, so that it may have no second name."""
        return any(type(atom) is not Literal and atom in self.writer.donated for atom in atoms)

    def _narrowed(
        self, body: Any, names: dict[Var, Atom], invars: Sequence[Var], wanted: Sequence[bool]
    ) -> Any:
        """A closed body that takes `invars` and gives the wanted results, with variables renamed.

        The same request gives the same object.
        """
        # In JAX 0.10 an open body is closed anew whenever it is viewed: what lasts is the open one.
        anchor = body if body.consts else jaxcompat.open_jaxpr(body)
        renamed = tuple((var, _key(atom), atom.aval) for var, atom in names.items())
        request = anchor, renamed, tuple(invars), tuple(wanted)
        if request not in self._made:
            self._made[request] = _narrow(body, names, invars, wanted)
        return self._made[request]


#: By primitive, what is done to its equations.
_RULES: dict[str, Callable[[_Forwarding, JaxprEqn], Sequence[Atom] | None]] = {
    name: rule
    for cls, rule in (
        (Scan, _Forwarding.scan),
        (While, _Forwarding.while_),
        (Cond, _Forwarding.cond),
        (Call, _Forwarding.call),
        (CustomJVP, _Forwarding.custom),
        (CustomVJP, _Forwarding.custom),
        (ShardMap, _Forwarding.shard_map),
    )
    for name in cls.primitives
}


def _plain(params: dict[str, tuple[Any, ...]], count: int) -> list[bool]:
    """Of which operands, or results, of a call nothing is asked."""
    asked = [(given, UNASKED[k]) for k, given in params.items() if k != "prevent_cse"]
    return [all(values[i] == plain for values, plain in asked) for i in range(count)]


def _scalar(writer: Writer, atom: Atom, aval: Any) -> Literal | None:
    """The literal that an operand is in a body, where its type is `aval`; None if it is none."""
    if getattr(aval, "shape", None) != ():
        return None
    if type(atom) is Literal and atom.aval == aval:
        return atom
    if type(atom) is not Literal and atom not in writer.constant_values:
        return None
    return jaxcompat.as_literal(writer.value(atom), aval)


def _key(atom: Atom) -> Hashable:
    """What two atoms of one type have in common only if they are the same value, to the bit."""
    if type(atom) is not Literal:
        return atom
    if atom.aval.shape != ():
        return id(atom)
    value = np.asarray(atom.val).astype(atom.aval.dtype, copy=False)
    return value.dtype, atom.aval.weak_type, value.tobytes()


def _stable_classes(labels: Sequence[Hashable], step: Sequence[int]) -> list[int]:
    """Numbers that are equal where the labels seen by taking one step after the other all are."""
    numbers: dict[Hashable, int] = {}
    classes = [numbers.setdefault(label, len(numbers)) for label in labels]
    while True:
        count, numbers = len(numbers), {}
        pairs = [(here, classes[there]) for here, there in zip(classes, step, strict=True)]
        classes = [numbers.setdefault(pair, len(numbers)) for pair in pairs]
        if len(numbers) == count:
            return classes
        step = [step[there] for there in step]


def _give_unchanging(
    given: _Given,
    kinds: Sequence[int | None],
    starts: Sequence[Atom],
    carried: Sequence[Var],
    jaxpr: Any,
    wanted: Sequence[bool],
) -> None:
    """Give the carries that never change as constants, to a body that reads them."""
    if None not in kinds:
        return
    used = _read(jaxpr, wanted)
    for kind, atom, var in zip(kinds, starts, carried, strict=True):
        if kind is None and var in used:
            given.give(atom, (var,))


def _merged(kinds: Sequence[int | None], carried: Sequence[Var]) -> dict[Var, Atom]:
    """The carries that are always equal to others, by these."""
    return {
        carried[i]: carried[kind] for i, kind in enumerate(kinds) if kind is not None and kind != i
    }


def _carry_results(
    kinds: Sequence[int | None], starts: Sequence[Atom], outs: Sequence[Var]
) -> list[Atom]:
    return [
        start if kind is None else outs[kind] for kind, start in zip(kinds, starts, strict=True)
    ]


def _read(jaxpr: Any, wanted: Sequence[bool]) -> set[Atom]:
    """The variables that a body's equations and wanted results read."""
    atoms = [v for eqn in jaxpr.eqns for v in eqn.invars]
    return {v for v in (*atoms, *keep(jaxpr.outvars, wanted)) if type(v) is not Literal}


def _narrow(
    body: Any, names: dict[Var, Atom], invars: Sequence[Var], wanted: Sequence[bool]
) -> Any:
    jaxpr = jaxcompat.open_jaxpr(body)

    def now(atoms: Sequence[Atom]) -> list[Atom]:
        return [v if type(v) is Literal else names.get(v, v) for v in atoms]

    eqns = [
        eqn if names.keys().isdisjoint(_variables(eqn)) else eqn.replace(invars=now(eqn.invars))
        for eqn in jaxpr.eqns
    ]
    debug, arg_names = jaxpr.debug_info, None
    if debug.arg_names is not None:
        known = dict(zip(jaxpr.invars, debug.safe_arg_names(len(jaxpr.invars)), strict=True))
        arg_names = tuple(known[v] for v in invars)
    everything = [True] * len(jaxpr.invars)
    debug = jaxcompat.filter_debug_info(debug, everything, wanted)._replace(arg_names=arg_names)
    return jaxcompat.replace_jaxpr(
        body,
        constvars=jaxpr.constvars,
        consts=body.consts,
        invars=invars,
        outvars=now(keep(jaxpr.outvars, wanted)),
        eqns=eqns,
        debug_info=debug,
    )


def _variables(eqn: JaxprEqn) -> list[Var]:
    return [v for v in eqn.invars if type(v) is not Literal]
