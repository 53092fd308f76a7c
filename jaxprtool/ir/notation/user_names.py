"""Name variables as the user does: arguments by their paths, values by names in the source.

    params['w']          an argument
    hidden               the value of `hidden = x @ w + b`
    hidden_1             the next one of this name, as in the second iteration of a Python loop

A value has the name that the user's source gives to the outermost expression that computes it.
Parts of that expression, and values that a library computes on the way, have letters as in JAX's
notation. So do values of backward passes, which come from the same expressions. A program
that was read from a file has the names that the file states.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.caches import cached_method
from jaxprtool.ir.core.equations import holders
from jaxprtool.ir.core.regions import regions
from jaxprtool.ir.dataflow.dataflow import DataFlow
from jaxprtool.ir.dataflow.def_use import DefUse
from jaxprtool.ir.notation.names import VariableNames, fresh_names
from jaxprtool.ir.source.frames import Root, frames_now
from jaxprtool.ir.source.source_names import Range, SourceNames, range_of
from jaxprtool.jaxcompat import DropVar, Jaxpr, JaxprEqn, Var
from jaxprtool.jaxcompat.identity import identity
from jaxprtool.jaxcompat.source_locations import FrameReader, UserFrame, names_given

#: The names that `nnx.jit` and `eqx.filter_jit` give to the arrays of objects.
_FLATTENED = re.compile(r"\w+\.states\[\d+\]|dynamic_(?:no)?donate\[")

#: A name that can be used as it is.
_NAME = re.compile(r"[A-Za-z_]\w*")


class UserNames(VariableNames):
    """The names of variables: the user's, or else those of `VariableNames`.

    Args:
        root: The program's jaxpr.
        taken: The names of shared jaxprs.
        arguments: The paths of its arguments.
        roots: The folders of the user's files, as a `Program` has them.
    """

    def __init__(
        self,
        root: Jaxpr,
        taken: set[str],
        arguments: Sequence[str],
        roots: Sequence[Root] = (),
    ):
        super().__init__(root, taken)
        #: The names in each body, which is a separate scope, like a user's function.
        scopes = {root: Counter(taken)}
        self._assign_names(zip(root.invars, arguments, strict=True), scopes[root])
        finder = _Finder(roots)
        held = DataFlow(root).holders
        for jaxpr in held:
            self._assign_names(finder.names(jaxpr), scopes[jaxpr])
            for eqn, inside in holders(jaxpr):
                for _, body in inside:
                    if body not in scopes:
                        scopes[body] = Counter(taken)
                        if len(held[body]) == 1:
                            self._follow_flattened(eqn, body, scopes[body])
                        self._assign_names(_parameters(body), scopes[body])
                        if len(held[body]) == 1:
                            self._follow_captured(eqn, body, scopes[body])
        self.fresh = fresh_names(set().union(*scopes.values()))

    def follow_call(self, eqn: JaxprEqn, body: Jaxpr) -> None:
        """Leave the variables of a call's body the names that they have."""

    def _assign_names(self, names: Iterable[tuple[Var, str]], scope: Counter[str]) -> None:
        """Name variables in a body, with a number appended to names that are used already."""
        for var, wanted in names:
            if identity(var) not in self.spaced:
                name = wanted
                while name in scope:
                    name = f"{wanted}_{scope[wanted]}"
                    scope[wanted] += 1
                scope[name] += 1
                self.spaced[identity(var)] = f" {name}"

    def _follow_flattened(self, eqn: JaxprEqn, body: Jaxpr, scope: Counter[str]) -> None:
        """Give the arrays of a flattened model the names of their operands outside."""
        inside = regions(eqn)
        region = None if inside is None else inside.region_of(body)
        if region is None:
            return
        operands = dict(zip(body.invars, region.ins, strict=True))
        for var, name in _parameters(body):
            outer = self.spaced.get(identity(eqn.invars[operands[var]]), "")[1:]
            if outer and _FLATTENED.match(name):
                self._assign_names([(var, outer)], scope)

    def _follow_captured(self, eqn: JaxprEqn, body: Jaxpr, scope: Counter[str]) -> None:
        """Give loop-invariant arguments of a body the names of their operands outside."""
        inside = regions(eqn)
        region = None if inside is None else inside.region_of(body)
        if region is not None:
            for var, operand, same in zip(
                body.invars, region.ins, region.loop_invariant, strict=True
            ):
                name = self.spaced.get(identity(eqn.invars[operand]), "")[1:]
                if same and name and name not in scope:
                    self._assign_names([(var, name)], scope)


def source_names(root: Jaxpr, roots: Sequence[Root]) -> dict[Var, str]:
    """Return the names in the user's source for the values of equations, at every depth."""
    finder = _Finder(roots)
    return {var: name for jaxpr in DataFlow(root).holders for var, name in finder.names(jaxpr)}


def _within(part: Range, whole: Range) -> bool:
    """Return True if an expression is another one, or a part of it."""
    return whole[:2] <= part[:2] and part[2:] <= whole[2:]


def _parameters(body: Jaxpr) -> list[tuple[Var, str]]:
    """Return the arguments of a body that its function names."""
    names = body.debug_info.arg_names or ()
    if len(names) != len(body.invars):
        return []
    return [(var, name) for var, name in zip(body.invars, names, strict=True) if name]


class _Finder:
    """Finds the names in the user's source for the values of equations."""

    def __init__(self, roots: Sequence[Root]) -> None:
        self._sources = SourceNames()
        self._frames, self._reader = frames_now(roots, chosen=False), FrameReader()
        #: The user's own frames in each traceback, by its number, the innermost frame first.
        self._own: list[list[tuple[UserFrame, Range]]] = []
        #: The names that a file states, by the same numbers.
        self._given: list[list[str]] = []
        self._numbers: dict[object, int] = {}
        self._transposed: dict[int, bool] = {}

    def names(self, jaxpr: Jaxpr) -> list[tuple[Var, str]]:
        """Return the named values of the equations of a jaxpr, and their names."""
        numbers = [*map(self._number, jaxpr.eqns)]
        uses = DefUse(jaxpr.eqns).uses
        found = []
        for eqn, number in zip(jaxpr.eqns, numbers, strict=True):
            known = self._own[number] or self._given[number]
            if not known or self._is_transposed(eqn):
                continue
            for i, var in enumerate(eqn.outvars):
                if isinstance(var, DropVar):
                    continue
                result = (i, len(eqn.outvars)) if len(eqn.outvars) > 1 else None
                if given := self._given[number]:
                    name = given[i] if len(given) == len(eqn.outvars) else None
                else:
                    name = self._name(number, result, *(numbers[r] for r, _ in uses.get(var, ())))
                if name:
                    found.append((var, name))
        return found

    def _number(self, eqn: JaxprEqn) -> int:
        """Return the number of an equation's traceback; equal tracebacks have equal numbers."""
        numbers = self._numbers
        number = numbers.setdefault(eqn.source_info.traceback, len(numbers))
        if number == len(self._own):
            frames = self._reader.frames(eqn)
            own = [f for f in frames if self._frames.is_users(f.file)]
            self._own.append([(frame, range_of(frame)) for frame in own])
            self._given.append(names_given(eqn))
        return number

    def _is_transposed(self, eqn: JaxprEqn) -> bool:
        """Return True if an equation belongs to a backward pass."""
        key = identity(eqn.source_info.name_stack)
        if key not in self._transposed:
            self._transposed[key] = "transpose(" in jaxcompat.name_stack(eqn)
        return self._transposed[key]

    @cached_method
    def _name(self, number: int, result: tuple[int, int] | None, *readers: int) -> str | None:
        """Return the name of the expression of an equation but none of its readers."""
        returned = False
        for frame, place in self._own[number]:
            read = {p for reader in readers for f, p in self._own[reader] if f.file == frame.file}
            if returned:  # the next iteration of a loop may read it by the same call
                read.discard(place)
            if any(_within(place, each) for each in read):
                return None
            name = self._sources.assigned(frame, read, result)
            if name is not None:
                return name if _NAME.fullmatch(name) else None
            result, returned = None, self._sources.returned(frame, read)
        return None
