"""Break a listing into lines: a jaxpr, or the selected part of it, as a flat list of tokens.

The layout is that of JAX's own formatter. A group is a jaxpr, the parameters of an equation, or a
row of variables. It goes on the current line if all of it fits there; to test this, it is written
flat, at most to the end of the line. Otherwise it is broken: a jaxpr and parameters at all their
breaks, a row of variables only where a line is full. Most equations fit on a line as a whole, and
`_equations` tries that first.

A variable's name includes the space before it, so that it is one string wherever it occurs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any, TypeAlias

from jaxprtool import jaxcompat
from jaxprtool.ir.equations import Contains, bodies, holders
from jaxprtool.ir.notation import (
    BINDER,
    COMMENT_COLUMN,
    Comment,
    Keyword,
    SharedName,
    Token,
    Type,
)
from jaxprtool.ir.notation.signatures import Notation, Pieces, Signature, Value, shared_jaxprs
from jaxprtool.jaxcompat import Atom, Aval, DropVar, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.jaxcompat.jaxprs import identity

# --- layout ---------------------------------------------------------------------------------------
# Break a listing into lines: a jaxpr as a flat list of tokens.

#: Returns the tokens of the comment on an equation; none if it has no comment.
Commenter: TypeAlias = Callable[[JaxprEqn], Sequence[str]]


#: The columns that are reserved for the number of variables not shown.
_COUNT = 14

_LAMBDA, _LET, _IN = Keyword("lambda "), Keyword("let"), Keyword("in ")


class Middle:
    """The text between the one variable that an equation binds and the equation's operands.

    It is for signatures without jaxprs among their parameters.

    Attributes:
        flat: The text on one line.
        width: The columns of `flat`.
        left: The columns of the type in it.
        first_line: The first line if each parameter has a line of its own.
        more_lines: The other lines in that case.
    """

    def __init__(
        self,
        signature: Signature,
        types: list[Type],
        indent: int,
        width_of: Callable[[Iterable[str]], int],
    ):
        head = signature.head or []
        self.indent = indent
        self.flat = [*types, " = ", *head]
        self.width = width_of(self.flat)
        self.left = width_of(types)
        self.first_line = [*types, " = ", signature.name, "["]
        self.first_width = width_of(self.first_line)
        self.more_lines: list[str] = []
        for name, value in signature.pairs:
            self.more_lines += _newline(indent + 2), name, str(value)
        self.more_lines += _newline(indent), "]"
        self.may_break = bool(signature.pairs) and all(value for _, value in signature.pairs)

    def breaks(self, column: int, last: int, width: int) -> bool:
        """Return True if only the parameters must be broken, on lines of their own.

        The variable ends at `column`, and the operands take `last` columns.
        """
        return (
            self.may_break
            and column + self.left <= width
            and column + self.width > width
            and self.indent + 1 + last <= width
        )


class Layout:
    """Lays out one listing; `tokens()` returns it.

    Args:
        root: The program's jaxpr.
        width: The width in columns.
        types: Whether to write the types of variables.
        selection: The equations to show.
        comment: Returns the tokens of the comment on an equation, if there are comments.
        notation: The text of equations; by default JAX's.
        cut: If more than this many variables in a row do not fit on their line, those that fit are
            written and the others counted.
        arguments: A text that replaces the program's own arguments.
    """

    def __init__(
        self,
        root: Jaxpr,
        width: int,
        types: bool,
        selection: Selection,
        comment: Commenter | None,
        notation: Notation | None = None,
        cut: int | None = None,
        arguments: str = "",
    ):
        self.root = root
        self.width = width
        self.types = types
        self.selection = selection
        self.comment = comment
        self.cut = cut
        self.arguments = arguments
        self.notation = notation or Notation()
        self._naming = Naming(root, self.notation)
        self.shared, self.names = self._naming.shared, self._naming.variables
        self._literals: dict[int, str] = {}
        # By indentation, by signature, and by the identity of the type.
        self._middles: dict[int, dict[Signature, dict[int, Middle]]]
        self._middles = defaultdict(lambda: defaultdict(dict))
        self._by_rule: dict[int, Callable[[int, int | None], str]] = {}
        self._out: list[str] = []
        self._line_start = 0
        self._pending: Sequence[str] = ()
        self._most: int | None = None

    def tokens(self, most: int | None = None) -> list[str]:
        """Return the tokens of the whole listing, without a newline at its end.

        Args:
            most: The number of wanted lines. Lines after these may be left out.
        """
        self._most = most
        if not self.selection.everything:
            self._naming.name_all()  # each variable has its name in the full listing
        depths = self._shared_depths()
        for jaxpr, name in self.shared.items():
            if jaxpr in depths and not self._is_enough():
                self._put(Keyword("let "), SharedName(name), " = ")
                self._jaxpr(jaxpr, 0, depths[jaxpr])
                self._put(Keyword(" in"))
                self._newline(0)
        if not self._is_enough():
            self._jaxpr(self.root, 0, 0)
        self._end_line()
        return self._out

    def _is_enough(self) -> bool:
        """Return True if all wanted lines are written."""
        return self._most is not None and sum("\n" in token for token in self._out) >= self._most

    def _shared_depths(self) -> dict[Jaxpr, int]:
        """Return the shared jaxprs that the listing mentions, each with its least depth."""
        if self.selection.everything:
            return dict.fromkeys(self.shared, 1)
        depths: dict[Jaxpr, int] = {}
        level, depth = [self.root], 0
        while level:
            inside: dict[Jaxpr, None] = {}
            for jaxpr in level:
                if not self.selection.folds(depth):
                    for eqn, signature in self._rows(jaxpr):
                        if eqn is not None:
                            inside.update(dict.fromkeys(body for _, body in signature.called))
            depth += 1
            level = [jaxpr for jaxpr in inside if jaxpr not in depths]
            depths.update(dict.fromkeys(level, depth))
        return depths

    # --- lines --------------------------------------------------------------------------------

    def _put(self, *tokens: str) -> None:
        self._out += tokens

    def _newline(self, indent: int) -> None:
        self._end_line()
        self._line_start = len(self._out)
        self._out.append(_newline(indent))

    def _end_line(self) -> None:
        if self._pending:
            self._put(self._gap(self._column()), *self._pending)
            self._pending = ()

    def _gap(self, column: int) -> str:
        """Return the space before a comment on a line of which `column` columns are written."""
        return " " * max(min(COMMENT_COLUMN, self.width - 30) - column, 2)

    def _column(self) -> int:
        """Return the number of columns written on the current line."""
        line = self._out[self._line_start :]
        return self._width(line) - (1 if self._line_start else 0)

    def _width(self, tokens: Iterable[str]) -> int:
        return sum(map(self.notation.width_of, tokens))

    # --- variables ----------------------------------------------------------------------------

    def _binders(self, variables: Sequence[Var]) -> list[tuple[str, ...]]:
        """Return the tokens of each bound variable, starting with the space before it."""
        mention = self.names.mention
        if not self.types:
            return [(BINDER, mention(var)) for var in variables]
        type_of = self.notation.type_of
        return [(BINDER, mention(var), type_of(var.aval)) for var in variables]

    def _constants(self, jaxpr: Jaxpr) -> list[tuple[str, ...]]:
        """Return the tokens of each constant, with its value if the notation shows values."""
        cells = self._binders(jaxpr.constvars)
        if not cells:
            return cells
        values = self.notation.constant_values(jaxpr)
        return [(*c, v) for c, v in zip(cells, values, strict=True)] if values else cells

    def _operands(self, atoms: Sequence[Atom]) -> list[str]:
        """Return the text after a primitive: each operand, starting with the space before it."""
        if not atoms:
            return [" "]
        texts: list[Any] = [*map(self.names.spaced.get, map(identity, atoms))]
        if None in texts:
            for i, atom in enumerate(atoms):
                if texts[i] is None:
                    literal = isinstance(atom, Literal)
                    texts[i] = self._literal(atom) if literal else self.names.mention(atom)
        return texts

    def _literal(self, literal: Literal) -> str:
        text = self._literals.get(identity(literal))
        if text is None:
            text = self._literals[identity(literal)] = self.notation.literal(literal)
        return text

    def _row(self, cells: Sequence[tuple[str, ...]], comma: str, indent: int, column: int) -> int:
        """Write variables, breaking only where the line is full; return the column after them.

        The space before the first must be written already, and `column` is the column after it.
        """
        widths = list(map(self._width, cells))
        fits = sum(widths) - 1 + len(comma) * (len(cells) - 1) <= self.width - column
        may_cut = self.cut is not None and not fits and len(cells) > self.cut
        for i, cell in enumerate(cells):
            if may_cut and i and column + widths[i] > self.width - _COUNT:
                self._put(Comment(f" … {len(cells) - i:,} more"))
                return self.width
            if i == 0:
                cell = _after_space(cell)
            else:
                self._put(comma)
                column += len(comma)
                if fits or column < self.width:
                    column += 1
                else:
                    self._newline(indent)
                    column = indent
                    cell = _after_space(cell)
            self._put(*cell)
            column += widths[i] - 1
        return column

    # --- a jaxpr ------------------------------------------------------------------------------

    def _jaxpr(self, jaxpr: Jaxpr, indent: int, depth: int) -> None:
        """Write a jaxpr from the current column on; indent its further lines by `indent`."""
        column = self._column()
        flat = self._flat_jaxpr(jaxpr, self.width - column, depth)
        if flat is not None:
            self._put(*flat)
            self._pending = self._only_comment(jaxpr, depth) or self._pending
            return
        self._put("{ ", _LAMBDA)
        column = self._row(self._constants(jaxpr), "", indent + 4, column + 9)
        self._put("; ")
        binders = self._binders(jaxpr.invars)
        if jaxpr is self.root and self.arguments:
            self._put(Comment(self.arguments))
        else:
            self._row(binders, "", indent + 4, column + 2)
        self._put(". ")
        if self.selection.folds(depth):
            self._put(Comment(omitted_equations(self.selection.count(jaxpr))), " }")
            return
        self._put(_LET)
        self._equations(jaxpr, indent + 4, depth)
        self._newline(indent + 2)
        self._put(_IN, "(")
        self._row(self._results(jaxpr), ",", indent + 4, indent + 6)
        self._put(_end_of_tuple(jaxpr.outvars), " }")

    def _results(self, jaxpr: Jaxpr) -> list[tuple[str]]:
        return [(out,) for out in self._operands(jaxpr.outvars)] if jaxpr.outvars else []

    def _flat_jaxpr(self, jaxpr: Jaxpr, room: int, depth: int) -> list[str] | None:
        """Return a jaxpr on one line, or None if it takes more than `room` columns."""
        rows = len(jaxpr.eqns)
        folded = self.selection.folds(depth)
        if not folded and (2 * rows > room or (self.comment and rows > 1)):
            return None
        if len(jaxpr.constvars) + len(jaxpr.invars) > room:
            return None
        constants, inputs = self._constants(jaxpr), self._binders(jaxpr.invars)
        tokens = ["{ ", _LAMBDA, *_flat_row(constants), "; ", *_flat_row(inputs), ". "]
        if folded:
            tokens += [Comment(omitted_equations(self.selection.count(jaxpr))), " }"]
            return tokens if self._width(tokens) <= room else None
        tokens += [_LET, " "]
        for i, (eqn, signature) in enumerate(self._rows(jaxpr)):
            tokens += ["; "] if i else []
            left = room - self._width(tokens)
            line = self._flat_equation(eqn, signature, left, depth) if left >= 0 else None
            if line is None:
                return None
            tokens += line
        results = _flat_row(self._results(jaxpr), ",")
        tokens += [" ", _IN, "(", *results, _end_of_tuple(jaxpr.outvars), " }"]
        return tokens if self._width(tokens) <= room else None

    def _rows(self, jaxpr: Jaxpr) -> Iterable[tuple[Any, Any]]:
        """Return the equations to show with their signatures, and `(None, n)` for n left out."""
        if self.selection.has_all:
            return zip(jaxpr.eqns, self.notation.signatures(jaxpr), strict=True)
        rows = self.selection.rows(jaxpr)
        signature = self.notation.signature
        return ((None, r) if isinstance(r, int) else (r[1], signature(r[1])) for r in rows)

    def _only_comment(self, jaxpr: Jaxpr, depth: int) -> Sequence[str]:
        """Return the comment of the only equation of a jaxpr that has been written on one line."""
        shown = self.comment and jaxpr.eqns and not self.selection.folds(depth)
        return self.comment(jaxpr.eqns[0]) if shown and self.comment else ()

    # --- equations ----------------------------------------------------------------------------

    def _equations(self, jaxpr: Jaxpr, indent: int, depth: int) -> None:
        """Write the equations of a jaxpr, each on a new line."""
        # Nearly all of the time of a large listing goes here, and most equations bind one
        # variable and fit on a line: for them, everything is looked up in local variables.
        out, names, notation = self._out, self.names.spaced, self.notation
        newline, fresh = _newline(indent - 1), self.names.fresh
        middles = self._middles[indent]
        comment, width = self.comment, self.width
        if not jaxpr.eqns:
            self._newline(indent)
        # Each takes at least a line, so at most this many are needed.
        for eqn, signature in islice(self._rows(jaxpr), self._most):
            if eqn is None:
                self._newline(indent)
                self._put(Comment(self.selection.left_out(signature)))
                continue
            if signature.head is None or len(eqn.outvars) != 1:
                self._long_equation(eqn, signature, indent, depth)
                continue
            var = eqn.outvars[0]
            middle = middles[signature].get(identity(var.aval))
            if middle is None:
                middle = self._middle(signature, var.aval, indent)
                middles[signature][identity(var.aval)] = middle
            number = identity(var)
            name = names.get(number)
            if name is None:
                name = names[number] = " _" if isinstance(var, DropVar) else next(fresh)
            operands: list[Any] = [*map(names.get, map(identity, eqn.invars))]
            if None in operands or not operands:
                operands = self._operands(eqn.invars)
            column, last = indent - 1 + len(name), notation.width_of("".join(operands))
            flat = column + middle.width + last <= width
            if not (flat or middle.breaks(column, last, width)):
                self._long_equation(eqn, signature, indent, depth)
                continue
            if self._pending:
                self._end_line()
            out += newline, BINDER, name
            if flat:
                out += middle.flat
                out += operands
                column += middle.width + last
            else:
                out += middle.first_line
                column += middle.first_width
            if comment is not None and (tokens := comment(eqn)):
                out.append(self._gap(column))
                out += tokens
            if not flat:
                out += middle.more_lines
                out += operands

    def _middle(self, signature: Signature, aval: Aval, indent: int) -> Middle:
        types = [self.notation.type_of(aval)] if self.types else []
        return Middle(signature, types, indent, self._width)

    def _flat_equation(
        self, eqn: JaxprEqn | None, signature: Any, room: int, depth: int
    ) -> list[str] | None:
        """Return an equation on one line, or None if it is known to exceed `room` columns."""
        if eqn is None:
            return [Comment(self.selection.left_out(signature))]
        if signature.by_rule:
            return [self._rule(eqn)(0, None)]
        if signature.named_by_call:
            self._naming.name_call(eqn, signature)
        tokens = [*_flat_row(self._binders(eqn.outvars)), " = "] if eqn.outvars else []
        if signature.head is not None:
            tokens += signature.head
        else:
            params = self._flat_params(signature, room - self._width(tokens), depth)
            if params is None:
                return None
            tokens += [signature.name, *params]
        return tokens + self._operands(eqn.invars)

    def _long_equation(self, eqn: JaxprEqn, signature: Signature, indent: int, depth: int) -> None:
        """Write an equation that does not fit on a line, or is not known to fit."""
        self._newline(indent)
        if self.comment is not None:
            self._pending = self.comment(eqn)
        if signature.by_rule:
            self._put(self._rule(eqn)(indent, self.width))
            return
        if signature.named_by_call:
            self._naming.name_call(eqn, signature)
        column = indent
        if eqn.outvars:
            column = self._row(self._binders(eqn.outvars), "", indent + 2, column) + 3
            self._put(" = ")
        self._put(signature.name)
        column += self._width([signature.name])
        if signature.pairs:
            column = self._params(signature, indent, column, depth)
        self._put(" ")
        operands = [(operand,) for operand in self._operands(eqn.invars)] if eqn.invars else []
        self._row(operands, "", indent + 2, column + 1)

    def _rule(self, eqn: JaxprEqn) -> Callable[[int, int | None], str]:
        text = self._by_rule.get(identity(eqn))
        if text is None:
            text = jaxcompat.print_with_rule(eqn, self.names, self.shared, self.types)
            self._by_rule[identity(eqn)] = text
        return text

    # --- parameters ---------------------------------------------------------------------------

    def _params(self, signature: Signature, indent: int, column: int, depth: int) -> int:
        """Write an equation's parameters; return the column after them."""
        flat = self._flat_params(signature, self.width - column, depth)
        if flat is not None:
            self._put(*flat)
            return column + self._width(flat)
        self._put("[")
        for name, value in signature.pairs:
            self._newline(indent + 2)
            self._put(name)
            self._value(value, indent + 2, depth)
        self._newline(indent)
        self._put("]")
        return indent + 1

    def _flat_params(self, signature: Signature, room: int, depth: int) -> list[str] | None:
        if signature.head is not None:
            tokens = signature.head[1:]
            return tokens if self._width(tokens) <= room else None
        tokens = ["["]
        for i, (name, value) in enumerate(signature.pairs):
            tokens += [" ", name] if i else [name]
            text = self._flat_value(value, room - self._width(tokens), depth)
            if text is None or (self.comment and self._has_comments(value, depth)):
                return None
            tokens += text
        tokens.append("]")
        return tokens if self._width(tokens) <= room else None

    def _has_comments(self, value: Value, depth: int) -> bool:
        """Return True if a parameter contains equations, whose comments need lines."""
        jaxprs = (value,) if isinstance(value, Jaxpr) else value
        return not self.selection.folds(depth + 1) and any(
            isinstance(jaxpr, Jaxpr) and jaxpr not in self.shared and jaxpr.eqns for jaxpr in jaxprs
        )

    def _value(self, value: Value, indent: int, depth: int) -> None:
        """Write a parameter's value from the current column on."""
        if isinstance(value, str):
            self._put(value)
        elif isinstance(value, Jaxpr):
            self._body(value, indent, depth)
        elif isinstance(value, Pieces):
            for piece in self._without_repeated_name(value):
                self._value(piece, indent, depth)
        else:
            room = self.width - self._column()
            flat = self._flat_value(value, room, depth)
            if flat is not None and not (self.comment and self._has_comments(value, depth)):
                self._put(*flat)
                return
            self._put("(")
            for jaxpr in value:
                self._newline(indent + 2)
                self._body(jaxpr, indent + 2, depth)
            if not value:
                self._newline(indent + 2)
            self._newline(indent)
            self._put(")")

    def _body(self, jaxpr: Jaxpr, indent: int, depth: int) -> None:
        if jaxpr in self.shared:
            self._put(SharedName(self.shared[jaxpr]))
        else:
            self._jaxpr(jaxpr, indent, depth + 1)

    def _flat_value(self, value: Value, room: int, depth: int) -> list[str] | None:
        """Return a parameter's value on one line, or None if it takes more than `room` columns."""
        if isinstance(value, str):
            return [value]
        if isinstance(value, Jaxpr):
            if value in self.shared:
                return [SharedName(self.shared[value])]
            return self._flat_jaxpr(value, room, depth + 1)
        if isinstance(value, Pieces):
            return self._flat_pieces(value, room, depth)
        tokens = ["("]
        for i, jaxpr in enumerate(value):
            tokens += [" "] if i else []
            body = self._flat_value(jaxpr, room - self._width(tokens), depth)
            if body is None:
                return None
            tokens += body
        tokens.append(")")
        return tokens if self._width(tokens) <= room else None

    def _flat_pieces(self, pieces: Pieces, room: int, depth: int) -> list[str] | None:
        tokens: list[str] = []
        for piece in self._without_repeated_name(pieces):
            flat = self._flat_value(piece, room - self._width(tokens), depth)
            if flat is None:
                return None
            tokens += flat
        return tokens

    def _without_repeated_name(self, pieces: Pieces) -> Sequence[Value]:
        """Return the pieces without the name of a jaxpr that is printed under that name."""
        first, *rest = pieces
        if isinstance(first, str) and len(rest) == 1 and self.shared.get(rest[0]) == first.strip():
            return rest
        return pieces


def _newline(indent: int) -> str:
    return "\n" + " " * indent


def _flat_row(cells: Sequence[tuple[str, ...]], comma: str = "") -> list[str]:
    """Return variables on one line, without the space before the first."""
    tokens: list[str] = []
    for cell in cells:
        if tokens:
            tokens.append(comma)
            tokens += cell
        else:
            tokens += _after_space(cell)
    return tokens


def _after_space(cell: tuple[str, ...]) -> tuple[str, ...]:
    """Return the tokens of a variable or literal, without the space before it."""
    marks = 1 if cell[0] is BINDER else 0
    name = cell[marks]
    bare = type(name)(name[1:]) if isinstance(name, Token) else name[1:]
    return (*cell[:marks], bare, *cell[marks + 1 :])


def _end_of_tuple(values: Sequence[object]) -> str:
    return ",)" if len(values) == 1 else ")"


# --- selection ------------------------------------------------------------------------------------
# Select the part of a program that is shown: its depth, and its equations.
#
# `depth` folds the bodies that are nested deeper. `only` keeps the equations whose primitive
# matches a pattern, and the equations around them. `among` keeps some equations, such as those of a
# slice. Everything left out is counted, including the equations inside it.


class Selection:
    """The equations of a program to show, and to which depth.

    Args:
        depth: The depth to show bodies to; None for all. A program's own equations are at depth 0.
        only: Patterns of primitives to show, as for `fnmatch`; None for all primitives.
        among: The equations to show, by `id`; None for all.
        others: Describes the equations left out: "that x does not touch".
    """

    def __init__(
        self,
        depth: int | None = None,
        only: Sequence[str] | None = None,
        among: frozenset[int] | None = None,
        others: str = "",
    ):
        self.depth = depth
        self.only = None if only is None else tuple(only)
        self.among = among
        self._others = f" {others}" if others else ""
        self._counts: dict[Jaxpr, int] = {}
        self._fits: dict[str, bool] = {}
        self._contains = Contains(self.fits)

    @property
    def everything(self) -> bool:
        """True if nothing is left out."""
        return self.depth is None and self.has_all

    @property
    def has_all(self) -> bool:
        """True if no equation is left out at the depths that are shown."""
        return self.only is None and self.among is None

    def folds(self, depth: int) -> bool:
        """Return True if a body whose equations are at `depth` is shown only as a count."""
        return self.depth is not None and depth > self.depth

    def count(self, jaxpr: Jaxpr) -> int:
        """Return the number of equations of `jaxpr`, including those of its bodies at each call."""
        count = self._counts.get(jaxpr)
        if count is None:
            inside = (body for _, bodies in holders(jaxpr) for _, body in bodies)
            count = self._counts[jaxpr] = len(jaxpr.eqns) + sum(map(self.count, inside))
        return count

    def count_equation(self, eqn: JaxprEqn) -> int:
        """Return the number of equations in an equation's bodies, plus one for itself."""
        return 1 + sum(self.count(body) for _, body in bodies(eqn))

    def shows(self, eqn: JaxprEqn) -> bool:
        """Return True if an equation, or one inside it, is selected."""
        return self.fits(eqn) or self._contains.inside(eqn)

    def fits(self, eqn: JaxprEqn) -> bool:
        """Return True if an equation itself is selected."""
        if self.among is not None and id(eqn) not in self.among:
            return False
        if self.only is None:
            return True
        name = eqn.primitive.name
        if name not in self._fits:
            self._fits[name] = any(fnmatchcase(name, pattern) for pattern in self.only)
        return self._fits[name]

    def left_out(self, count: int) -> str:
        """Return `… 12 equations` for equations that are not selected."""
        return f"{omitted_equations(count)}{self._others}"

    def rows(self, jaxpr: Jaxpr) -> Iterator[tuple[int, JaxprEqn] | int]:
        """Yield the equations to show with their indices, and how many are left out between."""
        skipped = 0
        for index, eqn in enumerate(jaxpr.eqns):
            if not self.shows(eqn):
                skipped += self.count_equation(eqn)
                continue
            if skipped:
                yield skipped
                skipped = 0
            yield index, eqn
        if skipped:
            yield skipped


def omitted_equations(count: int) -> str:
    """Return `… 12 equations`, for those left out."""
    return f"… {count:,} equation{'' if count == 1 else 's'}"


# --- naming ---------------------------------------------------------------------------------------
# The names in the listing of a whole program, without writing the listing.


class Naming:
    """The names of a program's variables and shared jaxprs in a notation.

    Attributes:
        shared: The jaxprs that are written once, each with its name, in the order of the listing.
        variables: The names of variables, each assigned at its first mention.
    """

    def __init__(self, root: Jaxpr, notation: Notation):
        self._root = root
        self._notation = notation
        self.shared = shared_jaxprs(root, notation.called)
        self.variables = notation.variable_names(root, set(self.shared.values()))

    def name_all(self) -> None:
        """Mention each variable in the order of the listing."""
        for jaxpr in (*self.shared, self._root):
            self._name(jaxpr)

    def name_call(self, eqn: JaxprEqn, signature: Signature) -> None:
        """Name the variables of the bodies of a jit after those of the call."""
        for _, body in signature.called:
            if body not in self.shared:
                self.variables.follow_call(eqn, body)

    def _name(self, jaxpr: Jaxpr) -> None:
        self._mention(jaxpr.constvars)
        self._mention(jaxpr.invars)
        named, mention = self.variables.spaced, self.variables.mention
        for eqn, signature in zip(jaxpr.eqns, self._notation.signatures(jaxpr), strict=True):
            if signature.by_rule:
                jaxcompat.print_with_rule(eqn, self.variables, self.shared, types=False)
                continue
            if signature.named_by_call:
                self.name_call(eqn, signature)
            for var in eqn.outvars:
                if identity(var) not in named:
                    mention(var)
            if signature.head is None:
                for _, value in signature.pairs:
                    for body in _inside(value):
                        if body not in self.shared:
                            self._name(body)

    def _mention(self, variables: Iterable[Var]) -> None:
        for var in variables:
            self.variables.mention(var)


def _inside(value: Value) -> Iterator[Jaxpr]:
    """Yield the jaxprs in a parameter, in the order in which they are written."""
    if isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _inside(part)
