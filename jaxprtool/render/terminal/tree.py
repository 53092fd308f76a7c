"""Programs as trees and as tables, and the rows of equations.

Each equation is one line. One with bodies has its argument and result types and its number of
equations; a shared jaxpr is unfolded at its first use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any, TypeVar

from jaxprtool import jaxcompat
from jaxprtool.errors import TargetError
from jaxprtool.ir.backends import cached_method
from jaxprtool.ir.equations import bodies
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.hlo.module import (
    CALLS,
    Computation,
    HloModule,
    HloShape,
    Instruction,
    kernel_contents,
    while_trip_count,
)
from jaxprtool.ir.hlo.origins import OperationOrigin, OperationOrigins
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
from jaxprtool.ir.program import (
    NamedValue,
    Program,
    ProgramSignature,
    program_signature,
    size_of_values,
)
from jaxprtool.ir.regions import Edges, View, sub_jaxprs, views
from jaxprtool.ir.rules import rule
from jaxprtool.jaxcompat import (
    AnyJaxpr,
    Atom,
    Aval,
    ClosedJaxpr,
    DebugInfo,
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    new_jaxpr,
    new_jaxpr_eqn,
    open_jaxpr,
)
from jaxprtool.jaxcompat.source_locations import source_infos
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
        named: Whether to compute the names of variables, which takes time for a large program; or
            their names.
    """

    def __init__(
        self,
        about: ProgramSignature,
        options: ShowOptions = DEFAULTS,
        named: bool | Mapping[Var, str] = True,
    ):
        self._notation = options.notation(about)
        self.shared: dict[Jaxpr, str] = {}
        self._names: VariableNames | Mapping[Var, str] | _Unnamed = _Unnamed()
        if isinstance(named, Mapping):
            self._names = named
        elif named:
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


# --- as a jaxpr -----------------------------------------------------------------------------------
# A module as a jaxpr whose equations stand for instructions: its values, bodies, lines and scopes.
#
# It can only be read: no equation can be evaluated, differentiated or lowered. Primitives are named
# after opcodes. A tuple is the values in it: `tuple` and `get-tuple-element` have no equations, and
# each carried value is followed through a loop alone. A scalar constant is a literal.


def computes(module: HloModule, op: Instruction) -> str:
    """Return what an instruction computes: `dot`, `fusion[add, tanh]`, or `while[10 times]`."""
    if op.opcode == "while":
        trips = while_trip_count(module, op)
        return "while" if trips is None else f"while[{trips:,} times]"
    if op.opcode in CALLS:
        return op.opcode
    contents = kernel_contents(module, op)
    return f"fusion[{contents}]" if op.opcode == "fusion" else contents


#: The parameters of JAX's `while` and `call`, whose regions are the same, for the computations.
_BODY_PARAMS = {"while": ("body_jaxpr", "cond_jaxpr"), "call": ("call_jaxpr",)}

#: The roles of computations in XLA's notation, where they are not all alike.
_ROLES = {"while": ("body", "condition")}

#: The end of an operation in the background names the computation that its start runs.
_NO_BODIES = ("async-update", "async-done")

#: An instruction in the text of a module: its name, and the rest of its line.
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%?(\S+) = (.+)$", re.MULTILINE)

#: The parts of an instruction's text between which attributes begin and end.
_PART = re.compile(r'"(?:[^"\\]|\\.)*"|[{}()\[\]]|, (?=[a-z_]+=)')


class HloType(Aval):
    """The type of an array or token of a module, in HLO's notation."""

    def __init__(self, shape: HloShape) -> None:
        self.hlo_shape = shape

    def str_short(self, short_dtypes: bool = False, mesh_axis_types: bool = False) -> str:
        """Return `f32[8]`, without the layout."""
        return str(self.hlo_shape)


@rule(views, "fusion", "conditional")
class HloCall(View):
    """The computations of a fusion or a branch, each with its own operands.

    The first operand of a `conditional` selects a computation.
    """

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Any:
        bodies = [body for _, body in sub_jaxprs(eqn)]
        begin = int(eqn.primitive.name == "conditional")
        fields: dict[str, Any] = {"predicate": tuple(eqn.invars[:begin]), "outs": eqn.outvars}
        selects = "predicate" if begin else None
        for number, body in enumerate(bodies):
            end = begin + len(open_jaxpr(body).invars)
            fields |= {f"operands_{number}": tuple(eqn.invars[begin:end]), f"body_{number}": body}
            begin = end
        numbers = range(len(bodies))
        edges = Edges(
            operands=("predicate", *(f"operands_{i}" for i in numbers)),
            bodies=tuple((f"body_{i}", (f"operands_{i}",), ("outs",)) for i in numbers),
            predicate=selects,
        )
        return SimpleNamespace(eqn=eqn, edges=edges, **fields)


class ModuleJaxpr:
    """A module as a jaxpr.

    Args:
        module: The module.

    Attributes:
        module: The module.
        jaxpr: The closed jaxpr.
        signature: Its name, its arguments and its results.
        names: The name of each variable: that of the instruction, or of the user's for an argument
            of the module, with an index for an element of a tuple.
        tuples: The name of each instruction whose result is a tuple of several values, and the
            variables of these, by the first.

    Raises:
        TargetError: If jaxlib does not know an instruction.
    """

    def __init__(self, module: HloModule) -> None:
        from jaxprtool.jaxcompat.lowering import printed_hlo

        self.module = module
        self.names: dict[Var, str] = {}
        self.tuples: dict[Var, tuple[str, list[Var]]] = {}
        try:
            self._texts = dict(_INSTRUCTION.findall(printed_hlo(module.source)))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise TargetError(f"jaxlib cannot print '{self.module.name}': {reason}") from None
        self._origins = OperationOrigins(self.module, frames_now(), frozenset(self.module.by_name))
        self._arguments = {op.id: op for op in _hlo_parameters(self.module.entry)}
        self._instructions: dict[int, Instruction] = {}
        self._types: dict[int, HloType] = {}
        self._primitives: dict[str, Primitive] = {}
        self._sources = self._made_sources()
        self.jaxpr = self._body(self.module.entry.id)
        self.signature = self._signature()

    @property
    def notes(self) -> list[str]:
        """What the module is, besides its size: its devices, and whether it is optimized."""
        devices = self.module.devices
        notes = [f"on each of {devices} devices"] if devices > 1 else []
        return notes if self.module.schedule else [*notes, "before XLA's optimizations"]

    def instruction(self, eqn: JaxprEqn) -> Instruction:
        """Return the instruction that an equation stands for."""
        return self._instructions[id(eqn)]

    def opcode(self, eqn: JaxprEqn) -> str:
        """Return the opcode of the instruction that an equation stands for."""
        return self.instruction(eqn).opcode

    def scopes(self, jaxpr: Jaxpr) -> list[tuple[str, ...]]:
        """Return the scopes around each equation of a body, as `cost --by scope` groups them."""
        return [self._origin(self.instruction(eqn)).scope for eqn in jaxpr.eqns]

    def roles(self, eqn: JaxprEqn) -> list[str]:
        """Return the role and the name of each computation: `condition region_1.2`."""
        op = self.instruction(eqn)
        roles = _ROLES.get(op.opcode, ("",) * len(op.calls))
        pairs = zip(roles, op.calls, strict=True)
        return [f"{role} {self.module.computations[i].name}".strip() for role, i in pairs]

    def computes(self, eqn: JaxprEqn) -> str:
        """Return what an instruction computes: `dot`, `fusion[add, tanh]`, or `while[10 times]`."""
        return computes(self.module, self.instruction(eqn))

    def attributes(self, eqn: JaxprEqn) -> dict[str, str]:
        """Return the attributes of an instruction in XLA's notation, and its shape with layouts."""
        op = self.instruction(eqn)
        values = {"op_name": op.op_name} if op.op_name else {}
        if op.name not in self._texts:
            # XLA writes an operation in the background, and its attributes, as `all-gather-start`.
            return values
        shape, arguments, *attributes = _parts(self._texts[op.name])
        values |= dict(part.split("=", 1) for part in attributes)
        if op.opcode == "constant":
            values = {"value": arguments.partition("(")[2].removesuffix(")"), **values}
        return values if op.shape.parts else {**values, "shape": shape}

    # --- construction -------------------------------------------------------------------------

    @cached_method
    def _origin(self, op: Instruction) -> OperationOrigin:
        """Return where an instruction comes from; if it has no line, where most of it does."""
        origin = self._origins.origin(op)
        if origin.line is None:
            origin, _ = max(self._origins.of(op.name), key=lambda part: part[1])
        return origin

    def _made_sources(self) -> dict[Any, Any]:
        """Return the `source_info` of each call stack."""
        stacks = list({self._origin(op).frames: None for op in self.module.instructions.values()})
        return dict(zip(stacks, source_infos([(s[::-1], "") for s in stacks]), strict=True))

    @cached_method
    def _body(self, number: int) -> ClosedJaxpr:
        """Return the jaxpr of a computation."""
        computation = self.module.computations[number]
        values: dict[int, list[Var | Literal]] = {}
        eqns = []
        parameters = _hlo_parameters(computation)
        for op in parameters:
            values[op.id] = self._variables(op)
        for op in self._ordered(computation):
            operands = [values[i] for i in op.operands]
            if op.opcode == "tuple":
                values[op.id] = [value for operand in operands for value in operand]
            elif op.opcode == "get-tuple-element":
                values[op.id] = _element(self.module.instructions[op.operands[0]], operands[0], op)
            elif op.opcode == "constant" and not (op.shape.sizes or op.shape.parts):
                _, text = _parts(self._texts[op.name])[:2]
                values[op.id] = [Literal(text[len("constant(") : -1], self._type(op.shape))]
            elif op.opcode != "parameter":
                results = self._variables(op)
                values[op.id] = results
                eqns.append(self._equation(op, list(chain(*operands)), results))
        arguments = [var for op in parameters for var in values[op.id]]
        results = values[computation.root.id]
        described = DebugInfo("computation", computation.name, None, None)
        return new_jaxpr([], [], arguments, results, eqns, described)

    def _ordered(self, computation: Computation) -> Iterator[Instruction]:
        """Return the instructions in the order in which they run."""
        numbers = self.module.schedule.get(computation.id)
        if numbers is None:
            return iter(computation.instructions)
        return map(self.module.instructions.__getitem__, numbers)

    def _equation(
        self, op: Instruction, operands: Sequence[Var | Literal], results: Sequence[Var]
    ) -> JaxprEqn:
        params: dict[str, Any] = {}
        if op.calls and op.opcode not in _NO_BODIES:
            bodies = tuple(map(self._body, op.calls))
            names = _BODY_PARAMS.get(op.opcode)
            params = {"calls": bodies} if names is None else dict(zip(names, bodies, strict=True))
        if op.opcode == "while":
            params |= {"cond_nconsts": 0, "body_nconsts": 0}
        if op.opcode not in self._primitives:
            # HLO's `scan` is not JAX's, which has other parameters.
            is_known = op.opcode in _BODY_PARAMS or views.get(op.opcode) in (None, HloCall)
            self._primitives[op.opcode] = Primitive(op.opcode if is_known else f"hlo {op.opcode}")
            self._primitives[op.opcode].multiple_results = True
        source = self._sources[self._origin(op).frames]
        primitive = self._primitives[op.opcode]
        eqn = new_jaxpr_eqn(operands, results, primitive, params, frozenset(), source)
        self._instructions[id(eqn)] = op
        return eqn

    def _variables(self, op: Instruction) -> list[Any]:
        """Return a variable for each value of an instruction's result."""
        variables = []
        name = op.op_name or op.name if op.id in self._arguments else op.name
        for index, shape in _leaves(op.shape):
            var = Var(self._type(shape))
            self.names[var] = name + index
            variables.append(var)
        if len(variables) > 1:
            self.tuples[variables[0]] = name, variables
        return variables

    def _type(self, shape: HloShape) -> HloType:
        if id(shape) not in self._types:
            self._types[id(shape)] = HloType(shape)
        return self._types[id(shape)]

    def _signature(self) -> ProgramSignature:
        named = [(op.op_name or op.name, op.shape) for op in self._arguments.values()]
        arguments, outputs = (
            tuple(
                NamedValue(name + index, str(part), part.bytes)
                for name, shape in values
                for index, part in _leaves(shape)
            )
            for values in (named, [("result", self.module.entry.root.shape)])
        )
        return ProgramSignature(self.module.name, open_jaxpr(self.jaxpr), arguments, outputs, ())


def _hlo_parameters(computation: Computation) -> list[Instruction]:
    parameters = [op for op in computation.instructions if op.opcode == "parameter"]
    return sorted(parameters, key=lambda op: op.parameter_number)


def _leaves(shape: HloShape, index: str = "") -> Iterator[tuple[str, HloShape]]:
    """Yield the arrays in nested tuples, each with its index: `[1][0]`."""
    if shape.dtype != "tuple":
        yield index, shape
    for i, part in enumerate(shape.parts):
        yield from _leaves(part, f"{index}[{i}]")


def _element(tuple_op: Instruction, values: Sequence[Any], op: Instruction) -> list[Any]:
    """Return the values in an element of a tuple."""
    counts = [sum(1 for _ in _leaves(part)) for part in tuple_op.shape.parts]
    begin = sum(counts[: op.tuple_index])
    return list(values[begin : begin + counts[op.tuple_index]])


def _parts(text: str) -> list[str]:
    """Split an instruction's text: its shape, its opcode with the operands, and its attributes."""
    depth, begin, parts = 0, 0, list[str]()
    if text.startswith("("):
        for match in _PART.finditer(text):
            depth += (match[0] in ("(", "{", "[")) - (match[0] in (")", "}", "]"))
            if depth == 0 and match[0] == ")":
                begin = match.end()
                break
    begin = text.index(" ", begin)
    parts.append(text[:begin])
    begin += 1
    for match in _PART.finditer(text, begin):
        depth += (match[0] in ("(", "{", "[")) - (match[0] in (")", "}", "]"))
        if depth == 0 and match[0] == ", ":
            parts.append(text[begin : match.start()])
            begin = match.end()
    return [*parts, text[begin:]]
