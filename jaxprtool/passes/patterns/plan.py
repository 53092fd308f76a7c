"""Finding what is to be replaced in a program, and writing the replacements.

A match is found in three steps. The pattern as traced at its example types, without parameters and
numbers, shows where to look, and what the pattern's arguments would be there. It is traced anew at
exactly their types, which makes it `f32` or `bf16`, long or short, with the numbers that follow
from sizes; and this must be found in the same place, to the last parameter and literal. Last, the
equations must be the program's to give away: nobody else may use what they compute, but for the
results that the replacement gives too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.ir import writer as engine
from jaxprtool.ir.writer import Rule, Writer
from jaxprtool.jaxcompat import Atom, JaxprEqn, Literal, Var
from jaxprtool.passes.patterns import types
from jaxprtool.passes.patterns.graphs import Graph, Pattern, known_arguments
from jaxprtool.passes.patterns.match import Match
from jaxprtool.passes.patterns.search import Fit, Search, in_outline, same_parameters
from jaxprtool.passes.patterns.tracing import PLAIN_CALLS, Traced, inlined

if TYPE_CHECKING:
    from jaxprtool.passes.patterns.define import Rewrite

#: How many dimensions an ellipsis may stand for where the pattern is first looked for.
_MORE_DIMS = (0, 1, 2)


@dataclass(frozen=True)
class Found:
    """A match, and what is written at `place`, that of its last equation.

    `gone` are the places of its equations. `results` are the variables that become the results of
    `jaxpr` on `operands`.
    """

    match: Match
    place: int
    gone: frozenset[int]
    operands: tuple[Atom, ...]
    jaxpr: Any
    results: tuple[Any, ...]


class Application:
    """One rewrite applied to one program's jaxpr.

    `result` is the jaxpr with every match replaced: after inlining, if there is any, and else the
    very same object. `matches` are they, in the order in which the bodies are written.
    """

    def __init__(self, rewrite: Rewrite, jaxpr: Any):
        self.matches: list[Match] = []
        self._rewrite = rewrite
        self._traced: dict[Any, tuple[Traced, list[Pattern]] | None] = {}
        self._made: dict[Any, Any] = {}
        self._jaxpr = inlined(jaxpr, PLAIN_CALLS)
        written = engine.rewrite(self._jaxpr, self._visit, outside_in=True)
        self.result = written if self.matches else jaxpr

    @cached_property
    def _known(self) -> dict[Var, Any]:
        return known_arguments(self._jaxpr)

    # --- writing --------------------------------------------------------------------------------

    def _visit(self, writer: Writer) -> Rule:
        planned = self._plan(writer)
        if not planned:
            return lambda eqn: None
        gone = frozenset().union(*(found.gone for found in planned))
        at = {found.place: found for found in planned}
        self.matches += [found.match for found in planned]
        places = iter(range(len(jaxcompat.open_jaxpr(writer.body).eqns)))

        def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
            place = next(places)
            if place in at:
                found = at[place]
                operands = [writer.now(v) for v in found.operands]
                made = writer.splice(found.jaxpr, operands, eqn, keep_source=False)
                writer.became.update(zip(found.results, made, strict=True))
                return [writer.now(v) for v in eqn.outvars]
            return eqn.outvars if place in gone else None

        return rule

    # --- finding --------------------------------------------------------------------------------

    def _plan(self, writer: Writer) -> list[Found]:
        """What is to be replaced in a body, none sharing an equation: found from the front."""
        body = Graph(writer.body)
        outlines = [p for p in self._outlines(body) if p.needed <= body.by_primitive.keys()]
        if not outlines:
            return []
        body.known = self._known
        places: dict[int, list[Pattern]] = {}
        for outline in outlines:
            for place in body.by_primitive.get(outline.eqns[outline.root].primitive.name, ()):
                places.setdefault(place, []).append(outline)
        planned: list[Found] = []
        taken: set[int] = set()
        for place in sorted(places):
            each = self._replaceable(writer, body, taken, place, places[place])
            if place not in taken and (found := next(each, None)) is not None:
                planned.append(found)
                taken |= found.gone
        return planned

    def _outlines(self, body: Graph) -> list[Pattern]:
        """The outlines that the pattern could have in a body, by the types that are there."""
        given = [v.aval for v in (*body.inputs, *body.constants)]
        dtypes = {aval.dtype for aval in given if hasattr(aval, "dtype")}
        for place in body.by_primitive.get("convert_element_type", ()):
            dtypes.add(body.eqns[place].params["new_dtype"])
        floats = [d for d in dtypes if types.kind(d) is jnp.floating]
        symbolic = any(
            jaxcompat.is_symbolic_dimension(n) for aval in given for n in getattr(aval, "shape", ())
        )
        more_dims = _MORE_DIMS if any(d.more_dims for d in self._rewrite.declarations) else (0,)
        found: dict[Any, Pattern] = {}
        for dtype in (None, *sorted(floats, key=str)):
            for more in more_dims:
                for pattern in self._rewrite.outlines(dtype, more, symbolic):
                    found.setdefault(pattern.outline, pattern)
        return list(found.values())

    def _replaceable(
        self, writer: Writer, body: Graph, taken: set[int], root: int, outlines: Sequence[Pattern]
    ) -> Iterator[Found]:
        """The matches with this root that can be replaced, and that the user's check accepts."""
        rewrite = self._rewrite
        for avals, sizes in self._rough(body, taken, root, outlines):
            traced = self._pattern(avals, body.eqns[root])
            for form in () if traced is None else traced[1]:
                for fit in _exact(form, body, taken, root, avals):
                    gone = _given_away(form, body, fit)
                    if gone is None:
                        continue
                    match = _match(rewrite, form, body, fit, gone, sizes)
                    if not rewrite.accepts(match):
                        continue
                    assert traced is not None
                    found = self._found(form, fit, gone, match, traced[0], body.eqns[root])
                    if writer.can_hold(found.jaxpr):
                        yield found

    def _rough(
        self, body: Graph, taken: set[int], root: int, outlines: Sequence[Pattern]
    ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The types that the pattern's arguments could have here, and the sizes that it names."""
        tried: set[Any] = set()
        for outline in outlines:
            for fit in Search(outline, body, taken, in_outline, exact=False).fits(root):
                if any(v not in fit.atoms for v in outline.inputs):
                    continue
                avals = tuple(fit.atoms[v].aval for v in outline.inputs)
                if avals in tried:
                    continue
                tried.add(avals)
                sizes = types.sizes_in(self._rewrite.declarations, avals)
                if sizes is not None:
                    yield avals, sizes

    def _pattern(
        self, avals: tuple[Any, ...], like: JaxprEqn
    ) -> tuple[Traced, list[Pattern]] | None:
        """The pattern at these types, in the setting of an equation; None if it has none there."""
        key = avals, like.ctx
        if key not in self._traced:
            self._traced[key] = self._rewrite.pattern_at(avals, like)
        return self._traced[key]

    def _found(
        self,
        form: Pattern,
        fit: Fit,
        gone: frozenset[int],
        match: Match,
        traced: Traced,
        like: JaxprEqn,
    ) -> Found:
        results = [
            fit.atoms[v] if flag else None
            for v, flag in zip(form.outputs, form.computed, strict=True)
        ]
        operands = tuple(fit.atoms[v] for v in form.inputs)
        avals = tuple(a.aval for a in operands)
        wanted = tuple(None if v is None else v.aval for v in results)
        key = avals, wanted, like.ctx
        if key not in self._made:
            made = self._rewrite.replacement_at(avals, like, match, traced, wanted)
            self._made[key] = made
        kept = tuple(v for v in results if v is not None)
        return Found(match, max(gone), gone, operands, self._made[key], kept)


def _exact(
    form: Pattern, body: Graph, taken: set[int], root: int, avals: Sequence[Any]
) -> Iterator[Fit]:
    """The places of the pattern, traced at these types, that have them."""
    if form.eqns[form.root].primitive is not body.eqns[root].primitive:
        return
    for fit in Search(form, body, taken, same_parameters, exact=True).fits(root):
        atoms = [fit.atoms.get(v) for v in form.inputs]
        if all(a is not None and a.aval == t for a, t in zip(atoms, avals, strict=True)):
            yield fit


def _given_away(form: Pattern, body: Graph, fit: Fit) -> frozenset[int] | None:
    """The places of the equations that a match replaces; None if it shares a value with others.

    What depends on no argument, such as an iota, may be shared, and stays then.
    """
    gone = set(fit.places.values())
    roots = {fit.atoms[v] for v, flag in zip(form.outputs, form.computed, strict=True) if flag}
    for i in sorted(form.constant_places, reverse=True):
        place = fit.places.get(i)
        if place is not None and place in gone:
            outs = body.eqns[place].outvars
            if any(user not in gone for v in outs if v not in roots for user in body.users[v]):
                gone.discard(place)
    if not gone:
        return None
    last = max(gone)
    for place in gone:
        for v in body.eqns[place].outvars:
            least = last if v in roots else len(body.eqns)
            if any(user not in gone and user <= least for user in body.users[v]):
                return None
    inputs = [fit.atoms[v] for v in form.inputs]
    if any(type(a) is not Literal and body.definition.get(a) in gone for a in inputs):
        return None
    if not all(body.definition.get(v) in gone for v in roots):
        return None
    return frozenset(gone)


def _match(
    rewrite: Rewrite,
    form: Pattern,
    body: Graph,
    fit: Fit,
    gone: frozenset[int],
    sizes: dict[str, Any],
) -> Match:
    atoms = {name: fit.atoms[v] for name, v in zip(rewrite.arg_names, form.inputs, strict=True)}
    values = {name: body.value(atom) for name, atom in atoms.items()}
    frame = jaxcompat.user_frame(body.eqns[max(gone)])
    return Match(
        rewrite.name,
        {name: atom.aval for name, atom in atoms.items()},
        {name: value for name, value in values.items() if value is not None},
        sizes,
        tuple(body.eqns[place] for place in sorted(gone)),
        None if frame is None else f"{frame[0]}:{frame[1]}",
    )
