"""Find the arguments of a program that are keys: those at given positions, or all keys by type.

A key by type is typed (`key<fry>[]`), or it is an array of words (`u32[2]`) that the program wraps
into a typed key, or draws random bits from. If there is neither, an integer from which a key is
created counts as one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError
from jaxprtool.ir.core.regions import regions
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.trees import filled
from jaxprtool.jaxcompat import Aval, ClosedJaxpr, JaxprEqn, Literal
from jaxprtool.passes.unzip.binding_times import operand_of
from jaxprtool.passes.unzip.variables import UnzipError


@dataclass(frozen=True)
class Arguments:
    """The `(args, kwargs)` of init, and of apply without variables: trees of flat positions."""

    early: Any
    late: Any

    @property
    def marks(self) -> list[bool]:
        """For each flat argument of the program, True if it is an argument of init."""
        early, late = map(jax.tree.leaves, (self.early, self.late))
        return [i in set(early) for i in range(len(early) + len(late))]


def at_positions(program: Program, keys: Sequence[int]) -> Arguments:
    """Split off the positional arguments `keys`. Raises ArgumentsError if one does not exist."""
    args, kwargs = _positions(program)
    # A function without positional arguments has no key; the default position 0 is ignored.
    keys = keys if args else [key for key in keys if key != 0]
    for key in keys:
        if not -len(args) <= key < len(args):
            has = f"it has {len(args)}" if args else "it has none"
            raise ArgumentsError(f"{program.name} has no positional argument {key}; {has}")
    chosen = {key % len(args) for key in keys}
    early = tuple(arg for i, arg in enumerate(args) if i in chosen)
    late = tuple(arg for i, arg in enumerate(args) if i not in chosen)
    return Arguments((early, {}), (late, kwargs))


def by_type(program: Program) -> Arguments:
    """Split off all keys, wherever they are. Raises UnzipError if there is none.

    An argument of keys alone is passed to init unchanged; any other key is a positional argument of
    init, and replaced by None in apply.
    """
    found = _key_positions(program)
    if not found:
        raise UnzipError(
            f"{program.name} has no key among its arguments: none has a key's type (key<fry>[]), "
            "or is used as a key (u32[2])",
            "name the key arguments with --key-args (key_args), or arguments of any type with "
            "--known (known)",
        )
    args, kwargs = _positions(program)
    keys: list[Any] = []
    late = tuple(rest for arg in args if (rest := _without(arg, found, keys)) is not _GONE)
    named, others = {}, {}
    for name, arg in kwargs.items():
        if _is_whole(arg, found):
            named[name] = arg
        else:
            others[name] = _without(arg, found, keys)
    return Arguments((tuple(keys), named), (late, others))


_GONE = object()


def _without(arg: Any, found: set[int], keys: list[Any]) -> Any:
    """Return an argument without its keys, which are added to `keys`; `_GONE` if empty."""
    if _is_whole(arg, found):
        keys.append(arg)
        return _GONE
    keys += [i for i in jax.tree.leaves(arg) if i in found]
    return jax.tree.map(lambda i: None if i in found else i, arg)


def _is_whole(arg: object, found: set[int]) -> bool:
    leaves = jax.tree.leaves(arg)
    return bool(leaves) and found.issuperset(leaves)


def _positions(program: Program) -> Any:
    count = program.in_tree.num_leaves
    return filled(program.in_tree, list(range(count)))


# --- keys by type ---------------------------------------------------------------------------------


def _key_positions(program: Program) -> set[int]:
    """Return the flat arguments that are keys by type; if there are none, those that are seeds."""
    avals = dict(enumerate(program.in_avals))
    keys = {i for i, aval in avals.items() if is_of(aval, jax.dtypes.prng_key)}
    words = {i for i, aval in avals.items() if is_of(aval, jnp.uint32) and aval.ndim}
    if words:
        keys |= words & _used_by(program, _Uses(lambda eqn: traits(eqn).key_words))
    integers = {i for i, aval in avals.items() if is_of(aval, jnp.integer)}
    return keys or (integers and integers & _used_by(program, _Uses(_makes_key, computed=True)))


def is_of(aval: Aval, scalar_type: type) -> bool:
    """Return True if a value is an array of a kind of dtype."""
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, scalar_type)


def _used_by(program: Program, uses: _Uses) -> set[int]:
    """Return the flat arguments that are used in the way `uses` searches for."""
    flags = uses.arguments(program.jaxpr, [False] * len(program.jaxpr.outvars))
    return {i for i, flag in enumerate(flags) if flag}


def _makes_key(eqn: JaxprEqn) -> int:
    return int(eqn.primitive.name == "random_seed")


class _Uses:
    """Find the values that some primitives use, backwards; visits each body once.

    Between an argument and its use it may change its layout or be taken in parts; if `computed`,
    any computation is allowed.
    """

    def __init__(self, consumed: Callable[[JaxprEqn], int], computed: bool = False):
        #: The number of operands of an equation, from the first, that it uses in this way.
        self.consumed, self.computed = consumed, computed
        self.found: dict[Hashable, list[bool]] = {}

    def arguments(self, body: ClosedJaxpr, outs: Sequence[bool]) -> list[bool]:
        """Return which arguments of a body are used, if the marked results are."""
        jaxpr = jaxcompat.open_jaxpr(body)
        request = jaxpr, tuple(outs)
        if request not in self.found:
            used = {v for v, flag in zip(jaxpr.outvars, outs, strict=True) if flag}
            for eqn in reversed(jaxpr.eqns):
                flags = self.operands(eqn, [v in used for v in eqn.outvars])
                used.update(
                    atom
                    for atom, flag in zip(eqn.invars, flags, strict=True)
                    if flag and type(atom) is not Literal
                )
            self.found[request] = [v in used for v in jaxpr.invars]
        return self.found[request]

    def operands(self, eqn: JaxprEqn, outs: list[bool]) -> list[bool]:
        """Return which operands of an equation are used, if the marked results are."""
        count = len(eqn.invars)
        if consumed := self.consumed(eqn):
            return [i < consumed for i in range(count)]
        if eqn.primitive.name == "concatenate":
            return [any(outs)] * count
        if traits(eqn).gives in ("same", "layout", "part"):
            used = {operand_of(eqn, result) for result, flag in enumerate(outs) if flag}
            return [i in used for i in range(count)]
        inside = regions(eqn)
        if inside is None:
            return [self.computed and any(outs)] * count
        bodies = inside.bodies
        return inside.backward(outs, lambda number, asked: self.arguments(bodies[number], asked))
