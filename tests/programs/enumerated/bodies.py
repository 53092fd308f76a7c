"""All small bodies of loops, branches and calls, with operands in every combination.

A body returns any of its arguments, literals and values, in any order and possibly repeated. This
includes all that `forward` simplifies: pass-through results, duplicate operands, unchanged carries.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal

from jaxprtool import trace
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import Call, Cond, Scan, While
from jaxprtool.jaxcompat import as_literal, replace_jaxpr
from tests.programs import interpreter
from tests.programs.enumerated.graphs import EMPTY, Family

Scalar = jax.core.ShapedArray((), np.float32)


@dataclass(frozen=True)
class Kind:
    """A primitive with bodies of scalars.

    Attributes:
        types: The types of its operands, without the counter of a while loop.
        results: The number of results of a body.
        function: Makes a function of the operands from a body function.
        put: Returns the equation with other bodies.
        bodies: The number of bodies.
    """

    types: Sequence[Any]
    results: int
    function: Callable[[Callable[..., list[Any]]], Callable[..., Any]]
    put: Callable[[Any, Sequence[Any]], Any]
    bodies: int = 1


def _scan(body: Callable[..., list[Any]]) -> Callable[..., Any]:
    def fun(k: Any, a: Any, b: Any, xs: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            a, b, y = body(k, *carry, x)
            return (a, b), y

        carry, ys = lax.scan(step, (a, b), xs)
        return [*carry, ys]

    return fun


def _while(body: Callable[..., list[Any]]) -> Callable[..., Any]:
    def fun(k: Any, a: Any, b: Any) -> Any:
        def step(carry: Any) -> Any:
            return carry[0] + 1, *body(k, *carry[1:])

        return lax.while_loop(lambda carry: carry[0] < 2, step, (0, a, b))[1:]

    return fun


def _put_in_while(eqn: Any, bodies: Sequence[Any]) -> Any:
    """Put a body into a while loop, whose counter is between the constants and the carry."""
    loop, (body,) = While.of(eqn), bodies
    (step,) = (e for e in loop.body.eqns if loop.body.outvars[0] in e.outvars)
    k, *carry = body.invars
    changed = replace_jaxpr(
        loop.body,
        invars=[k, loop.body.invars[1], *carry],
        outvars=[loop.body.outvars[0], *body.outvars],
        eqns=[step, *body.eqns],
        debug_info=loop.body.debug_info,
    )
    return loop.rebuild(body=changed)


KINDS = {
    "call": Kind(
        [Scalar] * 3, 2, jax.jit, lambda eqn, bodies: Call.of(eqn).rebuild(body=bodies[0])
    ),
    "scan": Kind(
        [Scalar] * 3 + [jax.core.ShapedArray((3,), np.float32)],
        3,
        _scan,
        lambda eqn, bodies: Scan.of(eqn).rebuild(body=bodies[0]),
    ),
    "while": Kind([Scalar] * 3, 2, _while, _put_in_while),
    "cond": Kind(
        [Scalar] * 2,
        2,
        lambda body: lambda a, b: lax.cond(a < b, body, lambda a, b: body(b, a), a, b),
        lambda eqn, bodies: Cond.of(eqn).rebuild(branches=tuple(bodies)),
        bodies=2,
    ),
}


@dataclass(frozen=True, eq=False)
class Bodies:
    """The programs of one loop, branch or call, with bodies of a family's equations."""

    name: str
    kind: Kind
    family: Family
    pipelines: Sequence[str] = ("forward", "-O1")
    share: float = 1.0
    groups: int = 8
    in_ci: bool = False
    lanes: tuple[int, ...] = ()

    def units(self) -> list[str]:
        """Return the names of groups of programs of about equal size."""
        return [str(i) for i in range(self.groups)]

    def programs(self, unit: str) -> Iterator[tuple[Program, Program]]:
        """Yield every program whose first body belongs to the unit."""
        draw = random.Random(int(unit))
        for first in self._made[int(unit) :: self.groups]:
            for others in itertools.product(self._made, repeat=self.kind.bodies - 1):
                for operands in self._operands:
                    if draw.random() < self.share:
                        program = self._program([first, *others], operands)
                        yield program, program

    def text(self, program: Program) -> str:
        """Return a program as text for error messages."""
        return f"{self.name}: {program.jaxpr}"

    def inputs(self) -> list[jax.Array]:
        """Return arguments whose elements are all distinct."""
        numbers = iter([1.5, np.nan, -0.0, -2.0, 3.0, 0.25, 7.0, -5.0, 11.0])
        return [
            jax.numpy.asarray(
                np.array([next(numbers) for _ in range(t.size)], t.dtype).reshape(t.shape)
            )
            for t in self.kind.types
        ]

    # --- bodies and operands --------------------------------------------------------------------

    @cached_property
    def _made(self) -> list[Any]:
        """Return every body whose equations are all live, with any atoms as results."""
        family, kind = self.family, self.kind
        skeleton = jax.make_jaxpr(_dummy(kind))(
            *(jax.ShapeDtypeStruct((), t.dtype) for t in family.arguments)
        )
        literals = [as_literal(np.float32(value), Scalar) for value in family.literals]
        found = []
        for graph in family.grown(EMPTY, family.equations):
            unread = {graph.values[i] for i in graph.unread}
            atoms = [*family.variables, *graph.values, *literals]
            for outs in itertools.product(atoms, repeat=kind.results):
                if unread <= {v for v in outs if not isinstance(v, Literal)}:
                    found.append(
                        replace_jaxpr(
                            skeleton,
                            invars=family.variables,
                            outvars=outs,
                            eqns=graph.eqns,
                            debug_info=skeleton.jaxpr.debug_info,
                        )
                    )
        return found

    @cached_property
    def _operands(self) -> list[tuple[int | None, ...]]:
        """Return every choice of arguments for operands. At most one is None, for a literal."""
        types, found = self.kind.types, []

        def choose(chosen: tuple[int | None, ...]) -> None:
            position = len(chosen)
            if position == len(types):
                found.append(chosen)
                return
            alike = [n for n in range(position) if types[n] == types[position]]
            given = {chosen[n] for n in alike} - {None}
            for n in (*given, position):
                choose((*chosen, n))
            if types[position].shape == () and None not in chosen:
                choose((*chosen, None))

        choose(())
        return found

    @cached_property
    def _skeleton(self) -> Program:
        structs = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in self.kind.types]
        return trace(self.kind.function(_dummy(self.kind)), *structs)

    def _program(self, bodies: Sequence[Any], operands: Sequence[int | None]) -> Program:
        old = self._skeleton.jaxpr
        names = {
            var: _LITERAL if n is None else old.invars[n]
            for var, n in zip(old.invars, operands, strict=True)
        }
        eqns = []
        for eqn in old.eqns:
            new = self.kind.put(eqn, bodies) if interpreter.read(eqn) else eqn
            atoms = [v if isinstance(v, Literal) else names.get(v, v) for v in new.invars]
            eqns.append(new.replace(invars=atoms))
        return self._skeleton.replace(jaxpr=replace_jaxpr(old, eqns=eqns))


_LITERAL = as_literal(np.float32(2.0), Scalar)


def _dummy(kind: Kind) -> Callable[..., list[Any]]:
    """Return a body for a skeleton, without pass-through results."""
    return lambda *xs: [reduce(lax.add, xs) for _ in range(kind.results)]
