"""Rewrites from patterns: `@jaxprtool.rewrite`, and the files that `--rewrite` loads."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.errors import (
    ArgumentsError,
    JaxprToolError,
    PluginError,
    UnsupportedError,
    described,
)
from jaxprtool.ir import rewrite as engine
from jaxprtool.ir.equations import is_array
from jaxprtool.ir.equivalence import same_operation
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.keys import same_array
from jaxprtool.ir.program import Program
from jaxprtool.ir.rewrite import RewriteRule, Writer
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Aval, ClosedJaxpr, DropVar, JaxprEqn, Literal, Var
from jaxprtool.passes import Pass, Pipeline, Step, available, import_file, register
from jaxprtool.passes.patterns import definition
from jaxprtool.passes.patterns.definition import (
    PLAIN_CALLS,
    Check,
    DataflowGraph,
    Definition,
    Match,
    Pattern,
    TracedFunction,
    UserFunction,
    bodies_in,
    inlined,
    known_arguments,
    same_number,
)

__all__ = ["Match", "NamedRewrites", "Rewrite", "load_rewrites", "rewrite"]

# --- search ---------------------------------------------------------------------------------------
# Find where a pattern fits in a body, and write the replacements.
#
# Each step matches a value of the pattern with one of the body's. An argument matches any value,
# the same at each use; a literal or a constant matches one of the same value; a result of an
# equation matches the same result of a similar one, whose operands then must match likewise. At a
# choice (operands that may be swapped, several equations that use a value), the alternatives are
# tried in program order, with backtracking.

#: The maximum number of steps of one search; a pattern of a hundred equations takes a few hundred
#: if it fits.
_MOST_STEPS = 20_000
#: The maximum number of fits at one position that are tried: operands that may be swapped yield
#: very many.
_MOST_FITS = 64


@dataclass(frozen=True)
class Fit:
    """The atoms and positions in the body of the pattern's variables and equations."""

    atoms: dict[Var, Atom]
    positions: dict[int, int]


@dataclass(frozen=True)
class _AsNumber:
    """A variable of the pattern filled with one number, to be matched as such."""

    var: Var


#: Two equations by their positions, or two atoms, of the pattern and of the body.
Goal = tuple[Any, Any]
#: The remaining goals, as a linked list: the first goal, and the rest.
Goals = tuple[Goal, "Goals"] | None


class PatternSearch:
    """One search, from one equation of a body.

    `exact` requires the same parameters, literals and constants; otherwise, equations match if they
    have the same primitive. Those that are `taken` never match.
    """

    def __init__(self, pattern: Pattern, body: DataflowGraph, taken: set[int], *, exact: bool):
        self.pattern, self.body, self.taken, self.exact = pattern, body, taken, exact
        self.atoms: dict[Var, Atom] = {}
        self.positions: dict[int, int] = {}
        self._done: list[tuple[dict[Any, Any], Any]] = []

    def fits(self, root: int) -> Iterator[Fit]:
        """Return the first matches of the pattern with its root at this position."""
        return islice(self._fits(root), _MOST_FITS)

    def _fits(self, root: int) -> Iterator[Fit]:
        choices: list[tuple[Goals, int]] = [(((self.pattern.root, root), None), 0)]
        for _ in range(_MOST_STEPS):
            if not choices:
                return
            goals, mark = choices.pop()
            self._undo(mark)
            if goals is not None:
                (p, q), rest = goals
                if type(p) is int:
                    alternatives = self._equation(p, q)
                else:
                    alternatives = (
                        self._bind(p.var, q) if type(p) is _AsNumber else self._atom(p, q)
                    )
            else:
                rest = None
                missing = self._missing()
                if missing is None:
                    yield Fit(dict(self.atoms), dict(self.positions))
                    continue
                alternatives = self._users(missing)
            mark = len(self._done)
            choices += [(_chain(alternative, rest), mark) for alternative in reversed(alternatives)]

    # --- one step: the alternatives, each as goals; none if it does not match --------------------

    def _atom(self, p: Atom, q: Atom) -> list[list[Goal]]:
        if type(p) is Literal:
            return self._number(p, q)
        if p in self.atoms:
            return [[]] if self._same(self.atoms[p], q) else []
        position = self.pattern.position(p)
        if position is None:
            if p in self.pattern.constants:
                return self._constant(p, q)
            return self._bind(p, q) if is_array(q.aval) else []
        alternatives: list[list[Goal]] = []
        made_by = self.body.position(q)
        if made_by is not None:
            alternatives = [[(position, made_by), (p, q)]]
        if self.pattern.number(p) is not None and self._number(p, q):
            alternatives.append([(_AsNumber(p), q)])
        return alternatives

    def _same(self, a: Atom, b: Atom) -> bool:
        """Return True if two atoms of the body are one variable, or literals of the same bits."""
        if type(a) is not Literal or type(b) is not Literal:
            return a is b
        return a.aval == b.aval and same_number(self.body.number(a), self.body.number(b))

    def _bind(self, p: Var, q: Atom) -> list[list[Goal]]:
        self.atoms[p] = q
        self._done.append((self.atoms, p))
        return [[]]

    def _number(self, p: Atom, q: Atom) -> list[list[Goal]]:
        """Match a value filled with one number; its type may be weak in either graph."""
        number = self.body.number(q)
        if number is None:
            return []
        if not self.exact:
            return [[]]
        same = p.aval.shape == q.aval.shape and same_number(number, self.pattern.number(p))
        return [[]] if same else []

    def _constant(self, p: Var, q: Atom) -> list[list[Goal]]:
        """Match a constant of the pattern: an array of the same bits, or the same scalar."""
        if not self.exact:
            return self._bind(p, q)
        if self.pattern.number(p) is not None:
            return self._bind(p, q) if self._number(p, q) else []
        if type(q) is Literal or q not in self.body.constants or p.aval != q.aval:
            return []
        same = same_array(self.pattern.constants[p], self.body.constants[q])
        return self._bind(p, q) if same else []

    def _equation(self, i: int, j: int) -> list[list[Goal]]:
        if i in self.positions:
            return [[]] if self.positions[i] == j else []
        p, q = self.pattern.eqns[i], self.body.eqns[j]
        if p.primitive is not q.primitive or j in self.taken or q.effects:
            return []
        if len(p.invars) != len(q.invars) or len(p.outvars) != len(q.outvars):
            return []
        if self.exact and not same_parameters(p, q):
            return []
        self.positions[i] = j
        self._done.append((self.positions, i))
        for a, b in zip(p.outvars, q.outvars, strict=True):
            if type(a) is DropVar:
                continue
            if a in self.atoms and self.atoms[a] is not b:
                return []
            self._bind(a, b)
        operands = list(zip(p.invars, q.invars, strict=True))
        if len(operands) != 2 or not traits(p).commutes(p.invars[0].aval.dtype):
            return [operands]
        return [operands, list(zip(p.invars, reversed(q.invars), strict=True))]

    # --- the pattern's other roots --------------------------------------------------------------

    def _missing(self) -> int | None:
        """Return an equation of the pattern without a position that uses a value that has one."""
        if len(self.positions) == len(self.pattern.eqns):
            return None
        results = zip(self.pattern.outputs, self.pattern.computed, strict=True)
        wanted = [v for v, flag in results if flag]
        missing: set[int] = set()
        while wanted:
            position = self.pattern.position(wanted.pop())
            if position is None or position in missing or position in self.positions:
                continue
            missing.add(position)
            wanted += [v for v in self.pattern.eqns[position].invars if type(v) is not Literal]
        for i in sorted(missing):
            if any(type(v) is not Literal and v in self.atoms for v in self.pattern.eqns[i].invars):
                return i
        return min(missing, default=None)

    def _users(self, i: int) -> list[list[Goal]]:
        """Return the equations of the body that may match the pattern's `i`."""
        operands = (self.atoms.get(v) for v in self.pattern.eqns[i].invars if type(v) is Var)
        readers = [self.body.readers(v) for v in operands if type(v) is Var]
        return [[(i, j)] for j in min(readers, key=len, default=())]

    def _undo(self, mark: int) -> None:
        while len(self._done) > mark:
            where, key = self._done.pop()
            del where[key]


def _chain(goals: list[Goal], rest: Goals) -> Goals:
    for goal in reversed(goals):
        rest = goal, rest
    return rest


# --- matching equations ---------------------------------------------------------------------------

_PLAIN = (bool, int, str, type(None), np.dtype)


def same_parameters(p: JaxprEqn, q: JaxprEqn) -> bool:
    """Return True if two equations of one primitive compute the same from operands of equal types.

    Jaxprs in their parameters are compared up to names. Their contexts must be equal.
    """
    settings = jaxcompat.context_settings
    if p.ctx is not q.ctx and settings(p.ctx) != settings(q.ctx):
        return False
    if p.params.keys() != q.params.keys():
        return False
    different = [(a, q.params[name]) for name, a in p.params.items() if a is not q.params[name]]
    plain = [(a, b) for a, b in different if _is_plain(a) and _is_plain(b)]
    if any(a != b for a, b in plain):
        return False
    unsure = len(plain) < len(different)
    try:
        return not unsure or same_operation(p, q)
    except UnsupportedError:  # a custom rule cannot be traced
        return False


def _is_plain(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


# --- plan -----------------------------------------------------------------------------------------
# Find the matches of a pattern in a program, and write the replacements.
#
# A match is found in three steps. The pattern traced at example types, without parameters and
# numbers, determines where to search, and the types of its arguments there. It is then traced again
# at exactly these types, and must match at the same position, to the last parameter and literal.
# Finally, no other equation may use a value of the match, except the results that the replacement
# also returns.

#: The numbers of dimensions that an ellipsis may represent in the first search.
_MORE_DIMS = (0, 1, 2)


@dataclass(frozen=True)
class Replacement:
    """A match, and its replacement at `position`, that of its last equation.

    `replaced` are the positions of its equations, and of dead ones that use them. `results` are the
    variables that become the results of `jaxpr` on `operands`.
    """

    match: Match
    position: int
    replaced: frozenset[int]
    operands: tuple[Atom, ...]
    jaxpr: ClosedJaxpr
    results: tuple[Var, ...]


class Application:
    """One rewrite applied to one program's jaxpr.

    `result` is the jaxpr with every match replaced, after inlining; the same object if there is no
    match. `matches` are in the order in which the bodies are written.
    """

    def __init__(self, rewrite: Definition, jaxpr: AnyJaxpr):
        self.matches: list[Match] = []
        self._rewrite = rewrite
        self._traced: dict[Hashable, tuple[TracedFunction, list[Pattern]] | None] = {}
        self._made: dict[Hashable, ClosedJaxpr] = {}
        self.result = jaxpr
        start = inlined(jaxpr, PLAIN_CALLS)
        self._bodies = bodies_in(start)
        self._plans = {body: self._plan(body) for body in self._bodies}
        if any(self._plans.values()):
            self.result = engine.rewrite(start, self._visit, outside_in=True)

    @cached_property
    def _known(self) -> dict[Var, np.generic | None]:
        return known_arguments(self._bodies)

    # --- writing --------------------------------------------------------------------------------

    def _visit(self, writer: Writer) -> RewriteRule:
        planned = [f for f in self._plans[writer.body] if writer.can_hold(f.jaxpr)]
        if not planned:
            return lambda eqn: None
        replaced = frozenset().union(*(plan.replaced for plan in planned))
        at = {plan.position: plan for plan in planned}
        self.matches += [plan.match for plan in planned]
        positions = iter(range(len(jaxcompat.open_jaxpr(writer.body).eqns)))

        def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
            position = next(positions)
            if position in at:
                plan = at[position]
                operands = [writer.lookup(v) for v in plan.operands]
                outs = writer.splice(plan.jaxpr, operands, eqn, keep_source=False)
                writer.env.update(zip(plan.results, outs, strict=True))
                return [writer.lookup(v) for v in eqn.outvars]
            return eqn.outvars if position in replaced else None

        return rule

    # --- finding --------------------------------------------------------------------------------

    def _plan(self, jaxpr: AnyJaxpr) -> list[Replacement]:
        """Return the disjoint matches to replace in a body, found from the front."""
        body = DataflowGraph(jaxpr)
        skeletons = [p for p in self._skeletons(body) if p.needed <= body.by_primitive.keys()]
        if not skeletons:
            return []
        body.known = self._known
        positions: dict[int, list[Pattern]] = {}
        for skeleton in skeletons:
            for position in body.by_primitive.get(skeleton.eqns[skeleton.root].primitive.name, ()):
                positions.setdefault(position, []).append(skeleton)
        planned: list[Replacement] = []
        taken: set[int] = set()
        for position in sorted(positions):
            matches = self._replaceable(body, taken, position, positions[position])
            if position not in taken and (plan := next(matches, None)) is not None:
                planned.append(plan)
                taken |= plan.replaced
        return planned

    def _skeletons(self, body: DataflowGraph) -> list[Pattern]:
        """Return the skeletons that the pattern may have in a body with these types."""
        avals = [v.aval for v in (*body.inputs, *body.constants)]
        dtypes = {aval.dtype for aval in avals if hasattr(aval, "dtype")}
        for position in body.by_primitive.get("convert_element_type", ()):
            dtypes.add(body.eqns[position].params["new_dtype"])
        floats = [d for d in dtypes if definition.kind(d) is jnp.floating]
        symbolic = any(
            jaxcompat.is_symbolic_dimension(n) for aval in avals for n in getattr(aval, "shape", ())
        )
        more_dims = _MORE_DIMS if any(d.more_dims for d in self._rewrite.declarations) else (0,)
        patterns: dict[Hashable, Pattern] = {}
        for dtype in (None, *sorted(floats, key=str)):
            for more in more_dims:
                for pattern in self._rewrite.skeletons(dtype, more, symbolic):
                    patterns.setdefault(pattern.skeleton, pattern)
        return list(patterns.values())

    def _replaceable(
        self, body: DataflowGraph, taken: set[int], root: int, skeletons: Sequence[Pattern]
    ) -> Iterator[Replacement]:
        """Yield the replaceable matches with this root that the user's check accepts."""
        rewrite, seen = self._rewrite, set()
        for avals, sizes in self._rough(body, taken, root, skeletons):
            traced = self._pattern(avals, body.eqns[root])
            for form in () if traced is None else traced[1]:
                for fit in _exact(form, body, taken, root, avals):
                    replaced = _replaced_positions(form, body, fit)
                    key = replaced, *(id(fit.atoms[v]) for v in form.inputs)
                    if replaced is None or key in seen:
                        continue
                    seen.add(key)  # a sum of one value and itself fits in two equivalent ways
                    match = _match(rewrite, form, body, fit, replaced, sizes)
                    if not rewrite.accepts(match):
                        continue
                    assert traced is not None
                    jaxpr = self._replacement(form, fit, match, traced[0], body.eqns[root])
                    operands = tuple(fit.atoms[v] for v in form.inputs)
                    results = [fit.atoms[v] for v in compress(form.outputs, form.computed)]
                    dead = body.dead_after(replaced)
                    yield Replacement(
                        match, max(replaced), replaced | dead, operands, jaxpr, tuple(results)
                    )

    def _rough(
        self, body: DataflowGraph, taken: set[int], root: int, skeletons: Sequence[Pattern]
    ) -> Iterator[tuple[tuple[Aval, ...], dict[str, Any]]]:
        """Yield the types that the pattern's arguments may have here, and its named sizes."""
        tried: set[Hashable] = set()
        for skeleton in skeletons:
            for fit in PatternSearch(skeleton, body, taken, exact=False).fits(root):
                if any(v not in fit.atoms for v in skeleton.inputs):
                    continue
                avals = tuple(fit.atoms[v].aval for v in skeleton.inputs)
                if avals in tried:
                    continue
                tried.add(avals)
                sizes = definition.sizes_in(self._rewrite.declarations, avals)
                if sizes is not None:
                    yield avals, sizes

    def _pattern(
        self, avals: tuple[Aval, ...], like: JaxprEqn
    ) -> tuple[TracedFunction, list[Pattern]] | None:
        """Return the pattern at these types, in the context of an equation; None if invalid."""
        key = avals, like.ctx
        if key not in self._traced:
            self._traced[key] = self._rewrite.pattern_at(avals, like)
        return self._traced[key]

    def _replacement(
        self, form: Pattern, fit: Fit, match: Match, traced: TracedFunction, like: JaxprEqn
    ) -> ClosedJaxpr:
        """Return the replacement's jaxpr for a match, with the results the pattern computes."""
        outs = zip(form.outputs, form.computed, strict=True)
        results = tuple(fit.atoms[v].aval if flag else None for v, flag in outs)
        avals = tuple(fit.atoms[v].aval for v in form.inputs)
        key = avals, results, like.ctx
        if key not in self._made:
            jaxpr = self._rewrite.replacement_at(avals, like, match, traced, results)
            self._made[key] = jaxpr
        return self._made[key]


def _exact(
    form: Pattern, body: DataflowGraph, taken: set[int], root: int, avals: Sequence[Aval]
) -> Iterator[Fit]:
    """Yield the fits of the pattern traced at these types whose arguments have them."""
    if form.eqns[form.root].primitive is not body.eqns[root].primitive:
        return
    for fit in PatternSearch(form, body, taken, exact=True).fits(root):
        atoms = [fit.atoms.get(v) for v in form.inputs]
        if all(a is not None and a.aval == t for a, t in zip(atoms, avals, strict=True)):
            yield fit


def _replaced_positions(form: Pattern, body: DataflowGraph, fit: Fit) -> frozenset[int] | None:
    """Return the positions of the equations that a match replaces; None if others use its values.

    Equations that depend on no argument, such as an iota, may be shared, and then stay.
    """
    replaced = set(fit.positions.values())
    roots = {fit.atoms[v] for v, flag in zip(form.outputs, form.computed, strict=True) if flag}

    def used_up_to(var: Var, position: int) -> bool:
        readers = [*body.readers(var), *([len(body.eqns)] if var in body.results else ())]
        return any(i <= position and i not in replaced and i not in body.dead for i in readers)

    for i in reversed(form.constant_positions):
        position = fit.positions.get(i)
        if position is not None and any(
            used_up_to(v, len(body.eqns)) for v in body.eqns[position].outvars
        ):
            replaced.discard(position)
    if not replaced.isdisjoint(body.dead):
        return None
    last = max(body.definitions[v][0] for v in roots)
    for position in replaced:
        for v in body.eqns[position].outvars:
            if used_up_to(v, last if v in roots else len(body.eqns)):
                return None
    inputs = [fit.atoms[v] for v in form.inputs]
    if any(body.position(a) in replaced for a in inputs):
        return None
    return frozenset(replaced)


def _match(
    rewrite: Definition,
    form: Pattern,
    body: DataflowGraph,
    fit: Fit,
    replaced: frozenset[int],
    sizes: dict[str, Any],
) -> Match:
    atoms = {name: fit.atoms[v] for name, v in zip(rewrite.arg_names, form.inputs, strict=True)}
    values = {name: body.value(atom) for name, atom in atoms.items()}
    source, *_ = frames_now().texts(body.eqns[max(replaced)]) or (None,)
    return Match(
        rewrite.name,
        {name: atom.aval for name, atom in atoms.items()},
        {name: value for name, value in values.items() if value is not None},
        sizes,
        tuple(body.eqns[position] for position in sorted(replaced)),
        source,
    )


# --- define ---------------------------------------------------------------------------------------
# `@jaxprtool.rewrite`: a pattern, its replacement and a condition; and files of rewrites.


def rewrite(*args: Any, check: Check | None = None, name: str | None = None, **kwargs: Any) -> Any:
    """Return a pass that replaces matches of one function by another function.

    Use it as a decorator of the pattern, with the types of the pattern's arguments. Then add the
    replacement and, if needed, a condition. The result is a pass: `program.apply(dense)`.

        @jaxprtool.rewrite(x="f32[...,n]", w="f32[n,m]", b="f32[m]")
        def dense(x, w, b):
            return jax.nn.relu(x @ w + b)

        @dense.to
        def _(x, w, b):
            return fast.dense_relu(x, w, b)

        @dense.check
        def _(match):
            return match.sizes["n"] % 128 == 0

    `rewrite(pattern, replacement, *types, check=None, name=None)` does the same in one call.

    A type is text such as `f32[n,d]`, or an example (an array, a `jax.ShapeDtypeStruct`, a number),
    and may be a pytree of these. It represents every dtype of its kind and every size; names are
    sizes that must be equal wherever they occur, and `f32[...,n]` has any number of dimensions
    before `n`. Arguments of the pattern match any value, also literals; everything else matches
    only an equal part.

    Args:
        args: The types of the pattern's positional arguments; or the pattern, the replacement, and
            then these types.
        check: Returns True if a match is to be replaced. By default all matches are.
        name: The name of the pass; by default the name of the pattern.
        kwargs: The types of the pattern's arguments by name.

    Returns:
        The `Rewrite`; or, without a pattern, a decorator that returns it.

    Raises:
        ArgumentsError: If a type cannot be parsed, or the types do not fit the pattern.
        UserFunctionError: If the pattern raises.
        PluginError: If the pattern has effects, computes nothing, leaves an argument unused, or has
            parts that share no value.
    """
    if args and callable(args[0]):
        if len(args) < 2 or not callable(args[1]):
            raise ArgumentsError(
                "rewrite(pattern, replacement, *types) takes two functions",
                "as a decorator it takes the types of the pattern's arguments",
            )
        pattern, replacement, *examples = args
        new = Rewrite(pattern, examples, kwargs, name)
        new.to(replacement)
        if check is not None:
            new.check(check)
        return new

    def decorate(pattern: UserFunction) -> Rewrite:
        new = Rewrite(pattern, args, kwargs, name)
        if check is not None:
            new.check(check)
        return new

    return decorate


class Rewrite(Definition, Pass):
    """Replace every match of a pattern: a pass, created by `jaxprtool.rewrite`.

    Plain calls are inlined before the search, in the program and in the pattern. If nothing
    matches, the result is the same program object.
    """

    name: str  # type: ignore[misc]
    #: Whether it preserves values is the user's responsibility.
    preserves: ClassVar[bool] = True

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __str__(self) -> str:
        return self.name

    def __call__(self, program: Program) -> Program:
        """Return the program with every match replaced.

        Raises PluginError if there is no replacement, or its types are not those of the pattern,
        and UserFunctionError if it raises.
        """
        return self.applied(program)[0]

    def matches(self, program: Program) -> list[Match]:
        """Return the matches that would be replaced, in the order of the program's bodies."""
        return self.applied(program)[1]

    def applied(self, program: Program) -> tuple[Program, list[Match]]:
        """Return the program with every match replaced, and the matches."""
        if self.replacement is None:
            raise PluginError(
                f"rewrite '{self.name}' has no replacement", f"decorate one with @{self.name}.to"
            )
        with jaxcompat.axes_bound(program.axis_env):
            application = Application(self, program.jaxpr)
        if not application.matches:
            return program, []
        return program.replace(jaxpr=application.result), application.matches


# --- files ----------------------------------------------------------------------------------------
# The rewrites that a Python file defines, for pipelines to name and for `--rewrite` to run.


def load_rewrites(path: str) -> list[Rewrite]:
    """Return the rewrites in a Python file, including those that it imports, in order.

    Raises PluginError if the file cannot be imported or has none, and the error of an invalid one.
    """
    if not Path(path).is_file():
        raise PluginError(f"no file {path}")
    if Path(path).suffix != ".py":
        raise PluginError(f"{path} is not a Python file", "rewrites must be in a file.py")
    try:
        module = import_file(Path(path), "jaxprtool_rewrites")
    except JaxprToolError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{path} cannot be imported: {described(error)}", "see --traceback for the place"
        ) from error
    rewrites = list(dict.fromkeys(v for v in vars(module).values() if isinstance(v, Rewrite)))
    if not rewrites:
        raise PluginError(f"{path} has no rewrites", "define one with @jaxprtool.rewrite(...)")
    return rewrites


@dataclass(frozen=True)
class CountingRewrite(Pass):
    """A rewrite of a file, which records its matches."""

    rewrite: ClassVar[Rewrite]
    found: ClassVar[list[Match]]

    def __call__(self, program: Program) -> Program:
        program, matches = self.rewrite.applied(program)
        self.found.extend(matches)
        return program


class NamedRewrites:
    """The rewrites of some files, as passes that a pipeline may name, and their matches."""

    def __init__(self, paths: Sequence[str]):
        """Load and register the rewrites of files.

        Raises the errors of `load_rewrites`, and PluginError for a name that is in use.
        """
        self._passes: dict[str, type[CountingRewrite]] = {}
        for path in paths:
            for loaded in load_rewrites(path):
                taken = available().get(loaded.name)
                if loaded.name in self._passes or (taken and taken.origin != __name__):
                    raise PluginError(
                        f"rewrite '{loaded.name}' of {path} has the name of another pass",
                        "give it another name with rewrite(..., name=...)",
                    )
                fields: dict[str, object] = {
                    "__doc__": loaded.__doc__ or CountingRewrite.__doc__,
                    "__module__": __name__,
                    "name": loaded.name,
                    "rewrite": loaded,
                    "found": [],
                }
                self._passes[loaded.name] = type(loaded.name, (CountingRewrite,), fields)
        for cls in self._passes.values():
            register(cls)

    def before(self, pipeline: Pipeline) -> Pipeline:
        """Return a pipeline that begins with the rewrites it does not name itself, in order."""
        named = {instance.name for instance in pipeline.passes()}
        first = [Step(cls()) for name, cls in self._passes.items() if name not in named]
        return Pipeline((*first, *pipeline.steps)) if first else pipeline

    def matches(self) -> dict[str, list[Match]]:
        """Return the matches of each rewrite so far."""
        return {name: list(cls.found) for name, cls in self._passes.items()}
