"""Line breaks of emitted Python, the same as those of `ruff format`.

Text consists of pieces: strings, holes for operands, and brackets whose items may be on separate
lines. Most statements fit on one line and are written flat. Others are broken as by ruff: the
arguments of a call go on one further line if they fit, else one item per line with a trailing
comma.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

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


def filled(pieces: Sequence[Piece], texts: dict[int, str]) -> list[Piece]:
    """Return the pieces with holes replaced by the texts of operands."""
    result: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, Hole):
            result.append(texts[piece.index])
        elif isinstance(piece, Bracket):
            result.append(replace(piece, items=[filled(item, texts) for item in piece.items]))
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
    known = [t for t in types if t is not None]
    comment = "  # " + ", ".join(known) if known else ""
    line = f"{margin}def {name}({', '.join(parameters)}):{comment}"
    if len(line) <= WIDTH:
        return [line]
    if not known:
        items: list[list[Piece]] = [[p] for p in parameters]
        return statement(f"def {name}", [Bracket("(", items, ")", call=True)], ":", depth)
    targets: Targets = list(zip(parameters, types, strict=True))
    return [f"{margin}def {name}(", *_target_lines(targets, margin)[1:-1], f"{margin}):"]
