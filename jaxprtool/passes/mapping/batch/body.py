"""Batch a jaxpr: the open tables of batching rules, and the domain of mapped programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any
from weakref import ref

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend.core.primitives import jit_p

from jaxprtool import jaxcompat
from jaxprtool.errors import JaxprToolError, UnsupportedError
from jaxprtool.ir.backends import JaxprCache, process_cache
from jaxprtool.ir.custom_rules import rule_key
from jaxprtool.ir.equations import as_weak_as, is_weak, named, strongly_typed
from jaxprtool.ir.regions import (
    CALLS,
    Call,
    Cond,
    CustomJVP,
    CustomVJP,
    Regions,
    ShardMap,
    While,
    holds_jaxpr,
    regions,
    sub_jaxprs,
)
from jaxprtool.ir.rules import RuleTable, rule
from jaxprtool.jaxcompat import (
    AbstractRef,
    Atom,
    Aval,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Params,
    Primitive,
    Var,
    jaxpr_as_fun,
)
from jaxprtool.passes.mapping import (
    BodyBuilder,
    Domain,
    Rewritten,
    Role,
    Solution,
    StructuredRule,
    Template,
    by_edges,
    has_float,
    lifted,
    solve,
    write,
)
from jaxprtool.passes.mapping.batch.axes import Axis, BatchError, BatchTypeError, Dim

# --- table ----------------------------------------------------------------------------------------
# The open tables of batching rules, and JAX's own rules for every other primitive.
#
# A rule of `batch_rules` is a Python function that computes with JAX on operands, some of which
# have a batch dimension. It is traced once per signature (see `templates`). A rule of
# `structured_rules` is for an equation that holds jaxprs (see `mapping.domains`); if it returns
# False, the rule in `batch_rules` applies instead.


class BatchUnsupported(UnsupportedError, NotImplementedError):
    """An equation that cannot be mapped over an axis; names it and its source line."""


#: The operands of a rule.
Operands = Sequence[jax.Array]

#: `rule(axis, primitive, operands, dims, params) -> (results, dims)`. Results and their dimensions
#: are lists if the primitive has multiple results, as in JAX's own table. At least one operand is
#: mapped, unless the equation has an effect. A rule that returns None leaves the case to JAX's own.
BatchRule = Callable[[Axis, Primitive, Operands, Sequence[Dim], Params], tuple[Any, Any] | None]

#: The open table: a plug-in adds its primitive's rule by name.
batch_rules: RuleTable[BatchRule] = RuleTable()


#: The open table of rules for equations that hold jaxprs.
structured_rules: RuleTable[StructuredRule] = RuleTable()


def jaxs_rule(
    axis: Axis, primitive: Primitive, operands: Operands, dims: Sequence[Dim], params: Params
) -> tuple[Any, Any]:
    """Apply JAX's own batching rule for a primitive, or one that a package registered in JAX.

    Arguments and results are those of a rule in `batch_rules`. Raises NotImplementedError if there
    is no rule.
    """
    rule = jaxcompat.jaxs_batching_rules.get(primitive)
    if rule is None and not any(dim is not None for dim in dims):
        results = primitive.bind(*operands, **params)
        return results, [None] * len(results) if primitive.multiple_results else None
    if rule is None:
        raise NotImplementedError(f"Batching rule for '{primitive}' not implemented")
    return rule(axis.data, tuple(operands), tuple(dims), **params)


def batch_error(
    eqn: JaxprEqn, reason: str, error_type: type[JaxprToolError] = BatchUnsupported
) -> JaxprToolError:
    """Return the error for an equation that cannot be batched; its message names the equation."""
    return error_type(f"{named(eqn)} cannot be batched: {reason}")


def failed(eqn: JaxprEqn, error: Exception) -> JaxprToolError:
    """Return the error for an equation whose rule raised one, with its kind and message."""
    reason = " ".join(str(error).split()) or type(error).__name__
    error_types = {ValueError: BatchError, TypeError: BatchTypeError}
    error_type = next(
        (error_types[k] for k in error_types if isinstance(error, k)), BatchUnsupported
    )
    return batch_error(eqn, reason, error_type)


# --- corrections ----------------------------------------------------------------------------------
# Rules that replace JAX's where those fail, compute wrong types, or yield slower programs.

#: A result, and its batch dimension.
Batched = tuple[jax.Array, Dim]


def _at_bdim(axis: Axis, x: jax.Array, bdim: Dim, target: int) -> jax.Array:
    """Return a value moved, or broadcast, to have the batch dimension at `target`."""
    return jaxcompat.match_axis(axis.data, bdim, target, x)


def _element_shape(x: jax.Array, bdim: Dim) -> tuple[int, ...]:
    """Return the shape of one batch element of a value."""
    return x.shape if bdim is None else x.shape[:bdim] + x.shape[bdim + 1 :]


# --- wrong in JAX -------------------------------------------------------------------------------


@rule(batch_rules, "clamp")
def _clamp(
    axis: Axis, primitive: Primitive, operands: Operands, dims: Sequence[Dim], params: Params
) -> Batched | None:
    """Clamp a scalar per batch element. JAX's rule fails if only the upper bound is mapped."""
    if _element_shape(operands[1], dims[1]):
        return None
    batched = _at_bdim(axis, operands[1], dims[1], 0)
    return primitive.bind(operands[0], batched, operands[2], **params), 0


@rule(batch_rules, "tie")
def _tie(
    axis: Axis, primitive: Primitive, operands: Operands, dims: Sequence[Dim], params: Params
) -> Batched | None:
    """Return the second operand with its batch dimension; that of the first is arbitrary."""
    return primitive.bind(*operands, **params), dims[1]


@rule(batch_rules, "bitcast_convert_type")
def _bitcast_convert_type(
    axis: Axis, primitive: Primitive, operands: Operands, dims: Sequence[Dim], params: Params
) -> Batched | None:
    """Keep the batch dimension from being last where a wider type consumes the last dimension.

    JAX's rule would combine batch elements into elements of the new type.
    """
    (x,), (bdim,) = operands, dims
    element = jax.ShapeDtypeStruct(_element_shape(x, bdim), x.dtype)
    result = jax.eval_shape(lambda x: lax.bitcast_convert_type(x, params["new_dtype"]), element)
    if not result.ndim < element.ndim == bdim:
        return None
    return primitive.bind(_at_bdim(axis, x, bdim, 0), **params), 0


# --- refs ---------------------------------------------------------------------------------------


# A function that returns a ref cannot be traced: JAX's rule makes no template.
@rule(structured_rules, "new_ref")
def _new_ref(builder: BodyBuilder[Dim], eqn: JaxprEqn) -> bool:
    """Allocate the ref with a batch dimension, since any batch element may write to it."""
    dims = [builder.kind(atom) or 0 for atom in eqn.invars]
    operands = [*map(builder.held, eqn.invars, dims)]
    outs = builder.outs(eqn.outvars, dims)
    builder.add(eqn.replace(invars=operands, outvars=outs), eqn, dims)
    return True


@rule(batch_rules, "swap", "addupdate")
def _write_whole(
    axis: Axis, primitive: Primitive, operands: Operands, dims: Sequence[Dim], params: Params
) -> tuple[list[jax.Array], list[Dim]]:
    """Move a value written to a whole ref to the ref's batch dimension, as JAX's rule requires."""
    ref, value, *others = operands
    dim = dims[0]
    if not others and dim is not None and dims[1] is not None:
        value = _at_bdim(axis, value, dims[1], dim)
        dims = (dim, dim)
    return jaxs_rule(axis, primitive, (ref, value, *others), dims, params)


# --- collectives over the mapped axis, wrong in JAX -----------------------------------------------


_REDUCTIONS = {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}


@rule(batch_rules, "psum", "pmax", "pmin")
def _reduce(
    axis: Axis, primitive: Primitive, operands: Operands, dims: Sequence[Dim], params: Params
) -> Batched | None:
    """Reduce over the batch dimension as over any other, if no other named axis is left.

    JAX's rule keeps a collective over numbered dimensions, some of which have no derivative.
    """
    ((x,), (bdim,)), names = (operands, dims), params["axes"]
    if bdim is None or axis.name not in names or params["axis_index_groups"] is not None:
        return None
    others = [name for name in names if name != axis.name]
    if not all(isinstance(name, int) for name in others) or not jnp.issubdtype(x.dtype, jnp.number):
        return None
    axes = (bdim, *(name + (name >= bdim) for name in others))
    return _REDUCTIONS[primitive.name](x, axes), None


@rule(batch_rules, "ppermute")
def _ppermute(
    axis: Axis, primitive: Primitive, operands: Operands, dims: Sequence[Dim], params: Params
) -> Batched | None:
    """Permute batch elements by one gather. Those without a source are zero, as on devices.

    JAX's rule does not fill in these zeros.
    """
    (x,), (bdim,) = operands, dims
    if params["axis_name"] not in (axis.name, (axis.name,)):
        return None
    sources = np.full(axis.size, axis.size, np.int32)
    for source, target in params["perm"]:
        sources[target] = source
    is_whole = len(params["perm"]) == axis.size
    if bdim is None:
        if is_whole:
            return x, None
        x, bdim = _at_bdim(axis, x, None, 0), 0
    mode = lax.GatherScatterMode
    gathered = lax.gather(
        x,
        sources[:, None],
        lax.GatherDimensionNumbers(tuple(d for d in range(x.ndim) if d != bdim), (bdim,), (bdim,)),
        (*x.shape[:bdim], 1, *x.shape[bdim + 1 :]),
        unique_indices=is_whole,
        mode=mode.PROMISE_IN_BOUNDS if is_whole else mode.FILL_OR_DROP,
        fill_value=None if is_whole else 0,
    )
    return gathered, bdim


@rule(batch_rules, "all_to_all")
def _all_to_all(
    axis: Axis, primitive: Primitive, operands: Operands, dims: Sequence[Dim], params: Params
) -> Batched | None:
    """Send equal parts from all batch elements; JAX's rule misreads an unmapped operand's shape."""
    (x,), (bdim,), names = operands, dims, params["axis_name"]
    names = names if isinstance(names, (tuple, list)) else (names,)
    if bdim is not None or axis.name not in names or params["axis_index_groups"] is not None:
        return None
    return jaxs_rule(axis, primitive, [_at_bdim(axis, x, None, 0)], [0], params)


@rule(batch_rules, "reduce_scatter")
def _reduce_scatter(
    axis: Axis, primitive: Primitive, operands: Operands, dims: Sequence[Dim], params: Params
) -> Batched | None:
    """Scatter over another axis. Untiled it removes a dimension, but JAX's rule adds one."""
    (x,), (bdim,), names = operands, dims, params["axis_name"]
    names = names if isinstance(names, (tuple, list)) else (names,)
    if bdim is None or axis.name in names or params["tiled"] or bdim <= params["scatter_dimension"]:
        return None
    return primitive.bind(x, **params), bdim - 1


# --- slow in JAX --------------------------------------------------------------------------------
#
# JAX turns every dynamic slice into a gather, and every dynamic update into a scatter. Where the
# start is unmapped, XLA compiles that scatter to twice the instructions, and reads the array twice.
# The batch dimension is in front, as with JAX's rules.


@rule(batch_rules, "dynamic_slice")
def _dynamic_slice(
    axis: Axis, primitive: Primitive, operands: Operands, dims: Sequence[Dim], params: Params
) -> Batched | None:
    """Slice all batch elements at the same start."""
    (x, *starts), (bdim, *start_dims) = operands, dims
    if _is_left_to_jax(axis, starts, start_dims) or bdim is None or len(starts) != x.ndim - 1:
        return None
    sizes = (axis.size, *params["slice_sizes"])
    values = jaxcompat.varying_alike(_at_bdim(axis, x, bdim, 0), *_with_zero(starts))
    return primitive.bind(*values, slice_sizes=sizes), 0


@rule(batch_rules, "dynamic_update_slice")
def _dynamic_update_slice(
    axis: Axis, primitive: Primitive, operands: Operands, dims: Sequence[Dim], params: Params
) -> Batched | None:
    """Update all batch elements at the same start."""
    (x, update, *starts), (bdim, update_bdim, *start_dims) = operands, dims
    if _is_left_to_jax(axis, starts, start_dims) or bdim is update_bdim is None:
        return None
    like = jax.typeof(x)
    if is_weak(like):
        # JAX's scatter, and so its gradient, is weakly typed if the array is. An update is only if
        # the starts are, too.
        x, update = strongly_typed(x), strongly_typed(update)
    batched = _at_bdim(axis, x, bdim, 0), _at_bdim(axis, update, update_bdim, 0)
    updated = primitive.bind(*jaxcompat.varying_alike(*batched, *_with_zero(starts)))
    return as_weak_as(updated, like), 0


def _is_left_to_jax(axis: Axis, starts: Operands, start_dims: Sequence[Dim]) -> bool:
    """Return True if the start is mapped, or if batch elements are sharded over a mesh."""
    spread = axis.spmd_name is not None or axis.mesh_axes is not None
    return spread or any(bdim is not None for bdim in start_dims)


def _with_zero(starts: Operands) -> list[jax.Array | np.generic]:
    """Return the starts for the batched array, from those of one batch element."""
    dtype = starts[0].dtype if starts else np.dtype(np.int32)
    return [dtype.type(0), *starts]


# --- body -----------------------------------------------------------------------------------------
# Batch a jaxpr: the domain of mapped programs (`mapping.domains`).
#
# The kind of a value is its batch dimension; None if it is unmapped, the same in every batch
# element. An equation whose operands are all unmapped stays as it is, unless it names the mapped
# axis or has an effect, which a rule may repeat. Every other equation is replaced by its template
# (see `templates`) or, if it holds jaxprs, by its structured rule, which batches these in turn.

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
    rewritten = domain_of(axis).body(body, dims, outs, outermost)
    if asked and (missed := _mapped_at(outs, rewritten.kinds)):
        narrow = replace(axis, derivatives=False)
        other = domain_of(narrow).body(body, dims, outs, outermost)
        if _mapped_at(outs, other.kinds) < missed:
            rewritten = other
    return rewritten.jaxpr, rewritten.kinds


def _mapped_at(outs: Sequence[Dim], dims: Sequence[Dim]) -> int:
    """Return the number of mapped results that were requested to be unmapped."""
    return sum(out is None and dim is not None for out, dim in zip(outs, dims, strict=True))


@dataclass(eq=False)
class BatchBodyBuilder(BodyBuilder[Dim]):
    """Builds one batched body. Its context is True in the outermost body.

    `numbered` has, for each variable of the old jaxpr that is mapped or renamed, the new atom and
    the id of its type and batch dimension (`Domain.aval_id`).
    """

    domain: BatchDomain
    numbered: dict[Var, tuple[Atom, int]] = field(default_factory=dict)
    _unmapped: dict[int, int] = field(default_factory=dict)
    _scopes: dict[int, Any] = field(default_factory=dict)

    # --- values ---------------------------------------------------------------------------------

    def kind(self, atom: Atom) -> Dim:
        entry = None if type(atom) is Literal else self.numbered.get(atom)
        return None if entry is None else self.domain.kinds[entry[1]]

    def bind(self, var: Var, bdim: Dim, atom: Atom) -> None:
        if atom is not var or bdim is not None:
            self.numbered[var] = atom, self.domain.aval_id(atom.aval, bdim)

    def held(self, atom: Atom, bdim: Dim) -> Atom:
        """Return the atom with this batch dimension, moved or broadcast if necessary."""
        value = None if type(atom) is Literal else self.numbered.get(atom)
        if value is None and bdim is None:
            return atom
        current, aval_id = value or (atom, self.domain.aval_id(atom.aval, None))
        source = self.domain.kinds[aval_id]
        if bdim is None or bdim == source:
            return current
        templates, key = self.domain.templates, ("match", aval_id, bdim)
        if key not in templates:
            templates[key] = trace_match(current.aval, source, bdim, self.domain)
        return self.instantiate(templates[key], [current], self.source)[0]

    # --- equations ------------------------------------------------------------------------------

    def equations(self, jaxpr: Jaxpr) -> None:
        """Batch every equation in turn. One-step templates, the common case, are written inline."""
        values, templates, written = self.numbered, self.domain.templates, self.eqns
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
            try:  # a jit has a structured rule, and a long key
                template = None if eqn.primitive is jit_p else templates.get(key_of(eqn, aval_ids))
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
        domain = self.domain
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
        applies = not theirs or eqn.primitive.name in structured_rules
        return applies and super().structured(eqn)

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
        mapped = self._mapped.get((aval, bdim))
        if mapped is None:
            mapped = self._mapped[aval, bdim] = self.axis.aval(aval, bdim)
        return mapped

    def join(self, first: Dim, second: Dim) -> Dim:
        return second if first is None else first

    def uniform(self, bdim: Dim) -> bool:
        return bdim is None

    def settled(self, bdim: Dim, aval: Aval, role: Role, inside: Regions) -> Dim:
        """Return the batch dimension where JAX's rules place it: in front, except as follows.

        Refs cannot be moved. In a while loop whose predicate has dimensions, it comes after these,
        as they must be a prefix of the dimensions of each carry. Slices are cut off along the
        leading dimension, which therefore cannot be the batch dimension.
        """
        if bdim is None:
            return None
        if inside.kind == "call" and inside.eqn.primitive.name != "remat2":
            return bdim
        is_ref = isinstance(aval, AbstractRef)
        if role == "row" and is_ref:
            if bdim == 0:
                reason = "it runs over a ref that is mapped along its leading axis"
                raise batch_error(inside.eqn, reason)
            return bdim - 1
        if role == "operand":
            stays = inside.kind == "call" or (
                inside.repeats and (is_ref or not _moves_constants(inside))
            )
            return bdim if stays else 0
        return len(inside.view.cond.outvars[0].aval.shape) if isinstance(inside.view, While) else 0

    def stacked(self, bdim: Dim, length: Any) -> Dim:
        return None if bdim is None else bdim + 1

    def context(self, context: Any, inside: Regions) -> bool:
        return False

    def body(
        self,
        body: ClosedJaxpr,
        bdims: Sequence[Dim],
        wanted: Sequence[Dim] | None = None,
        context: Any = None,
    ) -> Rewritten[Dim]:
        wanted = (None,) * len(body.outvars) if wanted is None else tuple(wanted)
        results = _batched.of(body)
        request = tuple(bdims), self.axis, wanted, bool(context), jaxcompat.tracing_context()
        if request not in results:
            results[request] = BatchBodyBuilder(self, context).body(body, bdims, wanted)
        return results[request]

    def traced(self, *args: Any) -> Template:
        with jaxcompat.axis_mapped(self.axis.data):
            template = super().traced(*args)
        assert template is not None
        return template

    def template_kinds(self, avals: Sequence[Aval], bdims: Sequence[Dim]) -> list[int]:
        return [*map(self.aval_id, avals, bdims)]


def _moves_constants(inside: Regions) -> bool:
    """Return True for a loop whose constants JAX's rule moves: a scan, in some JAX releases."""
    return bool(inside.edges.sliced) and not jaxcompat.SCAN_LEAVES_CONSTS


#: The domains of all axes and tracing contexts; all are dropped when there are too many templates.
_domains: dict[Hashable, BatchDomain] = process_cache({})
_MOST_AXES, _MOST_TEMPLATES = 256, 100_000


def domain_of(axis: Axis) -> BatchDomain:
    """Return the domain of an axis in the current tracing context."""
    count = sum(len(domain.templates) + len(domain.kinds) for domain in [*_domains.values()])
    if len(_domains) > _MOST_AXES or count > _MOST_TEMPLATES:
        _domains.clear()
    key = axis, jaxcompat.tracing_context()
    return _domains.get(key) or _domains.setdefault(key, BatchDomain(axis))


# --- branches -------------------------------------------------------------------------------------
# Batching of cond and switch.
#
# If the index is unmapped, all batch elements take the same branch. Otherwise every branch is
# computed, and each batch element selects its own.
#
# Operands are selected too, so that a NaN in the derivative of a branch that a batch element does
# not take does not reach its gradient (jax-ml/jax#1052). Operands without a derivative need not be
# selected, nor those that a branch only returns, since results are selected. If a branch has an
# effect, every operand is mapped: its effects happen once for each batch element.


@rule(structured_rules, "cond")
def _cond(builder: BatchBodyBuilder, eqn: JaxprEqn) -> bool:
    effects = set().union(*(branch.effects for branch in Cond.of(eqn).branches))
    if reason := jaxcompat.forbidden_in_branches(effects):
        raise batch_error(eqn, reason)
    return by_edges(builder, eqn)


# --- a mapped index -----------------------------------------------------------------------------


@rule(batch_rules, "cond")
def _select(
    axis: Axis, primitive: Primitive, operands: Operands, dims: Sequence[Dim], params: Params
) -> tuple[list[jax.Array], list[Dim]]:
    """Compute every branch. Batch elements that do not take it get operands without gradient."""
    if "branches_platforms" in params:
        return jaxs_rule(axis, primitive, operands, dims, params)
    branches = [*map(jaxcompat.close_jaxpr, params["branches"])]
    index = jaxcompat.match_axis(axis.data, dims[0], 0, operands[0])
    if len(branches) == 2:
        index = lax.gt(index, lax.full_like(index, 0, shape=()))  # a quarter of the bytes
    selected = [jnp.issubdtype(x.dtype, jnp.inexact) for x in operands[1:]]
    seen = any(not jaxcompat.is_removable_effect(e) for branch in branches for e in branch.effects)
    ins = [
        0 if dim is not None or flag or seen else None
        for dim, flag in zip(dims[1:], selected, strict=True)
    ]
    triples = zip(operands[1:], dims[1:], ins, strict=True)
    values = [
        x if to is None else jaxcompat.match_axis(axis.data, dim, to, x) for x, dim, to in triples
    ]
    fixed = [lax.stop_gradient(x) if flag else x for x, flag in zip(values, selected, strict=True)]

    @cache
    def mask(shape: tuple[int, ...], i: int | None = None) -> jax.Array:
        """Return the index, or a mask that is True where it is `i`, broadcast to a shape."""
        which = index if i is None else lax.eq(index, lax.full_like(index, i, shape=()))
        return which if which.ndim == len(shape) else lax.broadcast_in_dim(which, shape, (0,))

    def in_branch(i: int, x: jax.Array, other: jax.Array) -> jax.Array:
        """Return `x` in the batch elements that take branch `i`, and `other` in the rest."""
        if len(branches) > 2:
            return lax.select_n(mask(x.shape, i), other, x)
        return lax.select_n(mask(x.shape), *((x, other) if i == 0 else (other, x)))

    @cache
    def whole(k: int) -> jax.Array:
        """Return an operand with a batch dimension, broadcast once for all results."""
        return jaxcompat.match_axis(axis.data, ins[k], 0, values[k])

    outs: list[Dim] = [0] * len(branches[0].outvars)
    outputs = []
    for i, branch in enumerate(branches):
        pairs = zip(values, fixed, strict=True)
        args = [x if x is still else in_branch(i, x, still) for x, still in pairs]
        body, _ = batch_body(branch, ins, axis, outs)
        outputs.append(jaxpr_as_fun(body)(*args))
    results = []
    for r, cases in enumerate(zip(*outputs, strict=True)):
        passed_on = [_passed_on(branch, r) for branch in branches]
        cases = tuple(x if k is None else whole(k) for x, k in zip(cases, passed_on, strict=True))
        same = passed_on[0] is not None and len(set(passed_on)) == 1
        results.append(cases[0] if same else lax.select_n(mask(cases[0].shape), *cases))
    return results, outs


def _passed_on(branch: ClosedJaxpr, result: int) -> int | None:
    """Return the number of the operand that a branch forwards as this result; None for others."""
    atom = branch.outvars[result]
    return branch.invars.index(atom) if atom in branch.invars else None


# --- calls ----------------------------------------------------------------------------------------
# Batching of jit, whose shardings have an entry for the batch dimension.

#: The parameters of a jit that have an entry per operand, or per result, by parameter name.
Layouts = dict[str, tuple[Any, ...]]

rule(structured_rules, *CALLS)(by_edges)


@rule(structured_rules, "jit")
def _jit(builder: BatchBodyBuilder, eqn: JaxprEqn) -> bool:
    if _plain_jit(builder, eqn):
        return True
    inside, axis = regions(eqn), builder.domain.axis
    solution = None if inside is None else solve(builder, inside)
    assert inside is not None and solution is not None
    call = inside.view
    assert isinstance(call, Call)
    ins = _laid_out(call.operand_params, "in", call.operands, solution.operands, eqn, axis)
    outs = _laid_out(call.out_params, "out", call.outs, solution.results, eqn, axis)
    changes = {"operand_params": ins, "out_params": outs}
    same = ins is call.operand_params and outs is call.out_params
    write(builder, solution, **({} if same else changes))
    return True


def _plain_jit(builder: BatchBodyBuilder, eqn: JaxprEqn) -> bool:
    """Write a jit without effects, shardings and layouts, in a fraction of the time of `solve`.

    Return False for any other. Its body takes and returns values with the batch dimensions that
    they have: there is nothing to settle.
    """
    params = eqn.params
    if (
        eqn.effects
        or not all(map(jaxcompat.is_unspecified, params["in_shardings"]))
        or not all(map(jaxcompat.is_unspecified, params["out_shardings"]))
        or any(layout is not None for layout in params["in_layouts"])
        or any(layout is not None for layout in params["out_layouts"])
    ):
        return False
    dims = [*map(builder.kind, eqn.invars)]
    rewritten = builder.domain.body(jaxcompat.close_jaxpr(params["jaxpr"]), dims)
    if rewritten.extras or rewritten.jaxpr.effects:
        return False
    new = eqn.replace(
        invars=[*map(builder.held, eqn.invars, dims)],
        outvars=builder.outs(eqn.outvars, rewritten.kinds),
        params={**params, "jaxpr": rewritten.jaxpr},
    )
    builder.add(new, eqn, rewritten.kinds)
    return True


def _laid_out(
    params: Layouts,
    side: str,
    atoms: Sequence[Atom],
    dims: Sequence[Dim],
    eqn: JaxprEqn,
    axis: Axis,
) -> Layouts:
    """Return the parameters of a jit for operands, or results, with their batch dimensions.

    They are the same object if none changes.
    """
    if any(layout is not None for layout in params[f"{side}_layouts"]):
        raise batch_error(eqn, "Concrete layouts are not supported for vmap(jit).")
    if all(map(jaxcompat.is_unspecified, params[f"{side}_shardings"])):
        return params
    shardings = tuple(
        sharding
        if dim is None or jaxcompat.is_unspecified(sharding)
        else jaxcompat.mapped_sharding(
            axis.data, sharding, dim, eqn.params["ctx_mesh"], axis.aval(atom.aval, dim)
        )
        for sharding, dim, atom in zip(params[f"{side}_shardings"], dims, atoms, strict=True)
    )
    return {**params, f"{side}_shardings": shardings}


# --- loops ----------------------------------------------------------------------------------------
# Batching of while loops.
#
# A while loop whose predicate is mapped runs until all batch elements are done, with every carry
# mapped; JAX's `while` primitive then leaves the carries of finished batch elements unchanged.

rule(structured_rules, "scan")(by_edges)


@rule(structured_rules, "while")
def _while(builder: BatchBodyBuilder, eqn: JaxprEqn) -> bool:
    inside, domain = regions(eqn), builder.domain
    assert inside is not None
    cond, body = inside.bodies
    effects = cond.effects | body.effects
    if reason := jaxcompat.forbidden_in_loops(effects, masked=False):
        raise batch_error(eqn, reason)
    solution = solve(builder, inside)
    if solution is None:  # the predicate is mapped
        if reason := jaxcompat.forbidden_in_loops(effects, masked=True):
            raise batch_error(eqn, reason)
        carried = {i for i, _ in inside.carried}
        dims = [0 if i in carried else builder.kind(atom) for i, atom in enumerate(eqn.invars)]
        outs: list[Dim] = [0] * len(carried)
        conds, consts = ([dims[i] for i in region.ins] for region in inside.regions)
        bodies = [domain.body(cond, conds, [0]), domain.matched(body, consts, outs, None)]
        solution = Solution(inside, dims, outs, bodies)
    write(builder, solution)
    return True


# --- sharding -------------------------------------------------------------------------------------
# Batching of shard_map.
#
# Every shard of an operand has all batch elements, or, with `spmd_axis_name`, the batch elements
# are distributed over these axes of the mesh.


@rule(structured_rules, "shard_map")
def _shard_map(builder: BatchBodyBuilder, eqn: JaxprEqn) -> bool:
    inside, axis = regions(eqn), builder.domain.axis
    assert inside is not None
    call, inner = ShardMap.of(eqn), axis
    if (spread := axis.spmd_name) is not None:
        inner = replace(axis, size=axis.size // math.prod(call.mesh.shape[n] for n in spread))
    dims = [*map(builder.kind, eqn.invars)]
    in_specs = _specs(call.in_specs, dims, axis, "in_specs")
    with jaxcompat.manual_mesh(**eqn.params):
        rewritten = domain_of(inner).body(call.body, dims)
    out_specs = _specs(call.out_specs, rewritten.kinds, axis, "out_specs")
    solution = Solution(inside, dims, [*rewritten.kinds], [rewritten])
    write(builder, solution, in_specs=in_specs, out_specs=out_specs)
    return True


def _specs(specs: Sequence[jax.P], dims: Sequence[Dim], axis: Axis, what: str) -> tuple[jax.P, ...]:
    """Return partition specs with an entry for the batch dimension."""
    names = axis.spmd_name or axis.mesh_axes or ()
    for spec in specs:
        if (used := set(names).intersection(jaxcompat.axes_of_spec(spec))) and axis.spmd_name:
            raise ValueError(f"vmap spmd_axis_name cannot appear in shard_map {what}: {used}")
        if used:
            raise ValueError(f"vmapped away explicit mesh axis cannot appear in shard_map {what}")
    return tuple(
        spec if dim is None else jaxcompat.spec_with_entry(spec, dim, axis.spmd_name)
        for spec, dim in zip(specs, dims, strict=True)
    )


# --- custom derivatives ---------------------------------------------------------------------------
# Batching of custom_jvp and custom_vjp calls: the function at once, its rules on demand.
#
# A result that is the same in all batch elements may have a mapped derivative, by the user's rule.
# Such a result is mapped too, as in `grad` of `jax.vmap`, so that the call has this derivative. To
# find out, the rule is traced, but only where a mapped call has an unmapped result. Rules may
# contain such calls, to any depth: only a few are traced, and results of calls nested deeper stay
# unmapped.
#
# Results also stay unmapped if mapping them would map a result of the program that must be
# unmapped. Such a call is refused if it is differentiated after all and its derivative is mapped.


@rule(structured_rules, *CustomJVP.primitives, *CustomVJP.primitives)
def _custom_derivative(builder: BatchBodyBuilder, eqn: JaxprEqn) -> bool:
    axis, dims = builder.domain.axis, [*map(builder.kind, eqn.invars)]
    jvp = eqn.primitive.name in CustomJVP.primitives
    call = (CustomJVP if jvp else CustomVJP).of(eqn)
    own_dims = tuple(dims[eqn.params["num_consts"] :])

    def batch(
        rule: ClosedJaxpr, dims: Sequence[Dim], outs: Sequence[Dim]
    ) -> tuple[ClosedJaxpr, tuple[Dim, ...]]:
        return batch_body(rule, dims, axis, outs)

    body, out_dims = batch_body(call.body, dims, axis)
    if axis.derivatives and None in out_dims and own_dims != (None,) * len(own_dims):
        more = _rule_dims(eqn, axis, batch, own_dims) or out_dims
        wanted = [b if a is None else a for a, b in zip(out_dims, more, strict=True)]
        body, out_dims = batch_body(call.body, dims, axis, wanted)
    mapped = jaxcompat.mapped_jvp_params if jvp else jaxcompat.mapped_vjp_params
    rules = mapped(eqn.params, axis.data, batch, own_dims, out_dims)
    body, consts = lifted(body)
    if consts:
        rules |= jaxcompat.with_leading_consts(eqn.params, len(consts))
    operands = [*map(builder.constant, consts), *map(builder.held, eqn.invars, dims)]
    new = call.rebuild(operands=operands, outs=builder.outs(eqn.outvars, out_dims), body=body)
    builder.add(new.replace(params={**new.params, **rules}), eqn, out_dims)
    return True


#: The maximum depth of nested rules to trace, and the maximum number of rules traced within one.
_MOST_WITHIN, _MOST_TRACED = 3, 16

#: The result dimensions of the rules traced within one; None while a rule is being traced.
_known: ContextVar[dict[Hashable, Sequence[Dim] | None] | None] = ContextVar("known", default=None)


def _rule_dims(
    eqn: JaxprEqn, axis: Axis, batch: Callable[..., Any], dims: Sequence[Dim]
) -> Sequence[Dim] | None:
    """Return where the rules of a call map results or their tangents; None if not known."""
    outer = _known.get()
    results = {} if outer is None else outer
    request = rule_key(eqn), tuple(dims)
    within = sum(result is None for result in results.values())
    if request in results or within == _MOST_WITHIN or len(results) == _MOST_TRACED:
        return results.get(request)
    jvp = eqn.primitive.name in CustomJVP.primitives
    asked = jaxcompat.jvp_result_dims if jvp else jaxcompat.vjp_result_dims
    token, results[request] = _known.set(results), None
    try:
        results[request] = asked(eqn, axis.data, batch, dims)
    except Exception:  # the user's rule may not support these operands
        results[request] = ()
    finally:
        _known.reset(token)
    return results[request]


# --- templates ------------------------------------------------------------------------------------
# Batching rules, traced once for all similar equations to templates (`mapping.domains`).
#
# Templates are kept for the process (in domains, and in `_of_bodies`), which makes `jaxprtool.vmap`
# and the next program of a kind fast; `jaxprtool.clear_caches` drops them.

#: Templates of equations that hold jaxprs, by the first of these jaxprs.
_of_bodies = JaxprCache()


def template_of(
    eqn: JaxprEqn,
    avals: Sequence[Aval],
    dims: Sequence[Dim],
    aval_ids: Sequence[int],
    domain: BatchDomain,
) -> Template:
    """Return the template of an equation, traced once for all with the same signature.

    The template of an equation that holds jaxprs is kept with the first of them, weakly.

    Args:
        eqn: The equation.
        avals: The types of its operands.
        dims: The batch dimensions of its operands.
        aval_ids: The ids of its operands; see `Domain.aval_id`.
        domain: The domain that keeps the template.

    Raises:
        Exception: If its rule raises.
    """
    templates, like = domain.templates, eqn
    key: tuple[Hashable, ...] = ()
    jaxprs = [body for _, body in sub_jaxprs(eqn)]
    if jaxprs:
        templates, key = _of_bodies.of(jaxprs[0]), (domain,)
        like = eqn.replace(params={name: _weak(value) for name, value in eqn.params.items()})
    if any(map(has_float, like.params.values())):
        domain.with_floats.add(eqn.primitive)
    key += domain.key(like, aval_ids)
    try:
        template = templates.get(key)
    except TypeError:  # a parameter that is not hashable
        return _trace_rule(eqn, avals, dims, domain)
    if template is None:
        template = _trace_rule(eqn, avals, dims, domain)
        if not jaxprs or not any(
            body is jaxprs[0] for step in template.steps for _, body in sub_jaxprs(step)
        ):
            template = templates.setdefault(key, template) or template
    return template


def _trace_rule(
    eqn: JaxprEqn, avals: Sequence[Aval], dims: Sequence[Dim], domain: BatchDomain
) -> Template:
    primitive, axis = eqn.primitive, domain.axis

    def compute(_: Mapping[Any, Any], *operands: jax.Array) -> tuple[Operands, Sequence[Dim]]:
        rule = batch_rules.get(primitive.name)
        batched = rule and rule(axis, primitive, operands, dims, eqn.params)
        results, out_dims = batched or jaxs_rule(axis, primitive, operands, dims, eqn.params)
        return (results, out_dims) if primitive.multiple_results else ([results], [out_dims])

    return domain.traced(compute, avals, (), eqn)


def _weak(value: object) -> object:
    """Return a parameter with weak references in place of jaxprs."""
    if isinstance(value, (tuple, list)):
        return type(value), *map(_weak, value)
    return ref(value) if holds_jaxpr([value]) else value


def trace_match(aval: Aval, source: Dim, target: int, domain: BatchDomain) -> Template:
    """Trace the template that moves a value's batch dimension to `target`, or broadcasts it."""

    def compute(_: Mapping[Any, Any], x: jax.Array) -> tuple[Operands, Sequence[Dim]]:
        return [jaxcompat.match_axis(domain.axis.data, source, target, x)], [target]

    return domain.traced(compute, [aval], (), None)


# --- sums -----------------------------------------------------------------------------------------
# `sum_match`: sum mapped results whose `out_axes` entry is None over the batch.


def summed(
    body: ClosedJaxpr, dims: Sequence[Dim], outs: Sequence[Dim]
) -> tuple[ClosedJaxpr, tuple[Dim, ...]]:
    """Sum the mapped results of a batched jaxpr that were requested to be unmapped.

    The sum is that of the method `sum` of arrays, as in `jax.vmap`: small integers are widened. It
    has the source line of the equation that computes the result, if one does.

    Args:
        body: The batched jaxpr.
        dims: The batch dimensions of its results.
        outs: The requested ones.

    Returns:
        The jaxpr with the sums, and the batch dimensions of its results.
    """
    definition = {v: eqn for eqn in body.eqns for v in eqn.outvars}
    eqns, results, left = list(body.eqns), list(body.outvars), list(dims)
    for i, (dim, out) in enumerate(zip(dims, outs, strict=True)):
        if dim is None or out is not None:
            continue
        var = body.outvars[i]
        eqn = definition.get(var)
        total = jaxcompat.trace_in_setting(partial(_sums, dim), [var.aval], eqn)
        (parameter,) = total.invars
        for added in total.eqns:
            bare = jaxcompat.source_info(None, added.source_info.name_stack)
            source = bare if eqn is None else eqn.source_info
            ins = [var if v is parameter else v for v in added.invars]
            eqns.append(added.replace(invars=ins, source_info=source))
        results[i], left[i] = total.outvars[0], None
        assert type(results[i]) is not Literal
    return jaxcompat.replace_jaxpr(body, eqns=eqns, outvars=results), tuple(left)


def _sums(dim: int, array: jax.Array) -> list[jax.Array]:
    return [array.sum(dim)]
