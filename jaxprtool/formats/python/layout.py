"""Line breaks of emitted Python, the same as those of `ruff format`, and unique names.

Text consists of pieces: strings, holes for operands, and brackets whose items may be on separate
lines. Most statements fit on one line and are written flat. Others are broken as by ruff: the
arguments of a call go on one further line if they fit, else one item per line with a trailing
comma.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product
from string import ascii_lowercase
from typing import TypeAlias

# --- layout ---------------------------------------------------------------------------------------
# Line breaks of emitted Python, the same as those of `ruff format`.

#: The maximal length of a line, including its comment.
WIDTH = 88
INDENT = "    "


@dataclass(frozen=True)
class Hole:
    """The place of an operand; one of lower precedence than `level` gets parentheses."""

    index: int
    level: int = 0


@dataclass
class Bracket:
    """Items between brackets. A `call` may have all its items on one separate line."""

    open: str
    items: list[list[Piece]]
    close: str
    call: bool = field(default=False, kw_only=True)
    single_comma: bool = field(default=False, kw_only=True)
    #: Whether brackets are left out when flat, as in return values and targets.
    bare: bool = field(default=False, kw_only=True)


Piece: TypeAlias = str | Hole | Bracket


def flat(pieces: Sequence[Piece]) -> str:
    """Return the text on one line; all holes must be filled."""
    return "".join(_flat(pieces))


def _flat(pieces: Sequence[Piece]) -> Iterator[str]:
    for piece in pieces:
        if isinstance(piece, str):
            yield piece
            continue
        assert isinstance(piece, Bracket)
        inner = ", ".join(map(flat, piece.items)) + ("," if piece.single_comma else "")
        bare = piece.bare and not piece.single_comma
        yield inner if bare else f"{piece.open}{inner}{piece.close}"


def holes_of(pieces: Sequence[Piece]) -> Iterator[Hole]:
    """Yield the holes in textual order, which is the order of evaluation."""
    for piece in pieces:
        if isinstance(piece, Hole):
            yield piece
        elif isinstance(piece, Bracket):
            for item in piece.items:
                yield from holes_of(item)


def filled_holes(pieces: Sequence[Piece], texts: dict[int, str]) -> list[Piece]:
    """Return the pieces with holes replaced by the texts of operands."""
    result: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, Hole):
            result.append(texts[piece.index])
        elif isinstance(piece, Bracket):
            result.append(replace(piece, items=[filled_holes(item, texts) for item in piece.items]))
        else:
            result.append(piece)
    if "**" in result and not _SIMPLE.fullmatch(flat(result)):
        return [" ** " if piece == "**" else piece for piece in result]
    return result


#: A power whose operands are names and numbers is written without spaces.
_SIMPLE = re.compile(r"-?[\w.]+\*\*-?[\w.]+")


# --- statements -------------------------------------------------------------------------------


def statement(prefix: str, pieces: Sequence[Piece], suffix: str, depth: int) -> list[str]:
    """Return the lines of `prefix pieces suffix` at level `depth`; all holes must be filled."""
    margin = INDENT * depth
    line = f"{margin}{prefix}{flat(pieces)}{suffix}"
    if len(line) <= WIDTH:
        return [line]
    return _broken(prefix, pieces, suffix, margin)


def _broken(prefix: str, pieces: Sequence[Piece], suffix: str, margin: str) -> list[str]:
    """Return the lines of a text that is too long for one, broken at its last bracket."""
    breakable = [i for i, p in enumerate(pieces) if isinstance(p, Bracket) and p.items]
    inner = flat(pieces)
    operator = any(isinstance(p, str) and p.startswith(" ") for p in pieces)
    if breakable and not operator:
        last = pieces[breakable[-1]]
        assert isinstance(last, Bracket)
        before, after = flat(pieces[: breakable[-1]]), flat(pieces[breakable[-1] + 1 :])
        first = f"{margin}{prefix}{before}{last.open}"
        if len(first) > WIDTH and len(breakable) > 1:  # `pl.pallas_call(kernel, ...)(x, y)`
            *lines, end = _broken(prefix, pieces[: breakable[-1]], "", margin)
            if len(line := f"{end}{flat(pieces[breakable[-1] :])}{suffix}") <= WIDTH:
                return [*lines, line]
        return [first, *_items(last, margin + INDENT), f"{margin}{last.close}{after}{suffix}"]
    if prefix.endswith(("= ", "return ")) and len(margin) + len(INDENT) + len(inner) <= WIDTH:
        return [f"{margin}{prefix}(", f"{margin}{INDENT}{inner}", f"{margin}){suffix}"]
    return [f"{margin}{prefix}{inner}{suffix}"]


def _items(bracket: Bracket, margin: str) -> list[str]:
    one = margin + ", ".join(map(flat, bracket.items))
    if bracket.call and len(one) <= WIDTH:
        return [one]
    lines = []
    for item in bracket.items:
        line = f"{margin}{flat(item)},"
        lines += [line] if len(line) <= WIDTH else _broken("", item, ",", margin)
    return lines


#: Targets of an assignment: a name and its type, or a list of these in parentheses.
Targets: TypeAlias = "tuple[str, str | None] | list[Targets]"


def unpacking(targets: Targets, pieces: Sequence[Piece], depth: int) -> list[str]:
    """Return the lines of `a, (b, c) = pieces  # types`, one target per line if too long."""
    margin = INDENT * depth
    types = list(_types(targets))
    comment = "  # " + ", ".join(types) if types else ""
    line = f"{margin}{_names(targets, bare=True)} = {flat(pieces)}{comment}"
    if len(line) <= WIDTH:
        return [line]
    *first, last = _target_lines(targets, margin)
    prefix = f"{last.strip()[:-1]} = "
    return [*first, *statement(prefix, pieces, "", depth)]


def _types(targets: Targets) -> Iterator[str]:
    if isinstance(targets, list):
        for target in targets:
            yield from _types(target)
    elif targets[1] is not None:
        yield targets[1]


def _names(targets: Targets, bare: bool = False) -> str:
    if not isinstance(targets, list):
        return targets[0]
    names = ", ".join(map(_names, targets)) + ("," if len(targets) == 1 else "")
    return names if bare and len(targets) > 1 else f"({names})"


def _target_lines(targets: Targets, margin: str) -> list[str]:
    if isinstance(targets, list):
        inner = [line for t in targets for line in _target_lines(t, margin + INDENT)]
        return [f"{margin}(", *inner, f"{margin}),"]
    name, type_comment = targets
    return [f"{margin}{name},  # {type_comment}" if type_comment else f"{margin}{name},"]


def definition(
    name: str, parameters: Sequence[str], types: Sequence[str | None], depth: int
) -> list[str]:
    """Return the lines of `def name(a, b):  # types`, one parameter per line if too long."""
    margin = INDENT * depth
    shown = [t for t in types if t is not None]
    comment = "  # " + ", ".join(shown) if shown else ""
    line = f"{margin}def {name}({', '.join(parameters)}):{comment}"
    if len(line) <= WIDTH:
        return [line]
    if not shown:
        items: list[list[Piece]] = [[p] for p in parameters]
        return statement(f"def {name}", [Bracket("(", items, ")", call=True)], ":", depth)
    targets: Targets = list(zip(parameters, types, strict=True))
    return [f"{margin}def {name}(", *_target_lines(targets, margin)[1:-1], f"{margin}):"]


# --- naming ---------------------------------------------------------------------------------------
# Names for definitions of an emitted module: unique identifiers that shadow nothing.

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
        self._numbered: dict[str, Iterator[str]] = {}

    def fresh(self) -> str:
        """Return the next free name of a, b, c, …, z, aa, ab and so on."""
        for name in self._letters:
            if self._is_free(name):
                return self.take(name)
        raise AssertionError("there are endlessly many names")

    def claim(self, hint: str) -> str:
        """Return `hint` as an identifier, with a number after it if it is taken."""
        names = self._numbered.setdefault(hint, numbered(hint))
        return self.take(next(filter(self._is_free, names)))

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
