"""Rewrite the jaxpr of one example into the jaxpr of all lanes: the entry point of `ragged`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.core.equations import type_of
from jaxprtool.jaxcompat import Atom, Aval, ClosedJaxpr, Var
from jaxprtool.passes.mapping.ragged.body import RaggedBodyBuilder, RaggedDomain
from jaxprtool.passes.mapping.ragged.table import RaggedContext, select
from jaxprtool.passes.mapping.ragged.values import Kind, Packed, Pairs, Sizes, Stacked


@dataclass(frozen=True, eq=False)
class RaggedJaxpr:
    """The jaxpr of all examples.

    Attributes:
        jaxpr: The jaxpr. It takes the arguments, then the lengths of each ragged symbol.
        kinds: The layouts of its results: `Shared`, `Batched`, or `Packed`.
    """

    jaxpr: ClosedJaxpr
    kinds: tuple[Kind, ...]


def ragged_jaxpr(
    body: ClosedJaxpr,
    kinds: Sequence[Kind],
    sizes: Sizes,
    result_names: Callable[[], Sequence[str]],
) -> RaggedJaxpr:
    """Return the jaxpr of all examples, from the jaxpr of one.

    Args:
        body: The jaxpr of one example.
        kinds: The layouts of its arguments.
        sizes: The ragged symbols, the number of their rows, and the layout of values.
        result_names: Returns the names of the results, for errors.

    Raises:
        UnsupportedError: If an equation cannot be computed for examples of different lengths, or a
            result has two ragged axes.
    """
    wanted = [_result_kind(sizes, v.aval, i, result_names) for i, v in enumerate(body.outvars)]
    domain = RaggedDomain(sizes)
    made = _ProgramBuilder(domain).body(body, kinds, wanted)
    jaxpr, count = made.taking(domain, domain.extras), len(domain.extras)
    invars = [*jaxpr.invars[count:], *jaxpr.invars[:count]]
    return RaggedJaxpr(jaxcompat.replace_jaxpr(jaxpr, invars=invars), made.kinds)


def _result_kind(
    sizes: Sizes, aval: Aval, place: int, names: Callable[[], Sequence[str]]
) -> Kind | None:
    if not sizes.axes(getattr(aval, "shape", ())):
        return None
    kind = sizes.canonical(aval)
    if isinstance(kind, Pairs | Stacked):
        raise UnsupportedError(
            f"{names()[place]} is {type_of(aval)} for each example, but a result can have only "
            "one ragged axis, of a size such as n, 2*n or n + 1"
        )
    return kind


class _ProgramBuilder(RaggedBodyBuilder):
    """The outermost body, which defines the spare rows of arguments and results.

    The spare rows of an argument may hold anything: they are made equal to the first row before use
    (see `values`). Those of a result are set to zero.
    """

    def body(self, body: ClosedJaxpr, kinds: Sequence[Kind], wanted: Sequence[Kind | None]) -> Any:
        self._arguments = set(body.invars)
        self._spared: dict[Var, Atom] = {}
        return super().body(body, kinds, wanted)

    def held(self, atom: Atom, kind: Kind) -> Atom:
        """Return the atom that holds an atom of the old body, with its spare rows defined."""
        found = super().held(atom, kind)
        if not isinstance(kind, Packed) or self.domain.sizes.is_exact(kind.size):
            return found
        if type(atom) is not Var or atom not in self._arguments:
            return found
        if atom not in self._spared:
            self._spared[atom] = self._rows(_spared, found, kind)
        return self._spared[atom]

    def _rows(self, convert: Callable[..., Any], atom: Atom, kind: Packed) -> Atom:
        """Apply `_spared` or `_cleared`."""

        def compute(context: RaggedContext, array: Any) -> Any:
            return convert(context, array, kind)

        return self.computed((convert, atom.aval, kind), compute, [atom], [kind.size])

    def results(
        self, atoms: Sequence[Atom], wanted: Sequence[Kind | None]
    ) -> tuple[list[Atom], list[Kind]]:
        """Return the atoms of the results, with zeros in their spare rows."""
        found, kinds = super().results(atoms, wanted)
        for i, kind in enumerate(kinds):
            if isinstance(kind, Packed) and not self.domain.sizes.is_exact(kind.size):
                found[i] = self._rows(_cleared, found[i], kind)
        return found, kinds


def _spared(context: RaggedContext, array: Any, kind: Packed) -> Any:
    return context.spared(array, kind.axis, kind.size)


def _cleared(context: RaggedContext, array: Any, kind: Packed) -> Any:
    return select(context.real(kind.size), kind.axis, array, 0)
