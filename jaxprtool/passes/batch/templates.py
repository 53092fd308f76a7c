"""A rule's work, done once for all equations that are alike.

The equations of a program have few signatures: what an equation is but for the names of its
operands and its place in the source. For each, the batching rule is traced once, to a *template*
of the few equations that it makes. To batch an equation is then to look its template up and to
write it down with the equation's own operands.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.ir.structured import holds_jaxpr
from jaxprtool.jaxcompat import Atom, JaxprEqn, Literal, Primitive, Var
from jaxprtool.passes.batch.axis import Axis, Dim
from jaxprtool.passes.batch.table import batch_rules, jaxs_rule
from jaxprtool.passes.dce import dce_body


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """An equation of a template. `inputs` are literals, or numbers of values: the operands come
    first, then the constants, then the results of the steps in order."""

    primitive: Primitive
    params: dict[str, Any]
    effects: Any
    ctx: Any
    inputs: tuple[Any, ...]
    avals: tuple[Any, ...]
    #: What a move does, if the step is one: equal for equal moves; see `moves`.
    move: Hashable


@dataclass(frozen=True, eq=False, slots=True)
class Template:
    """The equations that take an equation's place; `outs` are its results, as `inputs` of a step,
    and `kinds` those of the results. `binders` are the variables that effects on refs name. If
    the operands go to a single equation and its results are the template's, that is `alone`."""

    consts: tuple[Any, ...]
    steps: tuple[Step, ...]
    outs: tuple[Any, ...]
    kinds: tuple[int, ...]
    binders: tuple[Var, ...]
    alone: Step | None


def trace_rule(
    eqn: JaxprEqn, avals: Sequence[Any], dims: Sequence[Dim], templates: Templates
) -> Template:
    """The template of an equation, whose operands are of these types and mapped at `dims`.

    Raises what its rule raises.
    """
    primitive, axis = eqn.primitive, templates.axis
    rule = batch_rules.get(primitive.name, jaxs_rule)

    def call(*operands: Any) -> tuple[Sequence[Any], Sequence[Dim]]:
        results, out_dims = rule(axis, primitive, operands, dims, eqn.params)
        return (results, out_dims) if primitive.multiple_results else ([results], [out_dims])

    return _traced(call, avals, templates, eqn)


def trace_match(aval: Any, source: Dim, target: int, templates: Templates) -> Template:
    """The template that moves or broadcasts a value of this type to be mapped at `target`."""

    def call(x: Any) -> tuple[Sequence[Any], Sequence[Dim]]:
        return [jaxcompat.match_axis(templates.axis.data, source, target, x)], [target]

    return _traced(call, [aval], templates, None)


def _traced(
    call: Callable[..., tuple[Sequence[Any], Sequence[Dim]]],
    avals: Sequence[Any],
    templates: Templates,
    eqn: JaxprEqn | None,
) -> Template:
    dims: list[Dim] = []

    def fun(*operands: Any) -> list[Any]:
        results, out_dims = call(*operands)
        dims.extend(out_dims)
        return list(results)

    with jaxcompat.axis_mapped(templates.axis.data):
        jaxpr = jaxcompat.trace_in_setting(fun, avals, eqn)
    jaxpr, _ = dce_body(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    kinds = [templates.kind(v.aval, dim) for v, dim in zip(jaxpr.outvars, dims, strict=True)]
    return _template(jaxpr, kinds)


def _template(jaxpr: Any, kinds: Sequence[int]) -> Template:
    values = [*jaxpr.invars, *jaxpr.constvars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    numbers: dict[Var, int] = {v: i for i, v in enumerate(values)}

    def numbered(atoms: Sequence[Atom]) -> tuple[Any, ...]:
        return tuple(atom if type(atom) is Literal else numbers[atom] for atom in atoms)

    steps = tuple(
        Step(
            eqn.primitive,
            eqn.params,
            eqn.effects,
            eqn.ctx,
            numbered(eqn.invars),
            tuple(v.aval for v in eqn.outvars),
            move_of(eqn),
        )
        for eqn in jaxpr.eqns
    )
    outs = numbered(jaxpr.outvars)
    alone = None
    if len(steps) == 1 and not steps[0].effects and steps[0].move is None:
        whole = [*jaxpr.eqns[0].invars, *jaxpr.eqns[0].outvars]
        alone = steps[0] if whole == [*jaxpr.invars, *jaxpr.outvars] else None
    return Template(tuple(jaxpr.consts), steps, outs, tuple(kinds), tuple(values), alone)


_MOVES = ("transpose", "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "pvary")


def move_of(eqn: JaxprEqn) -> Hashable:
    """A key that equations share if they lay one operand out in the same way; None for others."""
    if eqn.primitive.name not in _MOVES or len(eqn.invars) != 1 or type(eqn.invars[0]) is Literal:
        return None
    return eqn.primitive, tuple(eqn.params.items()), eqn.ctx


# --- signatures -------------------------------------------------------------------------------


@dataclass(eq=False)
class Templates:
    """The templates of one axis in one tracing context, by signature.

    A *kind* is a number for a type and a mapped dimension: types are slow to hash and to compare,
    and a signature is made for every equation.
    """

    axis: Axis
    known: dict[Hashable, Template] = field(default_factory=dict)
    kinds: dict[tuple[Any, Dim], int] = field(default_factory=dict)
    dims: list[Dim] = field(default_factory=list)

    def kind(self, aval: Any, dim: Dim) -> int:
        """The number of values of this type that are mapped along this dimension."""
        number = self.kinds.setdefault((aval, dim), len(self.dims))
        if number == len(self.dims):
            self.dims.append(dim)
        return number


_FLOATS: frozenset[type] = frozenset({float, complex})


def params_key(params: dict[str, Any]) -> Hashable:
    """Equal for parameters that are the same; 0.0 and -0.0, which are equal, are not."""
    for value in params.values():
        if type(value) in _FLOATS:
            return *params.items(), repr(params)
    return tuple(params.items())


#: The templates of every axis and tracing context that has been met. They hold no jaxprs of
#: users', and go when there are too many.
_tables: dict[Hashable, Templates] = {}
_MOST_TABLES = 256


def templates_of(axis: Axis) -> Templates:
    """The templates for an axis in the present tracing context."""
    key = axis, jaxcompat.tracing_context()
    if key not in _tables:
        if len(_tables) >= _MOST_TABLES:
            _tables.clear()
        _tables[key] = Templates(axis)
    return _tables[key]


def forget_templates() -> None:
    """Forget all templates, as when a process begins."""
    _tables.clear()


def lasts(params: dict[str, Any]) -> bool:
    """Whether a template with these parameters may be kept: not if they hold a user's jaxpr."""
    return not holds_jaxpr(params.values())
