"""Batch a jaxpr: the domain of mapped programs (`mapping.domains`).

The kind of a value is its batch dimension; None if it is unmapped, the same in every batch element.
An equation whose operands are all unmapped stays as it is, unless it names the mapped axis or has
an effect, which a rule may repeat. Every other equation is replaced by its template (see
`templates`) or, if it holds jaxprs, by its structured rule, which batches these in turn.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.errors import JaxprToolError
from jaxprtool.ir.basics.caches import JaxprCache, process_cache
from jaxprtool.ir.core.regions import Regions
from jaxprtool.ir.core.structured import While
from jaxprtool.jaxcompat import (
    AbstractRef,
    Atom,
    Aval,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
)
from jaxprtool.passes.mapping.batch.axis import Axis, Dim
from jaxprtool.passes.mapping.batch.table import batch_rules, failed, refusal, structured_rules
from jaxprtool.passes.mapping.batch.templates import template_of, trace_match
from jaxprtool.passes.mapping.domains import BodyBuilder, Domain, Rewritten, Role
from jaxprtool.passes.mapping.domains.templates import Template

#: Batched bodies by their original body: a body that many equations share is batched once for each
#: pattern of mapped arguments, and stays shared.
_batched = JaxprCache()


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
        body: The jaxpr of one batch element.
        dims: The batch dimension of each invar, as its position in the new shape; None for
            unmapped ones.
        axis: The mapped axis.
        outs: The requested batch dimensions of the results, which are moved or broadcast to have
            them. None accepts any.
        outermost: Put the name scopes of equations in `vmap(...)`, and let None in `outs` request
            a result that is unmapped, if possible.

    Returns:
        The batched jaxpr, and the batch dimensions of its results.

    Raises:
        BatchUnsupported: If an equation, which the message names, cannot be batched.
    """
    asked = outermost and outs is not None
    outs = (None,) * len(body.outvars) if outs is None else tuple(outs)
    made = domain_of(axis).body(body, dims, outs, outermost)
    if asked and (missed := _mapped_at(outs, made.kinds)):
        narrow = replace(axis, derivatives=False)
        other = domain_of(narrow).body(body, dims, outs, outermost)
        if _mapped_at(outs, other.kinds) < missed:
            made = other
    return made.jaxpr, made.kinds


def _mapped_at(outs: Sequence[Dim], dims: Sequence[Dim]) -> int:
    """Return the number of mapped results that were requested to be unmapped."""
    return sum(out is None and dim is not None for out, dim in zip(outs, dims, strict=True))


@dataclass(eq=False)
class BatchBodyBuilder(BodyBuilder[Dim]):
    """Builds one batched body. Its context is True in the outermost body.

    `numbered` has, for each variable of the old jaxpr that is mapped or renamed, the new atom and
    the id of its type and batch dimension (`Domain.aval_id`).
    """

    numbered: dict[Var, tuple[Atom, int]] = field(default_factory=dict)
    _unmapped: dict[int, int] = field(default_factory=dict)
    _scopes: dict[int, Any] = field(default_factory=dict)

    # --- values ---------------------------------------------------------------------------------

    def kind(self, atom: Atom) -> Dim:
        found = None if type(atom) is Literal else self.numbered.get(atom)
        return None if found is None else self.domain.kinds[found[1]]

    def bind(self, var: Var, bdim: Dim, atom: Atom) -> None:
        if atom is not var or bdim is not None:
            self.numbered[var] = atom, self.domain.aval_id(atom.aval, bdim)

    def held(self, atom: Atom, bdim: Dim) -> Atom:
        """Return the atom with this batch dimension, moved or broadcast if necessary."""
        value = None if type(atom) is Literal else self.numbered.get(atom)
        if value is None and bdim is None:
            return atom
        found, aval_id = value or (atom, self.domain.aval_id(atom.aval, None))
        source = self.domain.kinds[aval_id]
        if bdim is None or bdim == source:
            return found
        known, key = self.domain.templates, ("match", aval_id, bdim)
        if key not in known:
            known[key] = trace_match(found.aval, source, bdim, self.domain)
        return self.instantiate(known[key], [found], self.source)[0]

    # --- equations ------------------------------------------------------------------------------

    def equations(self, jaxpr: Jaxpr) -> None:
        """Batch every equation in turn. One-step templates, the common case, are written inline."""
        values, known, written = self.numbered, self.domain.templates, self.eqns
        unmapped, outermost, scopes = self._unmapped, self.context, self._scopes
        key_of, named = self.domain.key, self.domain.axis.name is not None
        SourceInfo = jaxcompat.source_info
        for eqn in jaxpr.eqns:
            operands: list[Atom] = []
            aval_ids: list[int] = []
            same = True
            for atom in eqn.invars:
                value = None if type(atom) is Literal else values.get(atom)
                if value is None:
                    operands.append(atom)
                    aval_id = unmapped.get(id(atom.aval))
                    aval_ids.append(self._unmapped_id(atom.aval) if aval_id is None else aval_id)
                else:
                    same = False
                    operands.append(value[0])
                    aval_ids.append(value[1])
            if same and not eqn.effects and not (named and self._names_axis(eqn)):
                written.append(eqn)
                continue
            try:
                template = known.get(key_of(eqn, aval_ids))
            except TypeError:  # a parameter that is not hashable
                template = None
            if template is None or template.only_step is None:
                self._equation(eqn, operands, aval_ids, template)
                continue
            step, source = template.only_step, eqn.source_info
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
        aval_ids: Sequence[int],
        template: Template | None,
    ) -> None:
        """Batch an equation that holds jaxprs, or whose template is new or has several steps."""
        domain: BatchDomain = self.domain
        dims = [domain.kinds[aval_id] for aval_id in aval_ids]
        if not (eqn.effects or any(dim is not None for dim in dims) or self._names_axis(eqn)):
            self.eqns.append(eqn.replace(invars=operands))
            return
        self.source = eqn.source_info
        try:
            if template is None and self.structured(eqn):
                return
            avals = [atom.aval for atom in operands]
            template = template or template_of(eqn, avals, dims, aval_ids, domain)
            atoms = self.instantiate(template, operands, eqn.source_info)
        except JaxprToolError:
            raise
        except Exception as error:  # a rule of JAX or a plug-in may raise anything
            raise failed(eqn, error) from error
        self.numbered.update(zip(eqn.outvars, zip(atoms, template.kinds, strict=True), strict=True))

    def structured(self, eqn: JaxprEqn) -> bool:
        # A plug-in's own rule for JAX is used here, too.
        theirs = eqn.primitive in jaxcompat.jaxs_batching_rules
        known = not theirs or eqn.primitive.name in structured_rules
        return known and super().structured(eqn)

    def add(self, eqn: JaxprEqn, like: JaxprEqn, bdims: Sequence[Dim]) -> None:
        if self.context:
            eqn = eqn.replace(source_info=self._under_vmap(eqn.source_info))
        super().add(eqn, like, bdims)

    def instantiate(self, template: Template, operands: Sequence[Any], source: Any) -> list[Atom]:
        source = self._under_vmap(source) if self.context else source
        return super().instantiate(template, operands, source)

    def _names_axis(self, eqn: JaxprEqn) -> bool:
        """Return True if an equation names the mapped axis, at any depth; not all have effects."""
        name = self.domain.axis.name
        return name is not None and jaxcompat.names_axis(eqn.params, name)

    def _unmapped_id(self, aval: Aval) -> int:
        # `id` is a safe key: the types of the old jaxpr live as long as it does.
        aval_id = self._unmapped[id(aval)] = self.domain.aval_id(aval, None)
        return aval_id

    def _under_vmap(self, source: Any) -> Any:
        """Return the source info of an equation of the outermost jaxpr, under `vmap(...)`."""
        scopes = self._scopes.get(id(source.name_stack)) or self._within(source.name_stack)
        return jaxcompat.source_info(source.traceback, scopes)

    def _within(self, scopes: Any) -> Any:
        """Return name scopes with `vmap(...)` around them."""
        within = self._scopes[id(scopes)] = jaxcompat.VMAP_SCOPE + scopes
        return within


class BatchDomain(Domain[Dim]):
    """The domain of programs that are mapped over an axis, in one tracing context.

    The signature of an equation is its primitive, parameters and context, and a number for the type
    and the batch dimension of each operand.
    """

    builder_class = BatchBodyBuilder
    rules = batch_rules
    structured_rules = structured_rules

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        self._mapped: dict[tuple[Aval, Dim], Aval] = {}

    def aval(self, bdim: Dim, aval: Aval) -> Aval:
        if bdim is None:
            return aval
        known = self._mapped.get((aval, bdim))
        if known is None:
            known = self._mapped[aval, bdim] = self.axis.aval(aval, bdim)
        return known

    def join(self, first: Dim, second: Dim) -> Dim:
        return second if first is None else first

    def uniform(self, bdim: Dim) -> bool:
        return bdim is None

    def settled(self, bdim: Dim, aval: Aval, role: Role, found: Regions) -> Dim:
        """Return the batch dimension where JAX's rules place it: in front, except as follows.

        Refs cannot be moved. In a while loop whose predicate has dimensions, it comes after these,
        as they must be a prefix of the dimensions of each carry. Slices are cut off along the
        leading dimension, which therefore cannot be the batch dimension.
        """
        if bdim is None:
            return None
        if found.kind == "call" and found.eqn.primitive.name != "remat2":
            return bdim
        is_ref = isinstance(aval, AbstractRef)
        if role == "row" and is_ref:
            if bdim == 0:
                reason = "it runs over a ref that is mapped along its leading axis"
                raise refusal(found.eqn, reason)
            return bdim - 1
        if role == "operand":
            stays = found.kind == "call" or (
                found.repeats and (is_ref or not _moves_constants(found))
            )
            return bdim if stays else 0
        return len(found.view.cond.outvars[0].aval.shape) if isinstance(found.view, While) else 0

    def stacked(self, bdim: Dim, length: Any) -> Dim:
        return None if bdim is None else bdim + 1

    def context(self, context: Any, found: Regions) -> bool:
        return False

    def body(
        self,
        body: ClosedJaxpr,
        bdims: Sequence[Dim],
        wanted: Sequence[Dim] | None = None,
        context: Any = None,
    ) -> Rewritten[Dim]:
        wanted = (None,) * len(body.outvars) if wanted is None else tuple(wanted)
        known = _batched.of(body)
        request = tuple(bdims), self.axis, wanted, bool(context), jaxcompat.tracing_context()
        if request not in known:
            known[request] = BatchBodyBuilder(self, context).body(body, bdims, wanted)
        return known[request]

    def traced(self, *args: Any) -> Template:
        with jaxcompat.axis_mapped(self.axis.data):
            template = super().traced(*args)
        assert template is not None
        return template

    def template_kinds(self, avals: Sequence[Aval], bdims: Sequence[Dim]) -> list[int]:
        return [*map(self.aval_id, avals, bdims)]


def _moves_constants(found: Regions) -> bool:
    """Return True for a loop whose constants JAX's rule moves: a scan, in some JAX releases."""
    return bool(found.edges.sliced) and not jaxcompat.SCAN_LEAVES_CONSTS


#: The domains of all axes and tracing contexts; all are dropped when there are too many templates.
_domains: dict[Hashable, BatchDomain] = process_cache({})
_MOST_AXES, _MOST_TEMPLATES = 256, 100_000


def domain_of(axis: Axis) -> BatchDomain:
    """Return the domain of an axis in the current tracing context."""
    count = sum(len(each.templates) + len(each.kinds) for each in [*_domains.values()])
    if len(_domains) > _MOST_AXES or count > _MOST_TEMPLATES:
        _domains.clear()
    key = axis, jaxcompat.tracing_context()
    return _domains.get(key) or _domains.setdefault(key, BatchDomain(axis))
