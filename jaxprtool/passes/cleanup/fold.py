"""Constant folding: compute values that do not depend on the program's arguments ahead of time.

A *known* value is a literal, a constant of the body it is in, or the result of a pure equation of
known values. Where another equation needs a known value, the value replaces the equations that
compute it:

*   a scalar becomes a literal;
*   an array whose elements all have the same bits becomes a broadcast literal, which costs no bytes
    (if its equation has no other result);
*   another array becomes a constant of the body, if the program's constants then take no more than
    `max_bytes`, or if it is no larger than the constants that only it used, which it replaces.
    Equal arrays count once in each body.

An equation that only expands a small array to a big one (`iota`, and `broadcast_in_dim`) stays: it
is as cheap as the constant, and smaller. Then its own operands are the needed values. Equations
stay too if they have an intermediate value of more than 1 MiB (or 16 times `max_bytes`), or too
much work in their loops.

Values are computed by the default backend, one equation at a time, each as a kernel of its own;
on another backend an `exp` may differ in the last bit. They become NumPy arrays, which are on no
device. Constants that are committed to a device or are tracers (while JAX traces around the pass)
are not folded, nor are equations that run under a mesh, have effects, or have traits that forbid
it. A call with custom derivatives is folded if all its operands are constants: nothing
differentiates it.

Control flow with a known outcome is replaced: a cond with a constant index by its branch, a scan of
length 0 by its initial carry, a scan of length 1 by its body (unless slicing and stacking would
take more equations), and a while whose condition is false at once by its initial carry. It stays if
that would remove an effect that it declares, such as a print.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np
from jax import lax
from jax.extend.core import Effect

from jaxprtool import jaxcompat
from jaxprtool.errors import PipelineError
from jaxprtool.ir.dtypes import itemsize
from jaxprtool.ir.equations import Contains, is_flat, size_of
from jaxprtool.ir.equivalence import Unkeyable, parameters_key
from jaxprtool.ir.evaluation import Interpreter, bind, branch_of, checks_disabled, evaluate_exactly
from jaxprtool.ir.keys import literal_key
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import (
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
from jaxprtool.ir.rewrite import RewriteRule, Writer, rewrite
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Aval, ClosedJaxpr, DropVar, JaxprEqn, Literal, Var
from jaxprtool.passes import Pass
from jaxprtool.primitives import sow_p


@dataclass(frozen=True)
class Fold(Pass):
    """Evaluate constant expressions, and replace control flow with a known outcome.

    A value that does not depend on the program's arguments becomes a literal, a broadcast literal
    or a constant. A cond with a known index is replaced by its branch, a scan of length 1 by its
    body, and a while loop whose condition is false at once by its initial carry. Values are
    computed on the default backend, one equation at a time.

    Args:
        max_bytes: The maximum total size of the program's constants, in bytes.

    Note:
        Equations that only expand a small value to a large array, such as `iota`, stay: they are as
        cheap as the constant, and smaller. Equations that have effects, run under a mesh, or take
        too long to evaluate stay too.

    Example:
        def f(x):
            return x + jnp.sqrt(jnp.float32(2.0)) * 3

        $ jaxprtool opt f.py:f --args "f32[3]" -p fold
        { lambda ; a:f32[3]. let b:f32[3] = add a 4.242640495300293:f32[] in (b,) }
    """

    name: ClassVar[str] = "fold"
    group: ClassVar[str] = "clean up"

    max_bytes: int = 65536

    def __post_init__(self) -> None:
        if self.max_bytes < 0:
            raise PipelineError(
                f"option 'max_bytes' of pass 'fold' must not be negative: {self.max_bytes}"
            )

    def __call__(self, program: Program) -> Program:
        jaxpr = fold_jaxpr(program.jaxpr, self.max_bytes)
        return program.replace(jaxpr=jaxpr) if jaxpr is not program.jaxpr else program


def fold_jaxpr(jaxpr: ClosedJaxpr, max_bytes: int) -> ClosedJaxpr:
    """Compute the constant parts of a closed jaxpr; return the jaxpr itself if it has none."""
    folding = _Folder(jaxpr, max_bytes)
    while True:
        folding.opened = False
        before, jaxpr = jaxpr, rewrite(jaxpr, folding.visit)
        if jaxpr is before or not folding.opened:
            return jaxpr


# --- the pass ---------------------------------------------------------------------------------

#: The largest intermediate value, in bytes, unless `max_bytes` is large.
_LARGEST = 1 << 20


def _constant_bytes(jaxpr: AnyJaxpr, seen: set[AnyJaxpr]) -> int:
    """Return the bytes of the constants of a jaxpr and of the distinct jaxprs in it."""
    seen.add(jaxpr)
    consts = getattr(jaxpr, "consts", ())
    total = sum(size_of(value, 0) for value in consts if is_plain_type(jax.typeof(value)))
    for eqn in () if is_flat(jaxcompat.open_jaxpr(jaxpr)) else jaxpr.eqns:
        if holds_jaxpr(eqn.params.values()):
            bodies = (body for _, body in sub_jaxprs(eqn))
            total += sum(_constant_bytes(body, seen) for body in bodies if body not in seen)
    return total


class _Folder:
    """The state of one run: the known values of the program, and the remaining bytes."""

    def __init__(self, jaxpr: ClosedJaxpr, max_bytes: int) -> None:
        self._left = max_bytes - _constant_bytes(jaxpr, set())
        self._values = KnownValues(max(_LARGEST, 16 * max_bytes))
        #: True if control flow was replaced by equations that have not been visited.
        self.opened = False

    def visit(self, writer: Writer) -> RewriteRule | None:
        jaxpr = jaxcompat.open_jaxpr(writer.body)
        env: dict[Var, Number] = {}
        for var, value in writer.constant_values.items():
            number = self._values.of_constant(value) if is_plain_type(var.aval) else None
            if number is not None:
                env[var] = number
        foldable = self._values.follow(jaxpr.eqns, env)
        values: dict[Var, Array | None] = {}
        if not all(traits(eqn).fills for eqn in foldable):
            values = self._needed_values(writer, env, foldable)
        if not values and is_flat(jaxpr):  # it has no control flow
            return None

        def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
            if eqn.outvars and eqn.outvars[0] in values:
                return [_atom(writer, eqn, var, values[var]) for var in eqn.outvars]
            opener = OPENERS.get(eqn.primitive.name)
            atoms = opener(writer, eqn, self._values) if opener is not None else None
            self.opened |= atoms is not None
            return atoms

        return rule

    def _needed_values(
        self, writer: Writer, env: dict[Var, Number], foldable: Sequence[JaxprEqn]
    ) -> dict[Var, Array | None]:
        """Return the results of the removed equations, with the values of those that are needed.

        The value of a result that nothing needs is None.
        """
        jaxpr = jaxcompat.open_jaxpr(writer.body)
        freed = _freed(writer, foldable) if writer.constvars else {}
        folded, stored = {id(eqn) for eqn in foldable}, set[Number]()
        needed = {v for v in jaxpr.outvars if type(v) is not Literal}
        values: dict[Var, Array | None] = {}
        for eqn in reversed(jaxpr.eqns):
            if id(eqn) in folded and writer.donated.isdisjoint(eqn.outvars):
                wanted = {v: env[v] for v in eqn.outvars if v in needed}
                taken = self._taken(writer, eqn, wanted, freed.get(id(eqn), 0), stored)
                if taken is not None:
                    values.update(dict.fromkeys(eqn.outvars))
                    values.update(taken)
                    continue
            for atom in eqn.invars:
                if type(atom) is not Literal:
                    needed.add(atom)
        if values and len(writer.consts) == len(writer.constvars):
            _drop_constants(writer, needed)
        return values

    def _taken(
        self,
        writer: Writer,
        eqn: JaxprEqn,
        wanted: dict[Var, Number],
        freed: int,
        stored: set[Number],
    ) -> dict[Var, Array] | None:
        """Return the values of an equation's needed results; None if the equation must stay."""
        arrays = {v: number for v, number in wanted.items() if v.aval.shape != ()}
        cost = sum(size_of(v.aval, 0) for v, number in arrays.items() if number not in stored)
        if arrays and (_expands(eqn) or cost - freed > max(self._left, 0)):
            return None
        if any(jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in wanted):
            return None
        values = {
            v: value
            for v, number in wanted.items()
            if (value := self._values.value(number)) is not None
        }
        if len(values) < len(wanted):
            return None
        if arrays and len(eqn.outvars) == 1:
            element = _element(values[eqn.outvars[0]])
            if element is not None:
                return {eqn.outvars[0]: element}
        if arrays and not writer.holds_constants:
            return None
        stored.update(arrays.values())
        self._left -= cost - freed if cost else 0
        return values


def _drop_constants(writer: Writer, needed: set[Var]) -> None:
    """Drop the constants of a body that nothing reads any more."""
    flags = [v in needed for v in writer.constvars]
    for v, flag in zip(writer.constvars, flags, strict=True):
        if not flag:
            del writer.constant_values[v]
    writer.constvars[:] = keep(writer.constvars, flags)
    writer.consts[:] = keep(writer.consts, flags)


def _freed(writer: Writer, foldable: Sequence[JaxprEqn]) -> dict[int, int]:
    """Return the bytes of constants that removing each equation frees, by its id."""
    jaxpr = jaxcompat.open_jaxpr(writer.body)
    uses = Counter(v for eqn in jaxpr.eqns for v in eqn.invars if type(v) is not Literal)
    uses.update(v for v in jaxpr.outvars if type(v) is not Literal)
    free = {v: size_of(value, 0) for v, value in writer.constant_values.items() if v.aval.shape}
    by_equation: dict[int, int] = {}
    for eqn in foldable:
        operands = (v for v in eqn.invars if type(v) is not Literal and uses[v] == 1)
        by_equation[id(eqn)] = total = sum(free.get(v, 0) for v in operands)
        if len(eqn.outvars) == 1:
            free[eqn.outvars[0]] = total
    return by_equation


def _expands(eqn: JaxprEqn) -> bool:
    """Return True if an equation only fills a larger array, so that a constant saves nothing."""
    size = sum(size_of(v.aval, 0) for v in eqn.invars if type(v) is not Literal)
    return traits(eqn).fills and size_of(eqn.outvars[0].aval, 0) > size


def _element(value: Array) -> np.ndarray | None:
    """Return the scalar that an array is filled with, if all its elements have the same bits."""
    if value.size == 0:
        return None
    element = np.asarray(value[(0,) * value.ndim])
    return element if value.tobytes() == element.tobytes() * value.size else None


def _atom(writer: Writer, eqn: JaxprEqn, var: Var, value: Array | None) -> Atom:
    """Return the atom that replaces a result: its value, or a broadcast of the scalar value."""
    if value is None:
        return var  # nothing reads it
    if value.shape == var.aval.shape:
        return writer.constant(value, var.aval)
    scalar = jaxcompat.array_type((), var.aval.dtype, var.aval.weak_type)
    operand = writer.constant(value, scalar)
    params = {"shape": var.aval.shape, "broadcast_dimensions": (), "sharding": None}
    return writer.emit(lax.broadcast_in_dim_p, [operand], params, eqn)[0]


# --- constant evaluation --------------------------------------------------------------------------
# Constant evaluation: compute the values that depend on literals and constants alone.
#
# Equations are evaluated on demand, one at a time, and equal ones only once. NumPy evaluates those
# whose bits are prescribed (`ir.evaluation`), and the default backend all others.

#: The maximum number of equations that run when an equation with bodies is evaluated.
_MOST_STEPS = 1000

#: A value; random keys are JAX arrays.
Array = np.ndarray | jax.Array

#: The id of a known value: the number of its equation, and the index of the result.
Number = tuple[int, int]


class KnownValues:
    """The known values of a program, each computed on first use."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._numbers: dict[Hashable, int] = {}
        self._made: dict[int, tuple[JaxprEqn, list[Number]]] = {}
        self._results: dict[int, Sequence[Array] | None] = {}
        self._plain_settings: dict[object, bool] = {}

    def of_atom(self, atom: Atom, env: dict[Var, Number]) -> Number | None:
        """Return the number of a literal, or of a variable that is known."""
        if type(atom) is not Literal:
            return env.get(atom)
        return self._given(literal_key(atom), np.asarray(atom.val).astype(atom.aval.dtype))

    def of_constant(self, value: object) -> Number | None:
        """Return the number of a constant's value; None if the constant must not be folded."""
        if isinstance(value, jax.core.Tracer) or not isinstance(value, np.ndarray | jax.Array):
            return None
        if isinstance(value, jax.Array) and (value.committed or not value.is_fully_addressable):
            return None
        return self._given(id(value), value) if size_of(value, 0) <= self._largest else None

    def _given(self, key: Hashable, value: Array) -> Number:
        number = self._numbers.setdefault(key, len(self._numbers))
        self._results.setdefault(number, [value])
        return number, 0

    def follow(self, eqns: Sequence[JaxprEqn], env: dict[Var, Number]) -> list[JaxprEqn]:
        """Return the equations whose results are known, and add these results to `env`."""
        foldable = []
        for eqn in eqns:
            for atom in eqn.invars:
                if type(atom) is not Literal and atom not in env:
                    break
            else:
                if (number := self._of_equation(eqn, env)) is not None:
                    env.update((v, (number, i)) for i, v in enumerate(eqn.outvars))
                    foldable.append(eqn)
        return foldable

    def _of_equation(self, eqn: JaxprEqn, env: dict[Var, Number]) -> int | None:
        if eqn.effects or not traits(eqn).may_fold or not self._is_plain(eqn):
            return None
        if not eqn.outvars:
            return None  # nothing to know; dce removes it
        try:
            key, bodies = parameters_key(eqn)
        except Unkeyable:
            return None
        if bodies and not all(body.repeatable for body in bodies):
            return None
        if bodies and self._steps(eqn) > _MOST_STEPS:
            return None
        numbers = (self.of_atom(atom, env) for atom in eqn.invars)
        operands = [number for number in numbers if number is not None]
        whole = eqn.primitive, key, eqn.ctx, *operands
        number = self._numbers.setdefault(whole, len(self._numbers))
        self._made.setdefault(number, (eqn, operands))
        return number

    def _is_plain(self, eqn: JaxprEqn) -> bool:
        """Return True if an equation has the default context, and plain, small results."""
        if eqn.ctx not in self._plain_settings:
            settings = jaxcompat.context_settings(eqn.ctx)
            self._plain_settings[eqn.ctx] = all(
                name == "threefry_partitionable" or value == jaxcompat.CONTEXT_DEFAULTS[name]
                for name, value in settings.items()
            )
        return self._plain_settings[eqn.ctx] and all(
            is_plain_type(v.aval) and size_of(v.aval, 0) <= self._largest for v in eqn.outvars
        )

    def _steps(self, eqn: JaxprEqn) -> float:
        """Return how many equations an evaluation runs; infinity if one must not be folded."""
        if not traits(eqn).may_fold or not self._is_plain(eqn):
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

    def value(self, number: Number) -> Array | None:
        """Return a known value; None if the backend fails to compute it."""
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

    def _computed(self, eqn: JaxprEqn, operands: Sequence[Number]) -> Sequence[Array] | None:
        values = []
        for number, i in operands:
            results = self._results[number]
            if results is None:
                return None
            values.append(results[i])
        try:
            results = list(map(_on_host, _Evaluator().equation(eqn, list(map(_on_host, values)))))
        except Exception:  # a backend, or a plug-in's rule, may raise anything
            return None
        types = [(value.shape, value.dtype) for value in results]
        return results if types == [(v.aval.shape, v.aval.dtype) for v in eqn.outvars] else None


def is_plain_type(aval: Aval) -> bool:
    """Return True if a type is an array type with nothing but dtype and shape."""
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
    """Evaluate eagerly, even under a trace, and allow NaNs, infinities and transfers."""
    with jax.ensure_compile_time_eval(), checks_disabled(), jax.transfer_guard("allow"):
        yield


def _on_host(value: Array) -> Array:
    """Return a result as a NumPy array; random keys stay JAX arrays."""
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        return value
    return np.asarray(value)


class _Evaluator(Interpreter):
    """Evaluate equations by NumPy where the bits are prescribed, by the backend elsewhere."""

    def constant(self, value: Any, aval: Aval) -> Any:
        return value if isinstance(value, jax.Array) else np.asarray(value, aval.dtype)

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        if all(isinstance(x, np.ndarray) for x in operands):
            result = evaluate_exactly(eqn, operands)
            if result is not None:
                return [result]
        wide = any(itemsize(atom.aval.dtype) >= 8 for atom in (*eqn.invars, *eqn.outvars))
        with jaxcompat.setting_of(eqn), jax.enable_x64(True) if wide else nullcontext():
            return bind(eqn, operands)


# --- opening --------------------------------------------------------------------------------------
# Replace control flow whose outcome is known by the equations that would run.

#: Opens an equation: returns its results, or None if it must stay.
Opener = Callable[[Writer, JaxprEqn, KnownValues], Sequence[Atom] | None]


def _numbers(writer: Writer, atoms: Sequence[Atom], values: KnownValues) -> list[Number | None]:
    """Return the numbers of the atoms that are literals, or constants of the body."""
    env = {
        v: number
        for v in atoms
        if type(v) is not Literal and v in writer.constant_values
        if (number := values.of_constant(writer.constant_values[v])) is not None
    }
    return [values.of_atom(atom, env) for atom in atoms]


def _open_cond(writer: Writer, eqn: JaxprEqn, values: KnownValues) -> Sequence[Atom] | None:
    (number,) = _numbers(writer, eqn.invars[:1], values)
    if number is None:
        return None
    cond = Cond.of(eqn)
    branch = branch_of(cond, values.value(number))
    if eqn.effects:
        # JAX gives each branch the effects of all: its own are those of its equations.
        alone = jaxcompat.replace_jaxpr(branch, eqns=branch.eqns)
        if _lasting(jaxcompat.operand_effects(alone, cond.operands)) != _lasting(eqn.effects):
            return None
    return writer.splice(branch, cond.operands, eqn) if writer.can_hold(branch) else None


def _lasting(effects: Iterable[Effect]) -> set[Effect]:
    """Return the effects that are visible from outside: a program must still declare them."""
    return {effect for effect in effects if not jaxcompat.is_removable_effect(effect)}


def _open_while(writer: Writer, eqn: JaxprEqn, values: KnownValues) -> Sequence[Atom] | None:
    if eqn.effects:
        return None
    loop = While.of(eqn)
    numbers = _numbers(writer, (*loop.cond_consts, *loop.carry), values)
    env = {v: n for v, n in zip(loop.cond.invars, numbers, strict=True) if n is not None}
    values.follow(loop.cond.eqns, env)
    result = values.of_atom(loop.cond.outvars[0], env)
    goes_on = None if result is None else values.value(result)
    return None if goes_on is None or np.any(goes_on) else loop.carry


def _open_scan(writer: Writer, eqn: JaxprEqn, values: KnownValues) -> Sequence[Atom] | None:
    length = eqn.params["length"]
    if type(length) is not int or length > 1:
        return None
    scan = Scan.of(eqn)
    if any(isinstance(v.aval, jaxcompat.AbstractRef) for v in scan.xs):
        return None  # a ref has no rows
    if Contains(lambda eqn: eqn.primitive is sow_p)(scan.body):
        return None  # a value sown in a scan is collected once for each iteration
    return _without_iterations(writer, scan) if length == 0 else _with_one_iteration(writer, scan)


def _without_iterations(writer: Writer, scan: Scan) -> Sequence[Atom] | None:
    used = [v for v in scan.ys if type(v) is not DropVar]
    plain = all(is_plain_type(v.aval) and isinstance(v.aval.dtype, np.dtype) for v in used)
    if scan.eqn.effects or not plain or (used and not writer.holds_constants):
        return None
    empty = {v: np.zeros(v.aval.shape, v.aval.dtype) for v in used}
    ys = [writer.constant(empty[v], v.aval) if v in empty else v for v in scan.ys]
    return [*scan.carry, *ys]


def _with_one_iteration(writer: Writer, scan: Scan) -> Sequence[Atom] | None:
    """Return the results of the body inlined, or None if slicing and stacking cost too much."""
    eqn, body, start = scan.eqn, scan.body, len(writer.eqns)
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
    if len(writer.eqns) - start > 1 + len(body.eqns):
        return None
    return [*results[:k], *ys]


def _only_row(writer: Writer, x: Atom, eqn: JaxprEqn) -> Atom:
    """Return the only row of an array."""
    if (row := writer.repeated_row(x)) is not None:
        return row
    return writer.trace(lambda array: [lax.squeeze(array, (0,))], [x], eqn)[0]


def _stacked(writer: Writer, y: Atom, eqn: JaxprEqn) -> Atom:
    return writer.trace(lambda row: [lax.expand_dims(row, (0,))], [y], eqn)[0]


OPENERS: dict[str, Opener] = {"cond": _open_cond, "while": _open_while, "scan": _open_scan}
