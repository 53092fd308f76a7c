"""Find the matches of a pattern in a program, and write the replacements.

A match is found in three steps. The pattern traced at example types, without parameters and
numbers, determines where to search, and the types of its arguments there. It is then traced again
at exactly these types, and must match at the same position, to the last parameter and literal.
Finally, no other equation may use a value of the match, except the results that the replacement
also returns.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.ir.rewriting import rewrite as engine
from jaxprtool.ir.rewriting.rewrite import RewriteRule, Writer
from jaxprtool.ir.source.frames import frames_now
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Aval, ClosedJaxpr, JaxprEqn, Var
from jaxprtool.passes.patterns import types
from jaxprtool.passes.patterns.definition import Definition, Match
from jaxprtool.passes.patterns.graphs import DataflowGraph, Pattern, bodies_in, known_arguments
from jaxprtool.passes.patterns.search import Fit, PatternSearch
from jaxprtool.passes.patterns.tracing import PLAIN_CALLS, Traced, inlined

#: The numbers of dimensions that an ellipsis may represent in the first search.
_MORE_DIMS = (0, 1, 2)


@dataclass(frozen=True)
class Found:
    """A match, and its replacement at `position`, that of its last equation.

    `replaced` are the positions of its equations, and of dead ones that use them. `results` are the
    variables that become the results of `jaxpr` on `operands`.
    """

    match: Match
    position: int
    replaced: frozenset[int]
    operands: tuple[Atom, ...]
    jaxpr: ClosedJaxpr
    results: tuple[Var, ...]


class Application:
    """One rewrite applied to one program's jaxpr.

    `result` is the jaxpr with every match replaced, after inlining; the same object if there is no
    match. `matches` are in the order in which the bodies are written.
    """

    def __init__(self, rewrite: Definition, jaxpr: AnyJaxpr):
        self.matches: list[Match] = []
        self._rewrite = rewrite
        self._traced: dict[Hashable, tuple[Traced, list[Pattern]] | None] = {}
        self._made: dict[Hashable, ClosedJaxpr] = {}
        self.result = jaxpr
        start = inlined(jaxpr, PLAIN_CALLS)
        self._bodies = bodies_in(start)
        self._plans = {body: self._plan(body) for body in self._bodies}
        if any(self._plans.values()):
            self.result = engine.rewrite(start, self._visit, outside_in=True)

    @cached_property
    def _known(self) -> dict[Var, np.generic | None]:
        return known_arguments(self._bodies)

    # --- writing --------------------------------------------------------------------------------

    def _visit(self, writer: Writer) -> RewriteRule:
        planned = [f for f in self._plans[writer.body] if writer.can_hold(f.jaxpr)]
        if not planned:
            return lambda eqn: None
        replaced = frozenset().union(*(found.replaced for found in planned))
        at = {found.position: found for found in planned}
        self.matches += [found.match for found in planned]
        positions = iter(range(len(jaxcompat.open_jaxpr(writer.body).eqns)))

        def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
            position = next(positions)
            if position in at:
                found = at[position]
                operands = [writer.lookup(v) for v in found.operands]
                made = writer.splice(found.jaxpr, operands, eqn, keep_source=False)
                writer.env.update(zip(found.results, made, strict=True))
                return [writer.lookup(v) for v in eqn.outvars]
            return eqn.outvars if position in replaced else None

        return rule

    # --- finding --------------------------------------------------------------------------------

    def _plan(self, jaxpr: AnyJaxpr) -> list[Found]:
        """Return the disjoint matches to replace in a body, found from the front."""
        body = DataflowGraph(jaxpr)
        skeletons = [p for p in self._skeletons(body) if p.needed <= body.by_primitive.keys()]
        if not skeletons:
            return []
        body.known = self._known
        positions: dict[int, list[Pattern]] = {}
        for skeleton in skeletons:
            for position in body.by_primitive.get(skeleton.eqns[skeleton.root].primitive.name, ()):
                positions.setdefault(position, []).append(skeleton)
        planned: list[Found] = []
        taken: set[int] = set()
        for position in sorted(positions):
            each = self._replaceable(body, taken, position, positions[position])
            if position not in taken and (found := next(each, None)) is not None:
                planned.append(found)
                taken |= found.replaced
        return planned

    def _skeletons(self, body: DataflowGraph) -> list[Pattern]:
        """Return the skeletons that the pattern may have in a body with these types."""
        given = [v.aval for v in (*body.inputs, *body.constants)]
        dtypes = {aval.dtype for aval in given if hasattr(aval, "dtype")}
        for position in body.by_primitive.get("convert_element_type", ()):
            dtypes.add(body.eqns[position].params["new_dtype"])
        floats = [d for d in dtypes if types.kind(d) is jnp.floating]
        symbolic = any(
            jaxcompat.is_symbolic_dimension(n) for aval in given for n in getattr(aval, "shape", ())
        )
        more_dims = _MORE_DIMS if any(d.more_dims for d in self._rewrite.declarations) else (0,)
        found: dict[Hashable, Pattern] = {}
        for dtype in (None, *sorted(floats, key=str)):
            for more in more_dims:
                for pattern in self._rewrite.skeletons(dtype, more, symbolic):
                    found.setdefault(pattern.skeleton, pattern)
        return list(found.values())

    def _replaceable(
        self, body: DataflowGraph, taken: set[int], root: int, skeletons: Sequence[Pattern]
    ) -> Iterator[Found]:
        """Yield the replaceable matches with this root that the user's check accepts."""
        rewrite, seen = self._rewrite, set()
        for avals, sizes in self._rough(body, taken, root, skeletons):
            traced = self._pattern(avals, body.eqns[root])
            for form in () if traced is None else traced[1]:
                for fit in _exact(form, body, taken, root, avals):
                    replaced = _replaced_positions(form, body, fit)
                    key = replaced, *(id(fit.atoms[v]) for v in form.inputs)
                    if replaced is None or key in seen:
                        continue
                    seen.add(key)  # a sum of one value and itself fits in two equivalent ways
                    match = _match(rewrite, form, body, fit, replaced, sizes)
                    if not rewrite.accepts(match):
                        continue
                    assert traced is not None
                    made = self._replacement(form, fit, match, traced[0], body.eqns[root])
                    operands = tuple(fit.atoms[v] for v in form.inputs)
                    results = [fit.atoms[v] for v in compress(form.outputs, form.computed)]
                    dead = body.dead_after(replaced)
                    yield Found(
                        match, max(replaced), replaced | dead, operands, made, tuple(results)
                    )

    def _rough(
        self, body: DataflowGraph, taken: set[int], root: int, skeletons: Sequence[Pattern]
    ) -> Iterator[tuple[tuple[Aval, ...], dict[str, Any]]]:
        """Yield the types that the pattern's arguments may have here, and its named sizes."""
        tried: set[Hashable] = set()
        for skeleton in skeletons:
            for fit in PatternSearch(skeleton, body, taken, exact=False).fits(root):
                if any(v not in fit.atoms for v in skeleton.inputs):
                    continue
                avals = tuple(fit.atoms[v].aval for v in skeleton.inputs)
                if avals in tried:
                    continue
                tried.add(avals)
                sizes = types.sizes_in(self._rewrite.declarations, avals)
                if sizes is not None:
                    yield avals, sizes

    def _pattern(
        self, avals: tuple[Aval, ...], like: JaxprEqn
    ) -> tuple[Traced, list[Pattern]] | None:
        """Return the pattern at these types, in the context of an equation; None if invalid."""
        key = avals, like.ctx
        if key not in self._traced:
            self._traced[key] = self._rewrite.pattern_at(avals, like)
        return self._traced[key]

    def _replacement(
        self, form: Pattern, fit: Fit, match: Match, traced: Traced, like: JaxprEqn
    ) -> ClosedJaxpr:
        """Return the replacement's jaxpr for a match, with the results the pattern computes."""
        outs = zip(form.outputs, form.computed, strict=True)
        results = tuple(fit.atoms[v].aval if flag else None for v, flag in outs)
        avals = tuple(fit.atoms[v].aval for v in form.inputs)
        key = avals, results, like.ctx
        if key not in self._made:
            made = self._rewrite.replacement_at(avals, like, match, traced, results)
            self._made[key] = made
        return self._made[key]


def _exact(
    form: Pattern, body: DataflowGraph, taken: set[int], root: int, avals: Sequence[Aval]
) -> Iterator[Fit]:
    """Yield the fits of the pattern traced at these types whose arguments have them."""
    if form.eqns[form.root].primitive is not body.eqns[root].primitive:
        return
    for fit in PatternSearch(form, body, taken, exact=True).fits(root):
        atoms = [fit.atoms.get(v) for v in form.inputs]
        if all(a is not None and a.aval == t for a, t in zip(atoms, avals, strict=True)):
            yield fit


def _replaced_positions(form: Pattern, body: DataflowGraph, fit: Fit) -> frozenset[int] | None:
    """Return the positions of the equations that a match replaces; None if others use its values.

    Equations that depend on no argument, such as an iota, may be shared, and then stay.
    """
    replaced = set(fit.positions.values())
    roots = {fit.atoms[v] for v, flag in zip(form.outputs, form.computed, strict=True) if flag}

    def used_up_to(var: Var, position: int) -> bool:
        readers = [*body.readers(var), *([len(body.eqns)] if var in body.results else ())]
        return any(i <= position and i not in replaced and i not in body.dead for i in readers)

    for i in reversed(form.constant_positions):
        position = fit.positions.get(i)
        if position is not None and any(
            used_up_to(v, len(body.eqns)) for v in body.eqns[position].outvars
        ):
            replaced.discard(position)
    if not replaced.isdisjoint(body.dead):
        return None
    last = max(body.definitions[v][0] for v in roots)
    for position in replaced:
        for v in body.eqns[position].outvars:
            if used_up_to(v, last if v in roots else len(body.eqns)):
                return None
    inputs = [fit.atoms[v] for v in form.inputs]
    if any(body.position(a) in replaced for a in inputs):
        return None
    return frozenset(replaced)


def _match(
    rewrite: Definition,
    form: Pattern,
    body: DataflowGraph,
    fit: Fit,
    replaced: frozenset[int],
    sizes: dict[str, Any],
) -> Match:
    atoms = {name: fit.atoms[v] for name, v in zip(rewrite.arg_names, form.inputs, strict=True)}
    values = {name: body.value(atom) for name, atom in atoms.items()}
    source, *_ = frames_now().texts(body.eqns[max(replaced)]) or (None,)
    return Match(
        rewrite.name,
        {name: atom.aval for name, atom in atoms.items()},
        {name: value for name, value in values.items() if value is not None},
        sizes,
        tuple(body.eqns[position] for position in sorted(replaced)),
        source,
    )
