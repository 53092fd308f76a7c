"""Helpers for equations and values: types, sizes, bodies, names, and records in parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import chain
from operator import is_not
from typing import Any, TypeVar, overload

import jax
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.ir.backends import JaxprCache
from jaxprtool.ir.dtypes import is_wide, itemsize
from jaxprtool.ir.frames import source_place
from jaxprtool.ir.regions import holds_jaxpr, sub_jaxprs, views
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Aval, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

#: The primitives whose equations hold live objects that have an equivalent without them.
LIVE = (jaxcompat.CALL_HIGH, "remat_opt")

# --- equations ------------------------------------------------------------------------------------
# Helpers for equations and values: short types, sizes, bodies, and names.


#: What a type such as `~f32[]` is, for where one is shown.
WEAK_NOTE = "~ marks a weak type, as of a Python number: it takes the dtype of the array it meets"


def type_of(aval: Aval, weak: bool = False) -> str:
    """Return a type in JAX's short form: `f32[3]`, or `~f32[3]` if weakly typed and `weak`."""
    mark = "~" if weak and getattr(aval, "weak_type", False) else ""
    return mark + aval.str_short(short_dtypes=True)


def weak_marks(a: Aval, b: Aval) -> tuple[str, str]:
    """Return the prefixes of two types that are compared: a `~` if only one is weakly typed."""
    weak = [bool(getattr(aval, "weak_type", False)) for aval in (a, b)]
    return ("", "") if weak[0] == weak[1] else ("~" * weak[0], "~" * weak[1])


@overload
def size_of(aval: Aval) -> int | None: ...
@overload
def size_of(aval: Aval, unknown: int) -> int: ...
def size_of(aval: Aval, unknown: int | None = None) -> int | None:
    """Return the bytes of an array, or of a value of a type.

    Args:
        aval: The array, or the type.
        unknown: The result if the size depends on a symbolic dimension, or the value has no size,
            such as a token.
    """
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    if shape is None or dtype is None or not all(isinstance(n, int) for n in shape):
        return unknown
    size = itemsize(dtype)
    for n in shape:
        size *= n
    return int(size)


def size_in_bytes(aval: Aval) -> Any:
    """Return the bytes of a value, which may be symbolic; 0 for a token, which is not an array."""
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    return 0 if shape is None or dtype is None else math.prod(shape) * itemsize(dtype)


def bodies(eqn: JaxprEqn) -> list[tuple[str, Jaxpr]]:
    """Return the open jaxprs of an equation, each with the path of the parameter that holds it."""
    return [(path, jaxcompat.open_jaxpr(body)) for path, body in sub_jaxprs(eqn)]


_holders = JaxprCache()


def holders(jaxpr: Jaxpr) -> list[tuple[JaxprEqn, list[tuple[str, Jaxpr]]]]:
    """Return the equations of an open jaxpr that hold jaxprs, each with its `bodies`."""
    cached = _holders.of(jaxpr)
    if "holders" not in cached:
        eqns = () if is_flat(jaxpr) else jaxpr.eqns
        holding = (eqn for eqn in eqns if eqn.params and holds_jaxpr(eqn.params.values()))
        cached["holders"] = [(eqn, inside) for eqn in holding if (inside := bodies(eqn))]
    return cached["holders"]  # type: ignore[no-any-return]


_flat = JaxprCache()


def is_flat(jaxpr: Jaxpr, old: Jaxpr | None = None) -> bool:
    """Return True if no equation of an open jaxpr is a loop, branch or call, or holds jaxprs.

    If it is made from an `old` one that is flat, equations that are also in that are not visited.
    """
    cached = _flat.of(jaxpr)
    if "flat" not in cached:
        eqns: Iterable[JaxprEqn] = jaxpr.eqns
        if old is not None and is_flat(old):
            eqns = set(eqns).difference(old.eqns)
        names = {eqn.primitive.name for eqn in eqns}
        # Passes write many equations with the same dictionary of parameters.
        distinct = {id(eqn.params): eqn.params for eqn in eqns if eqn.params}.values()
        cached["flat"] = views.keys().isdisjoint(names) and not any(
            holds_jaxpr(params.values()) for params in distinct
        )
    return bool(cached["flat"])


def inner_jaxprs(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    """Return the open jaxprs that the equations of a jaxpr hold, each as often as it is held."""
    return (body for _, inside in holders(jaxpr) for _, body in inside)


def all_jaxprs(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    """Return an open jaxpr and those in it, at every depth, each once."""
    return reachable((jaxpr,), inner_jaxprs)


def outer_first(
    jaxpr: Jaxpr, inside: Callable[[Jaxpr], Iterable[Jaxpr]] = inner_jaxprs
) -> list[Jaxpr]:
    """Return an open jaxpr and those in it, each after all jaxprs that hold it.

    Args:
        jaxpr: The jaxpr.
        inside: Returns the jaxprs that a jaxpr holds.
    """
    order: list[Jaxpr] = []
    seen, stack = {jaxpr}, [(jaxpr, iter(inside(jaxpr)))]
    while stack:
        current, rest = stack[-1]
        new = next((body for body in rest if body not in seen), None)
        if new is None:
            order.append(current)
            stack.pop()
        else:
            seen.add(new)
            stack.append((new, iter(inside(new))))
    return order[::-1]


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield every equation of an open jaxpr, at every depth; those of a shared body once."""
    for body in all_jaxprs(jaxpr):
        yield from body.eqns


def donated_operands(eqns: Iterable[JaxprEqn]) -> list[tuple[Var, int]]:
    """Return the operands that calls donate, each with the position of the call in `eqns`."""
    return [
        (atom, i)
        for i, eqn in enumerate(eqns)
        if eqn.primitive.name == "jit" and any(eqn.params["donated_invars"])
        for atom, donated in zip(eqn.invars, eqn.params["donated_invars"], strict=True)
        if donated and type(atom) is not Literal
    ]


class Contains:
    """Tests whether a jaxpr contains an equation that meets a condition; visits each body once.

    Args:
        condition: The condition on an equation.
    """

    def __init__(self, condition: Callable[[JaxprEqn], Any]) -> None:
        self._condition = condition
        self._known: dict[Jaxpr, bool] = {}

    def __call__(self, jaxpr: AnyJaxpr) -> bool:
        """Return True if an equation of a jaxpr, at any depth, meets the condition."""
        body = jaxcompat.open_jaxpr(jaxpr)
        if body not in self._known:
            self._known[body] = any(map(self.at, body.eqns))
        return self._known[body]

    def at(self, eqn: JaxprEqn) -> bool:
        """Return True if an equation, or one in its bodies, meets the condition."""
        return bool(self._condition(eqn)) or self.inside(eqn)

    def inside(self, eqn: JaxprEqn) -> bool:
        """Return True if an equation in the bodies of an equation meets the condition."""
        return holds_jaxpr(eqn.params.values()) and any(self(body) for _, body in sub_jaxprs(eqn))


def free_variables(eqns: Iterable[JaxprEqn], results: Iterable[Atom] = ()) -> dict[Var, None]:
    """Return the variables that equations and results read and no equation defines, in order."""
    free: dict[Var, None] = {}
    defined: set[Var] = set()
    for eqn in eqns:
        free.update((v, None) for v in eqn.invars if type(v) is not Literal and v not in defined)
        defined.update(eqn.outvars)
    free.update((v, None) for v in results if type(v) is not Literal and v not in defined)
    return free


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """Return the variables among atoms."""
    return [v for v in atoms if type(v) is not Literal]


def part_of(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], name: str) -> ClosedJaxpr:
    """Return some equations of a jaxpr as a jaxpr of their own.

    Its results are the results of the jaxpr among their values, then the values that nothing reads,
    and then those that other equations read.
    """
    inside = set(map(id, eqns))
    there = free_variables([eqn for eqn in jaxpr.eqns if id(eqn) not in inside])
    here = {v for eqn in eqns for v in variables(eqn.invars)}
    outs = (v for eqn in eqns for v in eqn.outvars if not isinstance(v, jaxcompat.DropVar))
    defined = dict.fromkeys(outs)
    returned = [v for v in variables(jaxpr.outvars) if v in defined]
    unread = [v for v in defined if v not in there and v not in here]
    results = dict.fromkeys([*returned, *unread, *(v for v in defined if v in there)])
    free = free_variables(eqns)
    arguments = dict.fromkeys([*(v for v in jaxpr.invars if v in free), *free])
    debug = jaxcompat.DebugInfo(name, name, None, None)
    return jaxcompat.new_jaxpr((), (), list(arguments), list(results), eqns, debug)


def needed_equations(
    eqns: Sequence[JaxprEqn],
    results: Iterable[Atom],
    stays: Callable[[JaxprEqn], bool] = lambda eqn: False,
) -> list[JaxprEqn]:
    """Return the equations that results depend on, in order.

    Args:
        eqns: Equations, in order.
        results: The results.
        stays: Returns True for an equation that is needed in any case, with its dependencies.
    """
    needed, kept = set(variables(results)), []
    for eqn in reversed(eqns):
        if stays(eqn) or not needed.isdisjoint(eqn.outvars):
            needed.update(variables(eqn.invars))
            kept.append(eqn)
    return kept[::-1]


def is_array(aval: Aval) -> bool:
    """Return True for the type of an array; False for that of a ref or a token."""
    return hasattr(aval, "dtype") and not isinstance(aval, jaxcompat.AbstractRef)


def has_ref_type(atom: object) -> bool:
    """Return True if a value is a ref."""
    return isinstance(getattr(atom, "aval", None), jaxcompat.AbstractRef)


def has_external_effect(eqn: JaxprEqn) -> bool:
    """Return True if an equation has external effects; writing to a ref is not one."""
    if all(map(jaxcompat.is_removable_effect, eqn.effects)):
        return False
    atoms = (*eqn.invars, *eqn.outvars)
    return not any(isinstance(atom.aval, jaxcompat.AbstractRef) for atom in atoms)


def is_inexact(atom: object) -> bool:
    """Return True if a value has an inexact dtype, and so can have derivatives."""
    dtype = getattr(getattr(atom, "aval", None), "dtype", None)
    return dtype is not None and bool(jax.dtypes.issubdtype(dtype, np.inexact))


def substitute(atoms: Iterable[Atom], names: Mapping[Var, Atom]) -> list[Atom]:
    """Replace variables among atoms by the atoms that `names` maps them to."""
    return [v if type(v) is Literal else names.get(v, v) for v in atoms]


def with_operands(eqn: JaxprEqn, names: Mapping[Var, Atom]) -> JaxprEqn:
    """Substitute the operands of an equation; return the same object if nothing changes."""
    operands = substitute(eqn.invars, names)
    return eqn.replace(invars=operands) if any(map(is_not, operands, eqn.invars)) else eqn


def fuses(eqn: JaxprEqn) -> bool:
    """Return True if a compiler fuses an equation with its readers.

    This holds for elementwise equations and those that only move elements.
    """
    like = traits(eqn)
    if like.moves:
        return True
    if len(eqn.outvars) != 1 or like.expensive or like.reduces or holds_jaxpr(eqn.params.values()):
        return False
    shape = getattr(eqn.outvars[0].aval, "shape", None)
    return like.elementwise or any(getattr(v.aval, "shape", ()) == shape for v in eqn.invars)


def named(eqn: JaxprEqn) -> str:
    """Describe an equation in a message by its primitive and source line: `psum at model.py:12`."""
    place = source_place(eqn)
    return eqn.primitive.name + (f" at {place}" if place else "")


def has_64_bit_types(jaxpr: AnyJaxpr) -> bool:
    """Return True if a value, at any depth, has a type that JAX narrows by default."""
    top = jaxcompat.open_jaxpr(jaxpr)
    bound = (v for eqn in equations(top) for v in eqn.outvars)
    avals = {id(v.aval): v.aval for v in chain(top.constvars, top.invars, bound)}
    return any(is_wide(getattr(aval, "dtype", None)) for aval in avals.values())


# --- weak types -----------------------------------------------------------------------------------
# Give the results of a rule the weak types of the equation's results.


def is_weak(aval: Aval) -> bool:
    """Return True for a weak type, that of a Python number."""
    return bool(getattr(aval, "weak_type", False))


def as_weak_as(array: Any, aval: Aval) -> Any:
    """Return an array with the weak type of `aval`; the array itself if it has it already."""
    weak = is_weak(aval)
    if is_weak(jax.typeof(array)) == weak:
        return array
    return jaxcompat.with_weak_type(array, array.dtype, weak)


def strongly_typed(array: Any) -> Any:
    """Return an array without its weak type. Its gradient keeps the weak type."""
    return jaxcompat.with_weak_type(array, array.dtype, False) if _is_weak(array) else array


About = TypeVar("About")


def keep_weak_types(
    compute: Callable[..., tuple[list[Any], About] | None],
    arrays: Sequence[Any],
    avals: Sequence[Aval],
    eqn: JaxprEqn,
) -> tuple[list[Any], About] | None:
    """Return the results of a rule with the weak types of the equation's results.

    If the rule would lose or add a weak type, it is called with strongly typed arrays, and its
    results are cast. Gradients then have the weak types of the values that they are taken with
    respect to. The same is done for an equation that moves elements, whose rule may use gathers,
    slices or pads: their transposes in JAX return strongly typed gradients.

    Args:
        compute: Returns a list of arrays, and what is known of them; or None.
        arrays: Its arguments.
        avals: The types of the results of the equation.
        eqn: The equation.
    """
    if not (traits(eqn).moves and any(map(_is_weak, arrays))):
        result = compute(*arrays)
        if result is None or [*map(_is_weak, result[0])] == [*map(is_weak, avals)]:
            return result
    result = compute(*map(strongly_typed, arrays))
    if result is None:
        return None
    outs, about = result
    return [as_weak_as(out, aval) for out, aval in zip(outs, avals, strict=True)], about


def _is_weak(array: Any) -> bool:
    return is_weak(jax.typeof(array))


# --- records --------------------------------------------------------------------------------------
# Objects with named fields in the parameters of equations: a compiler's options, a kernel's grid.
#
# Two are the same if they have the same class and fields, whatever `==` says: for it, two jaxprs in
# them are different objects.


class Record:
    """An object of a class that may be unknown here, with its fields as attributes.

    Args:
        class_name: The module and the name of the class.
        **fields: The fields.
    """

    def __init__(self, class_name: str, /, **fields: Any) -> None:
        if not isinstance(class_name, str):
            raise TypeError("a record begins with the name of its class")
        self.__dict__.update(fields)
        self._class_name = class_name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self)))

    def __repr__(self) -> str:
        name, fields = fields_of(self) or ("", {})
        parts = ", ".join(f"{field}={value!r}" for field, value in fields.items())
        return f"{name.rpartition('.')[2]}({parts})"


def fields_of(value: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the name of the class and the fields of a record or a dataclass; None for others."""
    if isinstance(value, Record):
        fields = {name: field for name, field in vars(value).items() if name != "_class_name"}
        return value._class_name, fields
    if not dataclasses.is_dataclass(value) or isinstance(value, type | Enum) or callable(value):
        return None
    cls = type(value)
    names = [field.name for field in dataclasses.fields(value)]
    return f"{cls.__module__}.{cls.__qualname__}", {
        name: getattr(value, name) for name in names if hasattr(value, name)
    }


def without_defaults(value: object) -> object:
    """Return a dataclass as a record of the fields that are not at their defaults; others as is."""
    if not dataclasses.is_dataclass(value) or (record := fields_of(value)) is None:
        return value
    defaults = {f.name: f.default for f in dataclasses.fields(value)}
    changed = {k: v for k, v in record[1].items() if v is not defaults[k] and v != defaults[k]}
    return Record(record[0], **changed)


# --- reachability ---------------------------------------------------------------------------------
# Find the nodes of a graph that can be reached from others.

T = TypeVar("T", bound=Hashable)


def reachable(starts: Iterable[T], successors: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yield the nodes that can be reached from some nodes, including these, each once.

    Args:
        starts: The nodes to start from.
        successors: Returns the successors of a node.
    """
    todo = list(dict.fromkeys(starts))
    seen = set(todo)
    while todo:
        current = todo.pop()
        yield current
        new = [node for node in dict.fromkeys(successors(current)) if node not in seen]
        seen.update(new)
        todo += new
