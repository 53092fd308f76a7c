"""Name variables as JAX's listing does, and as the user does.

JAX names variables in the order in which they are written: a, b, …, z, ba, bb, …. There are three
exceptions. A result of the outermost jaxpr that nothing uses is `_`. The name of a shared jaxpr is
skipped. The arguments and results of a jit's body take the names of the variables that the call
passes and binds.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count, product
from operator import attrgetter
from string import ascii_lowercase

from jaxprtool import jaxcompat
from jaxprtool.ir.backends import cached_method
from jaxprtool.ir.dataflow import DataFlow
from jaxprtool.ir.equations import holders
from jaxprtool.ir.frames import Range, Root, SourceNames, frames_now, range_of
from jaxprtool.ir.regions import Region, regions
from jaxprtool.jaxcompat import Atom, DropVar, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.jaxcompat.jaxprs import identity
from jaxprtool.jaxcompat.source_locations import FrameReader, UserFrame, names_given

# --- names ----------------------------------------------------------------------------------------
# Name variables, and find the jaxprs that are printed once and referred to by name.

#: A body with more equations than this is printed separately even if it is used once.
LONGEST_INLINE_BODY = 10


def shared_jaxprs(
    root: Jaxpr, calls: Callable[[Jaxpr], Sequence[tuple[str | None, Jaxpr]]]
) -> dict[Jaxpr, str]:
    """Return the jaxprs below `root` that are printed once, at the top, with their names, in order.

    These occur more than once, or are long. `calls` returns the open jaxprs in the equations of a
    jaxpr, each with the name that its equation gives it.
    """
    uses: Counter[Jaxpr] = Counter()
    names: dict[Jaxpr, str] = {}
    queue = deque([root])
    while queue:
        jaxpr = queue.popleft()
        uses[jaxpr] += 1
        if uses[jaxpr] > 2:
            continue  # its bodies have been visited twice already, which is enough
        for name, body in calls(jaxpr):
            queue.append(body)
            if name is not None:
                names.setdefault(body, name.strip("<>"))
    long = {j for j in uses if j is not root and len(j.eqns) > LONGEST_INLINE_BODY}
    return _distinct({j: names.get(j, "jaxpr") for j, n in uses.items() if n > 1 or j in long})


def _distinct(names: dict[Jaxpr, str]) -> dict[Jaxpr, str]:
    """Return `names` with a number appended to each name that was used before."""
    taken: Counter[str] = Counter()
    result = {}
    for jaxpr, wanted in names.items():
        name = wanted
        # With the number, the name may equal another one: after `h11`, the second `h1` is `h12`.
        while name in taken:
            name = f"{wanted}{taken[wanted]}"
            taken[wanted] += 1
        taken[name] += 1
        result[jaxpr] = name
    return result


def fresh_names(taken: set[str]) -> Iterator[str]:
    """Yield a, b, …, z, ba, bb, …: numbers in base 26 with letters as digits, except `taken` ones.

    Each has a space before it, which is removed only after a parenthesis.
    """
    names = map("".join, _digits())
    return (name for name in names if name[1:] not in taken) if taken else names


def _digits() -> Iterator[tuple[str, ...]]:
    yield from product(" ", ascii_lowercase)
    for more in count(1):
        yield from product(" ", ascii_lowercase[1:], *[ascii_lowercase] * more)


class VariableNames:
    """The names of variables, each assigned at its first mention.

    `spaced` holds the names, each after a space, by the identity of the variable; so a jaxpr must
    outlive its names. JAX's printing rules use it as the mapping from variables to names that they
    expect.
    """

    def __init__(self, root: Jaxpr, taken: set[str]):
        self.fresh = fresh_names(taken)
        self._followed: set[int] = set()
        used = set(map(identity, root.outvars))
        used.update(map(identity, chain.from_iterable(map(attrgetter("invars"), root.eqns))))
        bound = set(map(identity, chain.from_iterable(map(attrgetter("outvars"), root.eqns))))
        self.spaced = dict.fromkeys(bound - used, " _")

    def mention(self, var: Var) -> str:
        """Return the name of a variable, after a space."""
        name = self.spaced.get(identity(var))
        if name is None:
            name = " _" if isinstance(var, DropVar) else next(self.fresh)
            self.spaced[identity(var)] = name
        return name

    def __getitem__(self, var: Var) -> str:
        return self.mention(var)[1:]

    def __setitem__(self, var: Var, name: str) -> None:
        self.spaced[identity(var)] = " " + name

    def __contains__(self, var: object) -> bool:
        return identity(var) in self.spaced

    def get(self, var: Var, default: str | None = None) -> str | None:
        """Return the name of `var` if it has been mentioned."""
        name = self.spaced.get(identity(var))
        return default if name is None else name[1:]

    def follow_call(self, eqn: JaxprEqn, body: Jaxpr) -> None:
        """Name the arguments and results of `body` like those of `eqn`, which calls it.

        Only the first call for an equation counts, as an equation may be laid out twice.
        """
        if identity(eqn) not in self._followed:
            self._followed.add(identity(eqn))
            self._name_alike(body.invars, eqn.invars)
            self._name_alike(body.outvars, eqn.outvars)

    def _name_alike(self, variables: Sequence[Atom], models: Sequence[Atom]) -> None:
        if len(variables) != len(models):
            return
        used = set()
        for var, model in zip(variables, models, strict=True):
            if isinstance(model, Literal) or isinstance(var, Literal):
                continue
            if identity(model) not in used and var not in self:
                used.add(identity(model))
                self[var] = self[model]


# --- user names -----------------------------------------------------------------------------------
# Name variables as the user does: arguments by their paths, values by names in the source.
#
#     params['w']          an argument
#     hidden               the value of `hidden = x @ w + b`
#     hidden_1             the next one of this name, as in the second iteration of a Python loop
#
# A value has the name that the user's source gives to the outermost expression that computes it.
# Parts of that expression, and values that a library computes on the way, have letters as in JAX's
# notation. So do values of backward passes, which come from the same expressions. A program
# that was read from a file has the names that the file states.

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
        callers = DataFlow(root).holders
        for jaxpr in callers:
            self._assign_names(finder.names(jaxpr), scopes[jaxpr])
            for eqn, inside in holders(jaxpr):
                for _, body in inside:
                    if body not in scopes:
                        scopes[body] = Counter(taken)
                        inside_of = regions(eqn) if len(callers[body]) == 1 else None
                        region = None if inside_of is None else inside_of.region_of(body)
                        if region is not None:
                            self._follow_flattened(eqn, body, region, scopes[body])
                        self._assign_names(_parameters(body), scopes[body])
                        if region is not None:
                            self._follow_captured(eqn, body, region, scopes[body])
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

    def _follow_flattened(
        self, eqn: JaxprEqn, body: Jaxpr, region: Region, scope: Counter[str]
    ) -> None:
        """Give the arrays of a flattened model the names of their operands outside."""
        flattened = [(var, name) for var, name in _parameters(body) if _FLATTENED.match(name)]
        operands = dict(zip(body.invars, region.ins, strict=True)) if flattened else {}
        for var, _ in flattened:
            if outer := self.spaced.get(identity(eqn.invars[operands[var]]), "")[1:]:
                self._assign_names([(var, outer)], scope)

    def _follow_captured(
        self, eqn: JaxprEqn, body: Jaxpr, region: Region, scope: Counter[str]
    ) -> None:
        """Give loop-invariant arguments of a body the names of their operands outside."""
        for var, operand, same in zip(body.invars, region.ins, region.loop_invariant, strict=True):
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
        readers: dict[int, list[int]] = defaultdict(list)
        for eqn, number in zip(jaxpr.eqns, numbers, strict=True):
            for atom in eqn.invars:
                readers[identity(atom)].append(number)
        named = []
        for eqn, number in zip(jaxpr.eqns, numbers, strict=True):
            hints = self._own[number] or self._given[number]
            if not hints or self._is_transposed(eqn):
                continue
            for i, var in enumerate(eqn.outvars):
                if isinstance(var, DropVar):
                    continue
                result = (i, len(eqn.outvars)) if len(eqn.outvars) > 1 else None
                if names := self._given[number]:
                    name = names[i] if len(names) == len(eqn.outvars) else None
                else:
                    name = self._name(number, result, *readers.get(identity(var), ()))
                if name:
                    named.append((var, name))
        return named

    def _number(self, eqn: JaxprEqn) -> int:
        """Return the number of an equation's traceback; equal tracebacks have equal numbers."""
        numbers = self._numbers
        number = numbers.setdefault(eqn.source_info.traceback, len(numbers))
        if number == len(self._own):
            frames = self._reader.frames(eqn)
            user_frames = [f for f in frames if self._frames.is_users(f.file)]
            self._own.append([(frame, range_of(frame)) for frame in user_frames])
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
            if any(_within(place, other) for other in read):
                return None
            name = self._sources.assigned(frame, read, result)
            if name is not None:
                return name if _NAME.fullmatch(name) else None
            result, returned = None, self._sources.returned(frame, read)
        return None
