"""Forwarding: remove pass-through and duplicate operands and results of loops, branches and calls.

Values that a body only forwards need not go through it:

*   a result that is an operand, a scalar or a constant of the body is replaced by that value
    outside; results that are always equal become one;
*   an operand that is passed twice is passed once, and scalars are moved inside the body, where
    `fold` and `simplify` can use them;
*   a carry of a scan or while that never changes becomes a constant of the loop, and its result
    the initial value; carries that start equal and stay equal become one. These are found as the
    coarsest stable partition of the carries (each carry has one successor, so sequences are
    compared by doubling; compare J. E. Hopcroft, "An n log n algorithm for minimizing states in a
    finite automaton", 1971);
*   an operand that a scan slices, and all of whose rows are one value, becomes a constant of the
    scan.

`dce` removes what is unused afterwards. These stay unchanged: operands that are donated, have a
requested sharding or layout, or are refs; results of `shard_map`, whose specifications are
shardings, except duplicates; results of a differentiated `remat`, behind its optimization barrier.
Nothing is forwarded past custom derivatives, since the user's rule may return any derivative: only
their bodies are rewritten. An array that a call in the same body donates gets no second name.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from jaxprtool import jaxcompat
from jaxprtool.ir.equations import free_variables, substitute, with_operands
from jaxprtool.ir.keys import atom_key
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import NO_OPTIONS, Call, Regions, ShardMap, keep, regions
from jaxprtool.ir.rewrite import Memo, RewriteRule, Writer, rewrite
from jaxprtool.jaxcompat import Atom, Aval, ClosedJaxpr, DropVar, JaxprEqn, Literal, Var
from jaxprtool.passes import Pass


@dataclass(frozen=True)
class Forward(Pass):
    """Remove pass-through and duplicate operands and results of loops, branches and calls.

    A result that is an operand is replaced by that operand. Duplicate operands are merged, carries
    that never change become constants of the loop, and scalars move into the bodies, where `fold`
    and `simplify` can use them. `dce` then removes what is unused.

    Note:
        Operands that are donated, or that have a requested sharding or layout, are unchanged, and
        so are the operands and results of custom derivatives and `shard_map`.

    Example:
        def f(x, y):
            a, b = jax.jit(lambda x, y: (jnp.sin(x), y))(x, y)
            return a * b

        $ jaxprtool opt f.py:f --args "f32[], f32[]" -p "forward, dce"
        { lambda ; a:f32[] b:f32[]. let
            c:f32[] = jit[
              name=<lambda>
              jaxpr={ lambda ; a:f32[]. let c:f32[] = sin a in (c,) }
            ] a
            d:f32[] = mul c b
          in (d,) }
    """

    name: ClassVar[str] = "forward"
    group: ClassVar[str] = "clean up"

    def __call__(self, program: Program) -> Program:
        jaxpr, previous = program.jaxpr, None
        # A value that leaves or enters one body may be forwarded through the next.
        while jaxpr is not previous:
            visitor = partial(_visitor, Memo())
            jaxpr, previous = rewrite(jaxpr, visitor, flat=False), jaxpr
        return program.replace(jaxpr=jaxpr) if jaxpr is not program.jaxpr else program


def _visitor(memo: Memo, writer: Writer) -> RewriteRule:
    def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
        inside = regions(eqn)
        return None if inside is None else _Forwarder(writer, inside, memo).rewrite()

    return rule


@dataclass(frozen=True)
class _Constraints:
    """The constraints on merging and forwarding the operands and results of an equation.

    Attributes:
        operands: The kind of each operand: only operands of the same kind are merged. Those of
            kind `_FIXED` must stay.
        results: The kind of each result, with the same meaning.
        into: True if scalars may be moved into the bodies.
        out: True if a result that a body forwards is the operand itself.
    """

    operands: Sequence[Hashable]
    results: Sequence[Hashable]
    into: bool = True
    out: bool = True

    @classmethod
    def of(cls, inside: Regions) -> _Constraints:
        """Return the constraints of an equation."""
        structured = inside.view
        if isinstance(structured, ShardMap):
            return cls(structured.in_specs, structured.out_specs, into=False, out=False)
        count = len(inside.eqn.invars), len(inside.eqn.outvars)
        if not isinstance(structured, Call):
            return cls([None] * count[0], [None] * count[1], out=not inside.edges.has_rule)
        prevent_cse = structured.operand_params.get("prevent_cse", (None,) * count[0])
        asked, out_asked = map(_asked, (structured.operand_params, structured.out_params), count)
        return cls(
            [
                _FIXED if is_fixed else prevents_cse
                for is_fixed, prevents_cse in zip(asked, prevent_cse, strict=True)
            ],
            [_FIXED if is_fixed else None for is_fixed in out_asked],
            out=not inside.eqn.params.get("differentiated"),
        )


#: The kind of operands and results that must stay as they are.
_FIXED = object()

#: The arguments for an operand, with the number of the region of each.
_Inside = Sequence[tuple[int, Var]]


class _Forwarder:
    """The rewriting of one loop, branch or call."""

    def __init__(self, writer: Writer, inside: Regions, memo: Memo):
        self.writer, self.inside, self._memo = writer, inside, memo
        self.eqn = inside.eqn
        self.constraints = _Constraints.of(inside)
        self.jaxprs = inside.jaxprs
        #: The new atoms of variables, in each region.
        self.names: list[dict[Var, Atom]] = [{} for _ in self.jaxprs]
        self.keeps = [True] * len(self.eqn.invars)
        self.wanted = [True] * len(self.eqn.outvars)
        self.replacements: list[Atom] = list(self.eqn.outvars)
        #: New constants by field, outside and inside.
        self.more: dict[str, list[Atom]] = {}
        self.more_inside: dict[str, list[Var]] = {}
        self._first: dict[Hashable, _Inside] = {}
        self.carried = dict(inside.carried)
        self.sliced = {i for field in inside.edges.sliced for i in inside.operands[field]}
        self.stacked = {i for field in inside.edges.stacked for i in inside.results[field]}
        self.arguments = inside.arguments_by_operand
        #: The operand of each argument of each body.
        self.operand_of: list[dict[Atom, int]] = [
            dict(zip(jaxpr.invars, region.ins, strict=True))
            for region, jaxpr in zip(inside.regions, self.jaxprs, strict=True)
        ]

    def rewrite(self) -> Sequence[Atom] | None:
        """Return the atoms that replace the results; None if nothing changes."""
        inside = self.inside
        for field, positions in inside.operands.items():
            for i in positions:
                if self.arguments[i] and i not in self.carried and i not in self.sliced:
                    self.pass_operand(i, field, self.constraints.into)
        if self.carried:
            self.remove_carries()
        for field in inside.edges.sliced:
            for i in inside.operands[field]:
                self.pass_rows(i, field)
        if inside.edges.has_rule:
            # The user's rule has all operands, and may return any derivative of the results.
            jaxpr = self.jaxprs[0]
            read = free_variables(jaxpr.eqns, keep(jaxpr.outvars, self.wanted))
            if self.names[0].keys().isdisjoint(read):
                return None
            self.keeps = [True] * len(self.keeps)
        else:
            self.results()
        if all(self.keeps) and all(self.wanted) and not any(self.names):
            return None
        bodies = [
            self._narrowed(
                body, number, inside.arguments(region, jaxpr.invars, self.more_inside, self.keeps)
            )
            for number, (body, region, jaxpr) in enumerate(
                zip(inside.bodies, inside.regions, self.jaxprs, strict=True)
            )
        ]
        self.writer.add(inside.rebuild(bodies, self.keeps, self.wanted, self.more))
        return self.replacements

    # --- operands -------------------------------------------------------------------------------

    def pass_operand(self, i: int, field: str, scalars: bool) -> None:
        """Keep an operand unless it is a scalar or a duplicate."""
        group = self.constraints.operands[i]
        if group is not _FIXED:
            self.keeps[i] = self._is_new(
                self.eqn.invars[i], self.arguments[i], field, scalars, group
            )

    def pass_rows(self, i: int, field: str) -> None:
        """Keep a sliced operand, unless all its rows are one value."""
        repeated = self._repeated(i)
        if repeated is None:
            self.pass_operand(i, field, scalars=False)
        else:
            self.keeps[i] = False
            self.make_constant(repeated, self.arguments[i])

    def make_constant(self, atom: Atom, arguments: _Inside) -> None:
        """Replace arguments by a loop-invariant value, in the bodies that read them."""
        for number, var in arguments:
            field = self.inside.regions[number].constants
            assert field is not None
            if self._is_new(atom, [(number, var)], field):
                self.more.setdefault(field, []).append(atom)
                self.more_inside.setdefault(field, []).append(var)

    def _is_new(
        self,
        atom: Atom,
        arguments: _Inside,
        field: str,
        scalars: bool = True,
        group: Hashable = None,
    ) -> bool:
        """Return True if an operand must stay: it is neither a scalar nor a duplicate.

        Otherwise its arguments are renamed.
        """
        if isinstance(atom.aval, jaxcompat.AbstractRef):
            return True
        if scalars:
            literals = [_scalar(self.writer, atom, var.aval) for _, var in arguments]
            if None not in literals:
                return self._rename(arguments, literals)
        if type(atom) is Literal:
            return True
        first = self._first.setdefault((field, atom, group), arguments)
        if first is arguments:
            return True
        pairs = zip(first, arguments, strict=True)
        if any(a.aval != b.aval for (_, a), (_, b) in pairs):
            return True
        return self._rename(arguments, [var for _, var in first])

    def _rename(self, arguments: _Inside, atoms: Sequence[Atom]) -> bool:
        for (number, var), atom in zip(arguments, atoms, strict=True):
            self.names[number][var] = atom
        return False

    def _can_add(self, arguments: _Inside) -> bool:
        """Return True if the bodies of these arguments can take new constants."""
        return all(self.inside.regions[number].constants is not None for number, _ in arguments)

    def _repeated(self, i: int) -> Atom | None:
        """Return the value of every row of an operand, if it repeats one value."""
        value, arguments = self.writer.repeated_row(self.eqn.invars[i]), self.arguments[i]
        if value is None or not self._can_add(arguments):
            return None
        return value if all(var.aval == value.aval for _, var in arguments) else None

    # --- carries of loops -----------------------------------------------------------------------

    def remove_carries(self) -> None:
        """Remove loop-invariant and duplicate carries."""
        carried, eqn = self.inside.carried, self.eqn
        representatives = self._equal_carries()
        for number, representative in enumerate(representatives):
            self.wanted[carried[number][1]] = representative == number
        used: list[dict[Var, None]] = []
        if None in representatives:
            used = [
                free_variables(jaxpr.eqns, keep(jaxpr.outvars, self._results_of(n)))
                for n, jaxpr in enumerate(self.jaxprs)
            ]
        for (i, out), representative in zip(carried, representatives, strict=True):
            if self.wanted[out]:
                continue
            self.keeps[i] = False
            if representative is None:
                self.replacements[out] = eqn.invars[i]
                read = [(n, var) for n, var in self.arguments[i] if var in used[n]]
                self.make_constant(eqn.invars[i], read)
            else:
                other, self.replacements[out] = (
                    carried[representative][0],
                    eqn.outvars[carried[representative][1]],
                )
                self._rename(self.arguments[i], [var for _, var in self.arguments[other]])

    def _equal_carries(self) -> list[int | None]:
        """Return for each carry an equal one, by number; None if it always has its initial value.

        Among equal carries, the first whose result is read is chosen, or else the first; the chosen
        one has its own number.
        """
        carried, eqn = self.inside.carried, self.eqn
        loop_regions = [
            n
            for n, region in enumerate(self.inside.regions)
            if any(b is not None for b in region.next_iteration)
        ]
        if len(loop_regions) != 1:
            return list(range(len(carried)))
        (number,) = loop_regions
        region, jaxpr = self.inside.regions[number], self.jaxprs[number]
        arguments = dict(zip(region.ins, jaxpr.invars, strict=True))
        nexts = dict(zip(region.next_iteration, jaxpr.outvars, strict=True))
        # The initial label of a value: its value before the loop or, if computed inside, itself.
        labels: dict[Hashable, Hashable] = {}
        step: dict[Hashable, Hashable] = {}  # the variable with this value in the next iteration
        for i, var, is_invariant in zip(
            region.ins, jaxpr.invars, region.loop_invariant, strict=True
        ):
            if is_invariant:
                labels[var] = self._start(eqn.invars[i], var)
        loose = []
        for i, out in carried:
            atom, var = eqn.invars[i], arguments[i]
            same_types = var.aval == eqn.outvars[out].aval == atom.aval
            same_types = same_types and not self._donates(atom, eqn.outvars[out])
            labels[var] = self._start(atom, var) if same_types else var
            loose.append(labels[var] is not var and self._can_add(self.arguments[i]))
        for i, _ in carried:
            after = nexts[i]
            step[arguments[i]] = key = atom_key(after)
            labels.setdefault(key, (key, after.aval) if type(after) is Literal else after)
        numbers = {key: number for number, key in enumerate(labels)}
        steps = [numbers[step.get(key, key)] for key in labels]
        classes = _stable_classes(list(labels.values()), steps)
        states = [numbers[arguments[i]] for i, _ in carried]
        chosen: dict[int, int] = {}
        representatives: list[int | None] = [None] * len(carried)
        for number in sorted(
            range(len(carried)), key=lambda n: isinstance(eqn.outvars[carried[n][1]], DropVar)
        ):
            at = states[number]
            if not (loose[number] and classes[at] == classes[steps[at]]):
                representatives[number] = chosen.setdefault(classes[at], number)
        return representatives

    def _start(self, atom: Atom, inside: Var) -> Hashable:
        """Return a key for the initial value of a loop's operand; its own variable for refs."""
        if isinstance(atom.aval, jaxcompat.AbstractRef):
            return inside
        literal = _scalar(self.writer, atom, inside.aval)
        return atom_key(atom if literal is None else literal), inside.aval

    # --- results --------------------------------------------------------------------------------

    def results(self) -> None:
        """Replace the results that are known outside: an operand, or another result."""
        outs, last = self.eqn.outvars, set(self.carried.values())
        sources = self.inside.sources()
        first: dict[Hashable, Atom] = {}
        # An unused result cannot replace one that is used.
        for i in sorted(range(len(outs)), key=lambda i: isinstance(outs[i], DropVar)):
            if i in last or self.constraints.results[i] is _FIXED:
                continue
            out, other = outs[i], self._outside(i, sources[i]) if self.constraints.out else None
            if other is None:
                same = tuple(atom_key(self._name(number, atom)) for number, atom in sources[i])
                group = self.constraints.results[i], i in self.stacked
                other = first.setdefault((same, group), out)
            if other is out or isinstance(out.aval, jaxcompat.AbstractRef):
                continue
            if other.aval == out.aval and not self._donates(other, out):
                self.replacements[i], self.wanted[i] = other, False

    def _name(self, number: int, atom: Atom) -> Atom:
        """Return the new atom of an atom of a body."""
        return atom if type(atom) is Literal else self.names[number].get(atom, atom)

    def _outside(self, result: int, sources: Sequence[tuple[int, Atom]]) -> Atom | None:
        """Return the value of a result outside, if it is the same whichever body runs."""
        stacked = result in self.stacked
        atoms = [self._source(number, atom, stacked) for number, atom in sources]
        if None not in atoms and len({atom_key(atom) for atom in atoms if atom is not None}) == 1:
            return atoms[0]
        if stacked or len(sources) != 1:
            return None
        ((number, atom),) = sources
        body, aval = self.inside.bodies[number], self.eqn.outvars[result].aval
        for var, value in zip(body.constvars, body.consts, strict=True):
            if var is atom and var.aval == aval:
                literal = jaxcompat.as_literal(value, var.aval)
                can_hold = literal is None and self.writer.holds_constants
                return self.writer.constant(value, var.aval) if can_hold else literal
        return None

    def _source(self, number: int, atom: Atom, stacked: bool) -> Atom | None:
        """Return the operand that a body forwards, row by row if `stacked`, or a scalar."""
        if not stacked:
            atom = self._name(number, atom)
        if type(atom) is Literal:
            return None if stacked else atom
        i = self.operand_of[number].get(atom)
        if i is None or i in self.carried or (i in self.sliced) != stacked:
            return None
        return None if self.constraints.operands[i] is _FIXED else self.eqn.invars[i]

    def _donates(self, *atoms: Atom) -> bool:
        """Return True if a call in this body donates one of these: it must then keep one name."""
        return any(type(atom) is not Literal and atom in self.writer.donated for atom in atoms)

    # --- bodies ---------------------------------------------------------------------------------

    def _results_of(self, number: int) -> list[bool]:
        """Return which results of a body are wanted."""
        return [out is None or self.wanted[out] for out in self.inside.regions[number].outs]

    def _narrowed(self, body: ClosedJaxpr, number: int, invars: Sequence[Var]) -> ClosedJaxpr:
        """Return a body from `invars` to the wanted results, with variables renamed.

        The same request returns the same object.
        """
        names, wanted = self.names[number], self._results_of(number)
        renamed = tuple((var, atom_key(atom), atom.aval) for var, atom in names.items())
        make = partial(_narrow, body, names, invars, wanted)
        return self._memo(make, body, renamed, tuple(invars), tuple(wanted))


def _asked(params: dict[str, tuple[Any, ...]], count: int) -> list[bool]:
    """Return which operands, or results, of a call have requested settings such as shardings."""
    asked = [False] * count
    for name, values in params.items():
        if name != "prevent_cse" and values.count(NO_OPTIONS[name]) < count:
            asked = [flag or v != NO_OPTIONS[name] for flag, v in zip(asked, values, strict=True)]
    return asked


def _scalar(writer: Writer, atom: Atom, aval: Aval) -> Literal | None:
    """Return a known scalar as a literal of the type `aval`, that of its argument; else None."""
    if getattr(aval, "shape", None) != ():
        return None
    if type(atom) is Literal and atom.aval == aval:
        return atom
    if type(atom) is not Literal and atom not in writer.constant_values:
        return None
    return jaxcompat.as_literal(writer.value(atom), aval)


def _stable_classes(labels: Sequence[Hashable], step: Sequence[int]) -> list[int]:
    """Return class numbers, equal for positions whose label sequences under `step` are equal."""
    numbers: dict[Hashable, int] = {}
    classes = [numbers.setdefault(label, len(numbers)) for label in labels]
    while True:
        count, numbers = len(numbers), {}
        pairs = [(here, classes[there]) for here, there in zip(classes, step, strict=True)]
        classes = [numbers.setdefault(pair, len(numbers)) for pair in pairs]
        if len(numbers) == count:
            return classes
        step = [step[there] for there in step]


def _narrow(
    body: ClosedJaxpr, names: dict[Var, Atom], invars: Sequence[Var], wanted: Sequence[bool]
) -> ClosedJaxpr:
    jaxpr = jaxcompat.open_jaxpr(body)
    eqns = [with_operands(eqn, names) for eqn in jaxpr.eqns] if names else jaxpr.eqns
    outvars = substitute(keep(jaxpr.outvars, wanted), names)
    return jaxcompat.replace_jaxpr(body, invars=invars, outvars=outvars, eqns=eqns)
