"""Substitute in all parts of a jaxpr, and put a program on a mesh of another size.

A subclass of `Substitution` changes single types, parameter values and contexts; this module
applies it at every depth. All else stays the same object, and a body that several equations share
stays shared.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.export
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError, UnsupportedError
from jaxprtool.ir.custom_rules import (
    CustomRule,
    custom_rule,
    following,
    has_rule,
    map_rule,
    rule_key,
    rules_followed,
)
from jaxprtool.ir.equations import (
    named,
    type_of,
)
from jaxprtool.ir.expansions import LIVE, without_live_objects
from jaxprtool.ir.program import JitOptions, Program, type_check
from jaxprtool.ir.regions import Call, ShardMap, sub_jaxprs, view
from jaxprtool.ir.rewrite import Memo
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Aval, DropVar, Jaxpr, JaxprEqn, Literal, Params, Var


class SubstitutedBody:
    """One body while it is rewritten by the substitution `owner`.

    Subclasses override `equation` and `finished`.
    """

    def __init__(self, owner: Any, jaxpr: AnyJaxpr) -> None:
        self.owner = owner
        self._jaxpr = jaxpr
        #: The atoms that replace variables.
        self.env: dict[Var, Atom] = {}

    def made(self) -> AnyJaxpr:
        """Return the rewritten body; the same object if nothing changes."""
        old = jaxcompat.open_jaxpr(self._jaxpr)
        invars = self.bound(old.invars)
        constvars = self.bound(old.constvars)
        eqns = [new for eqn in old.eqns if (new := self.equation(eqn)) is not None]
        outvars = [self.atom(atom) for atom in old.outvars]
        eqns, outvars = self.finished(eqns, outvars)
        consts = getattr(self._jaxpr, "consts", ())
        types = [var.aval for var in constvars]
        new_consts = self.owner.constants(consts, types) if consts else consts
        parts = zip(
            (invars, constvars, eqns, outvars, new_consts),
            (old.invars, old.constvars, old.eqns, old.outvars, consts),
            strict=True,
        )
        if all(len(new) == len(was) and all(map(operator.is_, new, was)) for new, was in parts):
            return self._jaxpr
        return jaxcompat.replace_jaxpr(
            self._jaxpr,
            constvars=constvars,
            consts=new_consts,
            invars=invars,
            outvars=outvars,
            eqns=eqns,
            debug_info=old.debug_info,
        )

    def finished(
        self, eqns: list[JaxprEqn], outvars: list[Atom]
    ) -> tuple[list[JaxprEqn], list[Atom]]:
        """Return the final equations and results, once all have been rewritten."""
        return eqns, outvars

    def bound(self, variables: Sequence[Var]) -> list[Var]:
        """Replace the variables whose types change by new ones."""
        return [self._variable(var) for var in variables]

    def _variable(self, var: Var) -> Var:
        aval = self.owner.aval(var.aval)
        if aval is var.aval:
            return var
        new = DropVar(aval) if type(var) is DropVar else Var(aval)
        self.env[var] = new
        return new

    def atom(self, atom: Atom) -> Atom:
        """Return the atom that replaces an atom."""
        return self.owner.literal(atom) if type(atom) is Literal else self.env.get(atom, atom)

    def equation(self, eqn: JaxprEqn) -> JaxprEqn | None:
        """Return the rewritten equation, or None to remove it."""
        if eqn.primitive.name in LIVE and self.owner.changes(eqn):
            eqn = without_live_objects(eqn)  # the object in the equation is bound to its old types
        operands = [self.atom(atom) for atom in eqn.invars]
        params = self.owner.params(eqn)
        context = self.owner.context(eqn.ctx)
        outvars = self.bound(eqn.outvars)
        same = (
            params is eqn.params
            and context is eqn.ctx
            and all(map(operator.is_, (*operands, *outvars), (*eqn.invars, *eqn.outvars)))
        )
        if same:
            return eqn
        effects = eqn.effects and jaxcompat.renamed_effects(eqn.effects, self.env)
        return eqn.replace(
            invars=operands, outvars=outvars, params=params, effects=effects, ctx=context
        )


class Substitution:
    """A substitution, with caches of the bodies, types and rules that it has rewritten.

    Subclasses override `leaf` and `array_type`, and also `context` or `constants` if these change.
    """

    def __init__(self) -> None:
        self._bodies = Memo()
        self._rules: dict[Hashable, Callable[[], Any]] = {}

    # --- for subclasses ---------------------------------------------------------------------------

    def leaf(self, value: Any) -> Any:
        """Substitute in a parameter value that is not a container; return the same if it stays."""
        return value

    def array_type(self, aval: Aval) -> Aval:
        """Substitute in the type of an array; return the same object if it stays."""
        return aval

    def context(self, context: Any) -> Any:
        """Substitute in the context of an equation (`eqn.ctx`)."""
        return context

    def constants(self, values: Sequence[Any], types: Sequence[Aval]) -> Sequence[Any]:
        """Substitute in the constants of a jaxpr, which have these new types."""
        return values

    def rewrites_rule(self, eqn: JaxprEqn) -> bool:
        """Return True if the rule of a call (a derivative or a transpose) is substituted in."""
        return self.changes(eqn)

    def rule(self, eqn: JaxprEqn) -> Callable[[], CustomRule]:
        """Return a function that makes the derivative rule of a custom call on JAX's request."""
        return SubstitutedRule(self, eqn)

    def rewritten(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        """Substitute in a jaxpr that was not rewritten before."""
        return SubstitutedBody(self, jaxpr).made()

    # --- at every depth ---------------------------------------------------------------------------

    def jaxpr(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        """Substitute in a jaxpr, closed or open; return the same object if nothing changes."""
        return self._bodies(lambda: self.rewritten(jaxpr), jaxpr)

    def aval(self, aval: Aval) -> Aval:
        """Substitute in a type; return the same object if nothing changes."""
        if isinstance(aval, jaxcompat.AbstractRef):
            inner = self.aval(aval.inner_aval)
            return aval if inner is aval.inner_aval else aval.update(inner_aval=inner)
        return self.array_type(aval) if hasattr(aval, "shape") else aval

    def value(self, value: Any) -> Any:
        """Substitute in a parameter; return the same object if nothing changes."""
        new = self.leaf(value)
        if new is not value:
            return new
        if isinstance(value, Jaxpr | jaxcompat.ClosedJaxpr):
            return self.jaxpr(value)
        if isinstance(value, jax.core.AbstractValue):
            return self.aval(value)
        if isinstance(value, jax.ShapeDtypeStruct):
            return self._described(value)
        if isinstance(value, dict):
            items = {name: self.value(item) for name, item in value.items()}
            return value if all(items[k] is value[k] for k in items) else type(value)(items)
        # An `Exported` is lowered as it is, and solves for its sizes when it is called.
        if is_dataclass(value) and not isinstance(value, type | jax.export.Exported):
            attributes = {
                field.name: getattr(value, field.name) for field in fields(value) if field.init
            }
            items = self.value(attributes)
            return value if items is attributes else replace(value, **items)
        if not isinstance(value, tuple | list):
            return value
        elements = [self.value(item) for item in value]
        if all(map(operator.is_, elements, value)):
            return value
        return type(value)(*elements) if hasattr(value, "_fields") else type(value)(elements)

    def _described(self, value: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        parts = {"shape": value.shape, "sharding": value.sharding}
        new = {name: self.value(part) for name, part in parts.items()}
        return value if all(new[k] is parts[k] for k in parts) else value.update(**new)

    def literal(self, literal: Literal) -> Literal:
        """Substitute in the type of a literal, which is a scalar."""
        aval = self.aval(literal.aval)
        if aval is literal.aval:
            return literal
        result = jaxcompat.as_literal(literal.val, aval)
        assert result is not None
        return result

    def changes(self, eqn: JaxprEqn) -> bool:
        """Return True if the substitution changes a type or a body of an equation."""
        types = any(self.aval(v.aval) is not v.aval for v in (*eqn.invars, *eqn.outvars))
        return types or any(self.jaxpr(body) is not body for _, body in sub_jaxprs(eqn))

    def params(self, eqn: JaxprEqn) -> Params:
        """Substitute in the parameters of an equation; return the same dict if nothing changes."""
        params = {name: self.value(value) for name, value in eqn.params.items()}
        if all(map(operator.is_, params.values(), eqn.params.values())):
            params = eqn.params
        # The derivative rules of a call are functions that JAX has bound to its types.
        if has_rule(eqn) and self.rewrites_rule(eqn):
            return params | self._custom(eqn, params)
        if "transpose_thunk" in params and self.rewrites_rule(eqn):
            transpose = jaxcompat.linear_call_transpose(eqn)
            return params | jaxcompat.linear_call_transpose_param(self.jaxpr(transpose))
        return params

    def _custom(self, eqn: JaxprEqn, params: Params) -> Params:
        """Return the parameters of a custom call whose derivative rule is substituted in."""
        rule = self._rules.setdefault(rule_key(eqn), self.rule(eqn))
        kept = params["num_consts"], params["symbolic_zeros"]
        return following(eqn, params["call_jaxpr"], rule, *kept)

    def with_rule(self, eqn: JaxprEqn) -> CustomRule:
        """Return the derivative rule of a custom call, traced as it is, and substituted in."""
        return map_rule(self.jaxpr, custom_rule(eqn))


class SubstitutedRule:
    """The derivative rule of a custom call after substitution, built when JAX first requests it."""

    def __init__(self, owner: Any, eqn: JaxprEqn) -> None:
        self.owner = owner
        self.eqn = eqn
        self._made: CustomRule | None = None

    def __call__(self) -> CustomRule:
        if self._made is None:
            self._made = self.found()
        return self._made

    def found(self) -> CustomRule:
        rule: CustomRule = self.owner.with_rule(self.eqn)
        return rule


# --- mesh sizes -----------------------------------------------------------------------------------
# Put a jaxpr on a mesh that has the same axes with other sizes.
#
# A mesh occurs in types (`f32[8@data]`), in shardings and other parameters, in the contexts of
# equations, and in the rules of custom derivatives. All of them are rewritten. Arrays are whole in
# these types, so no shape changes. This is not so in the body of a `shard_map`, whose shapes are
# those of one shard: its axes must keep their sizes.


def axes_text(sizes: Mapping[Any, int]) -> str:
    """Return the axes of a mesh as `--mesh` takes them: `data=2,model=4`."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def on_mesh(program: Program, mesh: Mesh | AbstractMesh) -> Program:
    """Return a program for a mesh that has the same axes with other sizes: `Program.on_mesh`."""
    meshes = program.meshes or meshes_in(program.jaxpr, rules=True)
    change = mesh_change(program.name, meshes, mesh)
    _check_division(program, change)
    jit = program.jit and program.jit.placed_by(change.placement)
    result = program.replace(jaxpr=change.jaxpr(program.jaxpr), jit=jit)
    type_check(result)
    return result


def _check_division(program: Program, change: MeshChange) -> None:
    """Raise ArgumentsError for an argument or result that a new mesh does not divide."""
    options = program.jit or JitOptions()
    for what, values, asked in (
        ("argument", program.arguments, options.of_arguments(program.arguments)),
        ("result", program.results, options.of_results(program.results)),
    ):
        for (name, aval), option in zip(values, asked, strict=True):
            try:
                change.aval(aval)
                change.require_division(aval, option.placement)
            except Indivisible as fault:
                raise ArgumentsError(f"{what} '{name}' of {program.name}: {fault}") from None


def meshes_in(
    jaxpr: AnyJaxpr, options: Any = None, rules: bool = False
) -> list[Mesh | AbstractMesh]:
    """Return the meshes that a jaxpr mentions, at every depth, without empty ones.

    Args:
        jaxpr: The jaxpr.
        options: The options of `jax.jit`, which are searched too.
        rules: Whether the rules of custom derivatives are traced and searched.
    """
    search = _MeshSearch(rules)
    search.value(options)
    with rules_followed():
        search.jaxpr(jaxpr)
    return list(search.found)


#: The types of most parameters, which mention no mesh.
_WITHOUT_MESH: frozenset[type] = frozenset({type(None), bool, int, float, str})


class _MeshSearch(Substitution):
    """A substitution that changes nothing, and collects all meshes."""

    def __init__(self, rules: bool) -> None:
        super().__init__()
        self.found: dict[Mesh | AbstractMesh, None] = {}
        self._searches_rules = rules
        self._searched: set[Hashable] = set()
        # The types and parameters that have been searched, by identity: most are shared.
        self._known: dict[int, Any] = {}

    def rewritten(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        # Every command searches its program: this visits all that `SubstitutedBody` does.
        body = jaxcompat.open_jaxpr(jaxpr)
        for var in (*body.invars, *body.constvars):
            self.aval(var.aval)
        for eqn in body.eqns:
            if eqn.primitive.name in LIVE:
                self.changes(eqn)
            for atom in eqn.invars:
                if type(atom) is Literal:
                    self.aval(atom.aval)
            if has_rule(eqn) or "transpose_thunk" in eqn.params:
                self.params(eqn)
            else:
                for value in eqn.params.values():
                    self.value(value)
            self.context(eqn.ctx)
            for var in eqn.outvars:
                self.aval(var.aval)
        for atom in body.outvars:
            self.aval(atom.aval)
        return jaxpr

    def aval(self, aval: Aval) -> Aval:
        if id(aval) not in self._known:
            self._known[id(aval)] = aval
            super().aval(aval)
        return aval

    def value(self, value: Any) -> Any:
        cls = type(value)
        if cls in _WITHOUT_MESH or (cls is tuple and jaxcompat.holds_integers(value)):
            return value
        if id(value) not in self._known:
            self._known[id(value)] = value
            super().value(value)
        return value

    def leaf(self, value: Any) -> Any:
        if isinstance(value, Mesh | AbstractMesh):
            if not value.empty:
                self.found[value] = None
        elif isinstance(value, Format):
            self.leaf(value.sharding)
        elif isinstance(value, NamedSharding):
            self.leaf(value.mesh)
        return value

    def array_type(self, aval: Aval) -> Aval:
        self.leaf(getattr(aval, "sharding", None))
        return aval

    def context(self, context: Any) -> Any:
        if id(context) not in self._known:
            self._known[id(context)] = context
            self.leaf(jaxcompat.context_settings(context)["cur_abstract_mesh"])
        return context

    def rewrites_rule(self, eqn: JaxprEqn) -> bool:
        if self._searches_rules and has_rule(eqn) and (key := rule_key(eqn)) not in self._searched:
            self._searched.add(key)  # a rule may contain its own call
            with suppress(UnsupportedError):  # the derivative raises it
                self.with_rule(eqn)
        return False


def mesh_change(name: str, meshes: Sequence[Mesh | AbstractMesh], mesh: Any) -> MeshChange:
    """Return the substitution of a mesh for the one that a program is for.

    Args:
        name: The name of the program.
        meshes: The meshes that it mentions.
        mesh: The new mesh, with or without devices.

    Raises:
        ArgumentsError: If the program has no mesh, several, or one with other axes.
    """
    if not meshes:
        raise ArgumentsError(f"{name} has no mesh, so it cannot be put on {axes_text(mesh.shape)}")
    texts = {tuple(old_mesh.shape.items()): axes_text(old_mesh.shape) for old_mesh in meshes}
    if len(texts) > 1:
        raise ArgumentsError(
            f"{name} has several meshes ({'; '.join(texts.values())}), so their sizes cannot change"
        )
    ((sizes, text),) = texts.items()
    old = dict(sizes)
    if old.keys() != mesh.shape.keys():
        raise ArgumentsError(
            f"{name} is for a mesh with the axes {text}, not {axes_text(mesh.shape)}",
            f"give a size to each of its axes: {','.join(f'{axis}=…' for axis in old)}",
        )
    return MeshChange(old, _in_order(mesh, tuple(old)))


def _in_order(mesh: Mesh | AbstractMesh, names: tuple[Any, ...]) -> Mesh | AbstractMesh:
    """Return a mesh whose axes have this order, each with its devices."""
    places = [mesh.axis_names.index(name) for name in names]
    types = tuple(mesh.axis_types[i] for i in places)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices.transpose(places), names, axis_types=types)
    sizes = tuple(mesh.shape[name] for name in names)
    return AbstractMesh(sizes, names, axis_types=types, abstract_device=mesh.abstract_device)


class Indivisible(Exception):
    """Raised for a dimension that the new mesh does not divide; its message has the type."""


class MeshChange(Substitution):
    """A substitution of one mesh for another.

    Args:
        old: The sizes of the axes before.
        new: The mesh of the same axes, in the same order. Their types stay those of the program.
        in_rules: Whether it is applied to rules of custom derivatives.
    """

    def __init__(
        self, old: Mapping[Any, int], new: Mesh | AbstractMesh, in_rules: bool = False
    ) -> None:
        super().__init__()
        self.old, self.new, self.in_rules = dict(old), new, in_rules
        self._meshes: dict[Any, Any] = {}
        self._avals: dict[Aval, Aval] = {}
        self._contexts: dict[int, tuple[Any, Any]] = {}  # with the old ones, to keep their ids

    @property
    def sizes(self) -> dict[Any, int]:
        """The sizes of the axes after the change."""
        return dict(self.new.shape)

    # --- meshes and shardings ---------------------------------------------------------------------

    def placement(self, placement: Any) -> Any:
        """Substitute in the sharding of an argument or result; over devices if the mesh has any."""
        if isinstance(placement, Format):
            return Format(placement.layout, self.placement(placement.sharding))
        if not isinstance(placement, NamedSharding):
            return self.leaf(placement)
        return self._sharding(placement, True)

    def leaf(self, value: Any) -> Any:
        if isinstance(value, Mesh | AbstractMesh):
            return self.mesh(value, isinstance(value, Mesh))
        if isinstance(value, Format):
            return Format(value.layout, self.leaf(value.sharding))
        if isinstance(value, NamedSharding):
            # Only shardings over devices have a kind of memory. Read from a file on a machine
            # without these devices, they have no devices either.
            return self._sharding(value, value.memory_kind is not None)
        if isinstance(value, Sharding) and value.num_devices > 1:
            raise UnsupportedError(
                f"a sharding names devices but no axes of a mesh: {value}", "use a NamedSharding"
            )
        return value

    def _sharding(self, sharding: NamedSharding, over_devices: bool) -> NamedSharding:
        mesh = self.mesh(sharding.mesh, over_devices)
        if mesh is sharding.mesh:
            return sharding
        return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)

    def mesh(self, mesh: Mesh | AbstractMesh, over_devices: bool) -> Mesh | AbstractMesh:
        """Return the new mesh with the axis types of an old one.

        It has devices if `over_devices`, and if the new mesh has some.
        """
        if mesh.empty:
            return mesh
        key = mesh, over_devices
        if key not in self._meshes:
            names, types, new = tuple(self.old), mesh.axis_types, self.new
            if tuple(mesh.shape.items()) not in (tuple(self.old.items()), tuple(new.shape.items())):
                raise UnsupportedError(
                    f"the program has another mesh, {axes_text(mesh.shape)}, in addition to "
                    f"{axes_text(self.old)}"
                )
            if over_devices and isinstance(new, Mesh):
                self._meshes[key] = Mesh(new.devices, names, axis_types=types)
            else:
                device = new.abstract_mesh.abstract_device or mesh.abstract_mesh.abstract_device
                self._meshes[key] = AbstractMesh(
                    tuple(self.sizes.values()), names, axis_types=types, abstract_device=device
                )
        return self._meshes[key]

    # --- types, contexts and constants ------------------------------------------------------------

    def array_type(self, aval: Aval) -> Aval:
        sharding = getattr(aval, "sharding", None)
        if sharding is None or sharding.mesh.empty:
            return aval
        if aval not in self._avals:
            self.require_division(aval, sharding)
            self._avals[aval] = aval.update(sharding=self.leaf(sharding))
        return self._avals[aval]

    def require_division(self, aval: Aval, placement: Any) -> None:
        """Check that the new mesh divides an array with a sharding, or a layout with one.

        Raises:
            Indivisible: If it does not.
        """
        sharding = placement.sharding if isinstance(placement, Format) else placement
        if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
            return
        for size, entry in zip(aval.shape, sharding.spec.partitions, strict=False):
            if entry is None or entry is PartitionSpec.UNCONSTRAINED or not isinstance(size, int):
                continue
            axes = entry if isinstance(entry, tuple) else (entry,)
            parts = {axis: self.sizes[axis] for axis in axes if axis in self.old}
            if size % math.prod(parts.values()):
                raise Indivisible(
                    f"{type_of(aval)} has a dimension of size {size}, which {axes_text(parts)} "
                    "does not divide"
                )

    def context(self, context: Any) -> Any:
        if id(context) not in self._contexts:
            settings = jaxcompat.context_settings(context)
            mesh = settings["cur_abstract_mesh"]
            new = context
            if not mesh.empty:
                new = jaxcompat.equation_context({**settings, "cur_abstract_mesh": self.leaf(mesh)})
            self._contexts[id(context)] = context, new
        return self._contexts[id(context)][1]

    def constants(self, values: Sequence[Any], types: Sequence[Aval]) -> Sequence[Any]:
        return [self._constant(*pair) for pair in zip(values, types, strict=True)]

    def _constant(self, value: Any, aval: Aval) -> Any:
        """Move a constant that lies on several devices: to the new ones, or to the host."""
        if not isinstance(value, jax.Array) or value.sharding.num_devices == 1:
            return value
        with jax.transfer_guard("allow"):
            if isinstance(self.new, Mesh):
                return jax.device_put(value, self._constant_placement(value))
            if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
                data = np.asarray(jax.random.key_data(value))
                return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
            host = np.asarray(value)
            return jaxcompat.weakly_typed(host) if aval.weak_type else host

    def _constant_placement(self, value: jax.Array) -> Any:
        try:
            self.require_division(value.aval, value.sharding)
        except Indivisible as fault:
            raise UnsupportedError(f"a constant {fault}") from None
        return self.placement(value.sharding)

    # --- equations --------------------------------------------------------------------------------

    def rewrites_rule(self, eqn: JaxprEqn) -> bool:
        return True  # a rule may name the mesh, though the call does not

    def rule(self, eqn: JaxprEqn) -> SubstitutedRule:
        return SubstitutedRule(self._for_rules, eqn)

    @cached_property
    def _for_rules(self) -> MeshChange:
        return self if self.in_rules else MeshChange(self.old, self.new, True)

    def rewritten(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        return _MeshBody(self, jaxpr).made()


class _MeshBody(SubstitutedBody):
    """One body while its mesh is changed."""

    owner: MeshChange

    def equation(self, eqn: JaxprEqn) -> JaxprEqn | None:
        self._check_shard_map(eqn)
        try:
            self._check_placements(eqn)
            return super().equation(self._with_devices(eqn))
        except Indivisible as fault:
            raise UnsupportedError(f"in the {named(eqn)}, {fault}") from None

    def _with_devices(self, eqn: JaxprEqn) -> JaxprEqn:
        """Return an equation whose meshes have the devices of the new mesh.

        In a program from a file, on a machine without these devices, its meshes have none. JAX
        needs devices in a `shard_map` where no mesh is set; in a jit it records the mesh that is
        set.
        """
        called = view(eqn)
        is_set = not jaxcompat.context_settings(eqn.ctx)["cur_abstract_mesh"].empty
        # JAX traces rules when it needs them, often where no mesh of devices is set.
        stays = is_set if isinstance(called, ShardMap) else self.owner.in_rules
        if stays or not isinstance(called, Call | ShardMap):
            return eqn
        meshes = {
            name: self.owner.mesh(value, True)
            for name, value in eqn.params.items()
            if isinstance(value, Mesh | AbstractMesh)
        }
        return eqn.replace(params={**eqn.params, **meshes})

    def _check_shard_map(self, eqn: JaxprEqn) -> None:
        """Raise UnsupportedError for a `shard_map` over axes whose sizes change."""
        old, new = self.owner.old, self.owner.sizes
        if not isinstance(mapped := view(eqn), ShardMap):
            return
        manual = {*eqn.params["newly_manual_axes"], *mapped.mesh.manual_axes}
        changed = [axis for axis in old if axis in manual and old[axis] != new[axis]]
        if changed:
            before, after = (axes_text({a: sizes[a] for a in changed}) for sizes in (old, new))
            raise UnsupportedError(
                f"the {named(eqn)} has the shapes of shards over {before}, so it cannot run over "
                f"{after}",
                f"trace the function again on this mesh: --mesh {axes_text(new)}",
            )

    def _check_placements(self, eqn: JaxprEqn) -> None:
        """Check that the new mesh divides the arrays that a jit shards, as JAX does in a trace."""
        if not isinstance(called := view(eqn), Call):
            return
        pairs = (
            *zip(eqn.invars, called.operand_params.get("in_shardings", ()), strict=False),
            *zip(eqn.outvars, called.out_params.get("out_shardings", ()), strict=False),
        )
        for atom, placement in pairs:
            self.owner.require_division(atom.aval, placement)
