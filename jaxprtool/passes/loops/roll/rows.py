"""The known rows of arrays along the leading axis: which variable is which row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jaxprtool import jaxcompat
from jaxprtool.jaxcompat import Atom, JaxprEqn, Literal, Var


@dataclass(frozen=True)
class Range:
    """The rows from `start` to `stop` of an array."""

    array: Var
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        """True if these are all the rows."""
        return self.start == 0 and self.array.aval.shape[0] == self.stop


class Rows:
    """The known rows, with the arrays that they belong to."""

    def __init__(self) -> None:
        self._of: dict[Var, dict[Var, int]] = defaultdict(dict)
        self._slices: dict[Var, tuple[Var, int]] = {}
        #: Arrays whose rows are one-row slices of other arrays; written when they are read.
        self.of_slices: dict[Var, Var] = {}
        self._expanded: dict[Var, Var] = {}

    def of(self, atom: Atom) -> Mapping[Var, int]:
        """Return the arrays that an atom is a row of, each with the number of the row."""
        return {} if type(atom) is Literal else self._of.get(atom, {})

    def add(self, atom: Atom, array: Var, number: int) -> None:
        """Record that an atom is a row of an array."""
        if type(atom) is not Literal:
            self._of[atom][array] = number

    def record(self, eqn: JaxprEqn) -> None:
        """Record the rows that an equation takes from an array."""
        name = eqn.primitive.name
        if name == "unstack" and eqn.params["axis"] == 0:
            for i, var in enumerate(eqn.outvars):
                self.add(var, eqn.invars[0], i)
        elif name == "slice" and (number := _one_row(eqn)) is not None:
            self._record_slice(eqn, number)
        elif (
            name == "squeeze" and eqn.params["dimensions"] == (0,) and eqn.invars[0] in self._slices
        ):
            self.add(eqn.outvars[0], *self._slices[eqn.invars[0]])

    def _record_slice(self, eqn: JaxprEqn, number: int) -> None:
        (array,), (var,) = eqn.invars, eqn.outvars
        self._slices[var] = array, number
        if array not in self._expanded:
            shape = array.aval.shape
            self._expanded[array] = Var(jaxcompat.stacked_aval(shape[0], var.aval))
            self.of_slices[self._expanded[array]] = array
        self.add(var, self._expanded[array], number)

    def parts(self, values: Sequence[Atom], usable: Callable[[Var], bool]) -> list[Atom | Range]:
        """Return the parts of an array with these rows.

        Args:
            values: The rows.
            usable: Whether an array may be read.

        Returns:
            Ranges of arrays, as long as possible, and single rows.
        """
        parts: list[Atom | Range] = []
        while values:
            best, longest = values[0], 1
            for array, start in self.of(values[0]).items():
                count = 1
                while (
                    count < len(values) and self.of(values[count]).get(array, -1) == start + count
                ):
                    count += 1
                if count > longest and usable(array):
                    best, longest = Range(array, start, start + count), count
            parts.append(best)
            values = values[longest:]
        return parts


def _one_row(eqn: JaxprEqn) -> int | None:
    """Return the number of the row that a slice takes, if it takes exactly one whole row."""
    if type(eqn.invars[0]) is Literal:
        return None
    shape, starts = eqn.invars[0].aval.shape, eqn.params["start_indices"]
    whole = eqn.outvars[0].aval.shape == (1, *shape[1:])
    return starts[0] if whole and isinstance(shape[0], int) else None
