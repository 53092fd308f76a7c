"""Constant folding: what does not depend on the program's arguments is computed once, here.

A *known* value is a literal, a constant of the body it is in, or the result of a pure equation of
known values. Where something else needs a known value, the value takes the place of the equations
that lead to it:

*   a scalar becomes a literal;
*   an array whose elements are all the same bits becomes a broadcast literal, which costs no bytes
    (if its equation has no other result);
*   another array becomes a constant of the body, if the program's constants do not grow by more
    than `max_bytes` in one run of the pass. What counts is the size of the new constants less that
    of constants that only they had a use for. An array that is equal to another costs once in each
    body.

An equation is left that only makes a big array of a small one (`iota`, and `broadcast_in_dim`): it
is as good as the constant, and smaller. Then its own operands are what is needed. So is one with a
value of more than 16 times `max_bytes` on the way, or with too much work in its loops.

Values are what the default backend computes, one equation at a time, each as a kernel of its own,
in the setting it was traced in; on another backend an `exp` may have another last bit. They become
arrays of NumPy, at home on no device. Constants on a device, under a mesh, or that are tracers
(while JAX traces around the pass) are left, and so are what has effects, random numbers that
differ from call to call, and calls of code that is not JAX's.

Control flow whose course is known is opened: a cond with a constant index becomes its branch, a
scan of no rounds its initial carry, a scan of one round its body (unless that takes more equations,
for slicing and stacking), and a while whose condition fails on the constants it starts with its
initial carry.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.ir.program import Program
from jaxprtool.ir.structural_key import UNREPEATABLE, Keyless, literal_key, parameters_key
from jaxprtool.ir.structured import (
    Call,
    Cond,
    CustomJVP,
    Scan,
    While,
    holds_jaxpr,
    keep,
    sub_jaxprs,
    view,
)
from jaxprtool.ir.writer import Rule, Writer, rewrite
from jaxprtool.jaxcompat import Atom, DropVar, JaxprEqn, Literal, Var
from jaxprtool.passes.base import Pass


@dataclass(frozen=True)
class Fold(Pass):
    """Compute constant expressions once, and open control flow whose course is constant."""

    name: ClassVar[str] = "fold"

    #: By how many bytes the program's constants may grow.
    max_bytes: int = 65536

    def __call__(self, program: Program) -> Program:
        jaxpr = fold_jaxpr(program.jaxpr, self.max_bytes)
        return program.replace(jaxpr=jaxpr) if jaxpr is not program.jaxpr else program


def fold_jaxpr(jaxpr: Any, max_bytes: int) -> Any:
    """A closed jaxpr with what is constant in it computed; itself if nothing is."""
    folding = _Folding(jaxpr, max_bytes)
    while True:
        folding.opened = False
        jaxpr = rewrite(jaxpr, folding.visit)
        if not folding.opened:
            return jaxpr


#: Primitives that are not computed here though they have no effect: those that depend on where
#: they run, whose code is not JAX's, or that say something of a value besides what it is.
_NEVER: frozenset[str] = UNREPEATABLE | {
    *("platform_index", "axis_index", "dim_as_value", "dimension_size", "shape_assertion"),
    *("ffi_call", "call_exported", "custom_partitioning", "composite", "pallas_call"),
    *("linear_call", "custom_lin", "call_hi_primitive", "call_hi_primitive_linearized"),
    *("sharding_constraint", "layout_constraint", "relayout", "reshard", "name", "shard_map"),
    *("with_memory_space_constraint", "inspect_sharding", "pvary", "while", "run_state"),
}

#: Primitives that make an array of little, and cost less than the array.
_EXPANDING: frozenset[str] = frozenset({"iota", "broadcast_in_dim"})

#: What an equation that holds jaxprs may come to, in equations of theirs.
_MOST_STEPS = 1000

#: What a known value goes by: the number of its equation, and which of the results it is.
Number = tuple[int, int]


class _Values:
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
        return self._given(id(value), value) if _bytes(value) <= self._largest else None

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
        try:
            key, held = parameters_key(eqn)
        except Keyless:
            return None
        if held and not (all(body.repeatable for body in held) and _steps(eqn) <= _MOST_STEPS):
            return None
        operands = [self.of_atom(atom, known) for atom in eqn.invars]
        if None in operands:
            return None
        whole = eqn.primitive, key, eqn.ctx, *operands
        number = self._numbers.setdefault(whole, len(self._numbers))
        self._made.setdefault(number, (eqn, operands))  # type: ignore[arg-type]
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
            _is_plain_type(v.aval) and _bytes(v.aval) <= self._largest for v in eqn.outvars
        )

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
        given = [self._results[n] for n, _ in operands]
        if None in [None if results is None else 0 for results in given]:
            return None
        values = [results[i] for results, (_, i) in zip(given, operands, strict=True) if results]
        try:
            results = [_at_home(value) for value in _run(eqn, values)]
        except Exception:  # whatever a backend, or a plug-in's rule, has against it
            return None
        types = [(value.shape, value.dtype) for value in results]
        return results if types == [(v.aval.shape, v.aval.dtype) for v in eqn.outvars] else None


def _bytes(array: Any) -> int:
    """The size of an array, or of one of such a type."""
    return int(np.prod(array.shape, dtype=np.int64)) * array.dtype.itemsize


def _is_plain_type(aval: Any) -> bool:
    """Whether a type is that of an array, of which nothing is said but dtype and shape."""
    return (
        isinstance(aval, jax.core.ShapedArray)
        and all(type(size) is int for size in aval.shape)
        and aval.dtype != jax.dtypes.float0
        and aval.sharding.mesh.empty
        and aval.memory_space == jax.memory.Space.Device
        and not jaxcompat.varying_axes(aval)
    )


def _steps(eqn: JaxprEqn) -> float:
    """How many equations are computed for one; no end for what is not followed into its bodies."""
    structured = view(eqn)
    match structured:
        case Scan():
            if type(structured.length) is not int:
                return float("inf")
            return structured.length * sum(map(_steps, structured.body.eqns))
        case Cond():
            return max(sum(map(_steps, branch.eqns)) for branch in structured.branches)
        case Call() | CustomJVP():
            return sum(map(_steps, structured.body.eqns))
        case None if not holds_jaxpr(eqn.params.values()):
            return float("inf") if eqn.primitive.name in _NEVER else 1
    return float("inf")


# --- computing --------------------------------------------------------------------------------


@contextmanager
def _computing() -> Iterator[None]:
    """Run what is bound, whatever is being traced, and let NaNs be."""
    with jax.ensure_compile_time_eval(), jax.debug_nans(False):
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
            return _run_body(structured.branches[_clamped(operands[0], structured)], operands[1:])
        case Call() | CustomJVP():
            return _run_body(structured.body, operands)
    wide = any(atom.aval.dtype.itemsize >= 8 for atom in (*eqn.invars, *eqn.outvars))
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


def _clamped(index: Any, cond: Cond) -> int:
    return min(max(int(index), 0), len(cond.branches) - 1)


# --- the pass ---------------------------------------------------------------------------------

#: Constants that this pass has made, by identity: what tells whether they live, and their price.
_prices: dict[int, tuple[Any, int]] = {}


def _price(value: Any) -> int:
    known = _prices.get(id(value))
    return known[1] if known is not None and known[0]() is value else 0


def _set_price(value: Any, price: int) -> None:
    number = id(value)
    _prices[number] = weakref.ref(value, lambda _: _prices.pop(number, None)), price


def _paid(jaxpr: Any, seen: set[Any]) -> int:
    """The prices of the constants of a jaxpr and of those in it."""
    seen.add(jaxpr)
    total = sum(map(_price, getattr(jaxpr, "consts", ())))
    for eqn in jaxpr.eqns:
        if holds_jaxpr(eqn.params.values()):
            total += sum(_paid(body, seen) for _, body in sub_jaxprs(eqn) if body not in seen)
    return total


@dataclass(frozen=True, eq=False)
class _Uniform:
    """An array all of whose elements are this scalar."""

    element: np.ndarray


class _Folding:
    """One run of the pass: the known values of the program, and the bytes that are left."""

    def __init__(self, jaxpr: Any, max_bytes: int) -> None:
        self._left = max_bytes - (_paid(jaxpr, set()) if _prices else 0)
        self._values = _Values(16 * max_bytes)
        #: Whether control flow has been opened, whose equations have not been looked at.
        self.opened = False

    def visit(self, writer: Writer) -> Rule:
        jaxpr = jaxcompat.open_jaxpr(writer.body)
        known: dict[Var, Number] = {}
        for var, value in writer.constant_values.items():
            number = self._values.of_constant(value) if _is_plain_type(var.aval) else None
            if number is not None:
                known[var] = number
        found = self._values.follow(jaxpr.eqns, known)
        values: dict[Var, Any] = {}
        if not all(eqn.primitive.name in _EXPANDING for eqn in found):
            values = self._needed_values(writer, known, found)

        def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
            if eqn.outvars and eqn.outvars[0] in values:
                return [_atom(writer, eqn, var, values[var]) for var in eqn.outvars]
            opener = _OPENERS.get(eqn.primitive.name)
            atoms = opener(writer, eqn, self._values) if opener is not None else None
            self.opened |= atoms is not None
            return atoms

        return rule

    def _needed_values(
        self, writer: Writer, known: dict[Var, Number], found: Sequence[JaxprEqn]
    ) -> dict[Var, Any]:
        """The results of the equations that go: of each its value, or None if nothing needs it."""
        jaxpr = jaxcompat.open_jaxpr(writer.body)
        freed = _freed(writer, found) if writer.constvars else {}
        folded, held = {id(eqn) for eqn in found}, set[Number]()
        needed = {v for v in jaxpr.outvars if type(v) is not Literal}
        values: dict[Var, Any] = {}
        for eqn in reversed(jaxpr.eqns):
            if id(eqn) in folded:
                wanted = {v: known[v] for v in eqn.outvars if v in needed}
                taken = self._taken(writer, eqn, wanted, freed.get(id(eqn), 0), held)
                if taken is not None:
                    values.update(dict.fromkeys(eqn.outvars))
                    values.update(taken)
                    continue
            needed.update(v for v in eqn.invars if type(v) is not Literal)
        if values and len(writer.consts) == len(writer.constvars):
            _drop_constants(writer, needed)
        return values

    def _taken(
        self,
        writer: Writer,
        eqn: JaxprEqn,
        wanted: dict[Var, Number],
        freed: int,
        held: set[Number],
    ) -> dict[Var, Any] | None:
        """The values of an equation's needed results; None if the equation is to stay."""
        arrays = {v: number for v, number in wanted.items() if v.aval.shape != ()}
        cost = sum(_bytes(v.aval) for v, number in arrays.items() if number not in held)
        if (arrays and _expands(eqn)) or cost - freed > self._left:
            return None
        if any(jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in wanted):
            return None
        values = {v: self._values.value(number) for v, number in wanted.items()}
        if any(value is None for value in values.values()):
            return None
        if arrays and len(eqn.outvars) == 1 and (uniform := _uniform(values[eqn.outvars[0]])):
            return {eqn.outvars[0]: uniform}
        if arrays and not writer.holds_constants:
            return None
        for i, (v, number) in enumerate(arrays.items()):
            if number not in held:
                _set_price(values[v], _bytes(v.aval) - (freed if i == 0 else 0))
        held.update(arrays.values())
        self._left -= cost - freed if cost else 0
        return values


def _drop_constants(writer: Writer, needed: set[Var]) -> None:
    """Drop the constants of a body that nothing needs any more."""
    flags = [v in needed for v in writer.constvars]
    for v, flag in zip(writer.constvars, flags, strict=True):
        if not flag:
            del writer.constant_values[v]
    writer.constvars[:] = keep(writer.constvars, flags)
    writer.consts[:] = keep(writer.consts, flags)


def _freed(writer: Writer, found: Sequence[JaxprEqn]) -> dict[int, int]:
    """The bytes of constants that nothing reads when an equation is gone, by its identity."""
    jaxpr = jaxcompat.open_jaxpr(writer.body)
    uses = Counter(v for eqn in jaxpr.eqns for v in eqn.invars if type(v) is not Literal)
    uses.update(v for v in jaxpr.outvars if type(v) is not Literal)
    free = {v: _bytes(value) for v, value in writer.constant_values.items() if v.aval.shape}
    by_equation: dict[int, int] = {}
    for eqn in found:
        operands = (v for v in eqn.invars if type(v) is not Literal and uses[v] == 1)
        by_equation[id(eqn)] = total = sum(free.get(v, 0) for v in operands)
        if len(eqn.outvars) == 1:
            free[eqn.outvars[0]] = total
    return by_equation


def _expands(eqn: JaxprEqn) -> bool:
    """Whether an equation makes an array of something smaller, and is as good as the array."""
    size = sum(_bytes(v.aval) for v in eqn.invars if type(v) is not Literal)
    return eqn.primitive.name in _EXPANDING and _bytes(eqn.outvars[0].aval) > size


def _uniform(value: np.ndarray) -> _Uniform | None:
    """An array as one of equal elements, if all their bits are equal."""
    if value.size == 0:
        return None
    element = value[(0,) * value.ndim]
    if value.tobytes() != np.asarray(element).tobytes() * value.size:
        return None
    return _Uniform(np.asarray(element))


def _atom(writer: Writer, eqn: JaxprEqn, var: Var, value: Any) -> Atom:
    """What a result of an equation that goes is from now on."""
    if value is None:
        return var  # nothing reads it
    if not isinstance(value, _Uniform):
        return writer.constant(value, var.aval)
    scalar = jaxcompat.array_type((), var.aval.dtype, var.aval.weak_type)
    operand = writer.constant(value.element, scalar)
    params = {"shape": var.aval.shape, "broadcast_dimensions": (), "sharding": None}
    return writer.emit(lax.broadcast_in_dim_p, [operand], params, eqn)[0]


# --- control flow -----------------------------------------------------------------------------

#: What opens an equation: gives its results, or None where it is to stay.
Opener = Callable[[Writer, JaxprEqn, _Values], Sequence[Atom] | None]


def _numbers(writer: Writer, atoms: Sequence[Atom], values: _Values) -> list[Number | None]:
    """The numbers of those that are literals, or constants of the body."""
    known = {
        v: number
        for v in atoms
        if type(v) is not Literal and v in writer.constant_values
        if (number := values.of_constant(writer.constant_values[v])) is not None
    }
    return [values.of_atom(atom, known) for atom in atoms]


def _open_cond(writer: Writer, eqn: JaxprEqn, values: _Values) -> Sequence[Atom] | None:
    (number,) = _numbers(writer, eqn.invars[:1], values)
    if number is None:
        return None
    cond = Cond.of(eqn)
    branch = cond.branches[_clamped(values.value(number), cond)]
    return writer.splice(branch, cond.operands, eqn) if writer.can_hold(branch) else None


def _open_while(writer: Writer, eqn: JaxprEqn, values: _Values) -> Sequence[Atom] | None:
    if eqn.effects:
        return None
    loop = While.of(eqn)
    numbers = _numbers(writer, (*loop.cond_consts, *loop.carry), values)
    known = {v: n for v, n in zip(loop.cond.invars, numbers, strict=True) if n is not None}
    values.follow(loop.cond.eqns, known)
    result = values.of_atom(loop.cond.outvars[0], known)
    goes_on = None if result is None else values.value(result)
    return None if goes_on is None or np.any(goes_on) else loop.carry


def _open_scan(writer: Writer, eqn: JaxprEqn, values: _Values) -> Sequence[Atom] | None:
    length = eqn.params["length"]
    if type(length) is not int or length > 1:
        return None
    scan = Scan.of(eqn)
    return _without_rounds(writer, scan) if length == 0 else _with_one_round(writer, scan)


def _without_rounds(writer: Writer, scan: Scan) -> Sequence[Atom] | None:
    used = [v for v in scan.ys if type(v) is not DropVar]
    if scan.eqn.effects or not (
        writer.holds_constants and all(_is_plain_type(v.aval) for v in used)
    ):
        return None
    return [
        *scan.carry,
        *(
            writer.constant(np.zeros(v.aval.shape, v.aval.dtype), v.aval) if v in used else v
            for v in scan.ys
        ),
    ]


def _with_one_round(writer: Writer, scan: Scan) -> Sequence[Atom] | None:
    """The body in the scan's place, unless slicing and stacking take more than the scan did."""
    eqn, body, before = scan.eqn, scan.body, len(writer.eqns)
    if not writer.can_hold(body):
        return None
    read = {v for inner in body.eqns for v in inner.invars if type(v) is not Literal}
    read.update(v for v in body.outvars if type(v) is not Literal)
    firsts = body.invars[len(body.invars) - len(scan.xs) :]
    xs = [
        _only_row(writer, x, eqn) if first in read else x
        for x, first in zip(scan.xs, firsts, strict=True)
    ]
    results = writer.splice(body, [*scan.consts, *scan.carry, *xs], eqn)
    k = len(scan.carry)
    ys = [
        y if type(v) is DropVar else _stacked(writer, y, eqn)
        for y, v in zip(results[k:], scan.ys, strict=True)
    ]
    if len(writer.eqns) - before > 1 + len(body.eqns):
        return None
    return [*results[:k], *ys]


def _only_row(writer: Writer, x: Atom, eqn: JaxprEqn) -> Atom:
    """The one row of an array."""
    made = writer.defined_by(x, "broadcast_in_dim")
    if (
        made is not None
        and made.invars[0].aval.shape == x.aval.shape[1:]
        and made.params["broadcast_dimensions"] == tuple(range(1, x.aval.ndim))
    ):
        return made.invars[0]
    return writer.trace(lambda array: [lax.squeeze(array, (0,))], [x], eqn)[0]


def _stacked(writer: Writer, y: Atom, eqn: JaxprEqn) -> Atom:
    return writer.trace(lambda row: [lax.expand_dims(row, (0,))], [y], eqn)[0]


_OPENERS: dict[str, Opener] = {"cond": _open_cond, "while": _open_while, "scan": _open_scan}
