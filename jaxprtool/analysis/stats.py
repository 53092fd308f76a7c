"""The size of a program: its equations by primitive and depth, its constants, its signature.

Equations are counted as written, where they run: the body of a jit counts at each call, also
when several calls share it, and the body of a loop counts once. The counts of each jaxpr are
computed once, so a program whose shared bodies unfold to billions of equations is counted in the
time that it takes to read it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from jaxprtool.ir.backends import JaxprCache
from jaxprtool.ir.documents import Printed
from jaxprtool.ir.equations import inner_jaxprs, size_of, type_of
from jaxprtool.ir.program import NamedValue, Program, program_signature, top_jaxpr
from jaxprtool.jaxcompat import AnyJaxpr, ClosedJaxpr, Jaxpr, Var


@dataclass(frozen=True)
class PrimitiveCount:
    """The number of equations of a primitive.

    Attributes:
        name: The name of the primitive.
        total: The number of its equations.
        by_depth: The number at each depth; that of the program itself is 0.
    """

    name: str
    total: int
    by_depth: tuple[int, ...]


@dataclass(frozen=True)
class Stats(Printed):
    """The size of a program.

    Attributes:
        name: The name of the function.
        equations: The number of equations, at every depth.
        by_depth: The number at each depth; that of the program itself is 0.
        primitives: The number of equations of each primitive, the most frequent first.
        constants: The constants of the program and of its bodies, once for each body.
        arguments: The arguments.
        outputs: The outputs.
    """

    name: str
    equations: int
    by_depth: tuple[int, ...]
    primitives: tuple[PrimitiveCount, ...]
    constants: tuple[NamedValue, ...]
    arguments: tuple[NamedValue, ...]
    outputs: tuple[NamedValue, ...]

    @property
    def constant_bytes(self) -> int:
        """The bytes of all constants whose size is known."""
        return sum(value.bytes or 0 for value in self.constants)


def stats(program: Program | ClosedJaxpr) -> Stats:
    """Return the stats of a `Program` or a closed jaxpr."""
    about = program_signature(program)
    counts: dict[Jaxpr, Counter[tuple[int, str]]] = {}
    _count(about.jaxpr, counts)
    depths = 1 + max((depth for depth, _ in counts[about.jaxpr]), default=-1)
    by_name: dict[str, list[int]] = defaultdict(lambda: [0] * depths)
    for (depth, name), number in counts[about.jaxpr].items():
        by_name[name][depth] += number
    primitives = [PrimitiveCount(name, sum(n), tuple(n)) for name, n in by_name.items()]
    primitives.sort(key=lambda primitive: (-primitive.total, primitive.name))
    by_depth = tuple(map(sum, zip(*by_name.values(), strict=True)))
    return Stats(
        about.name,
        sum(by_depth),
        by_depth,
        tuple(primitives),
        _constants(counts),
        about.arguments,
        about.outputs,
    )


#: The equations of a jaxpr at every depth.
_totals = JaxprCache()


def count_equations(program: Program | AnyJaxpr) -> int:
    """Return the number of equations of a `Program` or a jaxpr, at every depth, as `stats` does."""
    jaxpr = top_jaxpr(program)
    totals = _totals.of(jaxpr)
    if "total" not in totals:
        totals["total"] = len(jaxpr.eqns) + sum(map(count_equations, inner_jaxprs(jaxpr)))
    return totals["total"]  # type: ignore[no-any-return]


def _count(jaxpr: Jaxpr, counts: dict[Jaxpr, Counter[tuple[int, str]]]) -> None:
    """Fill in the counts, by depth and primitive, of `jaxpr` and its bodies."""
    total = Counter((0, eqn.primitive.name) for eqn in jaxpr.eqns)
    counts[jaxpr] = total
    for body in inner_jaxprs(jaxpr):
        if body not in counts:
            _count(body, counts)
        for (depth, name), number in counts[body].items():
            total[depth + 1, name] += number


def constants_of(jaxpr: Jaxpr) -> list[tuple[Jaxpr, Var]]:
    """Return the constants of a jaxpr and of its bodies, in the order of `stats`."""
    counts: dict[Jaxpr, Counter[tuple[int, str]]] = {}
    _count(jaxpr, counts)
    return _held(counts)


def _held(jaxprs: Iterable[Jaxpr]) -> list[tuple[Jaxpr, Var]]:
    return [(jaxpr, var) for jaxpr in jaxprs for var in jaxpr.constvars]


def _constants(jaxprs: Iterable[Jaxpr]) -> tuple[NamedValue, ...]:
    avals = [var.aval for _, var in _held(jaxprs)]
    return tuple(
        NamedValue(f"constant[{i}]", type_of(aval), size_of(aval)) for i, aval in enumerate(avals)
    )
