"""The dimensions of the values in a kernel's body that must have the same size, and why.

    classes = DimensionClasses(jaxpr)
    classes.root((x, 0)) == classes.root((y, 1))     # whether an equation ties them
    classes.fixed, classes.sums                      # what fixes a class, and what sums along it

A class is *fixed* by an equation that does more than act on each index along it alone: one that
reads a part of a Ref, counts positions, takes a maximum or sorts along it, or that is not known
here. Sums along a class are noted apart, since they may be taken in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.ir.equations import has_ref_type, variables
from jaxprtool.ir.regions import Regions, regions, run_jaxprs
from jaxprtool.ir.rules import RuleTable, rule
from jaxprtool.ir.substitution import SubstitutedBody, Substitution
from jaxprtool.ir.traits import Traits, nondefault_options, traits
from jaxprtool.jaxcompat import AbstractRef, AnyJaxpr, Atom, Jaxpr, JaxprEqn, Literal, Var

#: A dimension of a variable.
Dim = tuple[Var, int]

#: The equations around an equation of the body, the outermost first, and its own.
Path = tuple[JaxprEqn, ...]


class Reason(NamedTuple):
    """Why a size is fixed: what is done along it, and the equation that does it, if one does."""

    text: str
    path: Path = ()


class DimensionClasses:
    """The classes of the dimensions of a body's values.

    Attributes:
        fixed: What fixes a class, by its root.
        sums: The equations that sum along a class, by its root.
        unsupported: What makes the whole body unfit, such as an effect.
    """

    def __init__(self, jaxpr: Jaxpr) -> None:
        self._parent: dict[Dim, Dim] = {}
        self._fixed: list[tuple[Dim, Reason]] = []
        self._sums: list[tuple[Dim, Path]] = []
        self.unsupported: Reason | None = None
        for var in jaxpr.constvars:
            self.fix(var, Reason("the kernel closes over an array"))
        self._walk(jaxpr, ())
        self.fixed: dict[Dim, Reason] = {}
        for dim, reason in self._fixed:
            self.fixed.setdefault(self.root(dim), reason)
        self.sums: dict[Dim, list[Path]] = {}
        for dim, path in self._sums:
            self.sums.setdefault(self.root(dim), []).append(path)

    def root(self, dim: Dim) -> Dim:
        """Return the dimension that stands for the class of a dimension."""
        parent = self._parent
        while (above := parent.get(dim, dim)) != dim:
            parent[dim] = parent.get(above, above)
            dim = above
        return dim

    def tie(self, a: Atom, b: Atom, dims: Sequence[tuple[int, int]]) -> None:
        """Put pairs of dimensions of two values in one class."""
        for i, j in dims:
            pair = [(x, d) for x, d in ((a, i), (b, j)) if isinstance(x, Var)]
            if len(pair) == 2:
                self._parent[self.root(pair[0])] = self.root(pair[1])
            elif pair:
                self._fixed.append((pair[0], Reason("it is that of a literal")))

    def fix(self, atom: Atom, reason: Reason, dims: Sequence[int] | None = None) -> None:
        """Fix dimensions of a value; all of them by default."""
        if isinstance(atom, Var):
            dims = range(len(value_shape(atom))) if dims is None else dims
            self._fixed += [((atom, d), reason) for d in dims]

    def sum(self, atom: Atom, dims: Sequence[int], path: Path) -> None:
        """Note that an equation sums along dimensions of a value."""
        if isinstance(atom, Var):
            self._sums += [((atom, d), path) for d in dims]

    def _walk(self, jaxpr: Jaxpr, path: Path) -> None:
        for eqn in jaxpr.eqns:
            here = (*path, eqn)
            control = regions(eqn)
            if control is not None:
                self._walk_regions(control, here)
                continue
            apply = dimension_rules.get(eqn.primitive.name)
            if apply is None and traits(eqn).elementwise:
                apply = _elementwise
            known = _OPTIONS.get(eqn.primitive.name, frozenset())
            if apply is not None and nondefault_options(eqn) <= known:
                apply(self, eqn, here)
            else:
                self._unknown(eqn, here)

    def _unknown(self, eqn: JaxprEqn, path: Path) -> None:
        name = eqn.primitive.name
        if name in POSITIONS:
            return
        takes_refs = any(map(has_ref_type, eqn.invars))
        if eqn.effects or takes_refs or traits(eqn) == _UNKNOWN or any(run_jaxprs(eqn)):
            self.unsupported = self.unsupported or Reason(f"{name} has effects or is unknown", path)
        for atom in (*eqn.invars, *eqn.outvars):
            self.fix(atom, Reason(f"{name} acts along it", path))

    def _walk_regions(self, control: Regions, path: Path) -> None:
        """Tie the arguments and results of bodies to the operands and results of the equation."""
        eqn, reason = control.eqn, Reason("a loop runs over it", path)
        for region, body in zip(control.regions, control.jaxprs, strict=True):
            pairs = [(eqn.invars[i], var) for i, var in zip(region.ins, body.invars, strict=True)]
            ends = zip(region.outs, region.next_iteration, body.outvars, strict=True)
            for out, again, atom in ends:
                if out is not None:
                    pairs.append((eqn.outvars[out], atom))
                if again is not None:
                    pairs.append((eqn.invars[again], atom))
            for outer, inner in pairs:
                rank, shift = (
                    len(value_shape(inner)),
                    len(value_shape(outer)) - len(value_shape(inner)),
                )
                self.tie(outer, inner, [(d + shift, d) for d in range(rank)])
                self.fix(outer, reason, range(shift))
            for var in body.constvars:
                self.fix(var, Reason("the kernel closes over an array", path))
            self._walk(body, path)


def value_shape(atom: Any) -> tuple[Any, ...]:
    """Return the shape of a value, or of the content of a Ref."""
    return tuple(getattr(atom.aval, "shape", ()))


_UNKNOWN = Traits()

#: The equations of the position in the grid; `BlockSizes` judges them.
POSITIONS = frozenset({"program_id", "num_programs"})


_Rule = Callable[[DimensionClasses, JaxprEqn, Path], None]

#: What an equation ties, fixes and sums. Elementwise primitives need no rule.
dimension_rules: RuleTable[_Rule] = RuleTable()

#: The options that the rules allow, by primitive; those that change no shape.
_OPTIONS: dict[str, frozenset[str]] = {
    "argmax": frozenset({"axes", "index_dtype"}),
    "argmin": frozenset({"axes", "index_dtype"}),
    "dot_general": frozenset({"precision", "preferred_element_type"}),
    "get": frozenset({"tree"}),
    "swap": frozenset({"tree"}),
    "tile": frozenset({"reps"}),
    "addupdate": frozenset({"tree"}),
}


# --- rules ----------------------------------------------------------------------------------------
# What the equations of a primitive tie, fix and sum.


def _elementwise(classes: DimensionClasses, eqn: JaxprEqn, path: Path) -> None:
    (first, *_) = eqn.outvars
    shape = value_shape(first)
    for atom in (*eqn.invars, *eqn.outvars):
        # A kernel may have operands of one rank that broadcast along dimensions of size 1.
        same = [d for d, n in enumerate(value_shape(atom)) if n == shape[d]]
        classes.tie(first, atom, [(d, d) for d in same])


@rule(dimension_rules, "broadcast_in_dim")
def _broadcast(classes: DimensionClasses, eqn: JaxprEqn, path: Path) -> None:
    operand, out = eqn.invars[0], eqn.outvars[0]
    new = eqn.params["broadcast_dimensions"] or ()
    sizes, result = value_shape(operand), value_shape(out)
    classes.tie(operand, out, [(d, e) for d, e in enumerate(new) if sizes[d] == result[e]])


@rule(dimension_rules, "reshape", "squeeze")
def _reshape(classes: DimensionClasses, eqn: JaxprEqn, path: Path) -> None:
    """Tie the dimensions that stay; those of size 1 may come and go."""
    operand, out = eqn.invars[0], eqn.outvars[0]
    old = [(d, n) for d, n in enumerate(value_shape(operand)) if n != 1]
    new = [(d, n) for d, n in enumerate(value_shape(out)) if n != 1]
    if [n for _, n in old] == [n for _, n in new]:
        classes.tie(operand, out, [(d, e) for (d, _), (e, _) in zip(old, new, strict=True)])
        new = old = []
    reason = Reason("a reshape divides or joins it", path)
    classes.fix(operand, reason, [d for d, _ in old])
    classes.fix(out, reason, [d for d, _ in new])
    for atom in (operand, out):
        classes.fix(atom, reason, [d for d, n in enumerate(value_shape(atom)) if n == 1])


@rule(dimension_rules, "transpose")
def _transpose(classes: DimensionClasses, eqn: JaxprEqn, path: Path) -> None:
    order = eqn.params["permutation"]
    classes.tie(eqn.invars[0], eqn.outvars[0], [(d, e) for e, d in enumerate(order)])


@rule(
    dimension_rules,
    "reduce_sum",
    "reduce_max",
    "reduce_min",
    "reduce_prod",
    "reduce_and",
    "reduce_or",
    "argmax",
    "argmin",
)
def _reduce(classes: DimensionClasses, eqn: JaxprEqn, path: Path) -> None:
    operand, out = eqn.invars[0], eqn.outvars[0]
    axes, name = eqn.params["axes"], eqn.primitive.name
    kept = [d for d in range(len(value_shape(operand))) if d not in axes]
    classes.tie(operand, out, [(d, e) for e, d in enumerate(kept)])
    if name == "reduce_sum":
        classes.sum(operand, axes, path)
    else:
        classes.fix(operand, Reason(f"{name} goes along it", path), axes)


@rule(dimension_rules, "dot_general")
def _dot(classes: DimensionClasses, eqn: JaxprEqn, path: Path) -> None:
    (lhs, rhs), out = eqn.invars, eqn.outvars[0]
    contracted, batch = eqn.params["dimension_numbers"]
    classes.tie(lhs, rhs, [*zip(*batch, strict=True), *zip(*contracted, strict=True)])
    classes.sum(lhs, contracted[0], path)
    position = len(batch[0])
    classes.tie(lhs, out, [(d, e) for e, d in enumerate(batch[0])])
    for operand, used in ((lhs, (0, lhs)), (rhs, (1, rhs))):
        side = used[0]
        free = [
            d
            for d in range(len(value_shape(operand)))
            if d not in contracted[side] and d not in batch[side]
        ]
        classes.tie(operand, out, [(d, position + i) for i, d in enumerate(free)])
        position += len(free)


@rule(dimension_rules, "iota")
def _iota(classes: DimensionClasses, eqn: JaxprEqn, path: Path) -> None:
    counted = [eqn.params["dimension"]]
    classes.fix(eqn.outvars[0], Reason("iota counts positions along it", path), counted)


@rule(dimension_rules, "get", "swap", "addupdate")
def _access(classes: DimensionClasses, eqn: JaxprEqn, path: Path) -> None:
    """Tie the dimensions that a load or store has whole; others are fixed."""
    ref = eqn.invars[0]
    values = [v for v in (*eqn.invars[1:2], *eqn.outvars) if eqn.primitive.name != "get"]
    values = [*eqn.outvars] if eqn.primitive.name == "get" else values
    kept = whole_dims(eqn)
    reason = Reason("a load or store has a part of it", path)
    if kept is None:
        for atom in (ref, *values):
            classes.fix(atom, reason)
        return
    for value in values:
        pairs = [(d, e) for d, e in kept if e is not None]
        whole, parts = {e for _, e in pairs}, range(len(value_shape(value)))
        classes.tie(ref, value, pairs)
        classes.fix(value, reason, [e for e in parts if e not in whole])
    own = {d for d, _ in kept}
    classes.fix(ref, reason, [d for d in range(len(value_shape(ref))) if d not in own])


def whole_dims(eqn: JaxprEqn) -> list[tuple[int, int]] | None:
    """Return the dimensions of a Ref that an access has whole, and those of the value.

    Returns None if the part of the Ref is not given by indices and slices.
    """
    transforms = transforms_of(eqn)
    if not transforms:
        return [(d, d) for d in range(len(value_shape(eqn.invars[0])))]
    (indexer, *more) = transforms
    if more or not isinstance(indexer, jaxcompat.NDIndexer):
        return None
    whole, position = [], 0
    for d, (index, size) in enumerate(zip(indexer.indices, indexer.shape, strict=True)):
        if not isinstance(index, jaxcompat.IndexSlice):
            if getattr(index, "shape", ()) or getattr(getattr(index, "aval", index), "shape", ()):
                return None  # an array of indices
            continue
        if is_whole_slice(index, size):
            whole.append((d, position))
        position += 1
    return whole


def is_whole_slice(index: Any, size: Any) -> bool:
    """Return True if an index is a slice of all elements along a dimension of this size."""
    start = index.start.val if isinstance(index.start, Literal) else index.start
    return isinstance(start, int | np.integer) and (start, index.size, index.stride) == (0, size, 1)


def transforms_of(eqn: JaxprEqn) -> Any:
    """Return what selects the part of a Ref that a load or store has."""
    first = 1 if eqn.primitive.name == "get" else 2
    return jax.tree.unflatten(eqn.params["tree"], eqn.invars[first:])


@rule(dimension_rules, "slice")
def _slice(classes: DimensionClasses, eqn: JaxprEqn, path: Path) -> None:
    operand, out = eqn.invars[0], eqn.outvars[0]
    sizes, result = value_shape(operand), value_shape(out)
    kept = [d for d, n in enumerate(sizes) if n == result[d]]
    classes.tie(operand, out, [(d, d) for d in kept])
    reason = Reason("a slice takes a part of it", path)
    for atom in (operand, out):
        classes.fix(atom, reason, [d for d in range(len(sizes)) if d not in kept])


@rule(dimension_rules, "tile")
def _tile(classes: DimensionClasses, eqn: JaxprEqn, path: Path) -> None:
    operand, out = eqn.invars[0], eqn.outvars[0]
    once = [d for d, n in enumerate(eqn.params["reps"]) if n == 1]
    classes.tie(operand, out, [(d, d) for d in once])
    for atom in (operand, out):
        repeated = [d for d in range(len(value_shape(atom))) if d not in once]
        classes.fix(atom, Reason("tile repeats it", path), repeated)


@rule(dimension_rules, "concatenate", "split", "cumsum", "cumprod", "cummax", "cummin")
def _along(classes: DimensionClasses, eqn: JaxprEqn, path: Path) -> None:
    axis = eqn.params.get("axis", eqn.params.get("dimension"))
    (first, *_), reason = eqn.outvars, Reason(f"{eqn.primitive.name} goes along it", path)
    for atom in (*eqn.invars, *eqn.outvars):
        others = [d for d in range(len(value_shape(atom))) if d != axis]
        classes.tie(first, atom, [(d, d) for d in others])
        classes.fix(atom, reason, [axis])


# --- rewriting ------------------------------------------------------------------------------------
# A body at other sizes of classes.


class BodyResizing(Substitution):
    """A substitution of sizes by class of dimensions, in a kernel's body.

    Args:
        classes: The classes of its dimensions.
        sizes: The new size of each class that changes, by its root.
        last: The last step along axes of the grid, before and after, by the axis of `program_id`:
            comparisons with it are changed.
        new_axes: The number of new first axes of the grid.
    """

    def __init__(
        self,
        classes: DimensionClasses,
        sizes: Mapping[Dim, int],
        last: Mapping[int, tuple[int, int]],
        new_axes: int = 0,
    ) -> None:
        super().__init__()
        self._root, self._sizes = classes.root, sizes
        self.last, self.new_axes = last, new_axes

    def shape(self, var: Var) -> tuple[Any, ...]:
        """Return the new shape of a variable."""
        old = value_shape(var)
        return tuple(self._sizes.get(self._root((var, d)), n) for d, n in enumerate(old))

    def rewritten(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        return _ResizedBody(self, jaxpr).made()


class _ResizedBody(SubstitutedBody):
    """One body while its blocks are resized."""

    owner: BodyResizing

    def __init__(self, owner: BodyResizing, jaxpr: AnyJaxpr) -> None:
        super().__init__(owner, jaxpr)
        #: The variables that are the step along an axis, and the number of its last step.
        self._steps: dict[Var, tuple[int, int]] = {}

    def _variable(self, var: Var) -> Var:
        shape = self.owner.shape(var)
        if shape == value_shape(var):
            return var
        aval = var.aval
        if isinstance(aval, AbstractRef):
            aval = aval.update(inner_aval=aval.inner_aval.update(shape=shape))
        else:
            aval = aval.update(shape=shape)
        new = jaxcompat.DropVar(aval) if type(var) is jaxcompat.DropVar else Var(aval)
        self.env[var] = new
        return new

    def equation(self, eqn: JaxprEqn) -> JaxprEqn | None:
        name = eqn.primitive.name
        new = super().equation(eqn)
        assert new is not None
        if name == "program_id":
            axis = eqn.params["axis"]
            if axis in self.owner.last:
                self._steps[eqn.outvars[0]] = self.owner.last[axis]
            if self.owner.new_axes:
                params = {**eqn.params, "axis": axis + self.owner.new_axes}
                return new.replace(params=params)
            return new
        if name == "num_programs" and self.owner.new_axes:
            return new.replace(
                params={**eqn.params, "axis": eqn.params["axis"] + self.owner.new_axes}
            )
        for var in variables(eqn.invars):
            if var in self._steps:
                return _with_last(new, *self._steps[var])
        resize = resizing_rules.get(name)
        return new if new is eqn or resize is None else resize(new)


def _with_last(eqn: JaxprEqn, old: int, new: int) -> JaxprEqn:
    """Return a comparison with the last step along an axis that has another number of steps."""
    operands = [
        jaxcompat.as_literal(np.asarray(new, atom.aval.dtype), atom.aval)
        if isinstance(atom, Literal) and int(atom.val) == old
        else atom
        for atom in eqn.invars
    ]
    return eqn.replace(invars=operands)


#: Return an equation whose types have changed with sizes in its parameters that fit.
resizing_rules: RuleTable[Callable[[JaxprEqn], JaxprEqn]] = RuleTable()


@rule(resizing_rules, "broadcast_in_dim", "iota")
def _resized_shape(eqn: JaxprEqn) -> JaxprEqn:
    return eqn.replace(params={**eqn.params, "shape": value_shape(eqn.outvars[0])})


@rule(resizing_rules, "reshape")
def _resized_reshape(eqn: JaxprEqn) -> JaxprEqn:
    return eqn.replace(params={**eqn.params, "new_sizes": value_shape(eqn.outvars[0])})


@rule(resizing_rules, "get", "swap", "addupdate")
def _resized_access(eqn: JaxprEqn) -> JaxprEqn:
    """Return a load or store whose whole slices have the sizes of its Ref."""
    shape = value_shape(eqn.invars[0])
    transforms = transforms_of(eqn)
    if not transforms:
        return eqn
    (indexer,) = transforms
    indices = tuple(
        replace(index, size=size)
        if isinstance(index, jaxcompat.IndexSlice) and is_whole_slice(index, old)
        else index
        for index, old, size in zip(indexer.indices, indexer.shape, shape, strict=True)
    )
    tree = jax.tree.structure((replace(indexer, indices=indices, shape=shape),))
    return eqn.replace(params={**eqn.params, "tree": tree})


@rule(resizing_rules, "slice")
def _resized_slice(eqn: JaxprEqn) -> JaxprEqn:
    """Return a slice that has all of the dimensions that are resized."""
    sizes, result = value_shape(eqn.invars[0]), value_shape(eqn.outvars[0])
    limits = [
        n if n == result[d] else limit
        for d, (n, limit) in enumerate(zip(sizes, eqn.params["limit_indices"], strict=True))
    ]
    return eqn.replace(params={**eqn.params, "limit_indices": tuple(limits)})
