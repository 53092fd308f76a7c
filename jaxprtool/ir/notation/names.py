"""Name variables, and find the jaxprs that are printed once and referred to by name.

JAX names variables in the order in which they are written: a, b, …, z, ba, bb, …. There are three
exceptions. A result of the outermost jaxpr that nothing uses is `_`. The name of a shared jaxpr is
skipped. The arguments and results of a jit's body take the names of the variables that the call
passes and binds.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count, product
from operator import attrgetter
from string import ascii_lowercase

from jaxprtool.jaxcompat import Atom, DropVar, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.jaxcompat.identity import identity

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
