"""Simplify equations whose indices become constants once sizes are known.

For an array with symbolic sizes, JAX traces `x[1:]` to a `gather`, and `x[-1]` to a
`dynamic_slice`, at indices computed from the size. These become the `slice` that JAX traces for
known sizes, and the equations of the indices are removed if nothing else reads them. Likewise
`jnp.arange` becomes a single `iota`, and the grid of a Pallas kernel, whose symbolic sizes are
operands, becomes a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.extend.core import primitives
from jax.lax import GatherScatterMode

from jaxprtool.ir.core.equations import needed_equations, substitute, variables, with_operands
from jaxprtool.ir.dataflow.def_use import DefUse
from jaxprtool.ir.evaluation.exact_numpy import RULES, Evaluation
from jaxprtool.jaxcompat import Atom, JaxprEqn, Literal, Var

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
    known = _IndexEvaluator(eqns)
    written: list[JaxprEqn] = []
    same: dict[Var, Atom] = {}

    for eqn in eqns:
        eqn = with_operands(eqn, same)
        rule = _RULES.get(eqn.primitive.name)
        made = rule(eqn, known) if rule and changed(eqn) else None
        if isinstance(made, Var):
            same[eqn.outvars[0]] = made
        else:
            written += [eqn] if made is None else made
    results = substitute(results, same)
    return _without(known.read, written, results) if known.read else written, results


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
        found = [self._value(atom) for atom in atoms]
        if any(value is None for value in found):
            return None
        todo = variables(atoms)
        while todo:
            var = todo.pop()
            if var not in self.read:
                self.read.add(var)
                eqn = self._defined.equation(var)
                todo += [] if eqn is None else variables(eqn.invars)
        return found  # type: ignore[return-value]

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
            known = (self._known(each) for each in eqn.invars)
            operands = [value for value in known if value is not None]
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


def _dynamic_slice(eqn: JaxprEqn, known: _IndexEvaluator) -> list[JaxprEqn] | Var | None:
    x, *indices = eqn.invars
    # Literal indices come from the user's own `lax.dynamic_slice`, which JAX keeps.
    if not _are_numbers(x.aval.shape) or all(type(index) is Literal for index in indices):
        return None
    found = known.values(indices)
    if found is None:
        return None
    sizes = eqn.params["slice_sizes"]
    pairs = zip(found, x.aval.shape, sizes, strict=True)
    starts = [min(max(int(start), 0), whole - size) for start, whole, size in pairs]
    return _cut(eqn, starts, sizes)


def _gather(eqn: JaxprEqn, known: _IndexEvaluator) -> list[JaxprEqn] | Var | None:
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    x, indices = eqn.invars
    shape, sizes, mapped = x.aval.shape, list(params["slice_sizes"]), numbers.start_index_map
    static = params["mode"] == GatherScatterMode.PROMISE_IN_BOUNDS and _are_numbers(shape)
    if not static or numbers.operand_batching_dims:
        return None
    found = known.values([indices])
    if found is None:
        return None
    starts, strides, dropped = [0] * len(shape), [1] * len(shape), numbers.collapsed_slice_dims
    if found[0].ndim == 1:
        for dim, start in zip(mapped, found[0], strict=True):
            starts[dim] = int(start)
        kept = tuple(range(len(shape) - len(dropped)))
    elif found[0].ndim == 2 and found[0].shape[1] == 1 and mapped == dropped:
        (dim,), rows = mapped, found[0][:, 0]
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

    def rule(eqn: JaxprEqn, known: _IndexEvaluator) -> Var | None:
        number, x = eqn.invars
        if type(number) is not Literal or number.val != neutral or x.aval != eqn.outvars[0].aval:
            return None
        return x if known.made_by(x, "iota") else None

    return rule


def _grid(eqn: JaxprEqn, known: _IndexEvaluator) -> list[JaxprEqn] | None:
    """Move the sizes of a Pallas grid, once known, from the first operands to the parameter."""
    mapping = eqn.params["grid_mapping"]
    count = mapping.num_dynamic_grid_bounds
    sizes = known.values(eqn.invars[:count])
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
