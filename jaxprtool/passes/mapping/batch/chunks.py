"""`chunk=k`: map k batch elements at a time, so that memory is bounded by k, not by the axis size.

A scan maps the program over n // k chunks of k batch elements each. The remaining n % k are mapped
once more after it. Values that are the same in all batch elements are computed once, before the
scan; for that, the body of each jit is split in two.

Arguments are cut before the scan, by a reshape and, if the mapped axis is not the leading one, one
transpose. Slices taken in the scan would move fewer bytes, but not in reverse: the gradient of
each slice is as large as the whole argument, and n // k of these would be added up.

Batch elements of different chunks are never computed together. So collectives over the mapped axis
are refused, and the axis has no name in a chunk: code that is only traced later, such as the rule
of a custom derivative, then raises instead of summing over one chunk. Random bits that depend on
the whole batch, as in JAX's rule for `rbg` keys, depend on the chunk.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.errors import JaxprToolError
from jaxprtool.ir.equations import bodies, equations, free_variables, named, variables
from jaxprtool.ir.regions import Call, Regions, keep, regions
from jaxprtool.ir.rewrite import Memo, map_equations, narrow
from jaxprtool.jaxcompat import (
    AbstractRef,
    Atom,
    ClosedJaxpr,
    Effect,
    JaxprEqn,
    Literal,
    Var,
    jaxpr_as_fun,
)
from jaxprtool.passes.mapping.batch.axes import Axis, BatchError, BatchTypeError, Dim
from jaxprtool.passes.mapping.batch.body import BatchUnsupported, batch_body

#: A value, and its batch dimension.
Batched = tuple[jax.Array, Dim]


def chunked_body(
    body: ClosedJaxpr, dims: Sequence[Dim], axis: Axis, outs: Sequence[Dim], chunk: int
) -> tuple[ClosedJaxpr, tuple[Dim, ...]]:
    """Map a closed jaxpr over an axis, `chunk` batch elements at a time; see `batch_body`.

    A mapped result without a requested batch dimension has it at 0.

    Raises:
        BatchTypeError: If the chunk is not an integer.
        BatchError: If the chunk or the axis is invalid.
        BatchUnsupported: If there is a collective over the axis, a ref that chunks would share, or
            an effect that would happen once for each chunk. The message names the equation.
    """
    _check_chunk(chunk, axis)
    _check_no_collectives(body, axis.name, chunk)
    if axis.size <= chunk:
        return batch_body(body, dims, axis, outs, outermost=True)
    # An argument that is a result need not be cut and concatenated again.
    computed = [v for v in variables(body.outvars) if v not in body.invars]
    wanted = jaxcompat.replace_jaxpr(body, outvars=computed)
    split_body = _split(wanted, [dim is not None for dim in dims], Memo())
    varying = split_body.second
    _check_no_ref_enters([*varying.constvars, *varying.invars], varying.eqns)
    dim_of = dict(zip(body.invars, dims, strict=True))
    _check_effects(varying, [dim_of.get(v) is not None for v in varying.invars], chunk)
    out_of = {v: out for v, out in zip(body.outvars, outs, strict=True) if type(v) is not Literal}
    out_dims: list[Dim] = []

    def whole(*args: jax.Array) -> list[jax.Array]:
        env: dict[Atom, Batched] = dict(zip(body.invars, zip(args, dims, strict=True), strict=True))
        once = jaxpr_as_fun(split_body.first)(*(x for x, dim in env.values() if dim is None))
        env.update((v, (x, None)) for v, x in zip(split_body.first.outvars, once, strict=True))
        if varying.eqns:
            asked = [out_of[v] or 0 for v in varying.outvars]
            results = _in_chunks(varying, [env[v] for v in varying.invars], asked, axis, chunk)
            env.update(zip(varying.outvars, results, strict=True))
        values = []
        for v, out in zip(body.outvars, outs, strict=True):
            x, dim = (v.val, None) if type(v) is Literal else env[v]
            if out is not None and out != dim:
                x, dim = jaxcompat.match_axis(axis.data, dim, out, x), out
            values.append(x)
            out_dims.append(dim)
        return values

    avals = [axis.aval(v.aval, dim) for v, dim in dim_of.items()]
    try:
        new = _without_our_source(jaxcompat.trace_flat(whole, "chunks", avals), body)
    except JaxprToolError:
        raise
    except NotImplementedError as error:  # an effect that JAX does not allow in a scan
        raise BatchUnsupported(f"chunk={chunk}: {error}", "omit chunk") from error
    return jaxcompat.replace_jaxpr(new, debug_info=body.debug_info), tuple(out_dims)


def _in_chunks(
    body: ClosedJaxpr, operands: Sequence[Batched], outs: Sequence[int], axis: Axis, chunk: int
) -> list[Batched]:
    """Return the results of a body in chunks, the mapped ones with batch dimensions `outs`."""
    dims = [dim for _, dim in operands]

    def batched(size: int) -> tuple[ClosedJaxpr, tuple[Dim, ...]]:
        return batch_body(body, dims, replace(axis, name=None, size=size), outermost=True)

    mapped, places = batched(chunk)
    count, rest = divmod(axis.size, chunk)
    if not rest and None in places:  # the last chunk returns the unmapped results
        count, rest = count - 1, chunk

    def scanned(_: None, rows: Sequence[jax.Array]) -> tuple[None, Sequence[jax.Array]]:
        cut = iter(rows)
        args = [x if dim is None else next(cut) for x, dim in operands]
        return None, keep(jaxpr_as_fun(mapped)(*args), [place is not None for place in places])

    rows = [_chunks_of(x, dim, count, chunk) for x, dim in operands if dim is not None]
    _, stacked = lax.scan(scanned, None, rows, length=count)
    stacks, lasts, last_places = iter(stacked), [], places
    if rest:
        last, last_places = batched(rest)
        lasts = jaxpr_as_fun(last)(
            *(
                x if dim is None else lax.slice_in_dim(x, count * chunk, None, axis=dim)
                for x, dim in operands
            )
        )
    results: list[Batched] = []
    for i, (place, out) in enumerate(zip(places, outs, strict=True)):
        if place is None:
            results.append((lasts[i], None))
            continue
        # Chunks, [count, ..., chunk, ...], and the batch elements after them.
        stack = jnp.moveaxis(next(stacks), (0, place + 1), (out, out + 1))
        pieces = [_reshaped(stack, out, 2, (count * chunk,))]
        if rest:
            pieces.append(jaxcompat.match_axis(axis.data, last_places[i], out, lasts[i]))
        results.append((lax.concatenate(pieces, out), out))
    return results


def _chunks_of(x: jax.Array, dim: int, count: int, chunk: int) -> jax.Array:
    """Return the first chunks along a dimension: [..., n, ...] to [count, ..., chunk, ...]."""
    if count * chunk < x.shape[dim]:
        x = lax.slice_in_dim(x, 0, count * chunk, axis=dim)
    return jnp.moveaxis(_reshaped(x, dim, 1, (count, chunk)), dim, 0)


def _reshaped(x: jax.Array, start: int, many: int, sizes: tuple[int, ...]) -> jax.Array:
    """Return an array with some of its dimensions reshaped to `sizes` of the same product."""
    return lax.reshape(x, (*x.shape[:start], *sizes, *x.shape[start + many :]))


def _without_our_source(jaxpr: ClosedJaxpr, body: ClosedJaxpr) -> ClosedJaxpr:
    """Return a jaxpr in which only the equations of `body` have source locations."""
    tracebacks = {id(eqn.source_info.traceback) for eqn in equations(jaxcompat.open_jaxpr(body))}

    def rule(eqn: JaxprEqn) -> list[JaxprEqn] | None:
        source = eqn.source_info
        if id(source.traceback) in tracebacks:
            return None
        return [eqn.replace(source_info=jaxcompat.source_info(None, source.name_stack))]

    return map_equations(jaxpr, rule)


# --- refused programs -------------------------------------------------------------------------


def _check_chunk(chunk: object, axis: Axis) -> None:
    if type(chunk) is not int:
        raise BatchTypeError(f"chunk must be an integer, but got {chunk!r}")
    if chunk < 1:
        raise BatchError(f"chunk must be at least 1, but got {chunk}")
    if not isinstance(axis.size, int):
        raise BatchError(f"chunk needs an axis size that is a number, but it is {axis.size}")
    if axis.spmd_name is not None:
        raise BatchError(
            "chunk and spmd_axis_name cannot be combined: batch elements sharded over a mesh are "
            "computed all at once",
            "omit one of them",
        )
    if axis.mesh_axes is not None:
        over = ", ".join(map(str, axis.mesh_axes))
        raise BatchError(f"chunk cannot split an axis that is sharded over the mesh axes {over}")


def _check_no_collectives(body: ClosedJaxpr, name: Hashable, chunk: int) -> None:
    """Refuse equations over the axis of this name, at any depth: they need the whole batch."""
    if name is None:
        return
    for eqn in equations(jaxcompat.open_jaxpr(body)):
        inner = (sub_eqn for _, jaxpr in bodies(eqn) for sub_eqn in jaxpr.eqns)
        if _is_over(eqn, name) and not any(_is_over(sub_eqn, name) for sub_eqn in inner):
            raise BatchUnsupported(
                f"{named(eqn)} needs all elements of the mapped axis '{name}', but chunk={chunk} "
                f"computes {chunk} at a time",
                "omit chunk",
            )


def _is_over(eqn: JaxprEqn, name: Hashable) -> bool:
    """Return True if an equation is over a named axis. Some, as ppermute, have no effect for it."""
    over = eqn.params.get("axis_name", eqn.params.get("axes"))
    if over == name or (isinstance(over, tuple | list) and name in over):
        return True
    return jaxcompat.without_named_axes(eqn.effects, [name]) != set(eqn.effects)


def _check_no_ref_enters(values: Iterable[Var], eqns: Sequence[JaxprEqn]) -> None:
    """Refuse equations of the scan that use refs from outside."""
    refs = {v for v in values if isinstance(v.aval, AbstractRef)}
    for eqn in eqns:
        if not refs.isdisjoint(variables(eqn.invars)):
            raise BatchUnsupported(
                f"{named(eqn)} uses a ref that all chunks would share", "omit chunk"
            )


def _check_effects(body: ClosedJaxpr, mapped: Sequence[bool], chunk: int) -> None:
    """Refuse effects of unmapped values in a body that each chunk runs.

    In an unchunked batch such an effect happens once; in chunks it would happen for each of them.
    """
    if not any(map(_is_external, body.effects)):
        return
    eqn = _repeated_effect(body, mapped, Memo())[1]
    if eqn is not None:
        raise BatchUnsupported(
            f"{named(eqn)} happens once for the whole batch, but would happen for each chunk of "
            f"{chunk}",
            "omit chunk",
        )


def _repeated_effect(
    body: ClosedJaxpr, mapped: Sequence[bool], memo: Memo
) -> tuple[list[bool], JaxprEqn | None]:
    """Return which results are mapped, and the first equation with an effect of unmapped values."""

    def inside(bodies: Sequence[ClosedJaxpr], number: int, mapped: Sequence[bool]) -> Any:
        inner = bodies[number]
        return memo(partial(_repeated_effect, inner, mapped, memo), inner, tuple(mapped))

    env, external = set(keep(body.invars, mapped)), None
    for eqn in body.eqns:
        facts = [type(v) is not Literal and v in env for v in eqn.invars]
        outs = [any(facts)] * len(eqn.outvars)
        nested = regions(eqn)
        if nested is not None:
            look = partial(inside, nested.bodies)
            facts, outs = nested.forward(facts, lambda *at, f=look: f(*at)[0], or_, control=True)
            # All branches of a mapped index are computed, with mapped operands.
            chosen = any(facts[i] for i in nested.predicates)
            for number, region in enumerate(nested.regions):
                external = external or look(number, [chosen or facts[i] for i in region.ins])[1]
        elif not any(facts) and any(map(_is_external, eqn.effects)):
            external = external or eqn
        env.update(keep(eqn.outvars, outs))
    return [type(v) is not Literal and v in env for v in body.outvars], external


def _is_external(effect: Effect) -> bool:
    """Return True if an effect is visible from outside. Refs are not: each chunk has its own."""
    return not jaxcompat.is_removable_effect(effect) and jaxcompat.ref_of(effect) is None


# --- values that are the same in all batch elements -------------------------------------------


@dataclass(frozen=True, eq=False)
class _SplitBody:
    """A body in two: the part that is the same in all batch elements, and the rest.

    `first` takes the unmapped arguments. It returns the results marked in `same`, then the values
    that `second` takes before the arguments marked in `taken`; `second` returns the other results.
    """

    first: ClosedJaxpr
    second: ClosedJaxpr
    same: list[bool]
    taken: list[bool]


def _split(body: ClosedJaxpr, mapped: Sequence[bool], memo: Memo) -> _SplitBody:
    """Split a body, and those of the jits in it, by which of its arguments are mapped."""
    once: list[JaxprEqn] = []
    mapped_eqns: list[JaxprEqn] = []
    inside = set(keep(body.invars, mapped))
    for eqn in body.eqns:
        # A ref holds all batch elements, each of which may write to it: each chunk has its own.
        makes_ref = any(isinstance(v.aval, AbstractRef) for v in eqn.outvars) or any(
            jaxcompat.allocates_refs(inner) for _, inner in bodies(eqn)
        )
        if inside.isdisjoint(variables(eqn.invars)) and not makes_ref:
            once.append(eqn)
            continue
        if eqn.primitive.name == "jit":
            first, eqn = _split_call(Call.of(eqn), inside, memo)
            once += first
        mapped_eqns.append(eqn)
        inside.update(eqn.outvars)
    same = [type(v) is Literal or v not in inside for v in body.outvars]
    differing = keep(body.outvars, _not(same))
    read = free_variables(mapped_eqns, differing)
    passed = [v for eqn in once for v in eqn.outvars if v in read]
    _check_no_ref_enters(passed, mapped_eqns)
    taken = [v in read for v in body.invars]
    results = [*keep(body.outvars, same), *passed]
    return _SplitBody(
        narrow(body, keep(body.invars, _not(mapped)), results, once),
        narrow(body, [*passed, *keep(body.invars, taken)], differing, mapped_eqns),
        same,
        taken,
    )


def _split_call(call: Call, inside: set[Var], memo: Memo) -> tuple[list[JaxprEqn], JaxprEqn]:
    """Return the call of the part of a jit to compute once, if any, and the call of the rest."""
    mapped = tuple(type(v) is not Literal and v in inside for v in call.operands)
    split_body = memo(partial(_split, call.body, mapped, memo), call.body, mapped)
    first, same = split_body.first, split_body.same
    # A call that only computes constants for the other saves nothing.
    arguments = {
        v for v, x in zip(call.body.invars, call.operands, strict=True) if type(x) is not Literal
    }
    if not any(same) and not any(
        eqn.effects or not arguments.isdisjoint(variables(eqn.invars)) for eqn in first.eqns
    ):
        return [], call.eqn
    # Operands that both calls take can be donated to neither.
    kept = {**call.operand_params, "donated_invars": (False,) * len(call.operands)}
    called = Regions.of(replace(call, operand_params=kept))
    passed = [Var(v.aval) for v in first.outvars[sum(same) :]]
    return (
        [called.rebuild([first], _not(mapped), same, more_results={"outs": passed})],
        called.rebuild(
            [split_body.second], split_body.taken, _not(same), more={"operands": passed}, first=True
        ),
    )


def _not(flags: Iterable[bool]) -> list[bool]:
    return [not flag for flag in flags]
