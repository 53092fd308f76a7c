"""The interpreter: evaluate a jaxpr by equation, exactly with NumPy, and with checks.

XLA compiles the body of a loop as a whole and fuses its equations, so that a result depends on the
other equations. Here loops and branches run in Python: each equation runs as a kernel of its own,
and its result depends only on its operands, to the last bit. Subclasses of `Interpreter` override
the hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.ir.backends import JaxprCache
from jaxprtool.ir.dtypes import dtype_kind, is_extended, is_foreign
from jaxprtool.ir.regions import Call, Cond, CustomJVP, Scan, While, view
from jaxprtool.ir.traits import nondefault_options
from jaxprtool.jaxcompat import Atom, Aval, ClosedJaxpr, JaxprEqn, Literal, Var

# --- interpret ------------------------------------------------------------------------------------
# The interpreter: evaluate a jaxpr one first-order equation at a time, at every depth.


class LoopOperands(NamedTuple):
    """The operands of a loop by role.

    Attributes:
        cond_consts: The constants of a while loop's condition.
        consts: The loop-invariant operands of the body.
        carry: The initial carry.
        xs: The operands of a scan that each iteration reads a slice of.
    """

    cond_consts: list[Any]
    consts: list[Any]
    carry: list[Any]
    xs: list[Any]

    @classmethod
    def of(cls, loop: Scan | While, operands: Iterable[Any]) -> LoopOperands:
        """Return the operands of a loop, by role."""
        if isinstance(loop, Scan):
            first, second, third = 0, len(loop.consts), len(loop.carry)
        else:
            first, second, third = map(len, (loop.cond_consts, loop.body_consts, loop.carry))
        values = iter(operands)
        cond_consts, consts, carry = (list(islice(values, n)) for n in (first, second, third))
        return cls(cond_consts, consts, carry, list(values))


def slice_number(loop: Scan | While, iteration: Any) -> Any:
    """Return the index of the slice that an iteration reads, or the iteration of a while loop."""
    if isinstance(loop, Scan) and loop.reverse:
        return loop.length - 1 - iteration
    return iteration


def evaluate(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Return the results of a closed jaxpr. Rules of custom derivatives are ignored."""
    return Interpreter().run(closed, args)


class Interpreter:
    """Evaluates jaxprs on arrays."""

    # --- hooks ------------------------------------------------------------------------------------

    def constant(self, value: object, aval: Aval) -> Any:
        """Return the value of a literal, or of a constant of a jaxpr."""
        return value

    def concrete(self, value: Any) -> Any:
        """Return the scalar that selects a branch, or the predicate of a loop."""
        return value

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        """Return the results of a first-order equation, or of one without a structured view."""
        return bind(eqn, operands)

    def row(self, value: Any, i: int) -> Any:
        """Return the slice of a scanned operand that iteration `i` reads."""
        return row_of(value, i)

    def stack(self, rows: Sequence[Any], var: Var) -> Any:
        """Stack the values of the iterations of a scan as its result `var`."""
        if not rows:
            return _no_rows(var)
        if not is_foreign(var.aval.dtype):
            return jnp.stack(rows)
        return jax.lax.concatenate([jax.lax.expand_dims(row, (0,)) for row in rows], 0)

    def enter(self, body: ClosedJaxpr, operands: list[Any], predicate: Any = None) -> list[Any]:
        """Return the results of a body. It runs because of the value of `predicate`, if given."""
        return self.run(body, operands)

    def selected(self, values: list[Any], predicate: Any) -> list[Any]:
        """Return the results of a branch or a loop, which `predicate` selected."""
        return values

    # --- evaluation -------------------------------------------------------------------------------

    def run(self, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        """Return the results of a closed jaxpr."""
        env: dict[Var, Any] = dict(zip(closed.invars, args, strict=True))
        for var, value in zip(closed.constvars, closed.consts, strict=True):
            env[var] = self.constant(value, var.aval)

        def read(atom: Atom) -> Any:
            return self.constant(atom.val, atom.aval) if isinstance(atom, Literal) else env[atom]

        for eqn, dead in zip(closed.eqns, _last_read(closed), strict=True):
            with eqn.ctx.manager:
                results = self.equation(eqn, [read(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
            for var in dead:
                del env[var]
        return [read(atom) for atom in closed.outvars]

    def equation(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        """Return the results of one equation, running the bodies of loops, branches and calls."""
        match view(eqn):
            case Scan() as scan if isinstance(scan.length, int):
                return self.scan(scan, operands)
            case While() as loop if loop.cond.outvars[0].aval.shape == ():
                return self.while_loop(loop, operands)
            case Cond() as cond:
                return self.branch(cond, operands)
            case Call() | CustomJVP() as call:
                return self.enter(call.body, operands)
        return self.evaluate(eqn, operands)

    def branch(self, cond: Cond, operands: list[Any]) -> list[Any]:
        """Return the results of a `cond`."""
        taken = branch_of(cond, self.concrete(operands[0]))
        return self.selected(self.enter(taken, operands[1:], operands[0]), operands[0])

    def scan(self, scan: Scan, operands: list[Any]) -> list[Any]:
        """Return the results of a scan."""
        _, consts, carry, xs = LoopOperands.of(scan, operands)
        slices = []
        for i in range(scan.length):
            rows = [self.row(x, slice_number(scan, i)) for x in xs]
            outs = self.enter(scan.body, [*consts, *carry, *rows])
            carry, ys = outs[: len(carry)], outs[len(carry) :]
            slices.append(ys)
        if scan.reverse:
            slices.reverse()
        stacks = zip(*slices, strict=True) if slices else [()] * len(scan.ys)
        pairs = zip(stacks, scan.ys, strict=True)
        return [*carry, *(self.stack(rows, var) for rows, var in pairs)]

    def while_loop(self, loop: While, operands: list[Any]) -> list[Any]:
        """Return the results of a while loop."""
        cond_consts, consts, carry, _ = LoopOperands.of(loop, operands)
        while True:
            (more,) = self.enter(loop.cond, [*cond_consts, *carry])
            if not self.concrete(more):
                return self.selected(carry, more)
            carry = self.enter(loop.body, [*consts, *carry], more)


_last_reads = JaxprCache()


def _last_read(closed: ClosedJaxpr) -> list[list[Var]]:
    """Return, for each equation of a jaxpr, the variables that it is the last to read."""
    cached = _last_reads.of(closed)
    if "last" not in cached:
        live = {v for v in closed.outvars if type(v) is not Literal}
        reads: list[list[Var]] = []
        for eqn in reversed(closed.eqns):
            here = dict.fromkeys(v for v in (*eqn.invars, *eqn.outvars) if type(v) is not Literal)
            reads.append([v for v in here if v not in live])
            live.update(here)
        cached["last"] = reads[::-1]
    return cached["last"]  # type: ignore[no-any-return]


def bind(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """Return the results of an equation on arrays, run by JAX as a single operation."""
    eqn = jaxcompat.equation_for_jax(eqn)
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    if not eqn.primitive.multiple_results:
        results = [results]
    # Another package's primitive may return its operand, which may be a literal.
    return [jnp.asarray(x) if isinstance(x, int | float | complex) else x for x in results]


def branch_of(cond: Cond, index: Any) -> Any:
    """Return the branch that an index selects. Like XLA, take the last for an invalid index."""
    number = int(index)
    return cond.branches[number if 0 <= number < len(cond.branches) else -1]


def row_of(stack: Any, i: int) -> Any:
    """Return the slice at one index of the first axis."""
    # Arrays of another package's elements need not support NumPy's indexing.
    foreign = is_foreign(stack.dtype)
    return jax.lax.dynamic_index_in_dim(stack, i, keepdims=False) if foreign else stack[i]


def _no_rows(var: Var) -> Any:
    """Return an empty stack."""
    aval = var.aval
    if not is_extended(aval.dtype):
        return jnp.zeros(aval.shape, aval.dtype)
    element = jaxcompat.physical_element(aval.dtype)
    zeros = jnp.zeros((*aval.shape, *element.shape), element.dtype)
    return jaxcompat.logical_array(zeros, aval=aval)


# --- exact numpy ----------------------------------------------------------------------------------
# Evaluate with NumPy the equations whose bits are the same on every backend.
#
# These equations only move data, compute with integers, or use float operations that IEEE 754
# prescribes to the bit. A backend would first have to compile a kernel for each. No rule here knows
# an option of a primitive, such as `out_dtype`: an equation with one is left to the backend.

#: Returns an equation's result by NumPy, or None if a backend might compute other bits.
Evaluation = Callable[..., np.ndarray | None]


def numeric_rule(kinds: str, function: Callable[..., Any], any_nan: bool = False) -> Evaluation:
    """Return a rule for dtypes of these kinds. Integers are computed in their own type, and wrap.

    Floats must have 32 or 64 bits, where IEEE 754 prescribes the bits. They must not be subnormal,
    which a backend may flush to 0, or NaN, whose bits it does not prescribe; with `any_nan`, a NaN
    may have other bits.
    """

    def rule(eqn: JaxprEqn, *operands: np.ndarray) -> np.ndarray | None:
        if any(dtype_kind(x.dtype) not in kinds for x in operands):
            return None
        with np.errstate(all="ignore"):
            result = np.asarray(function(*operands), eqn.outvars[0].aval.dtype)
        return result if all(is_prescribed(x, any_nan) for x in (*operands, result)) else None

    return rule


def is_prescribed(x: np.ndarray, any_nan: bool = False) -> bool:
    """Return True if IEEE 754 prescribes the bits of these values; see `numeric_rule`."""
    if x.dtype.kind != "f":
        return True
    if x.dtype.itemsize not in (4, 8) or not (any_nan or not np.isnan(x).any()):
        return False
    return not ((x != 0) & (np.abs(x) < np.finfo(x.dtype).tiny)).any()


def _divide(eqn: JaxprEqn, x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    """Return the quotient by powers of two, which is exact on every backend."""
    is_power = y.dtype.kind == "f" and (np.abs(np.frexp(y)[0]) == 0.5).all()
    return numeric_rule("f", np.divide)(eqn, x, y) if is_power else None


def _convert(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray | None:
    """Convert integers, rounding to nearest, or floats that are exact integers to integers."""
    target = eqn.outvars[0].aval.dtype
    if x.dtype.kind == "f":
        fits = target.kind in "iu" and is_prescribed(x) and (x == np.clip(x, *_range(target))).all()
        return x.astype(target) if fits else None
    if x.dtype.kind not in "biu" or not (target.kind in "iu" or target in (np.float32, np.float64)):
        return None
    return x.astype(target)


def _range(dtype: np.dtype) -> tuple[int, int]:
    """Return the largest range of integers of a type that f32 represents exactly."""
    bounds = np.iinfo(dtype)
    return max(bounds.min, -(2**24)), min(bounds.max, 2**24)


def _broadcast(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray | None:
    shape, at = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    new = tuple(axis for axis in range(len(shape)) if axis not in at)
    return np.broadcast_to(np.expand_dims(x, new), shape)


def _iota(eqn: JaxprEqn) -> np.ndarray | None:
    shape, axis = eqn.params["shape"], eqn.params["dimension"]
    dtype = eqn.outvars[0].aval.dtype
    if dtype.kind not in "iu" and dtype not in (np.float32, np.float64):
        return None
    row = np.arange(shape[axis]).astype(dtype)
    others = tuple(i for i in range(len(shape)) if i != axis)
    return np.broadcast_to(np.expand_dims(row, others), shape)


def _select(eqn: JaxprEqn, which: np.ndarray, *cases: np.ndarray) -> np.ndarray | None:
    return np.where(which, cases[1], cases[0]) if which.dtype == bool and len(cases) == 2 else None


def _slice(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray | None:
    p = eqn.params
    strides = p["strides"] or (1,) * x.ndim
    bounds = zip(p["start_indices"], p["limit_indices"], strides, strict=True)
    return x[tuple(slice(*bound) for bound in bounds)]


def _reshape(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray:
    return x.reshape(eqn.outvars[0].aval.shape)


def without_options(rule: Evaluation) -> Evaluation:
    """Return a rule that leaves equations with options to the backend."""

    def plain(eqn: JaxprEqn, *operands: np.ndarray) -> np.ndarray | None:
        return None if nondefault_options(eqn) else rule(eqn, *operands)

    return plain


#: The kinds of dtypes and the function of primitives that NumPy computes.
NUMERIC: dict[str, tuple[str, np.ufunc]] = {
    "add": ("iuf", np.add),
    "sub": ("iuf", np.subtract),
    "mul": ("iuf", np.multiply),
    "neg": ("if", np.negative),
    "abs": ("if", np.abs),
    "floor": ("f", np.floor),
    "ceil": ("f", np.ceil),
    "max": ("biu", np.maximum),
    "min": ("biu", np.minimum),
    "and": ("biu", np.bitwise_and),
    "or": ("biu", np.bitwise_or),
    "xor": ("biu", np.bitwise_xor),
    "not": ("biu", np.invert),
    "eq": ("biuf", np.equal),
    "ne": ("biuf", np.not_equal),
    "lt": ("biuf", np.less),
    "le": ("biuf", np.less_equal),
    "gt": ("biuf", np.greater),
    "ge": ("biuf", np.greater_equal),
}

_RULES: dict[str, Evaluation] = {
    **{name: numeric_rule(*row) for name, row in NUMERIC.items()},
    "div": _divide,
    "convert_element_type": _convert,
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "select_n": _select,
    "slice": _slice,
    "reshape": _reshape,
    "squeeze": _reshape,
    "transpose": lambda eqn, x: x.transpose(eqn.params["permutation"]),
    "copy": lambda eqn, x: x,
    "rev": lambda eqn, x: np.flip(x, eqn.params["dimensions"]),
    "concatenate": lambda eqn, *xs: np.concatenate(xs, eqn.params["dimension"]),
}

#: Rules by primitive.
RULES = {name: without_options(rule) for name, rule in _RULES.items()}


def evaluate_exactly(
    eqn: JaxprEqn, operands: Sequence[np.ndarray], rules: Mapping[str, Evaluation] = RULES
) -> np.ndarray | None:
    """Return the result of an equation, or None if a backend might compute other bits."""
    rule = rules.get(eqn.primitive.name)
    result = None if rule is None else rule(eqn, *operands)
    return None if result is None else np.array(result, order="C")


# --- nonfinite ------------------------------------------------------------------------------------
# The checks of `jax_debug_nans` and `jax_debug_infs`: NaNs and infinities in results are errors.
#
# JAX checks the results of a jitted function and then runs it again, operation by operation, to
# find the source of the NaN. A jaxpr does not state where the function turned these checks off, so
# a program is checked in the same way: its results first, and only then its equations.


@contextmanager
def checks_disabled() -> Iterator[None]:
    """Disable JAX's own checks, which also raise for a NaN that no result depends on."""
    with jax.debug_nans(False), jax.debug_infs(False):
        yield


@dataclass(frozen=True)
class FiniteCheck:
    """The values that are forbidden in results."""

    nans: bool
    infs: bool

    @classmethod
    def from_config(cls) -> FiniteCheck:
        """Return the check that JAX's configuration currently requests."""
        return cls(jax.config.jax_debug_nans, jax.config.jax_debug_infs)

    def fault(self, value: object) -> str | None:
        """Describe the forbidden elements of a value, or of a Ref's contents; None if none."""
        if isinstance(value, jax.core.Tracer) or not hasattr(value, "dtype"):
            return None
        if isinstance(value, jax.Ref):
            value = value[...]
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            return None
        # Also while JAX traces a function around this.
        with checks_disabled(), jax.ensure_compile_time_eval():
            if self.nans and bool(jnp.isnan(value).any()):
                return "a NaN"
            return "an infinity" if self.infs and bool(jnp.isinf(value).any()) else None
