"""`chunk=k`: k lanes at a time, so that memory is bounded by k and not by the number of lanes.

A scan maps the program over n // k chunks of k lanes each, and what is left over, n % k lanes, is
mapped once more after it. What is the same in all lanes is computed once, before the scan; that is
so in the bodies of jits too, each of which becomes two.

Arguments are cut before the scan, by a reshape and, where the mapped axis is not the leading one,
one transpose. Slices taken in the scan would move fewer bytes, but not in reverse: the gradient of
each slice is as large as the whole argument, and n // k of these would be added up.

Lanes of different chunks never meet. So collectives over the mapped axis are refused, and the axis
bears no name in a chunk: what is only traced later, such as the rule of a custom derivative, then
fails loudly instead of summing over one chunk. Random bits that lanes draw together, as JAX has the
lanes of `rbg` keys do, depend on the chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import or_
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.ir.equations import bodies, equations, free_variables, named
from jaxprtool.ir.regions import Regions, regions
from jaxprtool.ir.rewrite import Memo
from jaxprtool.ir.structured import Call, Scan, keep
from jaxprtool.jaxcompat import Atom, JaxprEqn, Literal, Var
from jaxprtool.passes.batch.axes import BatchError, BatchTypeError
from jaxprtool.passes.batch.axis import Axis, Dim
from jaxprtool.passes.batch.body import batch_body
from jaxprtool.passes.batch.table import BatchUnsupported


def chunked_body(
    body: Any, dims: Sequence[Dim], axis: Axis, outs: Sequence[Dim], chunk: int
) -> tuple[Any, tuple[Dim, ...]]:
    """A closed jaxpr mapped over an axis, `chunk` lanes at a time; see `batch_body`.

    A mapped result that is not asked for anywhere is mapped at its leading dimension. Raises
    BatchTypeError and BatchError for a chunk or an axis that cannot be, and BatchUnsupported,
    which names the equation, for collectives over the axis, for refs that chunks would share, and
    for effects that would happen once for each chunk.
    """
    _check_chunk(chunk, axis)
    _check_lanes_apart(body, axis.name, chunk)
    if axis.size <= chunk:
        return batch_body(body, dims, axis, outs, outermost=True)
    return _Chunks(body, tuple(dims), axis, chunk).mapped(outs)


# --- what is refused --------------------------------------------------------------------------


def _check_chunk(chunk: Any, axis: Axis) -> None:
    if type(chunk) is not int:
        raise BatchTypeError(f"chunk must be an integer, but got {chunk!r}")
    if chunk < 1:
        raise BatchError(f"chunk is the number of lanes at a time, at least 1, but got {chunk}")
    if not isinstance(axis.size, int):
        raise BatchError(f"chunk needs the axis size as a number, but it is {axis.size}")
    if axis.spmd_name is not None:
        raise BatchError(
            "chunk and spmd_axis_name do not go together: lanes that are spread over a mesh are "
            "computed all at once",
            "leave one of them out",
        )
    if axis.mesh_axes is not None:
        over = ", ".join(map(str, axis.mesh_axes))
        raise BatchError(f"chunk cannot cut an axis that is sharded over the mesh axes {over}")


def _check_lanes_apart(body: Any, name: Any, chunk: int) -> None:
    """Refuse equations over the axis of this name, at any depth: they need all lanes at once."""
    if name is None:
        return
    for eqn in equations(jaxcompat.open_jaxpr(body)):
        inner = (each for _, held in bodies(eqn) for each in held.eqns)
        if _is_over(eqn, name) and not any(_is_over(each, name) for each in inner):
            raise BatchUnsupported(
                f"{named(eqn)} needs all lanes of the mapped axis '{name}', and chunk={chunk} has "
                f"{chunk} at a time",
                "leave chunk out",
            )


def _is_over(eqn: JaxprEqn, name: Any) -> bool:
    """Whether an equation is over a named axis. Not all have an effect that tells: ppermute."""
    over = eqn.params.get("axis_name", eqn.params.get("axes"))
    if over == name or (isinstance(over, tuple | list) and name in over):
        return True
    return jaxcompat.without_named_axes(eqn.effects, [name]) != set(eqn.effects)


def _check_no_ref_enters(values: Iterable[Var], eqns: Sequence[JaxprEqn]) -> None:
    """Refuse refs from outside of the scan that equations in it use."""
    refs = {v for v in values if isinstance(v.aval, jaxcompat.AbstractRef)}
    for eqn in eqns:
        if not refs.isdisjoint(_variables(eqn.invars)):
            raise BatchUnsupported(
                f"{named(eqn)} uses a ref that all chunks of lanes would share", "leave chunk out"
            )


class _Effects:
    """Refuses effects of unmapped values in equations that each chunk runs.

    With all lanes at once such an effect happens once; in chunks it would happen for each of them.
    """

    def __init__(self, chunk: int):
        self._chunk = chunk
        self._memo = Memo()

    def check(self, jaxpr: Any, mapped: Sequence[bool]) -> None:
        """Check a jaxpr whose arguments are mapped as said. Raises BatchUnsupported."""
        if not any(map(_leaves_the_program, jaxcompat.open_jaxpr(jaxpr).effects)):
            return
        for eqn, facts in self._flow(jaxpr, mapped)[1]:
            inside = regions(eqn)
            if inside is None:
                if not any(facts) and any(map(_leaves_the_program, eqn.effects)):
                    raise BatchUnsupported(
                        f"{named(eqn)} happens once for all lanes, and would for each chunk of "
                        f"{self._chunk}",
                        "leave chunk out",
                    )
                continue
            for body, region in zip(inside.bodies, inside.regions, strict=True):
                self.check(body, [facts[i] for i in region.ins])

    def _flow(self, jaxpr: Any, mapped: Sequence[bool]) -> tuple[list[bool], list[Any]]:
        """Return which results are mapped, and each equation with which of its operands are."""

        def found() -> tuple[list[bool], list[Any]]:
            env = set(keep(jaxpr.invars, mapped))
            equations = []
            for eqn in jaxpr.eqns:
                facts = [_is_var(v) and v in env for v in eqn.invars]
                outs = [any(facts)] * len(eqn.outvars)
                inside = regions(eqn)
                if inside is not None:
                    through = partial(self._results, inside.bodies)
                    facts, outs = inside.forward(facts, through, or_, decided=True)
                env.update(keep(eqn.outvars, outs))
                equations.append((eqn, facts))
            return [_is_var(v) and v in env for v in jaxpr.outvars], equations

        return self._memo(found, jaxpr, tuple(mapped))

    def _results(self, bodies: Sequence[Any], number: int, mapped: Sequence[bool]) -> list[bool]:
        return self._flow(bodies[number], mapped)[0]


def _leaves_the_program(effect: Any) -> bool:
    """Whether an effect is seen from outside. Each chunk has refs of its own."""
    return not jaxcompat.is_removable_effect(effect) and jaxcompat.ref_of(effect) is None


# --- what is the same in all lanes ------------------------------------------------------------


@dataclass
class _Parts:
    """The equations of a body: those of unmapped values, once for all lanes, and the others.

    `inside` are the variables that the others make, and the mapped arguments.
    """

    once: list[JaxprEqn] = field(default_factory=list)
    others: list[JaxprEqn] = field(default_factory=list)
    inside: set[Var] = field(default_factory=set)


def _parted(body: Any, mapped: Sequence[bool], known: dict[Any, Any]) -> _Parts:
    """A body in its two parts; `known` has the halves of the bodies of jits."""
    parts = _Parts(inside=set(keep(body.invars, mapped)))
    for eqn in body.eqns:
        # A ref that is made here may be written to by every lane: each chunk has its own.
        makes_ref = any(isinstance(v.aval, jaxcompat.AbstractRef) for v in eqn.outvars)
        if parts.inside.isdisjoint(_variables(eqn.invars)) and not makes_ref:
            parts.once.append(eqn)
            continue
        if eqn.primitive.name == "jit":
            first, eqn = _halves(Call.of(eqn), parts.inside, known)
            parts.once += first
        parts.others.append(eqn)
        parts.inside.update(eqn.outvars)
    return parts


def _halves(call: Call, inside: set[Var], known: dict[Any, Any]) -> tuple[list[JaxprEqn], JaxprEqn]:
    """What a jit computes once, a call or nothing, and the call that computes the rest."""
    mapped = tuple(_is_var(v) and v in inside for v in call.operands)
    given = tuple(map(_is_var, call.operands))
    request = jaxcompat.open_jaxpr(call.body), mapped, given
    if request not in known:
        known[request] = _half_bodies(call.body, mapped, given, known)
    if known[request] is None:
        return [], call.eqn
    first, second, same, taken = known[request]
    # What both calls take can be donated to neither.
    kept = {**call.operand_params, "donated_invars": (False,) * len(call.operands)}
    called = Regions.of(replace(call, operand_params=kept))
    passed = [Var(v.aval) for v in first.outvars[sum(same) :]]
    return (
        [called.rebuild([first], _not(mapped), same, more_results={"outs": passed})],
        called.rebuild([second], taken, _not(same), more={"operands": passed}, first=True),
    )


def _half_bodies(
    body: Any, mapped: Sequence[bool], given: Sequence[bool], known: dict[Any, Any]
) -> Any:
    """The bodies of both calls, which results are the first's, which arguments the second takes.

    The first gives besides what the second takes before its arguments. None if all that it would
    do is to make constants for the second, of the body's own or of arguments that are not `given`
    as variables.
    """
    parts = _parted(body, mapped, known)
    same = [not _is_var(v) or v not in parts.inside for v in body.outvars]
    arguments = set(keep(body.invars, given))
    if not any(same) and not any(
        e.effects or not arguments.isdisjoint(_variables(e.invars)) for e in parts.once
    ):
        return None
    differing = keep(body.outvars, _not(same))
    reads = free_variables(parts.others, differing)
    made = {v for eqn in parts.once for v in eqn.outvars}
    passed = [v for v in reads if v in made]
    _check_no_ref_enters(passed, parts.others)
    taken = [v in reads for v in body.invars]
    debug = body.debug_info._replace(arg_names=None, result_paths=None)

    def half(invars: Sequence[Var], outvars: Sequence[Atom], eqns: Sequence[JaxprEqn]) -> Any:
        return jaxcompat.new_jaxpr(body.constvars, body.consts, invars, outvars, eqns, debug)

    results = [*keep(body.outvars, same), *passed]
    first = half(keep(body.invars, _not(mapped)), results, parts.once)
    second = half([*passed, *keep(body.invars, taken)], differing, parts.others)
    return first, second, same, taken


def _not(flags: Iterable[bool]) -> list[bool]:
    return [not flag for flag in flags]


def _variables(atoms: Iterable[Atom]) -> list[Var]:
    return [atom for atom in atoms if _is_var(atom)]


# --- the chunks -------------------------------------------------------------------------------


@dataclass(eq=False)
class _Chunks:
    """The mapped jaxpr while it is written: its equations, and the constants that are new."""

    body: Any
    dims: tuple[Dim, ...]
    axis: Axis
    chunk: int
    eqns: list[JaxprEqn] = field(default_factory=list)
    constvars: list[Var] = field(default_factory=list)
    consts: list[Any] = field(default_factory=list)

    def mapped(self, outs: Sequence[Dim]) -> tuple[Any, tuple[Dim, ...]]:
        """The mapped jaxpr, and where its results are mapped."""
        body = self.body
        arguments = [
            (v if dim is None else Var(self.axis.aval(v.aval, dim)), dim)
            for v, dim in zip(body.invars, self.dims, strict=True)
        ]
        parts = _parted(body, [dim is not None for dim in self.dims], {})
        self.eqns += parts.once
        values: dict[Var, tuple[Atom, Dim]] = {
            **{v: (v, None) for v in body.constvars},
            **{v: (v, None) for eqn in parts.once for v in eqn.outvars},
            **dict(zip(body.invars, arguments, strict=True)),
        }
        if parts.others:
            asked = {v: out for v, out in zip(body.outvars, outs, strict=True) if _is_var(v)}
            values |= self._lanes(parts.others, asked, values)
        results, out_dims = [], []
        for atom, out in zip(body.outvars, outs, strict=True):
            value, dim = values[atom] if _is_var(atom) else (atom, None)
            if out is not None and out != dim:
                value, dim = self._computed(_matched, value, axis=self.axis, dim=dim, out=out), out
            results.append(value)
            out_dims.append(dim)
        new = jaxcompat.replace_jaxpr(
            body,
            constvars=[*body.constvars, *self.constvars],
            consts=[*body.consts, *self.consts],
            invars=[value for value, _ in arguments],
            outvars=results,
            eqns=self.eqns,
            debug_info=body.debug_info,
        )
        return new, tuple(out_dims)

    def _lanes(
        self,
        eqns: Sequence[JaxprEqn],
        outs: Mapping[Var, Dim],
        values: Mapping[Var, tuple[Atom, Dim]],
    ) -> dict[Var, tuple[Atom, Dim]]:
        """The results that mapped equations make, of all lanes, and where each is mapped."""
        results = [v for v in outs if v not in values]
        free = [v for v in free_variables(eqns, results) if v in values]
        _check_no_ref_enters(free, eqns)
        free.sort(key=lambda v: values[v][1] is not None)  # a scan takes its constants first
        operands, dims = [values[v][0] for v in free], [values[v][1] for v in free]
        inner = _alone(free, results, eqns, self.body.debug_info)
        _Effects(self.chunk).check(inner, [dim is not None for dim in dims])

        def batched(lanes: int) -> tuple[Any, tuple[Dim, ...]]:
            axis = replace(self.axis, name=None, size=lanes)
            return batch_body(inner, dims, axis, outermost=True)

        body, places = batched(self.chunk)
        count, rest = divmod(self.axis.size, self.chunk)
        if not rest and None in places:  # what is the same in all lanes, the last chunk gives
            count, rest = count - 1, self.chunk
        stacks = iter(self._scanned(body, places, operands, dims, count))
        lasts: list[Atom] = []
        last_places = places
        if rest:
            body, last_places = batched(rest)
            start = count * self.chunk
            lasts = self._written(body, self._cut(operands, dims, _lanes_from, start=start))
        made: dict[Var, tuple[Atom, Dim]] = {}
        for i, v in enumerate(results):
            if places[i] is None:
                made[v] = lasts[i], None
                continue
            out = outs[v] or 0
            pieces = next(stacks), *lasts[i : i + 1]
            at = places[i], last_places[i]
            made[v] = self._computed(_joined, *pieces, places=at, out=out), out
        return made

    def _scanned(
        self,
        body: Any,
        places: Sequence[Dim],
        operands: Sequence[Atom],
        dims: Sequence[Dim],
        count: int,
    ) -> list[Var]:
        """The mapped results of a body over the first chunks, stacked; the others are left out."""
        operands = self._cut(operands, dims, _chunks_of, count=count, chunk=self.chunk)
        same = dims.count(None)
        invars = [*body.constvars, *body.invars]
        outvars = keep(body.outvars, [place is not None for place in places])
        debug = body.debug_info._replace(arg_names=None, result_paths=None)
        stacks = [Var(jaxcompat.stacked_aval(count, v.aval)) for v in outvars]
        loop = jaxcompat.trace_flat(_loop, "chunks", ())
        scan = Scan.of(next(eqn for eqn in loop.eqns if eqn.primitive.name == "scan"))
        eqn = scan.rebuild(
            consts=(*self._constants(body), *operands[:same]),
            carry=(),
            xs=tuple(operands[same:]),
            carry_outs=(),
            ys=tuple(stacks),
            body=jaxcompat.new_jaxpr((), (), invars, outvars, body.eqns, debug),
            length=count,
        )
        self.eqns.append(eqn.replace(source_info=jaxcompat.NO_SOURCE))
        return stacks

    def _cut(
        self, operands: Sequence[Atom], dims: Sequence[Dim], cut: Callable[..., Any], **where: int
    ) -> list[Atom]:
        """What `cut` gives of each mapped operand, and the others."""
        return [
            x if dim is None else self._computed(cut, x, dim=dim, **where)
            for x, dim in zip(operands, dims, strict=True)
        ]

    def _constants(self, jaxpr: Any) -> list[Var]:
        """Variables of the whole jaxpr for the constants of one that becomes part of it."""
        new = [Var(v.aval) for v in jaxpr.constvars]
        self.constvars += new
        self.consts += jaxpr.consts
        return new

    def _computed(self, fun: Callable[..., Any], *operands: Atom, **options: Any) -> Atom:
        """The result of a function of arrays, which becomes equations from no place of a user's."""
        jaxpr = jaxcompat.trace_flat(
            lambda *xs: [fun(*xs, **options)], fun.__name__, [x.aval for x in operands]
        )
        start = len(self.eqns)
        (result,) = self._written(jaxpr, operands)
        nowhere = jaxcompat.NO_SOURCE
        self.eqns[start:] = [eqn.replace(source_info=nowhere) for eqn in self.eqns[start:]]
        return result

    def _written(self, jaxpr: Any, operands: Sequence[Atom]) -> list[Atom]:
        """The results of a closed jaxpr on these operands, its equations written here."""
        names: dict[Var, Atom] = dict(zip(jaxpr.invars, operands, strict=True))
        names |= zip(jaxpr.constvars, self._constants(jaxpr), strict=True)
        self.eqns += _renamed(jaxpr.eqns, names)
        return [names[v] if _is_var(v) else v for v in jaxpr.outvars]


def _alone(
    free: Sequence[Var], results: Sequence[Var], eqns: Sequence[JaxprEqn], debug: Any
) -> Any:
    """The closed jaxpr of equations by themselves: no variable of theirs is in another jaxpr."""
    names: dict[Var, Atom] = {v: Var(v.aval) for v in free}
    invars = list(names.values())
    eqns = _renamed(eqns, names)
    debug = debug._replace(arg_names=None, result_paths=None)
    return jaxcompat.new_jaxpr((), (), invars, [names[v] for v in results], eqns, debug)


def _renamed(eqns: Sequence[JaxprEqn], names: dict[Var, Atom]) -> list[JaxprEqn]:
    """Copies of equations with other variables; what these make is entered in `names`."""
    copies = []
    for eqn in eqns:
        outvars = [type(v)(v.aval) for v in eqn.outvars]
        names.update(zip(eqn.outvars, outvars, strict=True))
        invars = [names[v] if _is_var(v) else v for v in eqn.invars]
        effs = jaxcompat.renamed_effects(eqn.effects, names) if eqn.effects else eqn.effects
        copies.append(eqn.replace(invars=invars, outvars=outvars, effects=effs))
    return copies


def _is_var(atom: Atom) -> bool:
    return type(atom) is not Literal


# --- what becomes equations -------------------------------------------------------------------


def _loop() -> list[Any]:
    return [lax.scan(lambda count, _: (count + 1, None), 0, length=1)[0]]


def _chunks_of(x: Any, *, dim: int, count: int, chunk: int) -> Any:
    """The first chunks along a dimension: [..., n, ...] to [count, ..., chunk, ...]."""
    if count * chunk < x.shape[dim]:
        x = lax.slice_in_dim(x, 0, count * chunk, axis=dim)
    return jnp.moveaxis(_reshaped(x, dim, 1, (count, chunk)), dim, 0)


def _lanes_from(x: Any, *, dim: int, start: int) -> Any:
    """The lanes after the chunks."""
    return lax.slice_in_dim(x, start, None, axis=dim)


def _joined(stack: Any, *last: Any, places: Sequence[int], out: int) -> Any:
    """Chunks, [count, ..., chunk, ...], and the lanes after them along one dimension `out`."""
    stack = jnp.moveaxis(stack, (0, places[0] + 1), (out, out + 1))
    count, chunk = stack.shape[out : out + 2]
    whole = _reshaped(stack, out, 2, (count * chunk,))
    return lax.concatenate([whole, *(jnp.moveaxis(x, places[1], out) for x in last)], out)


def _reshaped(x: Any, start: int, many: int, sizes: tuple[int, ...]) -> Any:
    """An array with other sizes for some of its dimensions, which keep their product."""
    return lax.reshape(x, (*x.shape[:start], *sizes, *x.shape[start + many :]))


def _matched(x: Any, *, axis: Axis, dim: Dim, out: int) -> Any:
    """A value mapped along `dim`, or unmapped, to be mapped along `out`."""
    return jaxcompat.match_axis(axis.data, dim, out, x)
