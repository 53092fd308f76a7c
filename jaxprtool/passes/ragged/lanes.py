"""The jaxpr of one example made one of all: how its arguments and results are held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.equations import type_of
from jaxprtool.jaxcompat import Atom, Aval, ClosedJaxpr, Var
from jaxprtool.passes.ragged.body import Run, Writing
from jaxprtool.passes.ragged.table import Ragging, select
from jaxprtool.passes.ragged.values import Kind, Packed, Pairs, Sizes, Stacked


@dataclass(frozen=True, eq=False)
class AllLanes:
    """The jaxpr of all lanes.

    Attributes:
        jaxpr: It takes the arguments, then the lengths of each ragged symbol.
        kinds: How its results are held: shared, by lanes, or packed.
    """

    jaxpr: ClosedJaxpr
    kinds: tuple[Kind, ...]


def all_lanes(
    body: ClosedJaxpr,
    kinds: Sequence[Kind],
    sizes: Sizes,
    result_names: Callable[[], Sequence[str]],
) -> AllLanes:
    """Return the jaxpr of all lanes of that of one.

    Args:
        body: The jaxpr of one lane.
        kinds: How its arguments are held.
        sizes: The ragged symbols, how many rows there are, and how values are to be held.
        result_names: Gives the names of the results, for errors.

    Raises:
        UnsupportedError: For an equation that cannot be done by lanes, and for a result that has
            two ragged axes.
    """
    wanted = [_result_kind(sizes, v.aval, i, result_names) for i, v in enumerate(body.outvars)]
    run = Run(sizes)
    writing = _Outermost(run)
    made = writing.body(body, kinds, wanted)
    own = dict(zip(made.symbols, made.jaxpr.invars, strict=False))
    lengths = [own.get(name) or Var(sizes.lengths_aval) for name in sizes.bounds]
    invars = [*made.jaxpr.invars[len(made.symbols) :], *lengths]
    return AllLanes(jaxcompat.replace_jaxpr(made.jaxpr, invars=invars), made.kinds)


def _result_kind(
    sizes: Sizes, aval: Aval, place: int, names: Callable[[], Sequence[str]]
) -> Kind | None:
    if not sizes.axes(getattr(aval, "shape", ())):
        return None
    kind = sizes.canonical(aval)
    if isinstance(kind, Pairs | Stacked):
        raise UnsupportedError(
            f"{names()[place]} is {type_of(aval)} of each example: a result can have one ragged "
            "axis, of a size such as n, 2*n or n + 1"
        )
    return kind


class _Outermost(Writing):
    """The outermost body, into which rows come, and out of which they go, that are of no lane."""

    def body(self, body: ClosedJaxpr, kinds: Sequence[Kind], wanted: Sequence[Kind | None]) -> Any:
        self._arguments = set(body.invars)
        self._spared: dict[Var, Atom] = {}
        self._results = False
        return super().body(body, kinds, wanted)

    def held(self, atom: Atom, kind: Kind) -> Atom:
        """Return the atom that holds one of the old body; an argument with its spare rows made."""
        found = super().held(atom, kind)
        if not isinstance(kind, Packed) or self.run.sizes.is_exact(kind.size):
            return found
        if type(atom) is Var and atom in self._arguments:
            if atom not in self._spared:
                self._spared[atom] = self._rows(_spared, found, kind)
            return self._spared[atom]
        return found

    def _rows(self, convert: Callable[..., Any], atom: Atom, kind: Packed) -> Atom:
        def compute(ragging: Ragging, array: Any) -> list[Any]:
            return [convert(ragging, array, kind)]

        key = convert, atom.aval, kind
        return self.template(key, compute, [atom], [kind.size], None)[0]

    def result(self, atom: Atom, kind: Kind) -> Atom:
        """Return the atom of a result, with zeros in rows that belong to no lane."""
        found = self.held(atom, kind)
        if not isinstance(kind, Packed) or self.run.sizes.is_exact(kind.size):
            return found
        return self._rows(_cleared, found, kind)


def _spared(ragging: Ragging, array: Any, kind: Packed) -> Any:
    return ragging.spared(array, kind.axis, kind.size)


def _cleared(ragging: Ragging, array: Any, kind: Packed) -> Any:
    return select(ragging.real(kind.size), kind.axis, array, 0)
