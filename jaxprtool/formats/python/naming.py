"""Names for definitions of an emitted module: unique identifiers that shadow nothing."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable, Iterator
from itertools import count, product
from string import ascii_lowercase

#: Names that an emitted module must not shadow; linters reject `l`.
RESERVED = frozenset({*keyword.kwlist, *dir(builtins), "l"})


def identifier(text: str) -> str:
    """Return an identifier as similar to `text` as possible: `lambda_` for `<lambda>`."""
    name = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_" if text.startswith("<") else "")
    if not name or name[0].isdigit():
        name = f"_{name}"
    return f"{name}_" if name in RESERVED else name


class LocalNames:
    """The names taken in a function; `outer` are those of its module.

    Names of a function do not shadow names of the module or vice versa: `everywhere` has both.
    """

    def __init__(self, outer: set[str], everywhere: set[str]):
        self._taken: set[str] = set()
        self._outer = outer
        self._everywhere = everywhere
        self._letters = _letters()

    def fresh(self) -> str:
        """Return the next free name of a, b, c, …, z, aa, ab and so on."""
        for name in self._letters:
            if self._is_free(name):
                return self.take(name)
        raise AssertionError("there are endlessly many names")

    def claim(self, hint: str) -> str:
        """Return `hint` as an identifier, with a number after it if it is taken."""
        return self.take(next(filter(self._is_free, numbered(hint))))

    def unused(self) -> str:
        """Return the name of unused values: `_`, or `__` if a variable is called `_`."""
        name = next(filter(self._is_free, map("_".__mul__, count(1))))
        self._everywhere.add(name)  # no later function of the module may have this name
        return name

    def inside(self, captured: Iterable[str]) -> LocalNames:
        """Return names for a nested function, which may shadow names that it does not capture."""
        names = LocalNames(self._outer, self._everywhere)
        names._taken.update(captured)
        names._letters = self._letters
        return names

    def _is_free(self, name: str) -> bool:
        return name not in self._taken and name not in self._outer and name not in RESERVED

    def take(self, name: str) -> str:
        """Mark a name as taken."""
        self._taken.add(name)
        self._everywhere.add(name)
        return name


def numbered(hint: str) -> Iterator[str]:
    """Yield `hint` as an identifier, then with 2, 3, … after it."""
    name = identifier(hint)
    yield name
    yield from (f"{name}_{n}" for n in count(2))


def _letters() -> Iterator[str]:
    for length in count(1):
        yield from map("".join, product(ascii_lowercase, repeat=length))
