"""The lines of a listing, in tokens: told apart, and cut where the width ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from jaxprtool.ir.notation.tokens import BINDER, Comment


def lines_of(tokens: Iterable[str]) -> Iterator[list[str]]:
    """Yield the tokens of each line, without newlines."""
    line: list[str] = []
    for token in tokens:
        first, *others = token.split("\n") if "\n" in token else (token,)
        if first or token is BINDER:
            line.append(token if not others else type(token)(first))
        for rest in others:
            yield line
            line = [type(token)(rest)] if rest else []
    yield line


def cut(line: Sequence[str], width: int) -> list[str]:
    """Return a line's tokens as far as the width goes."""
    if sum(map(len, line)) <= width:
        return list(line)
    tokens: list[str] = []
    free = width - 1
    for token in line:
        if len(token) > free:
            return [*tokens, type(token)(token[:free]), Comment("…")]
        tokens.append(token)
        free -= len(token)
    return tokens
