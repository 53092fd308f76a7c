"""Choose variables for a function that declares none: find a cut, and sow its values.

The cut is the cheapest set of values that separates the values a function needs late from those it
gets early (see `flow` and `cut`): the set with the fewest bytes, and on a tie the one nearest to
its uses, so that the least work is left. A key is chosen only if the key itself is needed late.

The program is returned with a `sow` on each of these values, at any depth, under a tag of our own.
Then it is unzipped as if its author had written these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import jax

from jaxprtool import jaxcompat
from jaxprtool.ir.core.equations import substitute, with_operands
from jaxprtool.ir.core.regions import regions
from jaxprtool.ir.programs.program import Program
from jaxprtool.jaxcompat import ClosedJaxpr, JaxprEqn, Var
from jaxprtool.passes.cleanup.dce import Dce
from jaxprtool.passes.unzip.binding_times import EARLY, READY, Context
from jaxprtool.passes.unzip.cut import SINK, SOURCE, Graph
from jaxprtool.passes.unzip.flow import (
    BIT,
    KEY,
    CutConstraints,
    Location,
    bits_of,
    flow_of,
    parts_of,
)
from jaxprtool.passes.unzip.hoist import hoisted
from jaxprtool.passes.unzip.naming import NestedValue, names_of
from jaxprtool.passes.unzip.split import Split, split
from jaxprtool.primitives import sow_p

_LEAF = jax.tree.structure(0)


def sow_cut(program: Program, early: Sequence[bool], tag: str, computed_once: bool) -> Program:
    """Return the program with a cut between `early` arguments and its results sown under `tag`.

    `early` has an entry for each flat argument. The names are unique paths, joined by `SEPARATOR`.
    If `computed_once`, everything that depends only on early arguments is computed before the cut,
    except changes of a value to another layout or a wider type. Otherwise the early arguments are
    keys, and the values that are cheapest to store are sown. Dead code is removed. If there is no
    cut, nothing is sown.
    """
    program = Dce()(program)
    context = Context(tag=None)
    ins = [EARLY if flag else READY for flag in early]
    part = split(program.jaxpr, ins, context)
    if (body := hoisted(part, context)) is not part.body:
        program = Dce()(program.replace(jaxpr=body))
        part = split(program.jaxpr, ins, context)
    chosen = _CutValues()
    for location in _cut(part, early, CutConstraints(computed_once, context)):
        chosen.add(location)
    values = list(_values(chosen, (part,), (), context))
    names = iter(names_of(values, program.arg_names, context))
    return program.replace(jaxpr=_sown(program.jaxpr, chosen, tag, names))


def _cut(part: Split, early: Sequence[bool], constraints: CutConstraints) -> list[Location]:
    """Return the locations of the values to sow; empty if there is no cut."""
    extra: float = 0 if constraints.once else KEY
    flow = flow_of(part, [extra if flag else 0 for flag in early], constraints)
    graph, locations = flow.graph, dict(flow.locations)
    for var, node in zip(part.body.invars, flow.ins, strict=True):
        if node is not None:
            graph.costs[node] = extra + BIT * bits_of(var.aval)
            graph.link(SOURCE, node)
            locations[node] = var
    for node in flow.outs:
        if node is not None:
            graph.link(node, SINK)
    try:
        keys = _cut_off_keys(graph)
        return [locations[node] for node in (*keys, *graph.minimum_cut())]
    except ValueError:
        return []  # unzip then reports the values that need a key


def _cut_off_keys(graph: Graph) -> list[int]:
    """Return the keys that are needed late themselves, and remove keys from the choice.

    If they were chosen together with other values, they would be the only ones: all the rest can
    be computed from keys.
    """
    hard = {n for n in graph.nodes if graph.costs[n] >= KEY}
    keys = graph.part(hard).minimum_cut()
    late = graph.leading_to_sink(hard.difference(keys))
    for key in keys:
        for node in graph.after[key] & late:
            graph.unlink(key, node)
    for node in hard:
        graph.costs[node] = math.inf
    return keys


# --- the chosen values, body by body --------------------------------------------------------------


@dataclass
class _CutValues:
    """The chosen values of a body: its own variables, and those of the bodies inside."""

    own: set[Var] = field(default_factory=set)
    inner: dict[int, dict[int, _CutValues]] = field(default_factory=dict)

    def add(self, location: Location) -> None:
        if isinstance(location, Var):
            self.own.add(location)
        else:
            position, index, location = location
            bodies = self.inner.setdefault(position, {})
            bodies.setdefault(index, _CutValues()).add(location)


def _values(
    chosen: _CutValues, parts: tuple[Split, ...], calls: tuple[JaxprEqn, ...], context: Context
) -> Iterator[NestedValue]:
    """Yield the chosen values in program order: the order in which `_sown` sows them."""
    part = parts[-1]
    for var in part.body.invars:
        if var in chosen.own:
            yield NestedValue(parts, calls, var)
    for position, eqn in enumerate(part.body.eqns):
        for index, inside in sorted(chosen.inner.get(position, {}).items()):
            inner = parts_of(part, position, context)[index]
            yield from _values(inside, (*parts, inner), (*calls, eqn), context)
        for var in eqn.outvars:
            if var in chosen.own:
                yield NestedValue(parts, calls, var)


def _sown(body: ClosedJaxpr, chosen: _CutValues, tag: str, names: Iterator[str]) -> ClosedJaxpr:
    """Return a closed jaxpr with the chosen values sown; later equations use the sown values."""
    sown: dict[Var, Var] = {}
    eqns: list[JaxprEqn] = []

    def sow(values: Sequence[Var], context: object, source_info: object = None) -> None:
        for var in values:
            if var in chosen.own:
                sown[var] = Var(var.aval)
                params = {"tag": tag, "name": next(names), "mode": "strict", "tree": _LEAF}
                eqns.append(
                    jaxcompat.new_jaxpr_eqn(
                        [var], [sown[var]], sow_p, params, set(), source_info, context
                    )
                )

    sow(body.invars, body.eqns[0].ctx if body.eqns else None)
    for position, eqn in enumerate(body.eqns):
        eqn = with_operands(eqn, sown)
        if position in chosen.inner and (inside := regions(eqn)) is not None:
            bodies = list(inside.bodies)
            for index, within in sorted(chosen.inner[position].items()):
                bodies[index] = _sown(bodies[index], within, tag, names)
            eqn = inside.rebuild(bodies)
        eqns.append(eqn)
        sow(eqn.outvars, eqn.ctx, eqn.source_info)
    return jaxcompat.replace_jaxpr(body, outvars=substitute(body.outvars, sown), eqns=eqns)
