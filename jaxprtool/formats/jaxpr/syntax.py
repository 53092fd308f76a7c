"""The text of a `.jaxpr` file, errors with places in it, and its syntax tree.

    FILE      = "jaxprtool" version  { key "=" EXPRESSION }  { "let" name "=" JAXPR "in" }  JAXPR
    JAXPR     = "{" "lambda" { BINDER } ";" { BINDER } "." "let" { EQUATION [";"] }
                "in" "(" [ ATOM { "," ATOM } [","] ] ")" "}"
    BINDER    = name ":" TYPE [ "=" EXPRESSION ]        constants have a value; "_" binds nothing
    EQUATION  = [ { BINDER } "=" ] primitive [ "[" { name "=" VALUE } "]" ] { ATOM }
    ATOM      = name | EXPRESSION ":" TYPE
    VALUE     = EXPRESSION | TEXT JAXPR | "(" { JAXPR | name } ")"

An EXPRESSION is a Python expression without spaces outside of its brackets; it may contain JAXPRs.
A primitive's "[" follows it directly, and an equation that binds nothing has brackets even if they
are empty: otherwise its primitive would be an operand of the previous equation. The last result of
an equation may lack its type. The names `nan`, `inf`, `True`, `False` and `None` are values, and
`in` before a parenthesis ends the equations.

The parser matches regular expressions at the current position, so the time is linear. An equation's
comment is at the end of the line on which the equation begins, unless another equation begins after
it on that line. An equation without one has the comment of the equation that begins before it.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from jaxprtool.errors import ProgramFileError
from jaxprtool.ir.notation.types import ANY_TYPE, DENSE_TYPE

# --- syntax ---------------------------------------------------------------------------------------
# Parsing of a `.jaxpr` file to a syntax tree.

#: The version that is written. In version 1, each equation has a comment of its own; since version
#: 2, one without a comment has the place of the equation before it.
VERSION = 2

_NAME = r"[^\W\d]\w*+"
_PRIMITIVE = r"[^\W\d][\w.-]*+"
_NUMBER = r"(?:-?(?:\d[\w.]*+(?:(?<=[eE])[-+]\d++)?|inf|nan)|True|False)"

#: A primitive with its parameters if they have neither strings nor braces, the usual case.
_HEAD_TEXT = (
    rf"{_PRIMITIVE}(?:\[[^][{{}}'\"]*+(?:\[[^][{{}}'\"]*+\][^][{{}}'\"]*+)*+\])?+(?![\w\[])"
)

_OPERANDS_TEXT = (
    rf"(?:\s++(?:{_NUMBER}:{DENSE_TYPE}(?![\w\[{{@<])"
    rf"|(?!in\s*+\(){_NAME}(?![-.\[(]|\s*+[:=])))*+"
)
_LITERAL_START = r"\s*+(?:[-+.\d'\"(\[]|(?:nan|inf|True|False|None)\b|(?!in\()[\w.]++\()"

#: A whole equation that binds one variable and has no other operands, the usual case.
_EQUATION = re.compile(
    rf"[\s;]*+({_NAME}):({DENSE_TYPE}) = ({_HEAD_TEXT})({_OPERANDS_TEXT})(?!{_LITERAL_START})"
)
_OPERANDS = re.compile(_OPERANDS_TEXT)
_HEAD = re.compile(rf"\s*+({_HEAD_TEXT})")
_BARE_HEAD = re.compile(rf"\s*+({_PRIMITIVE})(\[?)")
_BINDER = re.compile(rf"\s*+({_NAME})\s*+:\s*+({ANY_TYPE})")
_UNTYPED = re.compile(rf"\s*+({_NAME})(?=\s*+=)")
_ATOM_NAME = re.compile(rf"\s*+({_NAME})(?!\(|\s*+:)")
_LITERAL = re.compile(rf"(?={_LITERAL_START})")
_LITERAL_TYPE = re.compile(rf"\s*+:\s*+({ANY_TYPE})")
_PARAMETER = re.compile(r"\s*+(@?[^\W\d]\w*+)\s*+=(?!=)\s*+")
_BEFORE_JAXPR = re.compile(rf"\s*+(?=\{{\s*+lambda\b)|\s++(?={_NAME}(?!\s*+=))")
_TEXT = re.compile(rf"{_NAME}|'[^']*+'|\"[^\"]*+\"")
_ROW_OF_NAMES = re.compile(rf"\(\s*+{_NAME}(?:\s++{_NAME})*+\s*+\)")
_ONE_OF_ROW = re.compile(rf"({_NAME})(?:\s|(?=\)))")
_PIECE = re.compile(
    r"""(?P<string>'(?:[^'\\\n]|\\.)*+'|"(?:[^"\\\n]|\\.)*+")
      | (?P<jaxpr>\{\s*+lambda\b) | (?P<open>[(\[{]) | (?P<close>[)\]}])
      | (?P<space>\s) | (?P<stop>[,:;=]) | (?P<quote>['"]) | [^][(){}'"\s,:;=]++""",
    re.VERBOSE,
)
_PAIRS = {"(": ")", "[": "]", "{": "}"}

_FIRST_LINE = re.compile(r"\s*+jaxprtool[ \t]++(\S++)[ \t]*+(?=\n|\Z)")
_ENTRY = re.compile(rf"\s*+({_NAME})[ \t]*+=(?!=)[ \t]*+")
_END_OF_LINE = re.compile(r"[ \t]*+(?=\n|\Z)")
_SHARED = re.compile(rf"\s*+let\s++({_NAME})\s*+=\s*+(?=\{{)")
_OPENING = re.compile(r"\s*+\{\s*+lambda\b")
_LET = re.compile(r"\s*+\.\s*+let\b")
_IN = re.compile(r"\s*+in\b")
_END_OF_EQUATIONS = re.compile(r"[\s;]*+in\s*+\(")
_SPACE = re.compile(r"\s*+")
_SEPARATOR = re.compile(r"[\s;]*+")


def _mark(character: str) -> re.Pattern[str]:
    return re.compile(rf"\s*+{re.escape(character)}")


_EQUALS, _SEMICOLON, _COMMA = _mark("="), _mark(";"), _mark(",")
_PARENTHESIS, _BRACKET, _BRACE = _mark(")"), _mark("]"), _mark("}")


@dataclass(slots=True)
class ParameterSyntax:
    """A parameter as written. `named` is the text before the jaxpr in `fwd=name { ... }`."""

    name: str
    position: int
    value: ExpressionSyntax
    named: ExpressionSyntax | None = None


@dataclass(slots=True, eq=False)
class OperationSyntax:
    """A primitive with its parameters, shared by equations with the same text."""

    primitive: str
    position: int
    parameters: list[ParameterSyntax]


@dataclass(slots=True)
class BinderSyntax:
    """A constant or argument of a jaxpr, with the value of a constant."""

    name: str
    type: str
    position: int
    value: ExpressionSyntax | None = None


@dataclass(slots=True, eq=False)
class EquationSyntax:
    """An equation. `results` and `types` are its outvars and their types, None if left out.

    `operands` are names and literals as written, literals with their types; the first one is at
    `operands_at`.
    """

    position: int
    operation: OperationSyntax
    results: list[str]
    types: list[str | None]
    operands: list[str]
    operands_at: int
    comment: str | None = None


@dataclass(slots=True, eq=False)
class BodySyntax:
    """A jaxpr; its results begin at `results_at`."""

    position: int
    constants: list[BinderSyntax]
    arguments: list[BinderSyntax]
    equations: list[EquationSyntax]
    results: list[str]
    results_at: int


@dataclass(slots=True)
class FileSyntax:
    """A whole file: its version, its header, its shared jaxprs by name, and its program.

    `equations` are those of all jaxprs in the order in which they begin. `literals` has the value
    and the type of each literal whose text is not just `value:type`.
    """

    source: FileText
    version: int
    header: dict[str, ExpressionSyntax]
    shared: dict[str, BodySyntax]
    body: BodySyntax
    equations: list[EquationSyntax]
    literals: dict[str, tuple[ExpressionSyntax, str]]


def parse_file(source: FileText) -> FileSyntax:
    """Return the tree of a file. Raises ProgramFileError."""
    return _Parser(source).file()


class _Parser:
    """Reads from the position `at` on. The equations read so far are in `equations`."""

    def __init__(self, source: FileText):
        self.source = source
        self.text = source.text
        self.at = 0
        self.equations: list[EquationSyntax] = []
        self.literals: dict[str, tuple[ExpressionSyntax, str]] = {}
        self._operations: dict[str, OperationSyntax] = {}
        self._open: list[int] = []

    def file(self) -> FileSyntax:
        version = self._version()
        header = self._header()
        shared: dict[str, BodySyntax] = {}
        while match := _SHARED.match(self.text, self.at):
            self.at = match.end()
            if match[1] in shared:
                raise self.source.fail(match.start(1), f"'{match[1]}' is defined twice")
            shared[match[1]] = self._jaxpr()
            self._expect(_IN, "'in'")
        body = self._jaxpr()
        if (end := self._next()) < len(self.text):
            raise self.source.fail(end, f"{self.source.shown(end)} after the end of the program")
        self._place_comments()
        return FileSyntax(self.source, version, header, shared, body, self.equations, self.literals)

    # --- small steps --------------------------------------------------------------------------

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Advance past a match at the current position, if there is one."""
        match = pattern.match(self.text, self.at)
        if match:
            self.at = match.end()
        return match

    def _expect(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        match = self._take(pattern)
        if match is None:
            raise self._expected(what)
        return match

    def _expected(self, what: str) -> ProgramFileError:
        position = self._next()
        hint = None
        if position == len(self.text) and self._open:
            line = self.text.count("\n", 0, self._open[-1]) + 1
            hint = f"the jaxpr that begins on line {line} is not closed"
        return self.source.fail(
            position, f"expected {what}, not {self.source.shown(position)}", hint
        )

    def _next(self) -> int:
        """Return the position of the next text after spaces."""
        match = _SPACE.match(self.text, self.at)
        assert match
        return match.end()

    # --- the header ---------------------------------------------------------------------------

    def _version(self) -> int:
        first = self._take(_FIRST_LINE)
        if first is None:
            message = f"not a jaxprtool program: it does not begin with 'jaxprtool {VERSION}'"
            raise self.source.fail(self._next(), message)
        versions = {str(version): version for version in range(1, VERSION + 1)}
        if first[1] not in versions:
            message = (
                f"the file has format {first[1]}, but this jaxprtool reads formats 1 to {VERSION}"
            )
            raise self.source.fail(first.start(1), message)
        return versions[first[1]]

    def _header(self) -> dict[str, ExpressionSyntax]:
        header: dict[str, ExpressionSyntax] = {}
        while match := self._take(_ENTRY):
            if match[1] in header:
                raise self.source.fail(match.start(1), f"'{match[1]}' is given twice")
            header[match[1]] = self._expression()
            if not self._take(_END_OF_LINE):
                raise self._expected(f"a new line after the value of '{match[1]}'")
        return header

    # --- jaxprs -------------------------------------------------------------------------------

    def _jaxpr(self) -> BodySyntax:
        self._expect(_OPENING, "'{ lambda'")
        start = self.text.rfind("{", 0, self.at)
        if len(self._open) == MAX_DEPTH:
            raise self.source.fail(start, f"jaxprs are nested more than {MAX_DEPTH} deep")
        self._open.append(start)
        constants = self._binders()
        self._expect(_SEMICOLON, "a variable with its type, or ';'")
        arguments = self._binders()
        self._expect(_LET, "a variable with its type, or '. let'")
        equations = self._equations()
        results_at = self.at
        results = self._results()
        self._expect(_BRACE, "'}'")
        self._open.pop()
        return BodySyntax(start, constants, arguments, equations, results, results_at)

    def _binders(self) -> list[BinderSyntax]:
        binders: list[BinderSyntax] = []
        while match := self._take(_BINDER):
            binder = BinderSyntax(match[1], match[2], match.start(1))
            binders.append(binder)
            if self._take(_EQUALS):
                self.at = self._next()
                binder.value = self._expression()
        return binders

    def _results(self) -> list[str]:
        results: list[str] = []
        while not self._take(_PARENTHESIS):
            results.append(self._atom())
            if not self._take(_COMMA) and not _PARENTHESIS.match(self.text, self.at):
                raise self._expected("',' or ')'")
        return results

    def _atom(self) -> str:
        if name := self._take(_ATOM_NAME):
            return name[1]
        if _LITERAL.match(self.text, self.at):
            return self._literal()
        raise self._expected("a variable or a literal with its type")

    def _literal(self) -> str:
        self.at = start = self._next()
        value = self._expression()
        type_ = self._expect(_LITERAL_TYPE, "the literal's type, as in 2.0:f32[]")
        text = self.text[start : self.at]
        self.literals[text] = value, type_[1]
        return text

    # --- equations ----------------------------------------------------------------------------

    def _equations(self) -> list[EquationSyntax]:
        """Parse equations and their end."""
        equations: list[EquationSyntax] = []
        text, known, take = self.text, self._operations, _EQUATION.match
        while True:
            match = take(text, self.at)
            if match is not None:
                name, type_, head, operands = match.groups()
                operation = known.get(head) or self._plain_operation(head, match.start(3))
                equation = EquationSyntax(
                    match.start(1), operation, [name], [type_], operands.split(), match.start(4)
                )
                self.equations.append(equation)
                self.at = match.end()
            elif self._take(_END_OF_EQUATIONS):
                return equations
            else:
                equation = self._unusual_equation()
            equations.append(equation)

    def _unusual_equation(self) -> EquationSyntax:
        """Parse an equation with no or several outvars, or with jaxprs, strings or arrays in it."""
        self._take(_SEPARATOR)
        equation = EquationSyntax(self.at, _NO_OPERATION, [], [], [], 0)
        self.equations.append(equation)
        while match := self._take(_BINDER):
            equation.results.append(match[1])
            equation.types.append(match[2])
        if match := self._take(_UNTYPED):
            equation.results.append(match[1])
            equation.types.append(None)
        if equation.results:
            self._expect(_EQUALS, "a variable with its type, or '='")
        elif _EQUALS.match(self.text, self.at):
            message = (
                "expected a variable before the '='; nan, inf, True, False and None are values"
            )
            raise self.source.fail(self._next(), message)
        if match := self._take(_HEAD):
            operation = self._operations.get(match[1])
            equation.operation = operation or self._plain_operation(match[1], match.start(1))
        else:
            equation.operation = self._long_operation()
        self._operands(equation, self.at)
        return equation

    def _operands(self, equation: EquationSyntax, at: int) -> None:
        """Read an equation's operands from `at` on."""
        match = _OPERANDS.match(self.text, at)
        assert match
        equation.operands_at = at
        equation.operands = match.group().split()
        self.at = match.end()
        while _LITERAL.match(self.text, self.at):
            equation.operands.append(self._literal())
            more = _OPERANDS.match(self.text, self.at)
            assert more
            equation.operands += more.group().split()
            self.at = more.end()

    def _plain_operation(self, head: str, position: int) -> OperationSyntax:
        """Return the operation of a primitive and parameters without strings and jaxprs."""
        dense = " ".join(head.split())
        operation = self._operations.get(dense)
        if operation is None:
            name, bracket, _ = head.partition("[")
            operation = self._operations[dense] = OperationSyntax(name, position, [])
            if bracket:
                saved, self.at = self.at, position + len(name) + 1
                operation.parameters = self._parameters()
                self.at = saved
        self._operations[head] = operation
        return operation

    def _long_operation(self) -> OperationSyntax:
        head = self._expect(_BARE_HEAD, "a variable with its type, a primitive, or 'in'")
        parameters = self._parameters() if head[2] else []
        operation = OperationSyntax(head[1], head.start(1), parameters)
        if any(parameter.value.bodies for parameter in parameters):
            return operation
        return self._operations.setdefault(self.text[head.start(1) : self.at], operation)

    def _parameters(self) -> list[ParameterSyntax]:
        """Return the parameters after a '['."""
        by_name: dict[str, ParameterSyntax] = {}
        while not self._take(_BRACKET):
            name = self._expect(_PARAMETER, "a parameter, as in axis=0, or ']'")
            if name[1] in by_name:
                raise self.source.fail(name.start(1), f"'{name[1]}' is given twice")
            parameter = ParameterSyntax(name[1], name.start(1), self._expression())
            by_name[name[1]] = parameter
            if _TEXT.fullmatch(parameter.value.text) and self._take(_BEFORE_JAXPR):
                parameter.named, parameter.value = parameter.value, self._expression()
        return list(by_name.values())

    # --- values -------------------------------------------------------------------------------

    def _expression(self) -> ExpressionSyntax:
        """Return the expression at the current position, with names in place of its jaxprs."""
        text, start = self.text, self.at
        brackets: list[tuple[str, int]] = []
        bodies: dict[str, BodySyntax] = {}
        pieces: list[str] = []
        at = done = start
        while at < len(text):
            match = _PIECE.match(text, at)
            assert match
            what, piece = match.lastgroup, match.group()
            if what == "jaxpr":
                pieces.append(text[done:at])
                self.at = at
                name = f"jaxpr{at}"
                bodies[name] = self._jaxpr()
                pieces.append(name.ljust(self.at - at))
                at = done = self.at
                continue
            if what == "quote":
                raise self.source.fail(at, "a string is not closed")
            if what == "open":
                brackets.append((piece, at))
                if len(brackets) > MAX_DEPTH:
                    raise self.source.fail(at, f"brackets are nested more than {MAX_DEPTH} deep")
            elif not brackets and what in ("close", "space", "stop"):
                break
            elif what == "close":
                bracket, opened = brackets.pop()
                if piece != _PAIRS[bracket]:
                    where = ":".join(map(str, self.source.line_and_column(opened)))
                    message = f"'{piece}' does not close the '{bracket}' at {where}"
                    raise self.source.fail(at, message)
            at = match.end()
        if brackets:
            bracket, position = brackets[-1]
            raise self.source.fail(position, f"'{bracket}' is not closed")
        self.at = at
        whole = "".join((*pieces, text[done:at]))
        if _ROW_OF_NAMES.fullmatch(whole):
            whole = _ONE_OF_ROW.sub(r"\1,", whole)
        return ExpressionSyntax(whole, start, bodies)

    # --- comments -----------------------------------------------------------------------------

    def _place_comments(self) -> None:
        """Assign each comment to the last equation that begins before it on its line."""
        positions = [equation.position for equation in self.equations]
        for position, comment in self.source.comments:
            index = bisect_left(positions, position) - 1
            if index >= 0 and "\n" not in self.text[positions[index] : position]:
                self.equations[index].comment = comment


_NO_OPERATION = OperationSyntax("", 0, [])


# --- source ---------------------------------------------------------------------------------------
# The text of a `.jaxpr` file, and errors with places in it.
#
# Positions are indices into the text; a message gives them as a line and a column, from 1. The
# Python expressions in a file are read with `ast` and never evaluated.

#: The nesting limits of brackets and of jaxprs, which fit Python's default recursion limit. Writers
#: observe them as well.
MAX_DEPTH = 80
#: The maximum number of commas in one expression.
MAX_VALUES = 1_000_000

#: The maximum number of characters of a line, without its constants.
MAX_LINE = 4_000_000
#: The maximum number of characters of a message, since it may quote the file.
_MAX_MESSAGE = 400

_CONSTANTS = re.compile(r"base64\('[\w+/=]*+'")
_STRINGS_AND_COMMENTS = re.compile(
    r"""'(?:[^'\\\n]|\\.)*+' | "(?:[^"\\\n]|\\.)*+" | \#[^\n]*+""", re.VERBOSE
)


class FileText:
    """A file's text, with its comments separated.

    In `text`, comments are blanked, so that positions are unchanged; `comments` has the position
    and text, without `#`, of each comment.
    """

    def __init__(self, name: str, text: str):
        self.name = name
        self.comments: list[tuple[int, str]] = []
        self.text = text
        self._check_lines()
        self.text = _STRINGS_AND_COMMENTS.sub(self._blank, text)

    def _check_lines(self) -> None:
        """Raise ProgramFileError for a line that would take minutes to read."""
        text, start = self.text, 0
        while len(text) - start > MAX_LINE:
            end = text.rfind("\n", start, start + MAX_LINE + 1)
            if end < 0:
                end = text.find("\n", start) % (len(text) + 1)
                constants = sum(len(match[0]) for match in _CONSTANTS.finditer(text, start, end))
                if end - start - constants > MAX_LINE:
                    raise self.fail(start, f"a line is longer than {MAX_LINE:,} characters")
            start = end + 1

    def _blank(self, match: re.Match[str]) -> str:
        text = match.group()
        if text[0] != "#":
            return text
        self.comments.append((match.start(), text[1:].strip()))
        return " " * len(text)

    def fail(self, position: int, message: str, hint: str | None = None) -> ProgramFileError:
        """Return the error for a place, to be raised by the caller."""
        line, column = self.line_and_column(position)
        if len(message) > _MAX_MESSAGE:
            message = f"{message[: _MAX_MESSAGE // 2]}...{message[-_MAX_MESSAGE // 2 :]}"
        message = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)
        return ProgramFileError(f"{self.name}:{line}:{column}: {message}", hint)

    def line_and_column(self, position: int) -> tuple[int, int]:
        """Return the line and the column of a place, from 1."""
        line = self.text.count("\n", 0, position) + 1
        return line, position - self.text.rfind("\n", 0, position)

    def shown(self, position: int) -> str:
        """Return a short excerpt of the text at a place, for a message."""
        rest = self.text[position : position + 200].split(maxsplit=1)
        if not rest:
            return "the end of the file"
        return f"'{rest[0]}'" if len(rest[0]) <= 30 else f"'{rest[0][:27]}...'"


@dataclass(slots=True)
class ExpressionSyntax:
    """A Python expression in a file. `bodies` are the jaxprs in it, by their placeholder names."""

    text: str
    position: int
    bodies: dict[str, Any]

    def parse(self, source: FileText) -> ast.expr:
        """Return the expression's syntax tree. Raises ProgramFileError if it is not well formed."""
        if not self.text.strip():
            raise source.fail(self.position, "expected a value")
        if self.text.count(",") > MAX_VALUES:
            raise source.fail(self.position, f"a nested value has more than {MAX_VALUES:,} parts")
        try:
            return ast.parse(f"({self.text})", mode="eval").body
        except SyntaxError as error:
            position = self._index(error.lineno or 1, (error.offset or 1) - 1)
            raise source.fail(position, f"invalid value: {error.msg}") from None
        except (ValueError, MemoryError, RecursionError):
            # NUL characters, lone surrogates, integers of thousands of digits, endless operators
            raise source.fail(self.position, "this value cannot be read") from None

    def position_of(self, node: ast.expr) -> int:
        """Return the position in the file of a node of the expression's tree."""
        lines = f"({self.text}".split("\n")
        prefix = lines[node.lineno - 1].encode()[: node.col_offset]
        return self._index(node.lineno, len(prefix.decode(errors="replace")))

    def _index(self, line: int, column: int) -> int:
        """Return the position in the file of a line and column in `(text)`."""
        lines = self.text.split("\n")
        offset = sum(len(text) + 1 for text in lines[: line - 1])
        last = min(max(offset + column - (line == 1), 0), len(self.text))
        return self.position + last
