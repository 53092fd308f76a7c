"""Propose sharding constraints that reduce communication. Each is compiled before it is proposed.

Each constraint of the source is tried with the specs that its operand and its readers suggest,
removed, and with its mesh axes on other dimensions. For a value that the partitioner reshards, the
candidates keep its sharding: the spec of the operand is put on the operation that needs another
sharding, or the same mesh axes on another dimension. A constraint applies to every equation of its
line, as an edit of the source does: in a gradient, also to the constraint of the cotangent. A new
one is tried only on lines without a gradient, since JAX would constrain the gradient too.

Compiling takes most of the time, so the first candidate of each constraint is tried before the
second of any, beginning with the largest value whose surroundings suggest another spec.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from math import prod
from typing import NamedTuple

from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxprtool import jaxcompat
from jaxprtool.analysis.shardings import Collective, Constraint, Shardings
from jaxprtool.analysis.shardings.constraint_specs import ConstraintSpecs
from jaxprtool.errors import JaxprToolError, UnsupportedError
from jaxprtool.ir.core.equations import equations
from jaxprtool.ir.hlo.mesh_axes import spec_text
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.program_signature import top_jaxpr
from jaxprtool.ir.source.frames import BEHIND, Frames, frames_now
from jaxprtool.ir.source.scopes import is_backward
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.transforms.constrained_values import constrain_values

#: The number of collectives for which constraints are tried, and of constraints.
_COLLECTIVES, _TRIES = 4, 16

#: The share of the bytes that a constraint has to save.
_LEAST = 0.01


class _Candidate(NamedTuple):
    """A constraint to try: the equations of a line with results of one shape, and a spec.

    A constraint of the source is removed if the spec is None.
    """

    equations: tuple[JaxprEqn, ...]
    spec: PartitionSpec | None


def with_constraints(
    found: Shardings,
    source: Sequence[ConstraintSpecs],
    program: Program,
    compile: Callable[[Program], Shardings],
) -> Shardings:
    """Return sharding facts with the constraints that reduce communication.

    Args:
        found: The facts of the program as it is.
        source: Its constraints, with the specs that their surroundings suggest.
        program: The program.
        compile: Compiles a program, and returns its facts.

    Raises:
        UnsupportedError: If the program names no mesh, or one with explicit axes: types state their
            shardings.
    """
    mesh = _mesh(program, found)
    frames = frames_now(program.roots)
    helpful, tried = [], 0
    for each in _candidates(found, source, program, frames):
        sharding = None if each.spec is None else NamedSharding(mesh, each.spec)
        wanted = {eqn.outvars[0]: sharding for eqn in each.equations}
        tried += 1
        try:
            changed = compile(constrain_values(program, wanted))
        except (JaxprToolError, ValueError):
            continue  # JAX or XLA rejects the constraint, as in a shard_map
        if changed.sent_bytes < found.sent_bytes * (1 - _LEAST):
            helpful.append(_constraint(each, frames, changed))
    helpful.sort(key=lambda each: each.sent_bytes)
    return replace(found, constraints=tuple(helpful), tried=tried)


def _mesh(program: Program, found: Shardings) -> Mesh | AbstractMesh:
    for mesh in program.meshes:
        if {str(axis): size for axis, size in mesh.shape.items()} == found.mesh:
            if AxisType.Explicit not in mesh.axis_types:
                return mesh
            raise UnsupportedError(
                f"no constraints are tried: the axes of the mesh of {program.name} are explicit",
                "jax.sharding.reshard changes the sharding of a value",
            )
    raise UnsupportedError(f"no constraints are tried: {program.name} names no mesh of its devices")


def _candidates(
    found: Shardings, source: Sequence[ConstraintSpecs], program: Program, frames: Frames
) -> Iterator[_Candidate]:
    """Yield the constraints to try, in turns: one for each constraint and collective."""
    found_equations = list(equations(top_jaxpr(program)))
    backward = {frames.line_of([eqn]) for eqn in found_equations if is_backward(eqn)}
    by_name = defaultdict[str, list[JaxprEqn]](list)
    for eqn in found_equations:
        is_new = not (_is_constraint(eqn) or _is_batched(eqn))
        if is_new and frames.line_of([eqn]) not in backward:
            by_name[frames.named([eqn])].append(eqn)
    added = [each for each in found.collectives if each.reason is not None and each.axes]
    of_source = list(_of_source(source, found_equations, frames, found)) if added else []
    of_values = [_of_collective(each, by_name, found) for each in added[:_COLLECTIVES]]
    tried: dict[object, _Candidate] = {}
    for turn in zip_longest(*of_source, *of_values):
        for candidate in filter(None, turn):
            tried.setdefault((candidate.equations[0].outvars[0], candidate.spec), candidate)
    yield from list(tried.values())[:_TRIES]


def _of_source(
    source: Sequence[ConstraintSpecs],
    found_equations: Sequence[JaxprEqn],
    frames: Frames,
    found: Shardings,
) -> Iterator[list[_Candidate]]:
    """Yield the candidates of each constraint of the source: other specs, and none."""
    by_place = defaultdict[tuple[str, str], list[JaxprEqn]](list)
    for eqn in filter(_is_constraint, found_equations):
        by_place[frames.line_of([eqn]).partition(BEHIND)[0], _source_spec(eqn)].append(eqn)
    suggested = {(each.line, each.spec): each.suggested for each in source}
    order = {place: i for i, place in enumerate(suggested)}
    for place in sorted(by_place, key=lambda place: order.get(place, len(order))):
        eqns = tuple(by_place[place])
        is_partial = any(_is_batched(e) or e.params["unconstrained_dims"] for e in eqns)
        others = [] if is_partial else _others(eqns, suggested.get(place, ()), found)
        candidates = [_Candidate(eqns, spec) for spec in others]
        removed = _Candidate(eqns, None)
        yield [*candidates[:1], removed, *candidates[1:]]


def _others(
    eqns: Sequence[JaxprEqn], suggested: Sequence[str], found: Shardings
) -> list[PartitionSpec]:
    """Return specs for a constraint of the source: those suggested, and its axes elsewhere."""
    now = _entries(_source_spec(eqns[0]))
    shapes = [eqn.outvars[0].aval.shape for eqn in eqns]
    rank = min(map(len, shapes))
    axes = [axis for entry in now for axis in _without((), entry)]
    groups = [axes] if axes else [[axis] for axis in found.mesh]
    moved = (spec for group in groups for spec in _specs(group, now, now, rank))
    specs = dict.fromkeys((*map(_entries, suggested), *moved))
    return [
        spec
        for spec in specs
        if spec != now
        and len(spec) <= rank
        and all(_divides(spec, shape, found.mesh) for shape in shapes)
    ]


def _is_batched(eqn: JaxprEqn) -> bool:
    """Return True for an equation under `vmap`: the source constrains a slice of its value."""
    return "vmap(" in jaxcompat.name_stack(eqn)


def _source_spec(eqn: JaxprEqn) -> str:
    """Return the spec of a constraint as text, without the dimensions that `vmap` adds."""
    spec = getattr(eqn.params["sharding"], "spec", PartitionSpec()).partitions
    free = eqn.params["unconstrained_dims"]
    added = free if _is_batched(eqn) else ()
    kept = (() if i in free else _without((), each) for i, each in enumerate(spec))
    return spec_text(tuple(entry for i, entry in enumerate(kept) if i not in added))


def _of_collective(
    each: Collective, by_name: Mapping[str, Sequence[JaxprEqn]], found: Shardings
) -> Iterator[_Candidate]:
    reason = each.reason
    assert reason is not None and each.axes is not None
    for name in (reason.consumer, reason.operand):
        arrays = [eqn for eqn in by_name.get(name, ()) if eqn.outvars[0].aval.shape]
        if not arrays:
            continue
        shape = max((eqn.outvars[0].aval.shape for eqn in arrays), key=prod)
        alike = tuple(eqn for eqn in arrays if eqn.outvars[0].aval.shape == shape)
        now = reason.consumer_spec if name == reason.consumer else reason.operand_spec
        for spec in _specs(each.axes, _entries(reason.operand_spec), _entries(now), len(shape)):
            if spec != _entries(now) and _divides(spec, shape, found.mesh):
                yield _Candidate(alike, spec)


def _specs(
    axes: Sequence[str], operand: PartitionSpec, now: PartitionSpec, rank: int
) -> Iterator[PartitionSpec]:
    """Yield specs that shard a value along mesh axes: as its operand, or along one dimension."""
    if len(operand) <= rank:
        yield operand
    rest = [_without(axes, entry) for entry in (*now, *[None] * (rank - len(now)))][:rank]
    for dimension in range(rank):
        entries = [*rest]
        entries[dimension] = (*axes, *rest[dimension])
        yield _entries(spec_text(tuple(entries)))


def _without(axes: Sequence[str], entry: object) -> tuple[str, ...]:
    given = entry if isinstance(entry, tuple) else () if entry is None else (str(entry),)
    return tuple(each for each in given if each not in axes)


def _entries(spec: str) -> PartitionSpec:
    """Return a spec from its text; an array on one device is not sharded."""
    inside = spec[2:-1] if spec.startswith("P(") else ""
    return PartitionSpec(*ast.literal_eval(f"({inside},)")) if inside else PartitionSpec()


def _divides(spec: PartitionSpec, shape: Sequence[int], mesh: Mapping[str, int]) -> bool:
    """Return True if a spec names whole axes, whose sizes divide the dimensions."""
    for size, entry in zip(shape, spec, strict=False):
        axes = _without((), entry)
        if any(axis not in mesh for axis in axes) or size % prod(mesh[axis] for axis in axes):
            return False
    return True


def _is_constraint(eqn: JaxprEqn) -> bool:
    return bool(eqn.primitive.name == "sharding_constraint")


def _constraint(candidate: _Candidate, frames: Frames, changed: Shardings) -> Constraint:
    eqn, spec = candidate.equations[0], candidate.spec
    replaces = _is_constraint(eqn)
    return Constraint(
        frames.line_of([eqn]).partition(BEHIND)[0],
        frames.named([eqn]),
        "" if spec is None else spec_text(tuple(_without((), entry) for entry in spec)),
        replaces,
        _source_spec(eqn) if replaces else "",
        changed.sent_bytes,
        changed.memory_bytes,
    )
