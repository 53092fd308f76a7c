"""Batch a jaxpr: one forward pass over its equations.

A value has a batch dimension, or is unmapped: the same in every lane. An equation whose operands
are all unmapped stays as it is, unless it has an effect, which a rule may repeat, or names the
mapped axis. Every other one is replaced by its template (see `templates`), or, if it holds jaxprs,
by its structured rule, which batches these in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jaxprtool import jaxcompat
from jaxprtool.errors import JaxprToolError
from jaxprtool.ir.caches import JaxprCache
from jaxprtool.ir.templates import Template, instantiated
from jaxprtool.jaxcompat import Atom, Aval, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.passes.batch.axis import Axis, Dim
from jaxprtool.passes.batch.table import failed, structured_rules
from jaxprtool.passes.batch.templates import (
    Templates,
    template_of,
    templates_of,
    trace_match,
)

#: Batched bodies by the body that they were made of: one that many equations share is batched once
#: for each pattern of mapped arguments, and stays shared.
_batched = JaxprCache()

#: Bodies that take their constants as arguments, by the body that holds them.
_lifted = JaxprCache()


def batch_body(
    body: ClosedJaxpr,
    dims: Sequence[Dim],
    axis: Axis,
    outs: Sequence[Dim] | None = None,
    *,
    outermost: bool = False,
) -> tuple[ClosedJaxpr, tuple[Dim, ...]]:
    """Batch a closed jaxpr. Free named axes must be bound.

    Args:
        body: The jaxpr of one lane.
        dims: The batch dimension of each invar, as its position in the new shape; None for those
            that are unmapped.
        axis: The axis that is mapped.
        outs: The batch dimensions asked for of the results, which are moved or broadcast to have
            them. None leaves a result as it comes.
        outermost: Put the name scopes of equations in `vmap(...)`, and take None in `outs` to ask
            for a result that is unmapped, if it can be.

    Returns:
        The batched jaxpr, and the batch dimensions of its results.

    Raises:
        BatchUnsupported: If an equation cannot be batched. It is named.
    """
    asked = outermost and outs is not None
    outs = (None,) * len(body.outvars) if outs is None else tuple(outs)
    made = _batch_body(body, tuple(dims), axis, outs, outermost)
    if asked and (missed := _mapped_at(outs, made[1])):
        narrow = replace(axis, derivatives=False)
        other = _batch_body(body, tuple(dims), narrow, outs, outermost)
        if _mapped_at(outs, other[1]) < missed:
            return other
    return made


def _mapped_at(outs: Sequence[Dim], dims: Sequence[Dim]) -> int:
    """Return how many results are mapped that were to be unmapped."""
    return sum(out is None and dim is not None for out, dim in zip(outs, dims, strict=True))


def _batch_body(
    body: ClosedJaxpr, dims: tuple[Dim, ...], axis: Axis, outs: tuple[Dim, ...], outermost: bool
) -> tuple[ClosedJaxpr, tuple[Dim, ...]]:
    known = _batched.of(body)
    request = (dims, axis, outs, outermost, jaxcompat.tracing_context())
    made = known.get(request)
    if made is None:
        made = known[request] = _Run(templates_of(axis), outermost).body(body, dims, outs)
    return made


def lifted(body: ClosedJaxpr) -> tuple[ClosedJaxpr, tuple[Any, ...]]:
    """Return a closed jaxpr that takes its constants before its arguments, and these constants.

    It is for equations whose bodies hold none. Shared bodies stay shared.
    """
    if not body.consts:
        return body, ()
    known = _lifted.of(body)
    new = known.get("lifted")
    if new is None:
        invars = [*body.constvars, *body.invars]
        new = jaxcompat.replace_jaxpr(body, constvars=(), consts=(), invars=invars)
        known["lifted"] = new
    return new, tuple(body.consts)


@dataclass(eq=False)
class _Run:
    """The batching of one jaxpr.

    `values` has the new atom, and its kind (see `Templates`), of each variable of the old jaxpr
    that is mapped or has another name now.
    """

    templates: Templates
    outermost: bool
    eqns: list[JaxprEqn] = field(default_factory=list)
    values: dict[Var, tuple[Atom, int]] = field(default_factory=dict)
    consts: dict[int, tuple[Var, Any]] = field(default_factory=dict)
    kinds: dict[int, int] = field(default_factory=dict)
    scopes: dict[int, Any] = field(default_factory=dict)

    def body(
        self, body: ClosedJaxpr, dims: Sequence[Dim], outs: Sequence[Dim]
    ) -> tuple[ClosedJaxpr, tuple[Dim, ...]]:
        """Return the batched body, and the batch dimensions of its results."""
        axis = self.templates.axis
        invars = list(body.invars)
        for i, (v, dim) in enumerate(zip(body.invars, dims, strict=True)):
            if dim is not None:
                invars[i] = Var(axis.aval(v.aval, dim))
                self.values[v] = invars[i], self.templates.kind(invars[i].aval, dim)
        self._equations(jaxcompat.open_jaxpr(body))
        results, out_dims = self._results(body.outvars, outs)
        made = self.consts.values()
        new = jaxcompat.replace_jaxpr(
            body,
            constvars=[*body.constvars, *(v for v, _ in made)],
            consts=[*body.consts, *(value for _, value in made)],
            invars=invars,
            outvars=results,
            eqns=self.eqns,
            debug_info=body.debug_info,
        )
        return new, out_dims

    def _equations(self, jaxpr: Jaxpr) -> None:
        """Batch every equation in turn. Most have a template of one step, which is written here."""
        values, known, written = self.values, self.templates.known, self.eqns
        unmapped, outermost, scopes = self.kinds, self.outermost, self.scopes
        key_of, named = self.templates.key, self.templates.axis.name is not None
        SourceInfo = jaxcompat.source_info
        for eqn in jaxpr.eqns:
            operands: list[Atom] = []
            kinds: list[int] = []
            same = True
            for atom in eqn.invars:
                value = None if type(atom) is Literal else values.get(atom)
                if value is None:
                    operands.append(atom)
                    kind = unmapped.get(id(atom.aval))
                    kinds.append(self._unmapped_kind(atom.aval) if kind is None else kind)
                else:
                    same = False
                    operands.append(value[0])
                    kinds.append(value[1])
            if same and not eqn.effects and not (named and self._names_axis(eqn)):
                written.append(eqn)
                continue
            try:
                template = known.get(key_of(eqn, kinds))
            except TypeError:  # a parameter that cannot be hashed
                template = None
            if template is None or template.alone is None:
                self._equation(eqn, operands, kinds, template)
                continue
            step, source = template.alone, eqn.source_info
            if outermost:
                scope = scopes.get(id(source.name_stack)) or self._within(source.name_stack)
                source = SourceInfo(source.traceback, scope)
            outs = [Var(step.avals[0])] if step.single else list(map(Var, step.avals))
            new = JaxprEqn(
                operands, outs, step.primitive, step.params, step.effects, source, step.ctx
            )
            written.append(new)
            if step.single:
                values[eqn.outvars[0]] = outs[0], template.kinds[0]
            else:
                values.update(zip(eqn.outvars, zip(outs, template.kinds, strict=True), strict=True))

    def _equation(
        self,
        eqn: JaxprEqn,
        operands: list[Atom],
        kinds: Sequence[int],
        template: Template | None,
    ) -> None:
        """Batch an equation of more than one step, or that holds jaxprs, or is met at first."""
        dims = [self.templates.dims[kind] for kind in kinds]
        if not (eqn.effects or any(dim is not None for dim in dims) or self._names_axis(eqn)):
            self.eqns.append(eqn.replace(invars=operands))
            return
        try:
            results = None if template else self._structured(eqn, operands, dims)
            if results is None:
                avals = [atom.aval for atom in operands]
                template = template or template_of(eqn, avals, dims, kinds, self.templates)
                atoms = self._written(template, operands, eqn)
                results = list(zip(atoms, template.kinds, strict=True))
        except JaxprToolError:
            raise
        except Exception as error:  # a rule, JAX's or a plug-in's, may raise anything
            raise failed(eqn, error) from error
        self.values.update(zip(eqn.outvars, results, strict=True))

    def _names_axis(self, eqn: JaxprEqn) -> bool:
        """Return True if an equation names the mapped axis, at any depth; not all have effects."""
        name = self.templates.axis.name
        return name is not None and jaxcompat.names_axis(eqn.params, name)

    def _unmapped_kind(self, aval: Aval) -> int:
        # The types of the old jaxpr live as long as it does.
        kind = self.kinds[id(aval)] = self.templates.kind(aval, None)
        return kind

    def _under_vmap(self, source: Any) -> Any:
        """Return the source of an equation of the outermost jaxpr, under `vmap(...)`."""
        scopes = self.scopes.get(id(source.name_stack)) or self._within(source.name_stack)
        return jaxcompat.source_info(source.traceback, scopes)

    def _within(self, scopes: Any) -> Any:
        """Return name scopes with `vmap(...)` around them."""
        within = self.scopes[id(scopes)] = jaxcompat.VMAP_SCOPE + scopes
        return within

    def _results(
        self, atoms: Sequence[Atom], outs: Sequence[Dim]
    ) -> tuple[list[Atom], tuple[Dim, ...]]:
        results: list[Atom] = []
        dims: list[Dim] = []
        for atom, out in zip(atoms, outs, strict=True):
            value = None if type(atom) is Literal else self.values.get(atom)
            result, kind = value or (atom, self._unmapped_kind(atom.aval))
            dim = self.templates.dims[kind]
            if out is not None and out != dim:
                result, dim = self._matched(result, dim, out, None), out
            results.append(result)
            dims.append(dim)
        return results, tuple(dims)

    # --- templates

    def _written(
        self, template: Template, operands: Sequence[Atom], like: JaxprEqn | None
    ) -> list[Atom]:
        """Instantiate a template for these operands in place of `like`, and return the results."""
        source = jaxcompat.NO_SOURCE if like is None else like.source_info
        if self.outermost:
            source = self._under_vmap(source)
        values = [*operands, *map(self._constant, template.consts)]
        eqns, results = instantiated(template, values, source)
        self.eqns += eqns
        return results

    def _constant(self, value: object) -> Var:
        """Return the constvar of a value that a rule has brought along."""
        if id(value) not in self.consts:
            self.consts[id(value)] = Var(jax.typeof(value)), value
        return self.consts[id(value)][0]

    def _matched(self, atom: Atom, source: Dim, target: int, like: JaxprEqn | None) -> Atom:
        """Move or broadcast a value to have the batch dimension at `target`."""
        key = "match", self.templates.kind(atom.aval, source), target
        known = self.templates.known.get(key)
        if known is None:
            known = trace_match(atom.aval, source, target, self.templates)
            self.templates.known[key] = known
        return self._written(known, [atom], like)[0]

    # --- structured equations

    def _structured(
        self, eqn: JaxprEqn, operands: Sequence[Atom], dims: Sequence[Dim]
    ) -> list[tuple[Atom, int]] | None:
        """Return the results, and their kinds, of an equation with a structured rule, or None."""
        rule = structured_rules.get(eqn.primitive.name)
        rebuilt = None if rule is None else rule(eqn, dims, self.templates.axis)
        if rebuilt is None:
            return None
        moved: list[Atom] = [self._constant(value) for value in rebuilt.consts]
        moved += [
            atom if want is None or want == dim else self._matched(atom, dim, want, eqn)
            for atom, dim, want in zip(operands, dims, rebuilt.operand_dims, strict=True)
        ]
        axis = self.templates.axis
        outs = [
            type(v)(axis.aval(v.aval, dim))
            for v, dim in zip(eqn.outvars, rebuilt.out_dims, strict=True)
        ]
        new = rebuilt.build(moved, outs)
        if self.outermost:
            new = new.replace(source_info=self._under_vmap(new.source_info))
        self.eqns.append(new)
        pairs = zip(outs, rebuilt.out_dims, strict=True)
        return [(out, self.templates.kind(out.aval, dim)) for out, dim in pairs]
