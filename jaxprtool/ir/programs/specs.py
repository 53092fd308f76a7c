"""Shardings written as specs: `P('data')`, `(P(), {'w': P(None, 'model')})`.

The text is parsed and walked, never evaluated. A spec holds for every array below its place in the
tree, as in `jax.jit(in_shardings=...)`; None leaves the sharding to JAX.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxprtool.errors import ArgumentsError, UnsupportedError, did_you_mean
from jaxprtool.ir.core.equations import type_of
from jaxprtool.ir.notation.partition_specs import NAMES, SpecReader
from jaxprtool.ir.programs.jit_options import JitOptions, ValueOptions
from jaxprtool.ir.programs.meshes import spread
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.static_leaf import StaticLeaf
from jaxprtool.ir.programs.trees import filled

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
            _mesh(self.names)

    def applied(self, program: Program) -> Program:
        """Return a program with these shardings as options of `jax.jit`, on the mesh that is set.

        Raises ArgumentsError for specs that do not fit the program or the mesh.
        """
        if self.arguments is None and self.results is None:
            return program
        mesh = _mesh(self.names)
        of_arguments, of_results = self.names
        options = program.jit or JitOptions()
        if self.arguments is not None:
            tree = filled(program.in_tree, range(len(program.arg_names)))
            specs = _keyed(_AxisReader(self.arguments, of_arguments).trees())
            found = _Matcher(of_arguments, mesh, program.arguments).arguments(specs, *tree)
            arguments = _placed(options.of_arguments(program.arguments), found, of_arguments)
            options = replace(options, arguments=arguments)
        if self.results is not None:
            tree = filled(program.out_tree, range(len(program.out_names)))
            values = _one(_AxisReader(self.results, of_results).trees(), of_results)
            matcher = _Matcher(of_results, mesh, program.results)
            matcher.match(values, tree, "result")
            results = _placed(options.of_results(program.results), matcher.found, of_results)
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


def _mesh(names: tuple[str, str]) -> Mesh | AbstractMesh:
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
        given, named = specs
        if isinstance(given, tuple | list) and not isinstance(given, PartitionSpec):
            if len(given) > len(args) or (len(given) != len(args) and not named):
                count = f"{len(given)} spec" + ("s" if len(given) != 1 else "")
                raise ArgumentsError(
                    f"{self.what} has {count} for {len(args)} traced positional arguments",
                    "write None for an argument that JAX places; leave out static arguments",
                )
            for number, (spec, arg) in enumerate(zip(given, args, strict=False)):
                self.match(spec, arg, f"argument {number}")
        else:
            self.match(given, tuple(args), "the arguments")
        for name, spec in named.items():
            places = {self._root(arg): arg for arg in args} | dict(kwargs)
            if name not in places:
                hint = did_you_mean(name, [each for each in places if each])
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
        known = list(map(str, self.mesh.axis_names))
        if axis not in known:
            raise ArgumentsError(
                f"{self.what}: the spec of {name} names the axis '{axis}', but the mesh has "
                f"{', '.join(known)}",
                did_you_mean(axis, known),
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
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda each: each is not tree)[0]
    children = {}
    for (key, *_), child in flat:
        children[getattr(key, "key", getattr(key, "name", getattr(key, "idx", str(key))))] = child
    return children


def _placed(
    options: Sequence[ValueOptions], found: Mapping[int, NamedSharding], what: str
) -> tuple[ValueOptions, ...]:
    """Return options with these placements, without values that have no options."""
    made = []
    for i, each in enumerate(options):
        if i in found and each.placement is not None and each.placement != found[i]:
            raise UnsupportedError(
                f"{each.name} already has a sharding from the function's jax.jit, so {what} does "
                "not apply",
                "write None for it",
            )
        made.append(replace(each, placement=found.get(i, each.placement)))
    return tuple(each for each in made if each.donated or each.placement is not None)
