"""`shardings`: how XLA partitions a program over devices, by the user's line.

found = jaxprtool.shardings(program)
found.collectives[0].line, found.collectives[0].reason, found.values[0].spec
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice, zip_longest
from math import prod
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxprtool import jaxcompat
from jaxprtool.commands.shardings.partitions import (
    Collective,
    Constraint,
    Shardings,
    found_collectives,
    found_values,
    repeated_work,
)
from jaxprtool.commands.shardings.reasons import ConstraintSpecs, ShardedModule, constraint_specs
from jaxprtool.errors import ArgumentsError, JaxprToolError, UnsupportedError
from jaxprtool.execute.running.backends import compiled_afresh
from jaxprtool.formats.lowering import Partitioned, partitioned
from jaxprtool.ir.conversions import with_contents
from jaxprtool.ir.documents import in_bytes, some
from jaxprtool.ir.equations import equations
from jaxprtool.ir.frames import Frames, frames_now
from jaxprtool.ir.hlo.module import product_flops
from jaxprtool.ir.hlo.origins import inserted_copies
from jaxprtool.ir.hlo.partitions import MeshAxes, spec_text
from jaxprtool.ir.meshes import mesh_of
from jaxprtool.ir.process import without_collector
from jaxprtool.ir.program import Program, require_program, top_jaxpr
from jaxprtool.ir.scopes import is_backward
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.transforms.scoped_checkpoint import constrain_values


def shardings(
    program: Program,
    arguments: Sequence[object] = (),
    *,
    propose: bool = False,
    avoidable: bool = False,
    devices: Sequence[jax.Device] = (),
) -> Shardings:
    """Compile a program for the devices of its mesh, and return its collectives and shardings.

    JAX's compilation cache is not used. Nothing is run.

    Args:
        program: A `Program` with a mesh: by the shardings given to `jax.jit`, by `shard_map`, or in
            its types.
        arguments: Its flat arguments or their types, if they lie on several devices.
        propose: Whether to compile the program also with other sharding constraints, and return
            those that reduce communication.
        avoidable: Whether to compile the program also with a few other sharding constraints if a
            value moves to another sharding, and name the collectives that one of them avoids.
        devices: The devices for the mesh in its types; by default JAX's devices. They may describe
            a machine that is not present (`jax.experimental.topologies`).

    Raises:
        ArgumentsError: If it was traced with arguments on several devices, and none are given.
        UnsupportedError: If it runs on one device; for symbolic sizes or free named axes; or if XLA
            cannot compile it.
        BackendError: If there are too few devices for its mesh.
    """
    require_program(program)
    avals = dict(program.arguments)
    placed = [name for name in program.sharded if mesh_of(avals[name]) is None]
    if placed and not arguments:  # types do not say where they lie
        raise ArgumentsError(
            f"{program.name} was traced with {some(placed, 3)} on several devices",
            "also pass its flat arguments, which have the devices",
        )
    program = with_contents(program)
    compile = partial(_shardings, arguments=arguments, devices=devices)
    facts, whole = compile(program)
    source = constraint_specs(whole)
    if propose:
        return with_constraints(facts, source, program, lambda p: compile(p)[0])
    if avoidable and any(_moves(collective) for collective in facts.collectives):
        with suppress(UnsupportedError):  # no constraint applies to explicit axes
            tried = with_constraints(facts, source, program, lambda p: compile(p)[0], _FEW_TRIES)
            return replace(tried, constraints=None, tried=0)
    return facts


def _shardings(
    program: Program, arguments: Sequence[object], devices: Sequence[jax.Device]
) -> tuple[Shardings, ShardedModule]:
    """Return the facts of a program, and its module before the partitioner."""
    with compiled_afresh():
        partition = partitioned(program, arguments, devices)
    axes = _axes(program, partition, partition.devices)
    frames = frames_now(program.roots)
    whole = ShardedModule(partition.before, axes, frames, program.out_names)
    with without_collector():
        return _described(program, partition, whole, frames), whole


def _described(
    program: Program, partition: Partitioned, whole: ShardedModule, frames: Frames
) -> Shardings:
    devices, axes = partition.devices, whole.axes
    memory = partition.compiled.memory_analysis()
    memory_bytes = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
    parts = ShardedModule(partition.after, axes, frames)
    repeated, share = repeated_work(whole, parts)
    return Shardings(
        program.name,
        len(devices),
        devices[0].platform,
        axes.shape,
        memory_bytes,
        product_flops(partition.final),
        found_collectives(whole, parts, partition.final),
        found_values(whole, partition.final, memory_bytes, _reduced(program)),
        repeated,
        share,
        copies=inserted_copies(partition.final, None, frames),
    )


def _reduced(program: Program) -> dict[str, list[str]]:
    """Return the axes that the types of arguments and results name as reduced, by name."""
    reduced = {}
    for name, aval in (*program.arguments, *program.results):
        sharding: Any = getattr(aval, "sharding", None)
        if axes := getattr(getattr(sharding, "spec", None), "reduced", None):
            reduced[name] = [str(axis) for axis in sharding.mesh.axis_names if axis in axes]
    return reduced


def _axes(program: Program, partition: Partitioned, devices: Sequence[Any]) -> MeshAxes:
    """Return the axes of the program's mesh, the one with most axes if it names several.

    If no mesh is of these devices, there is one axis, "devices".
    """
    numbers = {device.id: i for i, device in enumerate(devices)}
    placed = jax.tree.leaves(
        (partition.compiled.input_shardings, partition.compiled.output_shardings)
    )
    meshes = (mesh for sharding in placed if (mesh := getattr(sharding, "mesh", None)) is not None)
    best: MeshAxes | None = None
    for mesh in (*program.meshes, *meshes):
        mesh_devices = mesh.devices.flat if isinstance(mesh, Mesh) else devices
        order = [numbers[device.id] for device in mesh_devices if device.id in numbers]
        is_of_these = len(order) == prod(mesh.axis_sizes) == len(devices)
        if is_of_these and (best is None or len(mesh.shape) > len(best.shape)):
            best = MeshAxes(mesh.shape, order)
    return best or MeshAxes({"devices": len(devices)})


# --- constraints ----------------------------------------------------------------------------------
# Propose sharding constraints that reduce communication. Each is compiled before it is proposed.
#
# Each constraint of the source is tried with the specs that its operand and its readers suggest,
# removed, and with its mesh axes on other dimensions. For a value that the partitioner reshards,
# the candidates keep its sharding: the spec of the operand is put on the operation that needs
# another sharding, or the same mesh axes on another dimension. A constraint applies to every
# equation of its line, as an edit of the source does: in a gradient, also to the constraint of the
# cotangent. A new one is tried only on lines without a gradient, since JAX would constrain the
# gradient too.
#
# Compiling takes most of the time, so the first candidate of each constraint is tried before the
# second of any, beginning with the largest value whose surroundings suggest another spec.

#: The number of collectives for which constraints are tried, and of constraints.
_COLLECTIVES, _TRIES = 4, 16

#: The number of constraints that are tried without `propose`.
_FEW_TRIES = 3

#: The share of the bytes that a constraint has to save.
_LEAST = 0.01


class _ConstraintCandidate(NamedTuple):
    """A constraint to try: the equations of a line with results of one shape, and a spec.

    A constraint of the source is removed if the spec is None.
    """

    equations: tuple[JaxprEqn, ...]
    spec: PartitionSpec | None


def with_constraints(
    facts: Shardings,
    source: Sequence[ConstraintSpecs],
    program: Program,
    compile: Callable[[Program], Shardings],
    most: int = _TRIES,
) -> Shardings:
    """Return sharding facts with the constraints that reduce communication.

    Args:
        facts: The facts of the program as it is.
        source: Its constraints, with the specs that their surroundings suggest.
        program: The program.
        compile: Compiles a program, and returns its facts.
        most: The number of constraints to try.

    Raises:
        UnsupportedError: If the program names no mesh, or one with explicit axes: types state their
            shardings.
    """
    mesh = _mesh(program, facts)
    frames = frames_now(program.roots)
    helpful, tried = list[tuple[Constraint, Shardings]](), 0
    for candidate in islice(_candidates(facts, source, program, frames), most):
        sharding = None if candidate.spec is None else NamedSharding(mesh, candidate.spec)
        wanted = {eqn.outvars[0]: sharding for eqn in candidate.equations}
        tried += 1
        try:
            changed = compile(constrain_values(program, wanted))
        except (JaxprToolError, ValueError):
            continue  # JAX or XLA rejects the constraint, as in a shard_map
        if changed.sent_bytes < facts.sent_bytes * (1 - _LEAST):
            helpful.append((_constraint(candidate, frames, changed), changed))
    helpful.sort(key=lambda pair: pair[0].sent_bytes)
    if helpful:
        facts = replace(facts, collectives=tuple(_avoided(facts, *helpful[0])))
    return replace(facts, constraints=tuple(pair[0] for pair in helpful), tried=tried)


def _moves(collective: Collective) -> bool:
    """Return True if the partitioner moves a value whole from one sharding to another."""
    reason = collective.reason
    return reason is not None and not (collective.reduces or reason.mixes)


def _avoided(facts: Shardings, best: Constraint, changed: Shardings) -> Iterator[Collective]:
    """Yield the collectives; those that the program with a constraint does not have name it.

    A collective is still there if another one moves as much in the same way: its value may have got
    another name.
    """
    text = f"{best.change} at {best.line}, which leaves {in_bytes(best.sent_bytes)}"
    before, after = list(facts.collectives), list(changed.collectives)
    for key in (_named_key, _key):
        before, after = _unmatched(before, after, key), _unmatched(after, before, key)
    gone = set(map(id, before))
    for collective in facts.collectives:
        is_avoided = id(collective) in gone and collective.source == "partitioner"
        yield replace(collective, avoided_by=text) if is_avoided else collective


def _unmatched(
    collectives: Sequence[Collective],
    others: Sequence[Collective],
    key: Callable[[Collective], object],
) -> list[Collective]:
    """Return the collectives beyond the number of others with the same key."""
    left, rest = Counter(map(key, others)), []
    for collective in collectives:
        left[key(collective)] -= 1
        if left[key(collective)] < 0:
            rest.append(collective)
    return rest


def _key(collective: Collective) -> object:
    return collective.kind, collective.axes, collective.bytes, collective.count


def _named_key(collective: Collective) -> object:
    return _key(collective), collective.line, collective.value


def _mesh(program: Program, facts: Shardings) -> Mesh | AbstractMesh:
    for mesh in program.meshes:
        if {str(axis): size for axis, size in mesh.shape.items()} == facts.mesh:
            if AxisType.Explicit not in mesh.axis_types:
                return mesh
            raise UnsupportedError(
                f"no constraints are tried: the axes of the mesh of {program.name} are explicit",
                "jax.sharding.reshard changes the sharding of a value",
            )
    raise UnsupportedError(f"no constraints are tried: {program.name} names no mesh of its devices")


def _candidates(
    facts: Shardings, source: Sequence[ConstraintSpecs], program: Program, frames: Frames
) -> Iterator[_ConstraintCandidate]:
    """Yield the constraints to try, in turns: one for each constraint and collective."""
    found_equations = list(equations(top_jaxpr(program)))
    backward = {frames.line_of([eqn]) for eqn in found_equations if is_backward(eqn)}
    by_name = defaultdict[str, list[JaxprEqn]](list)
    for eqn in found_equations:
        is_new = not (_is_constraint(eqn) or _is_batched(eqn))
        if is_new and frames.line_of([eqn]) not in backward:
            by_name[frames.named([eqn])].append(eqn)
    added = [
        collective
        for collective in facts.collectives
        if collective.reason is not None and collective.axes
    ]
    of_source = list(_of_source(source, found_equations, frames, facts)) if added else []
    of_values = [_of_collective(collective, by_name, facts) for collective in added[:_COLLECTIVES]]
    tried: dict[object, _ConstraintCandidate] = {}
    for turn in zip_longest(*of_source, *of_values):
        for candidate in filter(None, turn):
            tried.setdefault((candidate.equations[0].outvars[0], candidate.spec), candidate)
    yield from list(tried.values())[:_TRIES]


def _of_source(
    source: Sequence[ConstraintSpecs],
    found_equations: Sequence[JaxprEqn],
    frames: Frames,
    facts: Shardings,
) -> Iterator[list[_ConstraintCandidate]]:
    """Yield the candidates of each constraint of the source: other specs, and none."""
    by_place = defaultdict[tuple[str, str], list[JaxprEqn]](list)
    for eqn in filter(_is_constraint, found_equations):
        by_place[frames.line_of([eqn]).user, _source_spec(eqn)].append(eqn)
    suggested = {(constraint.line, constraint.spec): constraint.suggested for constraint in source}
    order = {place: i for i, place in enumerate(suggested)}
    for place in sorted(by_place, key=lambda place: order.get(place, len(order))):
        eqns = tuple(by_place[place])
        is_partial = any(_is_batched(e) or e.params["unconstrained_dims"] for e in eqns)
        others = [] if is_partial else _others(eqns, suggested.get(place, ()), facts)
        candidates = [_ConstraintCandidate(eqns, spec) for spec in others]
        removed = _ConstraintCandidate(eqns, None)
        yield [*candidates[:1], removed, *candidates[1:]]


def _others(
    eqns: Sequence[JaxprEqn], suggested: Sequence[str], facts: Shardings
) -> list[PartitionSpec]:
    """Return specs for a constraint of the source: those suggested, and its axes elsewhere."""
    now = _entries(_source_spec(eqns[0]))
    shapes = [eqn.outvars[0].aval.shape for eqn in eqns]
    rank = min(map(len, shapes))
    axes = [axis for entry in now for axis in _without((), entry)]
    groups = [axes] if axes else [[axis] for axis in facts.mesh]
    moved = (spec for group in groups for spec in _specs(group, now, now, rank))
    specs = dict.fromkeys((*map(_entries, suggested), *moved))
    return [
        spec
        for spec in specs
        if spec != now
        and len(spec) <= rank
        and all(_divides(spec, shape, facts.mesh) for shape in shapes)
    ]


def _is_batched(eqn: JaxprEqn) -> bool:
    """Return True for an equation under `vmap`: the source constrains a slice of its value."""
    return "vmap(" in jaxcompat.name_stack(eqn)


def _source_spec(eqn: JaxprEqn) -> str:
    """Return the spec of a constraint as text, without the dimensions that `vmap` adds."""
    spec = getattr(eqn.params["sharding"], "spec", PartitionSpec()).partitions
    free = eqn.params["unconstrained_dims"]
    added = free if _is_batched(eqn) else ()
    kept = (() if i in free else _without((), entry) for i, entry in enumerate(spec))
    return spec_text(tuple(entry for i, entry in enumerate(kept) if i not in added))


def _of_collective(
    collective: Collective, by_name: Mapping[str, Sequence[JaxprEqn]], facts: Shardings
) -> Iterator[_ConstraintCandidate]:
    reason = collective.reason
    assert reason is not None and collective.axes is not None
    for name in (reason.consumer, reason.operand):
        arrays = [eqn for eqn in by_name.get(name, ()) if eqn.outvars[0].aval.shape]
        if not arrays:
            continue
        shape = max((eqn.outvars[0].aval.shape for eqn in arrays), key=prod)
        alike = tuple(eqn for eqn in arrays if eqn.outvars[0].aval.shape == shape)
        now = reason.consumer_spec if name == reason.consumer else reason.operand_spec
        for spec in _specs(
            collective.axes, _entries(reason.operand_spec), _entries(now), len(shape)
        ):
            if spec != _entries(now) and _divides(spec, shape, facts.mesh):
                yield _ConstraintCandidate(alike, spec)


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
    entry_axes = entry if isinstance(entry, tuple) else () if entry is None else (str(entry),)
    return tuple(axis for axis in entry_axes if axis not in axes)


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


def _constraint(candidate: _ConstraintCandidate, frames: Frames, changed: Shardings) -> Constraint:
    eqn, spec = candidate.equations[0], candidate.spec
    replaces = _is_constraint(eqn)
    return Constraint(
        frames.line_of([eqn]).user,
        frames.named([eqn]),
        "" if spec is None else spec_text(tuple(_without((), entry) for entry in spec)),
        replaces,
        _source_spec(eqn) if replaces else "",
        changed.sent_bytes,
        changed.memory_bytes,
    )
