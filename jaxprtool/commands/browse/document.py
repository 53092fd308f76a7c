"""A program as shown by the browser: its states, and the rows, sources and values of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from jaxprtool import Program, Programs
from jaxprtool.commands.browse.outline import Kind, OutlineNode
from jaxprtool.extend import (
    Atom,
    Jaxpr,
    JaxprEqn,
    Literal,
    NamedValue,
    bodies,
    equations,
    program_signature,
    top_jaxpr,
)
from jaxprtool.extend.listing import (
    BinderToken,
    Comment,
    ParameterToken,
    Reader,
    ScopeReader,
    Selection,
    SharedName,
    ShowOptions,
    Type,
    UserFrame,
    frames_now,
    in_bytes,
    plural,
    printable,
)
from jaxprtool.extend.programs import (
    Changes,
    DataFlow,
    Observer,
    Start,
    Step,
    backward_slice,
    changes,
)

# --- document -------------------------------------------------------------------------------------
# A state of a program as shown by the browser: tokens of rows, source locations, values.

#: The maximum number of results, and operands, of an equation named in its row.
_MOST_NAMED = 6

#: A program with more equations is first shown without names of variables.
MANY = 15_000


#: The frames of an equation and of the calls around it, the innermost first.
CallStack: TypeAlias = tuple[UserFrame, ...]


class Document:
    """The displayed content of a program state.

    Args:
        state: The state.
        names: Whether variables have the user's names.
    """

    def __init__(self, state: PassState, names: bool = True):
        self.state = state
        self.about = program_signature(state.program)
        self.top = self.about.jaxpr
        self.flow = DataFlow(self.top)
        self.frames = frames_now(self.about.roots)
        self._selection = Selection()
        self._counts: dict[int, int] = {}
        self._stacks: dict[tuple[object, CallStack], CallStack] = {}
        self._scope_reader = ScopeReader(self.about.roots)
        self._scopes: dict[Jaxpr, Sequence[tuple[str, ...]]] = {}
        self._options = ShowOptions(names=names, terse=True)
        #: Whether names, scopes and marks are known, which a large program computes later.
        self.is_complete = len(self.top.eqns) <= MANY and self.count <= MANY
        self.reader = Reader(self.about, self._options, named=self.is_complete)

    @cached_property
    def count(self) -> int:
        """The number of equations at every depth."""
        return self._selection.count(self.top)

    def complete(self) -> None:
        """Compute the names of variables, the scopes and the changes of a large program."""
        if not self.is_complete:
            self.scopes(self.top)
            self.reader = Reader(self.about, self._options)
            _ = self.state.marks
            self.is_complete = True

    def mark(self, eqn: JaxprEqn) -> str:
        """Return the mark of an equation that a pass changed, if known."""
        is_known = self.is_complete or self.state.is_compared
        return self.state.marks.get(id(eqn), "") if is_known else ""

    # --- scopes -----------------------------------------------------------------------------------

    def scopes(self, jaxpr: Jaxpr) -> Sequence[tuple[str, ...]]:
        """Return the scopes around each equation of a body, as `cost --by scope` groups them."""
        if jaxpr not in self._scopes:
            self._scopes[jaxpr] = self._scope_reader.paths(jaxpr)
        return self._scopes[jaxpr]

    # --- source locations -------------------------------------------------------------------------

    def stack(self, eqn: JaxprEqn, above: CallStack = ()) -> CallStack:
        """Return the frames of an equation, innermost first; without user code, its call's follow.

        JAX traces a jitted function once for all its calls, and keeps only the frames inside it.

        Args:
            eqn: The equation.
            above: The stack of the call of its body.
        """
        key = eqn.source_info.traceback, above
        if key not in self._stacks:
            frames = tuple(self.frames.of(eqn))
            is_users = any(self.frames.is_users(frame.file) for frame in frames)
            self._stacks[key] = frames if is_users else frames + above
        return self._stacks[key]

    def all_frames(self, node: OutlineNode) -> list[UserFrame]:
        """Return the frames of a row's equation and of its calls, starting with the shown one."""
        stack: CallStack = ()
        for eqn in node.equations:
            stack = self.stack(eqn, stack)
        nearest = self.frames.nearest(stack)
        return list(dict.fromkeys([*stack[nearest:][:1], *stack[:nearest], *reversed(stack)]))

    def line(self, eqn: JaxprEqn, above: CallStack) -> tuple[str, int] | None:
        """Return the file and line of an equation in a body that is called from a stack."""
        stack = self.stack(eqn, above)
        return stack[self.frames.nearest(stack)][:2] if stack else None

    @cached_property
    def lines(self) -> set[tuple[str, int]]:
        """The lines of the user's files that have equations."""
        locations = map(self.frames.location, equations(self.top))
        return {
            location.frame[:2]
            for location in set(locations)
            if location is not None and self.frames.is_users(location.frame.file)
        }

    # --- rows ---------------------------------------------------------------------------------

    def row(self, node: OutlineNode, width: int | None = None) -> list[str]:
        """Return the tokens of a row, without parameters that exceed `width`."""
        tokens = printable(getattr(self, f"_{node.kind.value}")(node))
        if width is None or node.folds or sum(map(len, tokens)) <= width:
            return tokens
        eqn = node.eqn
        if eqn is None:
            return tokens
        return printable(self.reader.line(eqn, True, _MOST_NAMED, parameters=False))

    def _equation(self, node: OutlineNode) -> list[str]:
        eqn = node.jaxpr.eqns[node.index]
        if not node.folds:
            return self.reader.line(eqn, True, _MOST_NAMED)
        results = self.reader.results(eqn, True, _MOST_NAMED)
        tokens = [*results, *self.reader.head(eqn), " ", *self.reader.operands(eqn, _MOST_NAMED)]
        return [*tokens, *self._counted(self._selection.count_equation(eqn) - 1)]

    def _body(self, node: OutlineNode) -> list[str]:
        assert node.body is not None
        return [ParameterToken(node.label), *self._counted(self._selection.count(node.body))]

    def _scope(self, node: OutlineNode) -> list[str]:
        return [SharedName(node.label), *self._counted(self._in_scope(node))]

    def _counted(self, count: int) -> list[str]:
        return ["  ", Comment(self._selection.left_out(count))]

    def _in_scope(self, node: OutlineNode) -> int:
        if id(node) not in self._counts:
            self._counts[id(node)] = sum(
                self._in_scope(child)
                if child.kind is Kind.scope
                else self._selection.count_equation(child.jaxpr.eqns[child.index])
                for child in node.children or ()
            )
        return self._counts[id(node)]

    def ends(self, kind: Kind) -> Sequence[NamedValue]:
        """Return the arguments or the results of the program."""
        is_argument = kind in (Kind.arguments, Kind.argument)
        return self.about.arguments if is_argument else self.about.outputs

    def _ends(self, node: OutlineNode) -> list[str]:
        sizes = [value.bytes for value in self.ends(node.kind)]
        known_sizes = [size for size in sizes if size is not None]
        size = (
            Comment(f"  {in_bytes(sum(known_sizes))}") if len(known_sizes) == len(sizes) > 0 else ""
        )
        return [ParameterToken(plural(len(sizes), node.kind.value.removesuffix("s"))), size]

    _arguments = _results = _ends

    def _argument(self, node: OutlineNode) -> list[str]:
        value = self.about.arguments[node.index]
        name = self.reader.name(node.jaxpr.invars[node.index])
        called = [f" {name}"] if name not in (value.name, "·") else []
        return [BinderToken(value.name), Type(f":{value.type}"), *called]

    def _result(self, node: OutlineNode) -> list[str]:
        value, atom = self.about.outputs[node.index], node.jaxpr.outvars[node.index]
        return [BinderToken(value.name), Type(f":{value.type}"), " = ", self.reader.operand(atom)]

    def parameters(self, eqn: JaxprEqn) -> dict[str, str]:
        """Return all parameters of an equation except jaxprs, including those hidden in its row."""
        return self._whole.parameters(eqn)

    @cached_property
    def _whole(self) -> Reader:
        return Reader(self.about, named=False)

    def name(self, atom: Atom) -> str:
        """Return the name of an operand as plain text."""
        return "".join(printable([self.reader.operand(atom)]))

    def text(self, node: OutlineNode) -> str:
        """Return a row, such as a whole equation, as plain text."""
        eqn = node.eqn
        tokens = self.row(node) if eqn is None else self.reader.line(eqn, True)
        return "".join(printable(tokens))

    def slice_text(self, node: OutlineNode) -> str:
        """Return the equations on which a row's values depend, one per line, bodies indented."""
        marked = backward_slice(self.top, Start(self.values(node))).members()
        if node.eqn is not None:
            marked |= {id(node.eqn)}
        lines: list[str] = []
        seen = {self.top}

        def write(jaxpr: Jaxpr, indent: int) -> None:
            for eqn in jaxpr.eqns:
                if id(eqn) not in marked:
                    continue
                lines.append("  " * indent + "".join(printable(self.reader.line(eqn, True))))
                for path, body in bodies(eqn):
                    if body not in seen:
                        seen.add(body)
                        lines.append("  " * (indent + 1) + f"{path}:")
                        write(body, indent + 2)

        write(self.top, 0)
        return "\n".join(lines)

    def values(self, node: OutlineNode) -> list[tuple[Jaxpr, Atom]]:
        """Return the values that a row binds, or the value of an argument or result."""
        if (eqn := node.eqn) is not None:
            return [(node.jaxpr, var) for var in eqn.outvars]
        if node.kind is Kind.argument:
            return [(node.jaxpr, node.jaxpr.invars[node.index])]
        if node.kind is Kind.result:
            atom = node.jaxpr.outvars[node.index]
            return [] if isinstance(atom, Literal) else [(node.jaxpr, atom)]
        return []


# --- states ---------------------------------------------------------------------------------------
# The states of a program: as traced, and after each pass that changed it.


@dataclass(eq=False)
class PassState:
    """A program between two passes.

    Attributes:
        label: The pass that produced it, or its name.
        program: The program.
        before: The state from which it was produced; None if traced.
        after: The states produced from it.
    """

    label: str
    program: Program
    before: PassState | None = None
    after: list[PassState] = field(default_factory=list)

    @cached_property
    def changes(self) -> Changes:
        """The changes of the pass that produced this state."""
        if self.before is None:
            return Changes(frozenset(), frozenset())
        return changes(top_jaxpr(self.before.program), top_jaxpr(self.program))

    @cached_property
    def marks(self) -> Mapping[int, str]:
        """The marks of equations, by `id`, that a pass added or will remove."""
        removed = [state.changes.removed for state in self.after]
        goes = removed[0].intersection(*removed) if removed else frozenset()
        added = self.changes.added
        return {**dict.fromkeys(goes, "-"), **{k: "±" if k in goes else "+" for k in added}}

    @property
    def is_compared(self) -> bool:
        """Whether `marks` and `changes` are computed, which takes time for large programs."""
        return "marks" in vars(self)


class StateRecorder(Observer):
    """Records the states of the programs in a pipeline, in order of creation."""

    def __init__(self, program: Program):
        self.states = [PassState("traced", program)]
        self._latest = {id(program): self.states[0]}

    def after(
        self, step: Step, program: Program, result: Program | Programs, seconds: float
    ) -> None:
        before = self._latest[id(program)]
        if result is program:
            return
        several = isinstance(result, Mapping)
        for name, new_program in result.items() if isinstance(result, Mapping) else [("", result)]:
            state = PassState(f"{step} {name}" if several else str(step), new_program, before)
            before.after.append(state)
            self.states.append(state)
            self._latest[id(new_program)] = state
