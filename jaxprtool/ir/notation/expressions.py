"""Python expressions typed by a user, read with `ast` and never evaluated.

Displays and numbers are values everywhere. Subclasses interpret names, calls and other nodes by
methods `visit_Name`, `visit_Call` and so on; a node without a method is refused by name.
"""

from __future__ import annotations

import ast
import keyword
import math
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from jaxprtool.errors import JaxprToolError

# --- whitelist ------------------------------------------------------------------------------------
# Read values from Python's syntax trees, which are walked and never evaluated.

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


class WhitelistReader(ABC, ast.NodeVisitor):
    """Reads constants, tuples, lists, dicts, and numbers with a sign, and refuses everything else.

    Attributes:
        what: The name of the text in messages.
    """

    what: str

    @abstractmethod
    def fail(self, node: ast.expr, message: str, hint: str | None = None) -> Exception:
        """Return the error for a node; to be raised by the caller."""

    def not_allowed(self, node: ast.expr, hint: str | None = None) -> Exception:
        """Return the error that names the construct of a node and states that it is refused."""
        return self.fail(node, f"{self.construct(node)} is not allowed in {self.what}", hint)

    def construct(self, node: ast.expr) -> str:
        """Return the name of a node's construct in Python."""
        if isinstance(node, ast.Name):
            return f"the name '{node.id}'"
        return _CONSTRUCTS.get(type(node).__name__, type(node).__name__)

    def generic_visit(self, node: Any) -> Any:
        raise self.not_allowed(node)

    def visit_Constant(self, node: ast.Constant) -> Any:
        return node.value

    def visit_Tuple(self, node: ast.Tuple) -> Any:
        return tuple(map(self.visit, node.elts))

    def visit_List(self, node: ast.List) -> Any:
        return list(map(self.visit, node.elts))

    def visit_Dict(self, node: ast.Dict) -> Any:
        pairs = zip(node.keys, node.values, strict=True)
        return {self.key(key, node): self.visit(value) for key, value in pairs}

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        value = self.visit(node.operand)
        if is_number(value) and isinstance(node.op, ast.USub | ast.UAdd):
            return -value if isinstance(node.op, ast.USub) else value
        return self.generic_visit(node)

    def key(self, node: ast.expr | None, parent: ast.Dict) -> Any:
        """Return the value of a dict's key, which must be hashable and not a `**` unpacking."""
        if node is None:
            raise self.fail(parent, f"unpacking with '**' is not allowed in {self.what}")
        value = self.visit(node)
        try:
            hash(value)
        except TypeError:
            raise self.fail(node, "a dict's key cannot be a list or a dict") from None
        return value


def is_number(value: object) -> bool:
    """Return True if a value is a number and not a bool."""
    return isinstance(value, int | float | complex) and not isinstance(value, bool)


# --- expressions ----------------------------------------------------------------------------------
# Python expressions typed by a user, read with `ast` and never evaluated.
#
# `--args` and pipelines are both the argument list of a call. `parse_arguments` parses one. It
# refuses text that could hurt the parser or a recursive reader: text that is too long or too deeply
# nested, unbalanced brackets, NUL bytes. The error is one line and names the location. The caller
# interprets the nodes: it walks `ParsedArguments.args` and `ParsedArguments.keywords`, reads
# literals with `ParsedArguments.literal`, and refuses all unknown nodes with
# `ParsedArguments.not_allowed`.
#
# Types as a jaxpr prints them (`f32[]`, `key<fry>[2]`, `f32[8@x]{V:i}`) are not Python. If types
# are allowed, each is one node of the tree, and `ParsedArguments.type_at` returns its location in
# the text.

#: In characters; typical argument lists are a thousand times shorter.
MAX_LENGTH = 64 * 1024
#: The maximum number of nested brackets, and nested nodes.
MAX_DEPTH = 64
#: The maximum number of bits of an integer literal: whatever fits a JAX dtype.
MAX_INTEGER_BITS = 64

_MARKS = re.compile(
    r"""'''(?:[^\\]|\\.)*?'''|\"\"\"(?:[^\\]|\\.)*?\"\"\" # strings: their brackets do not count
      | '(?:[^\\\n']|\\.)*'|"(?:[^\\\n"]|\\.)*"
      | \#[^\n]* | [][(){}'"]""",
    re.VERBOSE | re.DOTALL,
)
_CLOSING = {"(": ")", "[": "]", "{": "}"}
#: The beginning of a type, before its bracket, and the text that may follow the bracket.
_TYPE_HEAD = re.compile(r"(?<![\w.>])(\w+)(?:<\w+>)?\s*$")
_TYPE_TAIL = re.compile(r"\{[^{}'\"]*\}")
#: The longest head of a type that is searched for; no dtype has a longer name.
_MOST_HEAD = 100
_FORMAT_PREFIX = re.compile(r"(?<!\w)(?:f|rf|fr)$", re.IGNORECASE)


@dataclass(frozen=True)
class ParsedArguments(WhitelistReader):
    """A parsed argument list, with the means to report an error in a part of it.

    Attributes:
        text: The text.
        what: Its name in messages: `--args`, `the pipeline`.
        error: The class of the errors.
        args: The nodes of positional arguments.
        keywords: The names and nodes of keyword arguments.
        types: The end of each type in the text, by its start.
    """

    text: str
    what: str
    error: type[JaxprToolError]
    args: tuple[ast.expr, ...] = ()
    keywords: tuple[tuple[str, ast.expr], ...] = ()
    types: Mapping[int, int] = field(default_factory=dict)

    def place(self, node: ast.expr) -> str:
        """Return a node's location: `column 5`, or `line 2, column 5` in text of several lines."""
        prefix = self._lines[node.lineno - 2][: node.col_offset]
        return self._place(node.lineno - 1, len(prefix.decode()) + 1)

    def segment(self, node: ast.expr) -> str:
        """Return the text of a node on one line, for a message."""
        text = " ".join((ast.get_source_segment(_wrapped(self.text), node) or "").split())
        return text if len(text) <= 60 else text[:57] + "..."

    def fail(self, node: ast.expr, message: str, hint: str | None = None) -> JaxprToolError:
        """Return the error with `message` and the location of `node`, for the caller to raise."""
        return self.error(f"{message} ({self.place(node)})", hint)

    def construct(self, node: ast.expr) -> str:
        """Return the name of a node's construct in Python; a type is a subscript."""
        if self.type_at(node):
            return "a subscript"
        if isinstance(node, ast.Constant):
            return f"the literal {self.segment(node)}"
        return super().construct(node)

    def type_at(self, node: ast.expr) -> slice | None:
        """Return the location in the text of a node that is a type, or else None."""
        if not isinstance(node, ast.Name):
            return None
        start = self.start(node)
        return slice(start, self.types[start]) if start in self.types else None

    def part(self, where: slice) -> ast.expr:
        """Return the expression in a part of the text, as an item of a subscript.

        In it `^` is a power, as in JAX's notation.
        """
        prefix, text = self.text[: where.start], self.text[where].replace("^", "**")
        blank = "".join(c if c == "\n" else " " * len(c.encode()) for c in prefix)
        try:
            node = ast.parse(f"_[\n{blank}{text}\n]", mode="eval").body
        except SyntaxError as error:
            raise _syntax_error(self, error) from None
        except (MemoryError, RecursionError):
            raise self.error(_too_deep(self)) from None
        _check_depth(node, self)
        assert isinstance(node, ast.Subscript)
        return node.slice

    def fail_at(self, index: int, message: str, hint: str | None = None) -> JaxprToolError:
        """Return the error with `message` and a location in the text, for the caller to raise."""
        line = self.text.count("\n", 0, index) + 1
        place = self._place(line, index - self.text.rfind("\n", 0, index))
        return self.error(f"{message} ({place})", hint)

    def start(self, node: ast.expr) -> int:
        """Return the position in the text where a node begins."""
        lines = self._lines[: node.lineno - 1]
        return sum(len(line.decode()) + 1 for line in lines[:-1]) + len(
            lines[-1][: node.col_offset].decode()
        )

    def literal(self, node: ast.expr) -> Any:
        """Return the value of a literal: number, string, True, False, None, tuple, list or dict.

        Numbers may be signed and complex (`-1`, `1+2j`); `inf` and `nan` are numbers. Everything
        else raises.
        """
        return self.visit(node)

    def integer(self, node: ast.expr) -> int:
        """Return the value of an integer literal; raise for anything else."""
        value = self.literal(node)
        if type(value) is not int:
            raise self.fail(node, f"expected an integer, not {self.segment(node)}")
        return value

    def visit_Constant(self, node: ast.Constant) -> Any:
        value = node.value
        if isinstance(value, bytes) or value is ...:
            raise self.not_allowed(node)
        if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
            raise self.fail(node, f"an integer has more than {MAX_INTEGER_BITS} bits")
        return value

    def visit_Name(self, node: ast.Name) -> float:
        if node.id not in ("inf", "nan"):
            raise self.not_allowed(node)
        return math.inf if node.id == "inf" else math.nan

    def visit_BinOp(self, node: ast.BinOp) -> complex:
        if isinstance(node.op, ast.Add | ast.Sub):
            real, imaginary = self._number_operand(node.left), self._number_operand(node.right)
            if isinstance(real, int | float) and isinstance(imaginary, complex):
                return real + imaginary if isinstance(node.op, ast.Add) else real - imaginary
        raise self.not_allowed(node)

    def _number_operand(self, node: ast.expr) -> Any:
        """Return the value of a bare or signed number, and None for anything else."""
        bare = node.operand if isinstance(node, ast.UnaryOp) else node
        is_literal = isinstance(bare, ast.Constant) and is_number(bare.value)
        return self.literal(node) if is_literal else None

    @cached_property
    def _lines(self) -> list[bytes]:
        return [line.encode() for line in self.text.split("\n")]

    def _fail_at(self, line: int, column: int, message: str) -> JaxprToolError:
        return self.error(f"{message} ({self._place(line, column)})")

    def _place(self, line: int, column: int) -> str:
        return f"line {line}, column {column}" if "\n" in self.text else f"column {column}"


def parse_arguments(
    text: str, what: str, error: type[JaxprToolError], *, types: bool = False
) -> ParsedArguments:
    """Parse `text` as the contents of the parentheses of a call.

    With `types`, types as a jaxpr prints them are allowed.
    Raises `error` if the text is too long, too deeply nested, or not well formed.
    """
    if len(text) > MAX_LENGTH:
        raise error(
            f"{what} is {len(text):,} characters long; the maximum is {MAX_LENGTH:,}",
        )
    source = ParsedArguments(text.replace("\r\n", "\n").replace("\r", "\n"), what, error)
    type_ends = _check_brackets(source)
    call = _parse(source, type_ends if types else {})
    _check_depth(call, source)
    return replace(
        source,
        args=tuple(call.args),
        keywords=_keywords(call, source),
        types=type_ends if types else {},
    )


def dict_items(node: ast.Dict) -> list[tuple[ast.expr | None, ast.expr]]:
    """Return the key and value nodes of a dict display; the key is None where `**` unpacks one."""
    return list(zip(node.keys, node.values, strict=True))


def _wrapped(text: str) -> str:
    # Put the text on its own lines: a comment ends there, and columns are the user's.
    return f"_(\n{text}\n)"


def _check_brackets(source: ParsedArguments) -> dict[int, int]:
    """Refuse brackets that the parser cannot handle, or would report in terms of the wrapped text.

    Returns the end of each type by its beginning.
    """
    text = source.text
    if "\0" in text:
        raise source.fail_at(text.index("\0"), f"{source.what} contains a NUL character")
    types: dict[int, int] = {}
    opened: list[re.Match[str]] = []
    for mark in _MARKS.finditer(text):
        symbol = mark.group()
        if symbol in ("'", '"'):
            raise source.fail_at(mark.start(), f"a string in {source.what} is not closed")
        span = max(0, mark.start() - 3), mark.start()
        if symbol[0] in "'\"" and _FORMAT_PREFIX.search(text, *span):
            message = f"an f-string is not allowed in {source.what}"
            raise source.fail_at(mark.start(), message)
        if symbol in _CLOSING:
            opened.append(mark)
            if len(opened) > MAX_DEPTH:
                raise source.fail_at(mark.start(), _too_deep(source))
        elif symbol in _CLOSING.values():
            if not opened or _CLOSING[opened[-1].group()] != symbol:
                message = f"'{symbol}' in {source.what} does not match an opening bracket"
                raise source.fail_at(mark.start(), message)
            opening = opened.pop()
            if symbol == "]" and (start := _type_start(text, opening.start())) is not None:
                for inner in [begin for begin in types if begin > start]:
                    del types[inner]
                tail = _TYPE_TAIL.match(text, mark.end())
                types[start] = tail.end() if tail else mark.end()
    if opened:
        message = f"'{opened[-1].group()}' in {source.what} is not closed"
        raise source.fail_at(opened[-1].start(), message)
    return types


def _type_start(text: str, bracket: int) -> int | None:
    """Return the start of the type whose shape a bracket opens; None if it is another bracket."""
    head = _TYPE_HEAD.search(text, max(0, bracket - _MOST_HEAD), bracket)
    return None if head is None or keyword.iskeyword(head[1]) else head.start()


def _parse(source: ParsedArguments, types: Mapping[int, int]) -> ast.Call:
    text = list(source.text)
    for start, end in types.items():
        # Replace it by a name of the same length, on its first line, so that all positions stay.
        first = (source.text[start:end] + "\n").index("\n")
        rest = ("\n" if c == "\n" else " " for c in source.text[start + first : end])
        text[start:end] = [*("_" * first), *rest]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd escapes in strings
            call = ast.parse(_wrapped("".join(text)), mode="eval").body
    except SyntaxError as error:
        raise _syntax_error(source, error) from None
    except (MemoryError, RecursionError):  # the parser's errors for `-----1` and `1+1+1+1`
        raise source.error(_too_deep(source)) from None
    except ValueError:  # lone surrogates, from undecodable bytes of a command line
        raise source.error(f"{source.what} is not valid Unicode text") from None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.lineno == 1):
        raise source.error(f"{source.what} is not the argument list of a call")
    return call


def _syntax_error(source: ParsedArguments, error: SyntaxError) -> JaxprToolError:
    message, line, column = error.msg, (error.lineno or 0) - 1, error.offset or 1
    if "integer string conversion" in message:
        return source.error(f"{source.what} has an integer of more than {MAX_INTEGER_BITS} bits")
    message = f"{source.what} cannot be read: {' '.join(message.split())}"
    if 1 <= line <= source.text.count("\n") + 1:
        return source._fail_at(line, column, message)
    return source.error(f"{message} (at the end)")


def _check_depth(call: ast.expr, source: ParsedArguments) -> None:
    """Refuse deep trees, so that functions that walk the nodes may recurse."""
    level: list[ast.AST] = [call]
    for _ in range(MAX_DEPTH + 2):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return
    raise source.error(_too_deep(source))


def _too_deep(source: ParsedArguments) -> str:
    return f"{source.what} is nested too deeply; the maximum is {MAX_DEPTH} levels"


def _keywords(call: ast.Call, source: ParsedArguments) -> tuple[tuple[str, ast.expr], ...]:
    named: dict[str, ast.expr] = {}
    for word in call.keywords:
        if word.arg is None:
            raise source.fail(word.value, f"unpacking with '**' is not allowed in {source.what}")
        if word.arg in named:
            raise source.fail(word.value, f"'{word.arg}' is given twice in {source.what}")
        named[word.arg] = word.value
    return tuple(named.items())
