"""Programs for other sizes: their symbols are replaced by sizes.

For an array with symbolic sizes, JAX traces `x[1:]` to a `gather`, and `x[-1]` to a
`dynamic_slice`, at indices computed from the size. These become the `slice` that JAX traces for
known sizes, and the equations of the indices are removed if nothing else reads them. Likewise
`jnp.arange` becomes a single `iota`, and the grid of a Pallas kernel, whose symbolic sizes are
operands, becomes a parameter.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.extend.core import primitives
from jax.lax import GatherScatterMode

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
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
from jaxprtool.ir.substitution import SubstitutedBody, SubstitutedRule, Substitution
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
