"""Mutations of a text: each takes it and two numbers, and returns another text.

`test_fuzz.py` reads files after a few mutations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

_TOKEN = re.compile(r"\w+|'[^'\n]*'|[^\w\s]|\s+")
_NUMBER = re.compile(r"\b\d[\w.]*")
_TYPE = re.compile(r"\b[a-z]\w*\[[\w,]*\]")
_BRACKETED = re.compile(r"[(\[{][^()\[\]{}]*[)\]}]")
_SHOWN_PARAMETER = re.compile(r"@?\b\w+=[^\s=]+")

NUMBERS = ("0", "1", "-1", "2", "3", "64", "2147483648", "9" * 18, "9" * 40, "9" * 5000, "0.5")
NUMBERS += ("1e400", "-0.0", "nan", "inf", "True", "None", "1j", "0x7fc00000", "''", "()", "[]")
TYPES = ("f32[]", "f32[3]", "i32[]", "bool[2]", "f32[99999999999,99999]", "~f32[]", "c64[2,2]")
TYPES += ("key<fry>[]", "key<abc>[]", "f64[3]", "Tok", "Ref{f32[3]}", "f32[0]", "f32[-1]", "u4[5]")
TYPES += ("f32[n]", "f32[2*n]", "f32[3]{V:data}@m0", "f32<host>[3]", "float0[3]", "i32[999999]")
WORDS = (
    "{ lambda ; . let in () }",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    "'",
    '"',
    "#",
    ";",
    ":",
    "=",
    ",",
)
WORDS += (",", "\0", "\ud800", "é", "\N{NO-BREAK SPACE}", "\f", "\r", "\\", "in (", "let", "lambda")
WORDS += (
    "_",
    "--",
    "~",
    "@",
    "*",
    "jit[name=f jaxpr=",
    "__import__('os')",
    "lambda: 0",
    "npz('x')",
)
WORDS += ("Mesh", "P('data')", "float32", "NamedSharding(P(), P())", "frozenset({[]})", "-" * 3000)


def _replaced(text: str, pattern: re.Pattern[str], at: int, new: str) -> str:
    found = list(pattern.finditer(text))
    if not found:
        return text
    match = found[at % len(found)]
    return text[: match.start()] + new + text[match.end() :]


def _swap(parts: list[str], i: int, j: int) -> str:
    i, j = i % len(parts), j % len(parts)
    parts[i], parts[j] = parts[j], parts[i]
    return "".join(parts)


def _tokens(text: str) -> list[str]:
    return _TOKEN.findall(text) or [text]


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True) or [text]


def cut(text: str, a: int, b: int) -> str:
    at = a % (len(text) + 1)
    return text[:at] + text[at + 1 + b % 20 :]


def insert_word(text: str, a: int, b: int) -> str:
    at = a % (len(text) + 1)
    return text[:at] + WORDS[b % len(WORDS)] + text[at:]


def change_character(text: str, a: int, b: int) -> str:
    at = a % (len(text) + 1)
    return text[:at] + chr(32 + b % 95) + text[at + 1 :]


def end_early(text: str, a: int, b: int) -> str:
    return text[: a % (len(text) + 1)]


def swap_tokens(text: str, a: int, b: int) -> str:
    return _swap(_tokens(text), a, b)


def copy_token(text: str, a: int, b: int) -> str:
    tokens = _tokens(text)
    tokens[a % len(tokens)] = tokens[b % len(tokens)]
    return "".join(tokens)


def drop_token(text: str, a: int, b: int) -> str:
    tokens = _tokens(text)
    del tokens[a % len(tokens)]
    return "".join(tokens)


def swap_lines(text: str, a: int, b: int) -> str:
    return _swap(_lines(text), a, b)


def drop_line(text: str, a: int, b: int) -> str:
    lines = _lines(text)
    del lines[a % len(lines)]
    return "".join(lines)


def copy_lines(text: str, a: int, b: int) -> str:
    lines = _lines(text)
    at = a % len(lines)
    return "".join([*lines[:at], *lines[at : at + 1 + b % 5] * (1 + b % 3), *lines[at:]])


def change_number(text: str, a: int, b: int) -> str:
    return _replaced(text, _NUMBER, a, NUMBERS[b % len(NUMBERS)])


def change_type(text: str, a: int, b: int) -> str:
    return _replaced(text, _TYPE, a, TYPES[b % len(TYPES)])


def copy_type(text: str, a: int, b: int) -> str:
    types = _TYPE.findall(text) or ["f32[]"]
    return _replaced(text, _TYPE, a, types[b % len(types)])


def change_all_types(text: str, a: int, b: int) -> str:
    types = _TYPE.findall(text) or ["f32[]"]
    return text.replace(types[a % len(types)], TYPES[b % len(TYPES)])


def drop_parameter(text: str, a: int, b: int) -> str:
    return _replaced(text, _SHOWN_PARAMETER, a, "")


def copy_parameter(text: str, a: int, b: int) -> str:
    shown = _SHOWN_PARAMETER.findall(text) or [""]
    return _replaced(text, _SHOWN_PARAMETER, a, f"axis=0 {shown[b % len(shown)]}")


def nest(text: str, a: int, b: int) -> str:
    found = list(_BRACKETED.finditer(text))
    if not found:
        return text
    match, depth = found[a % len(found)], (2, 50, 70, 3000)[b % 4]
    inside = match.group()
    return (
        text[: match.start()]
        + inside[0] * depth
        + inside
        + inside[-1] * depth
        + text[match.end() :]
    )


def nest_jaxprs(text: str, a: int, b: int) -> str:
    depth = (2, 40, 70, 1000)[b % 4]
    start = text.find("{ lambda")
    body = text[start:]
    for _ in range(depth):
        body = f"{{ lambda ; . let jit[name=f jaxpr={body}] in () }}"
    return text[:start] + body


MUTATIONS: dict[str, Callable[[str, int, int], str]] = {
    function.__name__: function
    for function in (
        cut, insert_word, change_character, end_early, swap_tokens, copy_token, drop_token,
        swap_lines, drop_line, copy_lines, change_number, change_type, copy_type,
        change_all_types, drop_parameter, copy_parameter, nest, nest_jaxprs,
    )
}  # fmt: skip

Step = tuple[str, int, int]


def spoiled(text: str, steps: Sequence[Step]) -> str:
    """Return the text after mutations, each given by a name and two numbers."""
    for name, a, b in steps:
        text = MUTATIONS[name](text, a, b)[:1_000_000]
    return text
