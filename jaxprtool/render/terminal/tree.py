"""Programs as trees and as tables, and the rows of equations.

Each equation is one line. One with bodies has its argument and result types and its number of
equations; a shared jaxpr is unfolded at its first use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from jaxprtool import jaxcompat
from jaxprtool.ir.equations import bodies
from jaxprtool.ir.notation import (
    BinderToken,
    Comment,
    LiteralToken,
    ParameterToken,
    PrimitiveName,
    SharedName,
    Type,
)
from jaxprtool.ir.notation.layout import Naming, Selection, omitted_equations
from jaxprtool.ir.notation.signatures import Signature, VariableNames, value_text
from jaxprtool.ir.program import Program, ProgramSignature, program_signature, size_of_values
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.render.terminal.lines import Cell, Listing, cut_line, fits_width, grid, printable
from jaxprtool.render.terminal.listing import (
    DEFAULTS,
    MOST_IN_A_ROW,
    OPAQUE,
    ShowOptions,
    SourceComments,
)

# --- tree -----------------------------------------------------------------------------------------
# Programs as trees: calls, loops and branches with their bodies.

T = TypeVar("T")


def tree(program: Program | AnyJaxpr, options: ShowOptions = DEFAULTS) -> Listing:
    """Return the tree of a program; long lines are cut at the width."""
    about = program_signature(program)
    builder = _Lines(about, options)
    tokens = cut_line([SharedName(about.name), " ", *builder.first(about)], options.width)
    for line in builder.equations(about.jaxpr, 0, ""):
        tokens += "\n", *cut_line(line, options.width)
    return Listing(printable(tokens))


class _Lines:
    """The lines of a program's tree, each in tokens."""

    def __init__(self, about: ProgramSignature, options: ShowOptions):
        self._reader = Reader(about, options)
        self._comments = SourceComments(options, about.roots)
        self._types = options.types
        self._selection = options.selection()
        self._unfolded: set[Jaxpr] = set()

    def equations(self, jaxpr: Jaxpr, depth: int, guides: str) -> Iterator[list[str]]:
        """Yield the lines of the equations of `jaxpr`, preceded by tree guides."""
        if self._selection.folds(depth) or jaxpr in self._unfolded:
            return
        self._unfolded.add(jaxpr)
        for row, mark, below in _branches(list(self._selection.rows(jaxpr)), guides):
            if isinstance(row, int):
                yield [mark, Comment(self._selection.left_out(row))]
                continue
            _, eqn = row
            inside = bodies(eqn)
            if not inside:
                yield [mark, *self._reader.line(eqn, self._types), *self._comment(eqn)]
            elif len(inside) == 1:
                _, body = inside[0]
                types, comment = [" ", *self.signature(body)], self._comment(eqn)
                # The line is cut at its end, which must not hide that the equation is opaque.
                behind = [*comment, " ", *types] if jaxcompat.is_opaque(eqn) else [*types, *comment]
                yield [mark, *self._reader.head(eqn), *behind]
                yield from self.equations(body, depth + 1, below)
            else:
                yield [mark, *self._reader.head(eqn), *self._comment(eqn)]
                for (path, body), inner, deeper in _branches(inside, below):
                    yield [inner, ParameterToken(path), " ", *self.signature(body)]
                    yield from self.equations(body, depth + 1, deeper)

    def first(self, about: ProgramSignature) -> list[str]:
        """Return the signature of the program; many values are summarized by size."""
        types = self.signature(about.jaxpr)
        if self._types and max(len(about.arguments), len(about.outputs)) > MOST_IN_A_ROW:
            sizes = (
                size_of_values("argument", about.arguments),
                size_of_values("result", about.outputs),
            )
            types[0] = Type("({}) → {}".format(*sizes))
        return types

    def signature(self, jaxpr: Jaxpr) -> list[str]:
        """Return `(f32[3]) → f32[3]  12 equations`, and whether they are shown above."""
        count = omitted_equations(self._selection.count(jaxpr)).removeprefix("… ")
        shown = Comment(f"{count}, shown above" if jaxpr in self._unfolded else count)
        if not self._types:
            return [shown]
        ins, outs = map(self._some_types, (jaxpr.invars, jaxpr.outvars))
        return [Type(f"({ins}) → {outs}"), "  ", shown]

    def _some_types(self, atoms: Sequence[Atom], most: int = 4) -> str:
        shown = [self._reader.type_of(atom)[1:] for atom in atoms[:most]]
        if len(atoms) > most:
            shown.append(f"… {len(atoms) - most} more")
        return " ".join(shown) or "()"

    def _comment(self, eqn: JaxprEqn) -> list[str]:
        comment = self._comments.comment(eqn)
        return ["  ", *comment] if comment else []


def _branches(items: Sequence[T], guides: str) -> Iterator[tuple[T, str, str]]:
    """Yield each item of a branch with its guides, and the guides of its children."""
    for number, item in enumerate(items):
        if number < len(items) - 1:
            yield item, Comment(guides + "├── "), guides + "│   "
        else:
            yield item, Comment(guides + "└── "), guides + "    "


# --- table ----------------------------------------------------------------------------------------
# Programs as tables: one row for each equation in any body.

#: The number of values shown of an equation with many, if folded.
_FEW = 4


def table(program: Program | AnyJaxpr, options: ShowOptions = DEFAULTS) -> Listing:
    """Return the table of a program.

    A row's place, such as `3.0` or `3[1].0`, is its path: equation 3, its body (or body 1 of
    several), and equation 0 in the body. The rows of a shared body are at its first use. Parameters
    that do not fit their column are below their equations.
    """
    about = program_signature(program)
    reader, comments = Reader(about, options), SourceComments(options, about.roots)
    selection = options.selection()
    headings = ["#", "outputs", "primitive", "inputs", "parameters"]
    headings += ["source"] if options.source else []
    headings += ["scope"] if options.scopes else []
    rows: list[list[Cell]] = []
    for place, row in _rows(about.jaxpr, selection):
        cells: list[Cell] = [[Comment(place)]]
        if isinstance(row, int):
            cells.append([Comment(omitted_equations(row))])
            rows.append(cells + [[]] * (len(headings) - len(cells)))
            continue
        outs, ins = (_some(atoms, options) for atoms in (row.outvars, row.invars))
        cells += [
            [*reader.binder_tokens(outs, options.types), *_rest(row.outvars, outs)],
            [PrimitiveName(row.primitive.name)],
            [*reader.operand_tokens(ins), *_rest(row.invars, ins)],
            _parameters(reader, row, selection),
        ]
        if options.source:
            cells.append(comments.location(row))
        if options.scopes:
            cells.append([Comment(jaxcompat.name_stack(row))])
        rows.append(cells)
    below = None
    if not fits_width(headings, rows, options.width):
        at = headings.index("parameters")
        del headings[at]
        below = [row.pop(at) for row in rows]
    return Listing(printable(grid(headings, rows, options.width, below)))


def _some(atoms: Sequence[T], options: ShowOptions) -> Sequence[T]:
    """Return the displayed values of an equation."""
    return atoms[:_FEW] if options.fold and len(atoms) > MOST_IN_A_ROW else atoms


def _rest(atoms: Sequence[object], shown: Sequence[object]) -> Cell:
    more = f" …\N{NO-BREAK SPACE}{len(atoms) - len(shown):,}\N{NO-BREAK SPACE}more"
    return [Comment(more)] if len(atoms) > len(shown) else []


def _parameters(reader: Reader, eqn: JaxprEqn, selection: Selection) -> Cell:
    tokens = reader.parameter_tokens(eqn)
    if jaxcompat.is_opaque(eqn):
        tokens = [Comment(f"# {OPAQUE} "), *tokens]
    for path, body in bodies(eqn):
        space = [" "] if tokens else []
        shared = reader.shared.get(body)
        shown = (
            [Comment(f"{{{omitted_equations(selection.count(body))}}}")]
            if shared is None
            else [SharedName(shared)]
        )
        tokens = [*tokens, *space, ParameterToken(f"{path}="), *shown]
    return tokens


def _rows(root: Jaxpr, selection: Selection) -> Iterator[tuple[str, JaxprEqn | int]]:
    """Yield each equation to show with its place, and counts of those skipped in between."""
    seen: set[Jaxpr] = set()

    def below(jaxpr: Jaxpr, prefix: str, depth: int) -> Iterator[tuple[str, JaxprEqn | int]]:
        seen.add(jaxpr)
        for row in selection.rows(jaxpr):
            if isinstance(row, int):
                yield f"{prefix}…", row
                continue
            index, eqn = row
            yield f"{prefix}{index}", eqn
            inside = bodies(eqn)
            for number, (_, body) in enumerate(inside):
                if body not in seen and not selection.folds(depth + 1):
                    which = f"[{number}]" if len(inside) > 1 else ""
                    yield from below(body, f"{prefix}{index}{which}.", depth + 1)

    return below(root, "", 0)


# --- rows -----------------------------------------------------------------------------------------
# The parts of an equation for the tree, the table and the JSON document.
#
# A `Reader` names variables like the listing, so that names agree between them. The parts are
# tokens of a listing, except for JSON.


class _Unnamed:
    """A placeholder for the names of variables that are not yet known."""

    def __getitem__(self, var: Var) -> str:
        return "·"


class Reader:
    """Names and texts of one program's variables, literals and parameters.

    Args:
        about: The program.
        options: The display options.
        named: Whether to compute the names of variables, which takes time for a large program.
    """

    def __init__(
        self, about: ProgramSignature, options: ShowOptions = DEFAULTS, named: bool = True
    ):
        self._notation = options.notation(about)
        self.shared: dict[Jaxpr, str] = {}
        self._names: VariableNames | _Unnamed = _Unnamed()
        if named:
            naming = Naming(about.jaxpr, self._notation)
            naming.name_all()
            self._variables = naming.variables
            self.shared = naming.shared
            self._names = naming.variables
        self._parameters: dict[Signature, list[str]] = {}

    def name(self, var: Var) -> str:
        """Return the name of a variable, as in the listing."""
        return self._names[var]

    def names(self) -> set[str]:
        """Return the names of all variables that have one."""
        return {name[1:] for name in self._variables.spaced.values()}

    def rename(self, var: Var, name: str) -> None:
        """Give a variable another name than in the listing."""
        self._variables[var] = name

    def value_text(self, eqn: JaxprEqn, parameter: str) -> str:
        """Return the text of a parameter that is not a jaxpr."""
        return self._notation.text(eqn.params.get(parameter))

    def type_of(self, atom: Atom) -> Type:
        """Return the type of a variable or literal in the form of a binder: `:f32[3]`."""
        return self._notation.type_of(atom.aval)

    def operand(self, atom: Atom) -> str:
        """Return a variable's name, or a literal with its type."""
        if not isinstance(atom, Literal):
            return self.name(atom)
        return LiteralToken(f"{value_text(atom)}{self.type_of(atom)}")

    def parameters(self, eqn: JaxprEqn) -> dict[str, str]:
        """Return the parameters shown in the listing, except jaxprs; all if JAX has a rule."""
        signature = self._notation.signature(eqn)
        if signature.by_rule:
            return {k: self._notation.text(v) for k, v in sorted(eqn.params.items())}
        pairs = [(name.removesuffix("="), value) for name, value in signature.pairs]
        return {name: str(value) for name, value in pairs if isinstance(value, str) or not value}

    # --- tokens -------------------------------------------------------------------------------

    def binder_tokens(self, variables: Sequence[Var], types: bool) -> list[str]:
        """Return `a:f32[3] b:i32[]`, without types if `types` is False."""
        tokens: list[str] = []
        for var in variables:
            tokens += " ", BinderToken(self.name(var))
            if types:
                tokens.append(self.type_of(var))
        return tokens[1:]

    def operand_tokens(self, atoms: Sequence[Atom]) -> list[str]:
        """Return the operands of an equation with spaces between them."""
        return [token for atom in atoms for token in (" ", self.operand(atom))][1:]

    def parameter_tokens(self, eqn: JaxprEqn) -> list[str]:
        """Return the parameters of an equation with spaces between them."""
        signature = self._notation.signature(eqn)
        tokens = self._parameters.get(signature)
        if tokens is None or signature.by_rule:
            pairs = self.parameters(eqn).items()
            tokens = [t for k, v in pairs for t in (" ", ParameterToken(f"{k}="), v)][1:]
            self._parameters[signature] = tokens
        return tokens

    def head(self, eqn: JaxprEqn) -> list[str]:
        """Return `jit log_softmax`: the primitive, and the name of the called function if any."""
        name = eqn.params.get("name")
        named = [" ", SharedName(name)] if isinstance(name, str) else []
        return [PrimitiveName(eqn.primitive.name), *named]

    def line(
        self, eqn: JaxprEqn, types: bool, most: int | None = None, parameters: bool = True
    ) -> list[str]:
        """Return `c:f32[3] = mul[…] a b`, an equation on one line without its bodies.

        Args:
            eqn: The equation.
            types: Whether to write the types of results.
            most: The maximum number of results, and operands, to name; None for all.
            parameters: Whether to write parameters instead of `…`.
        """
        shown = self.parameter_tokens(eqn)
        return [
            *self.results(eqn, types, most),
            PrimitiveName(eqn.primitive.name),
            *(["[", *(shown if parameters else [Comment("…")]), "]"] if shown else []),
            " ",
            *self.operands(eqn, most),
        ]

    def results(self, eqn: JaxprEqn, types: bool, most: int | None = None) -> list[str]:
        """Return `a:f32[3] b:i32[] = ` for the results of an equation, at most `most`."""
        names = self.binder_tokens(eqn.outvars[:most], types)
        return [*names, *_more(eqn.outvars, most), " = "] if names else []

    def operands(self, eqn: JaxprEqn, most: int | None = None) -> list[str]:
        """Return the operands of an equation, at most `most`."""
        return [*self.operand_tokens(eqn.invars[:most]), *_more(eqn.invars, most)]


def _more(values: Sequence[object], most: int | None) -> list[str]:
    left = 0 if most is None else len(values) - most
    return [Comment(f" … {left} more")] if left > 0 else []
