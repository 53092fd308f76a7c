"""The known values of a program: what is computed of literals and constants alone.

Equations are computed one at a time, as the default backend does, each when its value is asked for
and once for all that are equal. Those that only move data, compute with integers, or with floats
what IEEE 754 prescribes to the bit, are left to NumPy: a backend would first have to compile a
kernel for each.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.ir.dtypes import itemsize, kind
from jaxprtool.ir.nonfinite import unchecked
from jaxprtool.ir.structural_key import UNREPEATABLE, Keyless, literal_key, parameters_key
from jaxprtool.ir.structured import Call, Cond, CustomJVP, Scan, holds_jaxpr, view
from jaxprtool.jaxcompat import Atom, JaxprEqn, Literal, Var

#: Primitives that are not computed here though they have no effect: those that depend on where
#: they run, whose code is not JAX's, or that say something of a value besides what it is.
_NEVER: frozenset[str] = UNREPEATABLE | {
    *("platform_index", "axis_index", "dim_as_value", "dimension_size", "shape_assertion"),
    *("ffi_call", "call_exported", "custom_partitioning", "composite", "pallas_call"),
    *("linear_call", "custom_lin", "call_hi_primitive_linearized"),
    *("sharding_constraint", "layout_constraint", "relayout", "reshard", "name", "shard_map"),
    *("with_memory_space_constraint", "inspect_sharding", "pvary", "while", "run_state"),
}

#: What an equation that holds jaxprs may come to, in equations of theirs.
_MOST_STEPS = 1000

#: What a known value goes by: the number of its equation, and which of the results it is.
Number = tuple[int, int]


class Values:
    """The known values of a program, each computed when it is first asked for."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._numbers: dict[Hashable, int] = {}
        self._made: dict[int, tuple[JaxprEqn, list[Number]]] = {}
        self._results: dict[int, Sequence[Any] | None] = {}
        self._plain_settings: dict[Any, bool] = {}

    def of_atom(self, atom: Atom, known: dict[Var, Number]) -> Number | None:
        """The number of a literal, or of a variable that is known."""
        if type(atom) is not Literal:
            return known.get(atom)
        return self._given(literal_key(atom), np.asarray(atom.val).astype(atom.aval.dtype))

    def of_constant(self, value: Any) -> Number | None:
        """The number of a constant's value; None if it is not to be computed with."""
        if isinstance(value, jax.core.Tracer) or not isinstance(value, np.ndarray | jax.Array):
            return None
        if isinstance(value, jax.Array) and (value.committed or not value.is_fully_addressable):
            return None
        return self._given(id(value), value) if size_of(value) <= self._largest else None

    def _given(self, key: Hashable, value: Any) -> Number:
        number = self._numbers.setdefault(key, len(self._numbers))
        self._results.setdefault(number, [value])
        return number, 0

    def follow(self, eqns: Sequence[JaxprEqn], known: dict[Var, Number]) -> list[JaxprEqn]:
        """Those of the equations whose results are known; puts these into `known`."""
        found = []
        for eqn in eqns:
            for atom in eqn.invars:
                if type(atom) is not Literal and atom not in known:
                    break
            else:
                if (number := self._of_equation(eqn, known)) is not None:
                    known.update((v, (number, i)) for i, v in enumerate(eqn.outvars))
                    found.append(eqn)
        return found

    def _of_equation(self, eqn: JaxprEqn, known: dict[Var, Number]) -> int | None:
        if eqn.effects or eqn.primitive.name in _NEVER or not self._is_plain(eqn):
            return None
        if not eqn.outvars:
            return None  # there is nothing to know; dce takes it away
        try:
            key, held = parameters_key(eqn)
        except Keyless:
            return None
        if held and not all(body.repeatable for body in held):
            return None
        if held and self._steps(eqn) > _MOST_STEPS:
            return None
        numbers = (self.of_atom(atom, known) for atom in eqn.invars)
        operands = [number for number in numbers if number is not None]
        whole = eqn.primitive, key, eqn.ctx, *operands
        number = self._numbers.setdefault(whole, len(self._numbers))
        self._made.setdefault(number, (eqn, operands))
        return number

    def _is_plain(self, eqn: JaxprEqn) -> bool:
        """Whether there is nothing special about where an equation runs, and its results' types."""
        if eqn.ctx not in self._plain_settings:
            settings = jaxcompat.context_settings(eqn.ctx)
            self._plain_settings[eqn.ctx] = all(
                name == "threefry_partitionable" or value == jaxcompat.CONTEXT_DEFAULTS[name]
                for name, value in settings.items()
            )
        return self._plain_settings[eqn.ctx] and all(
            is_plain_type(v.aval) and size_of(v.aval) <= self._largest for v in eqn.outvars
        )

    def _steps(self, eqn: JaxprEqn) -> float:
        """How many equations are computed for one; no end if one of them is not to be."""
        if eqn.primitive.name in _NEVER or not self._is_plain(eqn):
            return float("inf")
        structured = view(eqn)
        match structured:
            case Scan() if type(structured.length) is int:
                return structured.length * sum(map(self._steps, structured.body.eqns))
            case Cond():
                return max(sum(map(self._steps, branch.eqns)) for branch in structured.branches)
            case Call() | CustomJVP():
                return sum(map(self._steps, structured.body.eqns))
            case None if not holds_jaxpr(eqn.params.values()) or eqn.primitive.name == "reduce":
                return 1
        return float("inf")

    def value(self, number: Number) -> Any:
        """A known value; None if the backend does not compute it."""
        todo = [number[0]]
        with _computing():
            while todo:
                if todo[-1] in self._results:
                    todo.pop()
                    continue
                eqn, operands = self._made[todo[-1]]
                missing = [n for n, _ in operands if n not in self._results]
                if missing:
                    todo += missing
                    continue
                self._results[todo.pop()] = self._computed(eqn, operands)
        results = self._results[number[0]]
        return None if results is None else results[number[1]]

    def _computed(self, eqn: JaxprEqn, operands: Sequence[Number]) -> Sequence[Any] | None:
        values = []
        for number, i in operands:
            results = self._results[number]
            if results is None:
                return None
            values.append(results[i])
        try:
            results = [_at_home(value) for value in _run(eqn, list(map(_at_home, values)))]
        except Exception:  # whatever a backend, or a plug-in's rule, has against it
            return None
        types = [(value.shape, value.dtype) for value in results]
        return results if types == [(v.aval.shape, v.aval.dtype) for v in eqn.outvars] else None


def size_of(array: Any) -> int:
    """The size of an array, or of one of such a type."""
    return int(np.prod(array.shape, dtype=np.int64)) * itemsize(array.dtype)


def is_plain_type(aval: Any) -> bool:
    """Whether a type is that of an array, of which nothing is said but dtype and shape."""
    return (
        isinstance(aval, jax.core.ShapedArray)
        and all(type(size) is int for size in aval.shape)
        and aval.dtype != jax.dtypes.float0
        and aval.sharding.mesh.empty
        and aval.memory_space == jax.memory.Space.Device
        and not jaxcompat.varying_axes(aval)
    )


# --- computing --------------------------------------------------------------------------------


@contextmanager
def _computing() -> Iterator[None]:
    """Run what is bound, whatever is being traced, and let NaNs, infinities and transfers be."""
    with jax.ensure_compile_time_eval(), unchecked(), jax.transfer_guard("allow"):
        yield


def _at_home(value: Any) -> Any:
    """A result as an array of NumPy; random keys stay JAX's."""
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        return value
    return np.asarray(value)


def _run(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """The results of one equation, those of a loop, branch or call step by step."""
    structured = view(eqn)
    match structured:
        case Scan():
            return _run_scan(structured, operands)
        case Cond():
            return _run_body(structured.branches[clamped(operands[0], structured)], operands[1:])
        case Call() | CustomJVP():
            return _run_body(structured.body, operands)
    simple = _SIMPLE.get(eqn.primitive.name)
    if simple is not None and all(isinstance(x, np.ndarray) for x in operands):
        made = simple(eqn, *operands)
        if made is not None:
            return [np.array(made, order="C")]
    wide = any(itemsize(atom.aval.dtype) >= 8 for atom in (*eqn.invars, *eqn.outvars))
    with jaxcompat.setting_of(eqn), jax.enable_x64(True) if wide else nullcontext():
        params = eqn.primitive.get_bind_params(eqn.params)
        results = eqn.primitive.bind(*operands, **params)
    return results if eqn.primitive.multiple_results else [results]


def _run_body(body: Any, operands: Sequence[Any]) -> Sequence[Any]:
    values = dict(zip(body.constvars, body.consts, strict=True))
    values.update(zip(body.invars, operands, strict=True))

    def read(atom: Atom) -> Any:
        return np.asarray(atom.val, atom.aval.dtype) if type(atom) is Literal else values[atom]

    for eqn in body.eqns:
        values.update(zip(eqn.outvars, _run(eqn, list(map(read, eqn.invars))), strict=True))
    return list(map(read, body.outvars))


def _run_scan(scan: Scan, operands: Sequence[Any]) -> Sequence[Any]:
    n, k = len(scan.consts), len(scan.consts) + len(scan.carry)
    consts, carry, xs = operands[:n], operands[n:k], operands[k:]
    rows: list[Sequence[Any]] = []
    for i in reversed(range(scan.length)) if scan.reverse else range(scan.length):
        outs = _run_body(scan.body, [*consts, *carry, *(x[i] for x in xs)])
        carry = outs[: k - n]
        rows.append(outs[k - n :])
    if scan.reverse:
        rows.reverse()
    return [*carry, *(jax.numpy.stack(column) for column in zip(*rows, strict=True))]


def clamped(index: Any, cond: Cond) -> int:
    """The number of the branch that an index takes: the nearest that there is."""
    return min(max(int(index), 0), len(cond.branches) - 1)


# --- what has the same bits anywhere ----------------------------------------------------------


def _on(kinds: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A rule for dtypes of these kinds. Integers are computed in their own type, and wrap around.

    Of floats there are those of 32 and 64 bits, for what IEEE 754 prescribes to the bit; not with
    a NaN, whose bits it does not, nor with a subnormal number, which a backend may take for 0.
    """

    def rule(eqn: JaxprEqn, *operands: np.ndarray) -> Any:
        if any(kind(x.dtype) not in kinds for x in operands):
            return None
        with np.errstate(all="ignore"):
            result = np.asarray(function(*operands), eqn.outvars[0].aval.dtype)
        return result if all(map(_is_prescribed, (*operands, result))) else None

    return rule


def _is_prescribed(x: np.ndarray) -> bool:
    if x.dtype.kind != "f":
        return True
    if x.dtype.itemsize not in (4, 8) or np.isnan(x).any():
        return False
    return not ((x != 0) & (np.abs(x) < np.finfo(x.dtype).tiny)).any()


def _convert(eqn: JaxprEqn, x: np.ndarray) -> Any:
    """A conversion of integers, rounded to the nearest; or of floats that fit, to integers."""
    target = eqn.outvars[0].aval.dtype
    if x.dtype.kind == "f":
        fits = (
            target.kind in "iu" and _is_prescribed(x) and (x == np.clip(x, *_range(target))).all()
        )
        return x.astype(target) if fits else None
    if x.dtype.kind not in "biu" or not (target.kind in "iu" or target in (np.float32, np.float64)):
        return None
    return x.astype(target)


def _range(dtype: np.dtype) -> tuple[int, int]:
    """Integers of this type that floats hold exactly, and all between them."""
    bounds = np.iinfo(dtype)
    return max(bounds.min, -(2**24)), min(bounds.max, 2**24)


def _broadcast(eqn: JaxprEqn, x: np.ndarray) -> Any:
    shape, at = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    sizes = [1] * len(shape)
    for size, axis in zip(x.shape, at, strict=True):
        sizes[axis] = size
    return np.broadcast_to(x.reshape(sizes), shape)


def _iota(eqn: JaxprEqn) -> Any:
    shape, axis = eqn.params["shape"], eqn.params["dimension"]
    dtype = eqn.outvars[0].aval.dtype
    if dtype.kind not in "iu" and dtype not in (np.float32, np.float64):
        return None
    sizes = [size if i == axis else 1 for i, size in enumerate(shape)]
    row = np.arange(shape[axis]).astype(dtype)
    return np.broadcast_to(row.reshape(sizes), shape)


def _select(eqn: JaxprEqn, which: np.ndarray, *cases: np.ndarray) -> Any:
    return np.where(which, cases[1], cases[0]) if which.dtype == bool and len(cases) == 2 else None


def _slice(eqn: JaxprEqn, x: np.ndarray) -> Any:
    p = eqn.params
    strides = p["strides"] or (1,) * x.ndim
    bounds = zip(p["start_indices"], p["limit_indices"], strides, strict=True)
    return x[tuple(slice(*each) for each in bounds)]


def _reshape(eqn: JaxprEqn, x: np.ndarray) -> Any:
    return x.reshape(eqn.outvars[0].aval.shape) if eqn.params.get("dimensions") is None else None


#: By primitive: what NumPy makes of the operands, or None where that is not sure to be the same.
_SIMPLE: dict[str, Callable[..., Any]] = {
    "add": _on("iuf", np.add),
    "sub": _on("iuf", np.subtract),
    "mul": _on("iuf", np.multiply),
    "neg": _on("if", np.negative),
    "abs": _on("if", np.abs),
    "floor": _on("f", np.floor),
    "ceil": _on("f", np.ceil),
    "max": _on("biu", np.maximum),
    "min": _on("biu", np.minimum),
    "and": _on("biu", np.bitwise_and),
    "or": _on("biu", np.bitwise_or),
    "xor": _on("biu", np.bitwise_xor),
    "not": _on("biu", np.invert),
    "eq": _on("biuf", np.equal),
    "ne": _on("biuf", np.not_equal),
    "lt": _on("biuf", np.less),
    "le": _on("biuf", np.less_equal),
    "gt": _on("biuf", np.greater),
    "ge": _on("biuf", np.greater_equal),
    "convert_element_type": _convert,
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "select_n": _select,
    "slice": _slice,
    "reshape": _reshape,
    "squeeze": _reshape,
    "transpose": lambda eqn, x: x.transpose(eqn.params["permutation"]),
    "concatenate": lambda eqn, *xs: np.concatenate(xs, eqn.params["dimension"]),
}
