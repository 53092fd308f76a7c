"""Meshes and shardings of programs: found, written as specs, and left to the partitioner.

Such types (`f32[8@data,4]`) name the axes of a mesh and their sizes, but no devices.
"""

from __future__ import annotations

import ast
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxprtool.errors import ArgumentsError, TooFewDevicesError, UnsupportedError, did_you_mean
from jaxprtool.ir.backends import start_backends
from jaxprtool.ir.equations import equations, named, type_of
from jaxprtool.ir.notation import expressions
from jaxprtool.ir.notation.expressions import WhitelistReader
from jaxprtool.ir.program import JitOptions, Program, ValueOptions, top_jaxpr
from jaxprtool.ir.trees import StaticLeaf, filled
from jaxprtool.jaxcompat import AnyJaxpr, JaxprEqn

# --- meshes ---------------------------------------------------------------------------------------
# Find the mesh for a program whose argument types state how they are sharded.


def mesh_set(
    axes: Mapping[str, int], explicit: bool, virtual: bool = False
) -> AbstractContextManager[object]:
    """Set a mesh of the first devices, or an abstract one if there are too few.

    Args:
        axes: The names of its axes, and their sizes.
        explicit: Whether the axes are explicit, and named in types; otherwise they are left to the
            partitioner.
        virtual: Whether the CPU's devices are used if JAX's default ones are too few.
    """
    mesh = _mesh(axes, AxisType.Explicit if explicit else AxisType.Auto, virtual)
    return jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh)


def on_axes(program: Program, axes: Mapping[str, int]) -> Program:
    """Put a program on a mesh of the first devices, or on an abstract one if there are too few.

    Args:
        program: The program.
        axes: The names of the axes of its mesh, and their new sizes.

    Raises:
        ArgumentsError, UnsupportedError: As `Program.on_mesh`.
    """
    return program.on_mesh(_mesh(axes, AxisType.Auto))


def _mesh(axes: Mapping[str, int], kind: AxisType, virtual: bool = False) -> Mesh | AbstractMesh:
    sizes, names = tuple(axes.values()), tuple(axes)
    kinds, count = (kind,) * len(sizes), math.prod(sizes)
    start_backends()
    devices = jax.devices()
    if virtual and len(devices) < count:
        with suppress(RuntimeError):  # JAX_PLATFORMS leaves out the CPU
            devices = jax.devices("cpu")
    if len(devices) < count:
        return AbstractMesh(sizes, names, axis_types=kinds)
    return jax.make_mesh(sizes, names, axis_types=kinds, devices=devices[:count])


def mesh_in_types(program: Program) -> AbstractMesh | None:
    """Return the mesh without devices that a program names, or None.

    The types of arguments and results name it, or the shardings given to `jax.jit`; or equations,
    if nothing names devices.
    """
    meshes = [mesh_of(aval) for aval in (*program.in_avals, *program.out_avals)]
    if program.jit is not None:
        asked = (option.placement for option in (*program.jit.arguments, *program.jit.results))
        meshes += [getattr(placement, "mesh", None) for placement in asked]
    if not any(isinstance(mesh, Mesh | AbstractMesh) for mesh in meshes):
        inside = program.meshes
        meshes = [] if any(isinstance(mesh, Mesh) for mesh in inside) else inside
    return next((mesh for mesh in meshes if isinstance(mesh, AbstractMesh)), None)


def concrete_mesh(
    program: Program,
    arguments: Sequence[object],
    device: jax.Device | None = None,
    devices: Sequence[jax.Device] = (),
) -> Mesh | None:
    """Return the mesh of devices to run a program on, or None if its types name no mesh.

    It is the mesh that is set (`jax.set_mesh`), or the mesh of an argument, or else one of the
    first of `devices`, by default those of the platform of `device`. Raises TooFewDevicesError.
    """
    wanted = mesh_in_types(program)
    if wanted is None:
        return None
    candidates = [jax.sharding.get_mesh(), *map(mesh_of, arguments)]
    if device is None:
        for mesh in candidates:
            if isinstance(mesh, Mesh) and not mesh.empty and _alike(mesh.abstract_mesh, wanted):
                return mesh
    devices = devices or jax.devices(None if device is None else device.platform)
    count = math.prod(wanted.axis_sizes)
    if len(devices) < count:
        axes = ", ".join(f"{name}={size}" for name, size in wanted.shape.items())
        platform = devices[0].platform
        raise TooFewDevicesError(
            f"{program.name} runs on a mesh of {count} devices ({axes}), but backend "
            f"'{platform}' has {len(devices)}",
            f"--host-devices {count}, or JAX_NUM_CPU_DEVICES={count}, creates {count} devices on "
            "one CPU"
            if platform == "cpu"
            else f"--host-devices {count} creates {count} devices on the CPU",
            list(map(str, wanted.axis_names)),
        )
    chosen = np.array(devices[:count]).reshape(wanted.axis_sizes)
    return Mesh(chosen, wanted.axis_names, axis_types=wanted.axis_types)


def on_set_mesh(placement: Any) -> Any:
    """Return a sharding over a mesh without devices on the mesh that is set; others as they are."""
    mesh = jax.sharding.get_mesh()
    if not isinstance(placement, NamedSharding) or isinstance(placement.mesh, Mesh) or mesh.empty:
        return placement
    return NamedSharding(mesh, placement.spec, memory_kind=placement.memory_kind)


def place_on_mesh(program: Program, arguments: Sequence[Any], mesh: Mesh) -> list[Any]:
    """Place the arguments on the devices of a mesh.

    A sharding in the options of `jax.jit` comes before that of the type. A value without such an
    option stays where it is if it is on the mesh already.
    """
    options = (program.jit or JitOptions()).of_arguments(program.arguments)
    triples = zip(arguments, program.in_avals, options, strict=True)
    return [_placed(value, aval, asked.placement, mesh) for value, aval, asked in triples]


def _placed(value: Any, aval: Any, placement: Any, mesh: Mesh) -> Any:
    sharding = getattr(placement, "sharding", placement)  # that of a layout
    if isinstance(sharding, NamedSharding) and _is_traced_for(aval, sharding.mesh):
        concrete = sharding.mesh if isinstance(sharding.mesh, Mesh) else mesh
        kind = sharding.memory_kind
        return jax.device_put(value, NamedSharding(concrete, sharding.spec, memory_kind=kind))
    if mesh_of(aval) is None or mesh_of(value) == mesh:
        return value
    return jax.device_put(value, NamedSharding(mesh, aval.sharding.spec))


def spread(program: Program, values: Sequence[Any]) -> list[Any]:
    """Move arrays to the shardings that `jax.jit` of the program states.

    `jax.jit` does not move arrays from other devices, and does not shard NumPy arrays over several
    processes, all of which pass the same values. Types, and values without such a sharding, are
    returned as they are.
    """
    if program.jit is None:
        return list(values)
    asked = (option.placement for option in program.jit.of_arguments(program.arguments))
    return [
        jax.device_put(value, placement)
        if isinstance(value, jax.Array | np.ndarray)
        and is_over_devices(placement)
        and isinstance(mesh := getattr(placement, "mesh", None), Mesh)
        and _is_traced_for(aval, mesh)
        else value
        for value, aval, placement in zip(values, program.in_avals, asked, strict=True)
    ]


def _is_traced_for(aval: Any, mesh: Mesh | AbstractMesh) -> bool:
    """Return True if an argument of a program may be sharded over a mesh that `jax.jit` states.

    An array on Explicit axes has its sharding in its type. If the program was traced for a type
    without, only `jax.jit` may shard it.
    """
    has_types = AxisType.Explicit in mesh.axis_types
    return not mesh.empty and not (has_types and mesh_of(aval) is None)


def mesh_of(value: object) -> Any:
    """Return the mesh of an array or of its type, or None."""
    mesh = getattr(getattr(value, "sharding", None), "mesh", None)
    return None if mesh is None or mesh.empty else mesh


def _alike(a: AbstractMesh, b: AbstractMesh) -> bool:
    parts = attrgetter("axis_names", "axis_sizes", "axis_types")
    return bool(parts(a) == parts(b))


# --- auto sharding --------------------------------------------------------------------------------
# Find the parts of a program that XLA's partitioner shards, which its jaxpr does not show.
#
# The arrays of such a program are whole, and the jaxpr has none of the collectives: its costs are
# those of all devices together.


def left_to_partitioner(program: Program | AnyJaxpr) -> tuple[str, ...]:
    """Return the parts of a program with a sharding over several devices; () if there are none.

    Returns:
        The paths of arguments and results with such a sharding, given to `jax.jit`, in their types,
        or by the arguments of the call, and equations: `sharding_constraint at model.py:9`.
    """
    return tuple(dict.fromkeys(_parts(program)))


def partitioner_note(name: str, parts: Sequence[str]) -> str:
    """Return a note that a program was not partitioned; "" if it needs none.

    Args:
        name: The name of the program.
        parts: The parts that are left to the partitioner.
    """
    if not parts:
        return ""
    return (
        f"{name} is not partitioned; XLA would partition it by its shardings. Arrays have their "
        "whole size, and collectives are missing"
    )


def partitioner_notes(results: Sequence[Any], split: str | None) -> list[str]:
    """Return notes on programs that XLA would partition, or on the devices of a partitioned one.

    Args:
        results: The cost or the memory of each program.
        split: The line about the devices of the only program; None if it was not compiled.
    """
    if split is not None:
        return [split]
    notes = (partitioner_note(result.name, result.left_to_partitioner) for result in results)
    return list(dict.fromkeys(filter(None, notes)))


def is_over_devices(placement: Any) -> bool:
    """Return True for a sharding, or the layout with one, over several devices."""
    sharding = getattr(placement, "sharding", placement)
    return getattr(sharding, "num_devices", 0) > 1


def _parts(program: Program | AnyJaxpr) -> Iterator[str]:
    if isinstance(program, Program):
        yield from (name for name in program.arg_names if name in program.sharded)
        if program.jit is not None:
            options = (*program.jit.arguments, *program.jit.results)
            yield from (option.name for option in options if is_over_devices(option.placement))
        yield from (
            name for name, aval in (*program.arguments, *program.results) if _is_sharded(aval)
        )
    yield from (named(eqn) for eqn in equations(top_jaxpr(program)) if _states_sharding(eqn))


def _states_sharding(eqn: JaxprEqn) -> bool:
    """Return True if an equation states how an array is sharded over devices."""
    params = eqn.params
    if eqn.primitive.name == "sharding_constraint":
        return is_over_devices(params["sharding"])
    if eqn.primitive.name == "jit":
        return any(map(is_over_devices, (*params["in_shardings"], *params["out_shardings"])))
    if eqn.primitive.name == "shard_map":
        mesh = params["mesh"]
        pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
        manual = {name for name, axis_type in pairs if axis_type is AxisType.Manual}
        rest = set(mesh.axis_names) - manual - set(params["newly_manual_axes"])
        return any(mesh.shape[axis] > 1 for axis in rest)
    return False


def _is_sharded(aval: Any) -> bool:
    """Return True if a type states that its values are sharded over devices: `f32[8@x]`."""
    sharding = getattr(aval, "sharding", None)
    sizes = {} if sharding is None else sharding.mesh.shape
    spec = PartitionSpec() if sharding is None else sharding.spec
    axes = (*jax.tree.leaves(spec.partitions), *spec.unreduced)
    return any(sizes.get(axis, 1) > 1 for axis in axes)


# --- partition specs ------------------------------------------------------------------------------
# Read trees of PartitionSpecs from text: `(P(), {'w': P(None, 'model')})`.
#
# The text is parsed and walked, never evaluated.

#: The names of `PartitionSpec` in a text.
NAMES = ("P", "PartitionSpec", "jax.P", "jax.sharding.PartitionSpec")


class SpecReader(WhitelistReader):
    """Reads trees of PartitionSpecs and None. Subclasses read the entries of a PartitionSpec.

    Args:
        text: The trees, separated by commas; those by name are written `name=P(…)`.
        what: The name of the text in messages.
    """

    #: What the entries are, and examples of specs, for messages.
    entries: ClassVar[str]
    examples: ClassVar[str]

    def __init__(self, text: str, what: str):
        self.source, self.what = expressions.parse_arguments(text, what, ArgumentsError), what

    def trees(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the trees by position and by name.

        Raises ArgumentsError for text that cannot be read, with its place.
        """
        named = {name: self.visit(node) for name, node in self.source.keywords}
        return tuple(map(self.visit, self.source.args)), named

    @abstractmethod
    def entry(self, node: ast.expr) -> Any:
        """Return an entry of a PartitionSpec."""

    def fail(self, node: ast.expr, message: str, hint: str | None = None) -> Exception:
        return self.source.fail(node, message, hint)

    def visit_Constant(self, node: ast.Constant) -> Any:
        if node.value is not None:
            text = self.source.segment(node)
            message = f"expected a PartitionSpec in {self.what}, not {text}"
            raise self.fail(node, message, f"write {self.examples}, or None")
        return None

    def key(self, node: ast.expr | None, parent: ast.Dict) -> Any:
        return node.value if isinstance(node, ast.Constant) else super().key(node, parent)

    def visit_Call(self, node: ast.Call) -> PartitionSpec:
        if ast.unparse(node.func) not in NAMES:
            raise self.not_allowed(node, f"write {self.examples}")
        if node.keywords:
            raise self.fail(node, f"a PartitionSpec takes {self.entries} by position")
        return PartitionSpec(*map(self.entry, node.args))


# --- specs ----------------------------------------------------------------------------------------
# Shardings written as specs: `P('data')`, `(P(), {'w': P(None, 'model')})`.
#
# The text is parsed and walked, never evaluated. A spec holds for every array below its place in
# the tree, as in `jax.jit(in_shardings=...)`; None leaves the sharding to JAX.

_UNCONSTRAINED = tuple(f"{name}.UNCONSTRAINED" for name in NAMES)


@dataclass(frozen=True)
class Specs:
    """The specs of arguments and results, as text, and the names of the two options."""

    arguments: str | None = None
    results: str | None = None
    names: tuple[str, str] = ("--in-specs", "--out-specs")

    def check_mesh(self) -> None:
        """Raise ArgumentsError if there are specs, but no mesh for them is set."""
        if self.arguments is not None or self.results is not None:
            _mesh_in_use(self.names)

    def applied(self, program: Program) -> Program:
        """Return a program with these shardings as options of `jax.jit`, on the mesh that is set.

        Raises ArgumentsError for specs that do not fit the program or the mesh.
        """
        if self.arguments is None and self.results is None:
            return program
        mesh = _mesh_in_use(self.names)
        of_arguments, of_results = self.names
        options = program.jit or JitOptions()
        if self.arguments is not None:
            tree = filled(program.in_tree, range(len(program.arg_names)))
            specs = _keyed(_AxisReader(self.arguments, of_arguments).trees())
            shardings = _Matcher(of_arguments, mesh, program.arguments).arguments(specs, *tree)
            arguments = _placed_options(
                options.of_arguments(program.arguments), shardings, of_arguments
            )
            options = replace(options, arguments=arguments)
        if self.results is not None:
            tree = filled(program.out_tree, range(len(program.out_names)))
            values = _one(_AxisReader(self.results, of_results).trees(), of_results)
            matcher = _Matcher(of_results, mesh, program.results)
            matcher.match(values, tree, "result")
            results = _placed_options(
                options.of_results(program.results), matcher.found, of_results
            )
            options = replace(options, results=results)
        return program.replace(jit=options)

    def placed(self, program: Program, values: Sequence[Any]) -> Sequence[Any]:
        """Move arrays to the shardings that were `applied`, which `jax.jit` does not do.

        Arrays that a factory creates lie on the whole mesh, since it is set.
        """
        return values if self.arguments is None else spread(program, values)


#: No option states a sharding.
NO_SPECS = Specs()


class _AxisReader(SpecReader):
    entries, examples = "axes", "P('data'), P(None, 'model')"

    def entry(self, node: ast.expr) -> Any:
        if ast.unparse(node) in _UNCONSTRAINED:
            return PartitionSpec.UNCONSTRAINED
        if isinstance(node, ast.Tuple):
            return tuple(map(self.entry, node.elts))
        if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str)):
            return node.value
        text = self.source.segment(node)
        raise self.fail(node, f"expected the name of a mesh axis, not {text}")


def _keyed(specs: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[Any, dict[str, Any]]:
    """Return the specs of all positional arguments, and those of arguments by name."""
    positional, named = specs
    if named and len(positional) != 1:
        return positional, named
    return (positional[0] if len(positional) == 1 else positional), named


def _one(specs: tuple[tuple[Any, ...], dict[str, Any]], what: str) -> Any:
    positional, named = specs
    if named:
        raise ArgumentsError(f"{what} takes a tree of PartitionSpecs without names")
    return positional[0] if len(positional) == 1 else positional


def _mesh_in_use(names: tuple[str, str]) -> Mesh | AbstractMesh:
    """Return the mesh that is set. Raises ArgumentsError if there is none, or it is explicit."""
    concrete = jax.sharding.get_mesh()
    mesh = jax.sharding.get_abstract_mesh() if concrete.empty else concrete
    if mesh.empty:
        raise ArgumentsError(
            f"{' and '.join(names)} need a mesh", "name its axes: --mesh data=4,model=2"
        )
    explicit = [
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind is AxisType.Explicit
    ]
    if explicit:
        raise ArgumentsError(
            f"the axis '{explicit[0]}' of the mesh is explicit: a type shards it",
            f'write it in --args "f32[8@{explicit[0]},4]", or set an Auto mesh',
        )
    return mesh


class _Matcher:
    """Matches a prefix tree of specs with arguments or results."""

    def __init__(self, what: str, mesh: Mesh | AbstractMesh, values: Sequence[tuple[str, Any]]):
        self.what, self.mesh, self.values = what, mesh, values
        self.found: dict[int, NamedSharding] = {}

    def arguments(
        self, specs: tuple[Any, dict[str, Any]], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> dict[int, NamedSharding]:
        """Return the shardings of flat arguments by position."""
        positional, named = specs
        if isinstance(positional, tuple | list) and not isinstance(positional, PartitionSpec):
            if len(positional) > len(args) or (len(positional) != len(args) and not named):
                count = f"{len(positional)} spec" + ("s" if len(positional) != 1 else "")
                raise ArgumentsError(
                    f"{self.what} has {count} for {len(args)} traced positional arguments",
                    "write None for an argument that JAX places; leave out static arguments",
                )
            for number, (spec, arg) in enumerate(zip(positional, args, strict=False)):
                self.match(spec, arg, f"argument {number}")
        else:
            self.match(positional, tuple(args), "the arguments")
        for name, spec in named.items():
            places = {self._root(arg): arg for arg in args} | dict(kwargs)
            if name not in places:
                hint = did_you_mean(name, [place for place in places if place])
                raise ArgumentsError(f"{self.what}: no traced argument is named '{name}'", hint)
            self.match(spec, places[name], f"argument {name}")
        return self.found

    def _root(self, arg: Any) -> str:
        positions = _positions(arg)
        name = self.values[positions[0]][0] if positions else ""
        return name.partition("[")[0].partition(".")[0]

    def match(self, spec: Any, tree: Any, where: str) -> None:
        """Record the sharding of each array of `tree`."""
        if spec is None:
            return
        if isinstance(spec, PartitionSpec):
            for position in _positions(tree):
                self.found[position] = self._sharding(spec, *self.values[position])
            return
        children = _children(tree)
        keys = list(spec) if isinstance(spec, Mapping) else list(range(len(spec)))
        if children is None or set(keys) != set(children):
            have = "no parts" if children is None else ", ".join(map(repr, children))
            raise ArgumentsError(
                f"{self.what}: {where} has {have}, but its specs have {', '.join(map(repr, keys))}",
                "one P(…) applies to all arrays below it",
            )
        for key in keys:
            self.match(spec[key], children[key], f"{where}[{key!r}]")

    def _sharding(self, spec: PartitionSpec, name: str, aval: Any) -> NamedSharding:
        shape = getattr(aval, "shape", None)
        text = f"P({', '.join(map(repr, spec))})"
        if shape is None:
            raise ArgumentsError(f"{self.what}: {name} is not an array, so {text} does not apply")
        if len(spec) > len(shape):
            raise ArgumentsError(
                f"{self.what}: {text} has {len(spec)} dimensions, but {name}:{type_of(aval)} has "
                f"{len(shape)}"
            )
        seen: set[str] = set()
        for size, axes in zip(shape, spec, strict=False):
            if axes is None or axes is PartitionSpec.UNCONSTRAINED:
                continue
            parts = 1
            for axis in axes if isinstance(axes, tuple) else (axes,):
                self._check_axis(axis, name, seen)
                parts *= self.mesh.shape[axis]
            if isinstance(size, int) and size % parts:
                raise ArgumentsError(
                    f"{self.what}: {text} splits a dimension of {name}:{type_of(aval)} into {parts}"
                    f" parts, but its size is {size}"
                )
        return NamedSharding(self.mesh, spec)

    def _check_axis(self, axis: str, name: str, seen: set[str]) -> None:
        axes = list(map(str, self.mesh.axis_names))
        if axis not in axes:
            raise ArgumentsError(
                f"{self.what}: the spec of {name} names the axis '{axis}', but the mesh has "
                f"{', '.join(axes)}",
                did_you_mean(axis, axes),
            )
        if axis in seen:
            raise ArgumentsError(f"{self.what}: the spec of {name} names the axis '{axis}' twice")
        seen.add(axis)


def _positions(tree: Any) -> list[int]:
    return [leaf for leaf in jax.tree.leaves(tree) if not isinstance(leaf, StaticLeaf)]


def _children(tree: Any) -> dict[Any, Any] | None:
    """Return the parts of a node by key, index or attribute; None for a leaf."""
    if jax.tree.structure(tree) == jax.tree.structure(0):
        return None
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)[0]
    children = {}
    for (key, *_), child in flat:
        children[getattr(key, "key", getattr(key, "name", getattr(key, "idx", str(key))))] = child
    return children


def _placed_options(
    options: Sequence[ValueOptions], shardings: Mapping[int, NamedSharding], what: str
) -> tuple[ValueOptions, ...]:
    """Return options with these placements, without values that have no options."""
    updated = []
    for i, option in enumerate(options):
        if i in shardings and option.placement is not None and option.placement != shardings[i]:
            raise UnsupportedError(
                f"{option.name} already has a sharding from the function's jax.jit, so {what} does "
                "not apply",
                "write None for it",
            )
        updated.append(replace(option, placement=shardings.get(i, option.placement)))
    return tuple(option for option in updated if option.donated or option.placement is not None)
