"""Programs for other sizes: their symbols are replaced by sizes.

For an array with symbolic sizes, JAX traces `x[1:]` to a `gather`, and `x[-1]` to a
`dynamic_slice`, at indices computed from the size. These become the `slice` that JAX traces for
known sizes, and the equations of the indices are removed if nothing else reads them. Likewise
`jnp.arange` becomes a single `iota`, and the grid of a Pallas kernel, whose symbolic sizes are
operands, becomes a parameter.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.export
import numpy as np
from jax.experimental.layout import Format
from jax.extend.core import primitives
from jax.lax import GatherScatterMode
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError, UnsupportedError
from jaxprtool.ir.custom_rules import (
    CustomRule,
)
from jaxprtool.ir.dataflow import DefUse
from jaxprtool.ir.equations import (
    named,
    needed_equations,
    substitute,
    type_of,
    variables,
    with_operands,
)
from jaxprtool.ir.evaluation import RULES, Evaluation
from jaxprtool.ir.program import JitOptions, Program, type_check
from jaxprtool.ir.regions import Call, ShardMap, view
from jaxprtool.ir.substitution import SubstitutedBody, SubstitutedRule, Substitution, meshes_in
from jaxprtool.ir.symbols import Sizes, value_of
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Aval, JaxprEqn, Literal, Var

# --- static indices -------------------------------------------------------------------------------
# Simplify equations whose indices become constants once sizes are known.

#: The maximum number of elements of an array of indices to evaluate.
_MOST = 1 << 16


#: How to evaluate the primitives by which JAX computes indices from sizes.
_COMPUTED: dict[str, Evaluation] = {
    "iota": RULES["iota"],
    "add": RULES["add"],
    "mul": RULES["mul"],
    "lt": RULES["lt"],
    "select_n": RULES["select_n"],
    "convert_element_type": RULES["convert_element_type"],
    "copy": RULES["copy"],
    "rev": RULES["rev"],
    "concatenate": RULES["concatenate"],
    "broadcast_in_dim": RULES["broadcast_in_dim"],
}


def with_slices(
    eqns: Sequence[JaxprEqn], results: Sequence[Atom], changed: Callable[[JaxprEqn], bool]
) -> tuple[list[JaxprEqn], list[Atom]]:
    """Replace gathers and dynamic slices at known indices by slices.

    Args:
        eqns: The equations of a body.
        results: The results of the body.
        changed: Returns True for an equation in which sizes were replaced. Others are kept.

    Returns:
        The new equations and results.
    """
    evaluator = _IndexEvaluator(eqns)
    written: list[JaxprEqn] = []
    same: dict[Var, Atom] = {}

    for eqn in eqns:
        eqn = with_operands(eqn, same)
        rule = _RULES.get(eqn.primitive.name)
        new = rule(eqn, evaluator) if rule and changed(eqn) else None
        if isinstance(new, Var):
            same[eqn.outvars[0]] = new
        else:
            written += [eqn] if new is None else new
    results = substitute(results, same)
    return _without(evaluator.read, written, results) if evaluator.read else written, results


def _without(
    indices: set[Var], eqns: Sequence[JaxprEqn], results: Sequence[Atom]
) -> list[JaxprEqn]:
    """Remove equations that computed indices, if nothing reads their results any more."""

    def stays(eqn: JaxprEqn) -> bool:
        return not (eqn.outvars and indices.issuperset(eqn.outvars))

    return needed_equations(eqns, results, stays)


class _IndexEvaluator:
    """Evaluates indices.

    Attributes:
        read: The variables that known indices were computed from.
    """

    def __init__(self, eqns: Sequence[JaxprEqn]) -> None:
        self._defined = DefUse(eqns)
        self._values: dict[Var, np.ndarray | None] = {}
        self.read: set[Var] = set()

    def values(self, atoms: Sequence[Atom]) -> list[np.ndarray] | None:
        """Return the values of indices, or None if one is unknown."""
        values = [self._value(atom) for atom in atoms]
        if any(value is None for value in values):
            return None
        todo = variables(atoms)
        while todo:
            var = todo.pop()
            if var not in self.read:
                self.read.add(var)
                eqn = self._defined.equation(var)
                todo += [] if eqn is None else variables(eqn.invars)
        return values  # type: ignore[return-value]

    def made_by(self, atom: Atom, primitive: str) -> bool:
        """Return True if an atom is the result of an equation of this primitive."""
        eqn = self._defined.equation(atom)
        return eqn is not None and eqn.primitive.name == primitive

    def _value(self, atom: Atom) -> np.ndarray | None:
        """Evaluate an atom, with a stack in place of recursion: chains of equations are long."""
        todo = [atom]
        while todo:
            var = todo[-1]
            if type(var) is Literal or var in self._values:
                todo.pop()
                continue
            eqn = self._defined.equation(var)
            compute = None if eqn is None else _COMPUTED.get(eqn.primitive.name)
            if eqn is None or compute is None or not _is_small(getattr(var.aval, "shape", None)):
                self._values[var] = None
                continue
            missing = [v for v in variables(eqn.invars) if v not in self._values]
            if missing:
                todo += missing
                continue
            values = (self._known(v) for v in eqn.invars)
            operands = [value for value in values if value is not None]
            complete = len(operands) == len(eqn.invars)
            self._values[var] = compute(eqn, *operands) if complete else None
        return self._known(atom)

    def _known(self, atom: Atom) -> np.ndarray | None:
        if type(atom) is Literal:
            return np.asarray(atom.val, atom.aval.dtype)
        return self._values[atom]


def _is_small(shape: Any) -> bool:
    return _are_numbers(shape) and int(np.prod(shape, dtype=np.int64)) <= _MOST


def _are_numbers(shape: Any) -> bool:
    return shape is not None and all(isinstance(n, int) for n in shape)


# --- rules ----------------------------------------------------------------------------------------


def _dynamic_slice(eqn: JaxprEqn, evaluator: _IndexEvaluator) -> list[JaxprEqn] | Var | None:
    x, *indices = eqn.invars
    # Literal indices come from the user's own `lax.dynamic_slice`, which JAX keeps.
    if not _are_numbers(x.aval.shape) or all(type(index) is Literal for index in indices):
        return None
    values = evaluator.values(indices)
    if values is None:
        return None
    sizes = eqn.params["slice_sizes"]
    pairs = zip(values, x.aval.shape, sizes, strict=True)
    starts = [min(max(int(start), 0), whole - size) for start, whole, size in pairs]
    return _cut(eqn, starts, sizes)


def _gather(eqn: JaxprEqn, evaluator: _IndexEvaluator) -> list[JaxprEqn] | Var | None:
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    x, indices = eqn.invars
    shape, sizes, mapped = x.aval.shape, list(params["slice_sizes"]), numbers.start_index_map
    static = params["mode"] == GatherScatterMode.PROMISE_IN_BOUNDS and _are_numbers(shape)
    if not static or numbers.operand_batching_dims:
        return None
    values = evaluator.values([indices])
    if values is None:
        return None
    starts, strides, dropped = [0] * len(shape), [1] * len(shape), numbers.collapsed_slice_dims
    if values[0].ndim == 1:
        for dim, start in zip(mapped, values[0], strict=True):
            starts[dim] = int(start)
        kept = tuple(range(len(shape) - len(dropped)))
    elif values[0].ndim == 2 and values[0].shape[1] == 1 and mapped == dropped:
        (dim,), rows = mapped, values[0][:, 0]
        steps = set(np.diff(rows).tolist())
        if len(rows) == 0 or len(steps) > 1 or min(steps, default=1) < 1:
            return None
        starts[dim], strides[dim], sizes[dim] = int(rows[0]), steps.pop() if steps else 1, len(rows)
        kept, dropped = tuple(i for i in range(len(shape)) if i != dim), ()
    else:
        return None
    spans = zip(starts, sizes, strides, shape, strict=True)
    inside = all(start >= 0 and start + (n - 1) * step < whole for start, n, step, whole in spans)
    if numbers.offset_dims != kept or not inside:
        return None
    return _cut(eqn, starts, sizes, strides, dropped)


def _cut(
    eqn: JaxprEqn,
    starts: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int] = (),
    dropped: Sequence[int] = (),
) -> list[JaxprEqn] | Var:
    """Return a slice of an equation's first operand, and a squeeze of the `dropped` axes.

    JAX traces no slice of all elements. One would have a strongly typed gradient.
    """
    (out,), x = eqn.outvars, eqn.invars[0]
    whole = tuple(sizes) == x.aval.shape
    if not dropped:
        same = whole and isinstance(x, Var)
        return x if same else [_slice(eqn, out, starts, sizes, strides)]
    inner = x if whole else Var(out.aval.update(shape=tuple(sizes)))
    squeezed = eqn.replace(
        primitive=primitives.squeeze_p, params={"dimensions": tuple(dropped)}, invars=[inner]
    )
    return [squeezed] if whole else [_slice(eqn, inner, starts, sizes, strides), squeezed]


def _slice(
    eqn: JaxprEqn,
    out: Var,
    starts: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int],
) -> JaxprEqn:
    x = eqn.invars[0]
    steps = tuple(strides) if any(step != 1 for step in strides) else None
    ends = zip(starts, sizes, steps or (1,) * len(sizes), x.aval.shape, strict=True)
    params = {
        "start_indices": tuple(starts),
        "limit_indices": tuple(min(start + n * step, whole) for start, n, step, whole in ends),
        "strides": steps,
    }
    return eqn.replace(primitive=primitives.slice_p, params=params, invars=[x], outvars=[out])


def _of_iota(neutral: int) -> Callable[[JaxprEqn, _IndexEvaluator], Var | None]:
    """Return the rule that removes `iota + 0` or `iota * 1`, which `jnp.arange` adds."""

    def rule(eqn: JaxprEqn, evaluator: _IndexEvaluator) -> Var | None:
        number, x = eqn.invars
        if type(number) is not Literal or number.val != neutral or x.aval != eqn.outvars[0].aval:
            return None
        return x if evaluator.made_by(x, "iota") else None

    return rule


def _grid(eqn: JaxprEqn, evaluator: _IndexEvaluator) -> list[JaxprEqn] | None:
    """Move the sizes of a Pallas grid, once known, from the first operands to the parameter."""
    mapping = eqn.params["grid_mapping"]
    count = mapping.num_dynamic_grid_bounds
    sizes = evaluator.values(eqn.invars[:count])
    if not count or sizes is None:
        return None
    left = map(int, sizes)
    grid = tuple(size if isinstance(size, int) else next(left) for size in mapping.grid)
    params = eqn.params | {"grid_mapping": replace(mapping, grid=grid)}
    return [eqn.replace(invars=eqn.invars[count:], params=params)]


_RULES: dict[str, Callable[[JaxprEqn, _IndexEvaluator], list[JaxprEqn] | Var | None]] = {
    "add": _of_iota(0),
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "mul": _of_iota(1),
    "pallas_call": _grid,
}


# --- specialization -------------------------------------------------------------------------------
# Replace symbols in a jaxpr by sizes. The result is that of tracing at these sizes.
#
# Everything that mentions a symbol is rewritten, at every depth: the types of variables, parameters
# and bodies of equations, and the rules of custom derivatives. All else stays the same object, and
# a body that several equations share stays shared. The value of a size (`dim_as_value`) becomes a
# literal. So does arithmetic on sizes that Python computes when JAX traces at known sizes, such as
# `x.shape[0] / 2`.

#: Primitives that represent Python's arithmetic on sizes, and the conversions before it.
_OPERATORS: dict[str, Callable[..., Any]] = {
    "convert_element_type": operator.pos,
    "copy": operator.pos,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
}


def specialized(jaxpr: AnyJaxpr, sizes: Sizes) -> AnyJaxpr:
    """Replace symbols in a jaxpr by sizes.

    Args:
        jaxpr: A closed or open jaxpr.
        sizes: The size of each symbol to replace, an integer or a symbolic dimension.

    Returns:
        The new jaxpr; the same object if it mentions none of the symbols.

    Raises:
        UnsupportedError: If an equation has a negative size, or divides by zero, at these sizes.
    """
    return _SizeSubstitution(sizes).jaxpr(jaxpr)


class _SizeSubstitution(Substitution):
    """A substitution of sizes for symbols."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self._sizes = sizes
        self._avals: dict[Aval, Aval] = {}

    def leaf(self, value: Any) -> Any:
        return value_of(value, self._sizes) if jaxcompat.is_symbolic_dimension(value) else value

    def array_type(self, aval: Aval) -> Aval:
        shape = aval.shape
        if not any(map(jaxcompat.is_symbolic_dimension, shape)):
            return aval
        if aval not in self._avals:
            new = self.value(tuple(shape))
            self._avals[aval] = aval if new is shape else aval.update(shape=new)
        return self._avals[aval]

    def rewrites_rule(self, eqn: JaxprEqn) -> bool:
        return self.changes(eqn) or jaxcompat.closes_over_sizes(eqn.params)

    def rewritten(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        return _SpecializedBody(self, jaxpr).made()

    # --- rules of custom derivatives ------------------------------------------------------------

    def rule(self, eqn: JaxprEqn) -> _SizedRule:
        return _SizedRule(self, eqn)

    def retyped(self, eqn: JaxprEqn) -> JaxprEqn:
        """Return a custom call with new types, whose rule JAX will trace at these types."""

        def again(value: Any) -> Any:
            return value.then(self) if isinstance(value, _SizedRule) else self.value(value)

        params = {name: self.value(value) for name, value in eqn.params.items()}
        return eqn.replace(
            invars=[v if type(v) is Literal else Var(self.aval(v.aval)) for v in eqn.invars],
            outvars=[Var(self.aval(v.aval)) for v in eqn.outvars],
            params=params | jaxcompat.retyped_rules(eqn.params, again),
        )

    @property
    def is_idempotent(self) -> bool:
        """True if applying it twice is the same as once, which it is not for `n='2*n'`."""
        return all(self.value(size) == size for size in self._sizes.values())

    def then(self, after: _SizeSubstitution) -> _SizeSubstitution:
        """Return the composition of this substitution and the one after it."""
        sizes = {symbol: after.value(size) for symbol, size in self._sizes.items()}
        return _SizeSubstitution({**after._sizes, **sizes})


class _SizedRule(SubstitutedRule):
    """The derivative rule of a custom call after substitution.

    The user's rule is traced with symbols, which are then replaced by sizes. If JAX cannot trace it
    with symbols, it is traced at the new sizes, and the symbols that it closes over are replaced
    afterwards. The sizes in its types are then substituted in twice, so the substitution must be
    idempotent.
    """

    def then(self, after: _SizeSubstitution) -> _SizedRule:
        """Return the rule after another substitution."""
        return _SizedRule(self.owner.then(after), self.eqn)

    def found(self) -> CustomRule:
        try:
            rule: CustomRule = self.owner.with_rule(self.eqn)
        except UnsupportedError:
            if not self.owner.is_idempotent:
                raise
        else:
            if getattr(rule, "raises", None) is None or not self.owner.is_idempotent:
                return rule
        again: CustomRule = self.owner.with_rule(self.owner.retyped(self.eqn))
        return again


class _SpecializedBody(SubstitutedBody):
    """One body while sizes are substituted in."""

    def __init__(self, owner: _SizeSubstitution, jaxpr: AnyJaxpr) -> None:
        super().__init__(owner, jaxpr)
        self._before = set(map(id, jaxcompat.open_jaxpr(jaxpr).eqns))
        #: The variables whose values Python would have computed from sizes.
        self._numbers: dict[Var, int | float] = {}

    def finished(
        self, eqns: list[JaxprEqn], outvars: list[Atom]
    ) -> tuple[list[JaxprEqn], list[Atom]]:
        if not self.env:
            return eqns, outvars
        return with_slices(eqns, outvars, lambda eqn: id(eqn) not in self._before)

    def equation(self, eqn: JaxprEqn) -> JaxprEqn | None:
        """Return the rewritten equation, or None if its result becomes a literal."""
        if self._numbers or eqn.primitive.name == jaxcompat.DIM_AS_VALUE:
            number = self._number(eqn)
            if number is not None:
                return None
        try:
            new = super().equation(eqn)
        except ZeroDivisionError:
            raise UnsupportedError(f"a size in the {named(eqn)} would divide by zero") from None
        assert new is not None
        for var in new.outvars:
            if any(isinstance(n, int) and n < 0 for n in getattr(var.aval, "shape", ())):
                raise UnsupportedError(
                    f"the result of the {named(eqn)} would be {type_of(var.aval)}, which has a "
                    "negative size"
                )
        return new

    # --- numbers --------------------------------------------------------------------------------

    def _number(self, eqn: JaxprEqn) -> int | float | None:
        """Return the value of an equation if it is known, and replace its result by a literal."""
        if eqn.primitive.name == jaxcompat.DIM_AS_VALUE:
            number = self.owner.value(eqn.params["dim"])
            if jaxcompat.is_symbolic_dimension(number):
                return None
        else:
            operands = [self._known(atom) for atom in eqn.invars]
            if None in operands or self._numbers.keys().isdisjoint(variables(eqn.invars)):
                return None
            number = _computed(eqn, operands)
            if number is None:
                return None
        (var,) = eqn.outvars
        literal = jaxcompat.as_literal(number, var.aval)
        assert literal is not None
        self.env[var] = literal
        if var.aval.weak_type:  # otherwise it is an array, with which JAX computes at run time
            self._numbers[var] = number
        return number

    def _known(self, atom: Atom) -> Any:
        if type(atom) is not Literal:
            return self._numbers.get(atom)
        return np.asarray(atom.val).item() if atom.aval.weak_type else None


def _computed(eqn: JaxprEqn, operands: Sequence[Any]) -> int | float | None:
    """Return the number that Python computes for an equation; None if JAX computes it."""
    compute = _OPERATORS.get(eqn.primitive.name)
    scalar_type = type(np.zeros((), eqn.outvars[0].aval.dtype).item())
    if compute is None or scalar_type not in (int, float):
        return None
    if compute is operator.truediv and scalar_type is int:  # Python's // of sizes is a size
        return None
    try:
        return scalar_type(compute(*operands))  # type: ignore[no-any-return]
    except ZeroDivisionError:  # JAX computes inf or NaN instead
        return None


# --- meshes ---------------------------------------------------------------------------------------
# A program on a mesh of another size, with the same axes.


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
