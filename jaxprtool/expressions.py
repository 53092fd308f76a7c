"""Python expressions typed by a user, read with `ast` and never evaluated.

`--args` and pipelines are both the argument list of a call. `read` parses one and refuses, with a
one-line error that names the place, whatever could hurt the parser or a recursive reader: text
that is too long or too deeply nested, unbalanced brackets, NUL bytes. What the nodes mean is the
caller's business: it walks `Source.args` and `Source.keywords`, takes literals with
`Source.literal`, and refuses everything it does not know with `Source.not_allowed`.
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxprtool.errors import JaxprToolError

#: Characters; an argument list that people write is a thousand times shorter.
MAX_LENGTH = 64 * 1024
#: Brackets within brackets, and nodes within nodes.
MAX_DEPTH = 64
#: Bits of an integer literal: whatever fits a JAX dtype.
MAX_INTEGER_BITS = 64

_CONSTRUCTS: dict[str, str] = {
    "Attribute": "attribute access",
    "Await": "'await'",
    "BinOp": "arithmetic",
    "BoolOp": "'and' or 'or'",
    "Call": "a call",
    "Compare": "a comparison",
    "Dict": "a dict",
    "DictComp": "a comprehension",
    "GeneratorExp": "a comprehension",
    "IfExp": "a conditional expression",
    "JoinedStr": "an f-string",
    "Lambda": "a lambda",
    "List": "a list",
    "ListComp": "a comprehension",
    "Name": "a name",
    "NamedExpr": "an assignment ':='",
    "Set": "a set",
    "SetComp": "a comprehension",
    "Slice": "a slice",
    "Starred": "unpacking with '*'",
    "Subscript": "a subscript",
    "Tuple": "a tuple",
    "UnaryOp": "an operator",
    "Yield": "'yield'",
    "YieldFrom": "'yield'",
}

_MARKS = re.compile(
    r"""'''(?:[^\\]|\\.)*?'''|\"\"\"(?:[^\\]|\\.)*?\"\"\" # strings: their brackets do not count
      | '(?:[^\\\n']|\\.)*'|"(?:[^\\\n"]|\\.)*"
      | \#[^\n]* | [][(){}'"]""",
    re.VERBOSE | re.DOTALL,
)
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_EMPTY_SUBSCRIPT = re.compile(r"\w\[[ \t]*\]")
_FORMAT_PREFIX = re.compile(r"(?<!\w)(?:f|rf|fr)$", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """An argument list as parsed, with what it takes to complain about a part of it.

    `what` is its name in messages (`--args`, `the pipeline`), `error` the class they are raised as.
    """

    text: str
    what: str
    error: type[JaxprToolError]
    args: tuple[ast.expr, ...] = ()
    keywords: tuple[tuple[str, ast.expr], ...] = ()

    def place(self, node: ast.expr) -> str:
        """Where a node begins: `column 5`, or `line 2, column 5` if the text has several lines."""
        before = self._lines[node.lineno - 2][: node.col_offset]
        return self._place(node.lineno - 1, len(before.decode()) + 1)

    def segment(self, node: ast.expr) -> str:
        """The text of a node on one line, for a message."""
        text = " ".join((ast.get_source_segment(_wrapped(self.text), node) or "").split())
        return text if len(text) <= 60 else text[:57] + "..."

    def fail(self, node: ast.expr, message: str, hint: str | None = None) -> JaxprToolError:
        """The error that says `message` and where `node` stands; to be raised by the caller."""
        return self.error(f"{message} ({self.place(node)})", hint)

    def not_allowed(self, node: ast.expr, hint: str | None = None) -> JaxprToolError:
        """The error that names the construct of `node` and says that it has no place here."""
        construct = _CONSTRUCTS.get(type(node).__name__, type(node).__name__)
        if isinstance(node, ast.Name):
            construct = f"the name '{node.id}'"
        elif isinstance(node, ast.Constant):
            construct = f"the literal {self.segment(node)}"
        return self.fail(node, f"{construct} is not allowed in {self.what}", hint)

    def is_empty_subscript(self, node: ast.expr) -> bool:
        """Whether a call is what `name[]` was parsed as."""
        if not isinstance(node, ast.Call):
            return False
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._lines[node.end_lineno - 2][: node.end_col_offset].endswith(b"]")

    def literal(self, node: ast.expr) -> Any:
        """The value of a literal: number, string, True, False, None, tuple, list or dict of them.

        Numbers may be signed and complex (`-1`, `1+2j`); `inf` and `nan` are numbers. Everything
        else raises.
        """
        if isinstance(node, ast.Constant):
            return self._constant(node)
        if isinstance(node, ast.Tuple):
            return tuple(map(self.literal, node.elts))
        if isinstance(node, ast.List):
            return list(map(self.literal, node.elts))
        if isinstance(node, ast.Dict):
            return {self.key(k, node): self.literal(v) for k, v in dict_items(node)}
        return self._number(node)

    def key(self, node: ast.expr | None, parent: ast.Dict) -> Any:
        """The value of a dict's key: a literal that can be hashed, and no `**` unpacking."""
        if node is None:
            raise self.fail(parent, f"unpacking with '**' is not allowed in {self.what}")
        value = self.literal(node)
        try:
            hash(value)
        except TypeError:
            raise self.fail(node, "a dict's key cannot be a list or a dict") from None
        return value

    def integer(self, node: ast.expr) -> int:
        """The value of an integer literal; everything else raises."""
        value = self.literal(node)
        if type(value) is not int:
            raise self.fail(node, f"an integer is needed here, not {self.segment(node)}")
        return value

    def _constant(self, node: ast.Constant) -> Any:
        value = node.value
        if isinstance(value, bytes) or value is ...:
            raise self.not_allowed(node)
        if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
            raise self.fail(node, f"an integer of more than {MAX_INTEGER_BITS} bits")
        return value

    def _number(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name) and node.id in ("inf", "nan"):
            return math.inf if node.id == "inf" else math.nan
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            value = self.literal(node.operand)
            if _is_number(value):
                return -value if isinstance(node.op, ast.USub) else value
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            real, imaginary = self._number_operand(node.left), self._number_operand(node.right)
            if isinstance(real, int | float) and isinstance(imaginary, complex):
                return real + imaginary if isinstance(node.op, ast.Add) else real - imaginary
        raise self.not_allowed(node)

    def _number_operand(self, node: ast.expr) -> Any:
        """The value of a bare or signed number, and None for anything else."""
        bare = node.operand if isinstance(node, ast.UnaryOp) else node
        known = isinstance(bare, ast.Constant) and _is_number(bare.value)
        return self.literal(node) if known else None

    @cached_property
    def _lines(self) -> list[bytes]:
        return [line.encode() for line in self.text.split("\n")]

    def _fail_at(self, line: int, column: int, message: str) -> JaxprToolError:
        return self.error(f"{message} ({self._place(line, column)})")

    def _fail_at_index(self, index: int, message: str) -> JaxprToolError:
        line = self.text.count("\n", 0, index) + 1
        return self._fail_at(line, index - self.text.rfind("\n", 0, index), message)

    def _place(self, line: int, column: int) -> str:
        return f"line {line}, column {column}" if "\n" in self.text else f"column {column}"


def read(
    text: str, what: str, error: type[JaxprToolError], *, empty_subscripts: bool = False
) -> Source:
    """Parse `text` as what stands between the parentheses of a call.

    With `empty_subscripts`, `name[]` (a scalar's type as JAX prints it, but no Python) is parsed
    as the call `name()`; `Source.is_empty_subscript` tells the two apart.
    Raises `error` if the text is too long, too deeply nested, or not well formed.
    """
    if len(text) > MAX_LENGTH:
        raise error(
            f"{what} is {len(text):,} characters long; at most {MAX_LENGTH:,} are read",
        )
    source = Source(text.replace("\r\n", "\n").replace("\r", "\n"), what, error)
    empty = _check_brackets(source)
    call = _parse(source, empty if empty_subscripts else [])
    _check_depth(call, source)
    return Source(source.text, what, error, tuple(call.args), _keywords(call, source))


def dict_items(node: ast.Dict) -> list[tuple[ast.expr | None, ast.expr]]:
    """The key and value nodes of a dict display; the key is None where `**` unpacks one."""
    return list(zip(node.keys, node.values, strict=True))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | complex) and not isinstance(value, bool)


def _wrapped(text: str) -> str:
    # The text has lines of its own: a comment ends there, and columns are the user's.
    return f"_(\n{text}\n)"


def _check_brackets(source: Source) -> list[tuple[int, int]]:
    """Refuse what the parser would choke on, or word in terms of the wrapped text.

    Gives the places of the brackets of empty subscripts.
    """
    text = source.text
    if "\0" in text:
        raise source._fail_at_index(text.index("\0"), f"{source.what} has a NUL character")
    empty: list[tuple[int, int]] = []
    opened: list[re.Match[str]] = []
    for mark in _MARKS.finditer(text):
        symbol = mark.group()
        if symbol in ("'", '"'):
            raise source._fail_at_index(mark.start(), f"a string in {source.what} is never closed")
        before = max(0, mark.start() - 3), mark.start()
        if symbol[0] in "'\"" and _FORMAT_PREFIX.search(text, *before):
            message = f"an f-string is not allowed in {source.what}"
            raise source._fail_at_index(mark.start(), message)
        if symbol in _CLOSING:
            opened.append(mark)
            if len(opened) > MAX_DEPTH:
                raise source._fail_at_index(mark.start(), _too_deep(source))
        elif symbol in _CLOSING.values():
            if not opened or _CLOSING[opened[-1].group()] != symbol:
                message = f"'{symbol}' in {source.what} does not match an opening bracket"
                raise source._fail_at_index(mark.start(), message)
            opening = opened.pop()
            if symbol == "]" and _EMPTY_SUBSCRIPT.match(text, max(0, opening.start() - 1)):
                empty.append((opening.start(), mark.start()))
    if opened:
        message = f"'{opened[-1].group()}' in {source.what} is never closed"
        raise source._fail_at_index(opened[-1].start(), message)
    return empty


def _parse(source: Source, empty_subscripts: list[tuple[int, int]]) -> ast.Call:
    text = list(source.text)
    for opening, closing in empty_subscripts:
        text[opening], text[closing] = "()"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes in strings
            call = ast.parse(_wrapped("".join(text)), mode="eval").body
    except SyntaxError as error:
        raise _syntax_error(source, error) from None
    except (MemoryError, RecursionError):  # how the parser reports `-----1` and `1+1+1+1`
        raise source.error(_too_deep(source)) from None
    except ValueError:  # lone surrogates, which undecodable bytes of a command line become
        raise source.error(f"{source.what} is not valid Unicode text") from None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.lineno == 1):
        raise source.error(f"{source.what} is not the argument list of a call")
    return call


def _syntax_error(source: Source, error: SyntaxError) -> JaxprToolError:
    message, line, column = error.msg, (error.lineno or 0) - 1, error.offset or 1
    if "integer string conversion" in message:
        return source.error(f"{source.what} has an integer of more than {MAX_INTEGER_BITS} bits")
    message = f"{source.what} cannot be read: {' '.join(message.split())}"
    if 1 <= line <= source.text.count("\n") + 1:
        return source._fail_at(line, column, message)
    return source.error(f"{message} (at the end)")


def _check_depth(call: ast.Call, source: Source) -> None:
    """Refuse deep trees, so that whoever walks the nodes may recurse."""
    level: list[ast.AST] = [call]
    for _ in range(MAX_DEPTH + 2):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return
    raise source.error(_too_deep(source))


def _too_deep(source: Source) -> str:
    return f"{source.what} is nested too deeply; at most {MAX_DEPTH} levels are read"


def _keywords(call: ast.Call, source: Source) -> tuple[tuple[str, ast.expr], ...]:
    named: dict[str, ast.expr] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise source.fail(keyword.value, f"unpacking with '**' is not allowed in {source.what}")
        if keyword.arg in named:
            raise source.fail(keyword.value, f"'{keyword.arg}' is given twice in {source.what}")
        named[keyword.arg] = keyword.value
    return tuple(named.items())
