"""`jax.checkpoint` on parts of a program, and names and sharding constraints on its values.

    checkpoint(only='Block_*', policy='dots_saveable')

A scope is one of `ir.scopes`: a name scope as modules open them, or a called function.
A call that JAX keeps, such as that of a function under `jax.jit`, and the body of a loop are scopes
too, with the names of their functions. Of nested matching scopes the outermost is taken. Its
equations are consecutive; they become one call, which computes the same.
"""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import count
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxprtool import jaxcompat
from jaxprtool.errors import PipelineError, UnsupportedError, did_you_mean
from jaxprtool.ir.dataflow import DefUse
from jaxprtool.ir.documents import some
from jaxprtool.ir.equations import bodies, equations, free_variables, named
from jaxprtool.ir.equivalence import Unkeyable, parameters_key, value_key
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import holds_jaxpr, regions
from jaxprtool.ir.rewrite import RewriteRule, Writer, rewrite
from jaxprtool.ir.scopes import Part, ScopeCall, ScopeReader
from jaxprtool.ir.traits import traits
from jaxprtool.ir.trees import without_numbers
from jaxprtool.jaxcompat import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

# --- scoped checkpoint ----------------------------------------------------------------------------
# `jax.checkpoint` on parts of a program: on its scopes, and the bodies of its loops.

#: The number of scopes to list if none matches.
_SHOWN = 8

#: Puts a function under `jax.checkpoint`.
Checkpointed = Callable[[Callable[..., Any]], Callable[..., Any]]


def checkpoint_scopes(program: Program, only: str, checkpointed: Checkpointed) -> Program:
    """Return a program whose matching scopes are under `jax.checkpoint`, each in a call.

    Args:
        program: The program.
        only: A pattern for `fnmatch`, of the end of a scope's path: `Block_*`, `GPT/Block_3`.
        checkpointed: Puts a function under `jax.checkpoint`.

    Raises:
        PipelineError: If no scope matches.
        UnsupportedError: If one has effects, which would happen again in a backward pass.
    """
    plan = _Plan(only, program)
    plan.look_into(jaxcompat.open_jaxpr(program.jaxpr), ())
    if not plan.groups:
        scopes = list(plan.seen)
        there = f"its scopes are: {some(scopes, _SHOWN)}" if scopes else None
        raise PipelineError(
            f"checkpoint: no scope of {program.name} matches '{only}'",
            did_you_mean(only, scopes) or there or "it has no scopes",
        )
    jaxpr = rewrite(
        program.jaxpr, lambda writer: _CheckpointRule(writer, plan, checkpointed), outside_in=True
    )
    return program.replace(jaxpr=jaxpr)


@dataclass(frozen=True)
class CheckpointScopes:
    """Scopes that may be put under `jax.checkpoint`.

    Attributes:
        pattern: The pattern of their names, `Block_*`.
        around: The patterns of the loop bodies around them.
        is_loop: Whether they are bodies of loops.
    """

    pattern: str
    around: tuple[str, ...]
    is_loop: bool


def checkpoint_levels(program: Program) -> tuple[CheckpointScopes, ...]:
    """Return the bodies of loops, and scopes and calls with products, the outermost first."""
    plan = _Plan("", program)
    plan.look_into(jaxcompat.open_jaxpr(program.jaxpr), ())
    return tuple(plan.levels.values())


@dataclass(eq=False)
class _CheckpointGroup:
    """Equations of a body that become one call, identified by their first results.

    Attributes:
        last: The first result of the last of them.
        results: Their results that other equations read.
        eqns: Those visited so far, with their new operands.
    """

    last: Var
    results: list[Var]
    eqns: list[JaxprEqn] = field(default_factory=list)


class _Plan:
    """The equations of each body that become calls."""

    def __init__(self, only: str, program: Program) -> None:
        self._pattern = only.split("/")
        self._scopes = ScopeReader(program.roots)
        self._known: set[Jaxpr] = set()
        self.groups: dict[Var, _CheckpointGroup] = {}
        #: The calls, by group: JAX caches the derivative of a call by its jaxpr.
        self.calls: dict[Hashable, ClosedJaxpr] = {}
        self.seen: dict[str, None] = {}
        self.levels: dict[str, CheckpointScopes] = {}

    def look_into(self, jaxpr: Jaxpr, path: tuple[str, ...]) -> None:
        """Add the matching scopes of a body, which is in the scopes of `path` itself."""
        if jaxpr in self._known:
            return
        self._known.add(jaxpr)
        read = {v: uses[-1][0] for v, uses in DefUse(jaxpr.eqns).uses.items()}
        read.update(dict.fromkeys(free_variables((), jaxpr.outvars), len(jaxpr.eqns)))
        positions = {id(eqn): position for position, eqn in enumerate(jaxpr.eqns)}

        def walk(parts: Sequence[Part], path: tuple[str, ...]) -> None:
            for part, names in zip(parts, self._names_of(parts), strict=True):
                inside = (*path, *names)
                if self._matches(inside, len(path)):
                    eqns = list(_equations(part))
                    self._add(jaxpr, eqns, read, positions[id(eqns[-1])])
                    continue
                if inside != path and any(map(_has_product, _equations(part))):
                    self._add_level(inside, False)
                if isinstance(part, ScopeCall):
                    walk(part.parts, inside)
                else:
                    self._look_inside(part, inside)

        if path and self._matches(path, len(path) - 1) and jaxpr.eqns:
            self._add(jaxpr, jaxpr.eqns, read, len(jaxpr.eqns) - 1)
        else:
            walk(self._scopes.parts(jaxpr), path)

    def _names_of(self, parts: Sequence[Part]) -> Iterator[tuple[str, ...]]:
        """Yield the scopes that each part opens: those of a scope, or a called function."""
        calls = ["" if isinstance(part, ScopeCall) else self._called(part) for part in parts]
        numbers = Counter[str]()
        for part, name in zip(parts, calls, strict=True):
            numbers[name] += 1
            if isinstance(part, ScopeCall):
                yield tuple(part.name.split("/"))
            elif name and calls.count(name) > 1:
                yield (f"{name} #{numbers[name]}",)
            else:
                yield (name,) if name else ()

    def _called(self, eqn: JaxprEqn) -> str:
        """Return the name of the user's function that an equation calls, or ""."""
        if traits(eqn).call in ("", "remat"):
            return ""
        for _, body in bodies(eqn):
            name = str(eqn.params.get("name") or body.debug_info.func_name)
            if any(name in self._scopes.functions(inner) for inner in body.eqns):
                return name
        return ""

    def _look_inside(self, eqn: JaxprEqn, path: tuple[str, ...]) -> None:
        inside = None if traits(eqn).custom_derivative else regions(eqn)
        for body in () if inside is None else inside.jaxprs:
            name = body.debug_info.func_name
            loop = inside is not None and inside.kind == "loop" and name.isidentifier()
            if loop:
                self._add_level((*path, name), True)
            self.look_into(body, (*path, name) if loop else path)

    def _add_level(self, path: tuple[str, ...], is_loop: bool) -> None:
        *outer, pattern = (without_numbers(glob.escape(name)) for name in path)
        around = tuple(name for name in outer if name in self.levels and self.levels[name].is_loop)
        self.levels.setdefault(pattern, CheckpointScopes(pattern, around, is_loop))

    def _matches(self, path: tuple[str, ...], start: int) -> bool:
        """Return True if the path of a scope, up to one of its names from `start`, matches."""
        self.seen.update(dict.fromkeys(path[start:]))
        count = len(self._pattern)
        return any(
            all(map(_is_like, path[end - count : end], self._pattern))
            for end in range(max(start + 1, count), len(path) + 1)
        )

    def _add(self, jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], read: dict[Var, int], last: int) -> None:
        for eqn in eqns:
            if eqn.effects or not eqn.outvars:
                raise UnsupportedError(
                    f"checkpoint: the {named(eqn)} has an effect, which would happen again in "
                    "the backward pass"
                )
        group = _CheckpointGroup(
            eqns[-1].outvars[0],
            [v for eqn in eqns for v in eqn.outvars if read.get(v, -1) > last],
        )
        self.groups.update((eqn.outvars[0], group) for eqn in eqns)


def _is_like(name: str, pattern: str) -> bool:
    """Return True if a scope's name matches: `Block #2`, as that or as `Block`."""
    return any(fnmatchcase(candidate, pattern) for candidate in (name, name.partition(" #")[0]))


def _equations(part: Part) -> Iterator[JaxprEqn]:
    if isinstance(part, ScopeCall):
        for child in part.parts:
            yield from _equations(child)
    else:
        yield part


def _has_product(eqn: JaxprEqn) -> bool:
    inside = (inner for _, body in bodies(eqn) for inner in equations(body))
    return any(traits(inner).expensive for inner in (eqn, *inside))


class _CheckpointRule:
    """The rule of one body: it collects the equations of a group and writes a call for them."""

    def __init__(self, writer: Writer, plan: _Plan, checkpointed: Checkpointed) -> None:
        self._writer, self._plan, self._checkpointed = writer, plan, checkpointed

    def __call__(self, eqn: JaxprEqn) -> Sequence[Atom] | None:
        group = self._plan.groups.get(eqn.outvars[0]) if eqn.outvars else None
        if group is None:
            return None
        group.eqns.append(eqn)
        if eqn.outvars[0] is group.last:
            self._write(group)
        return [self._writer.env.get(v, v) for v in eqn.outvars]

    def _write(self, group: _CheckpointGroup) -> None:
        operands = list(free_variables(group.eqns))
        first, key = group.eqns[0], _key(group, operands)
        call = self._plan.calls.get(key)
        if call is None:
            debug = jaxcompat.DebugInfo("checkpoint", "checkpoint", None, None)
            closed = jaxcompat.new_jaxpr((), (), operands, group.results, group.eqns, debug)
            fun = self._checkpointed(jaxcompat.jaxpr_as_fun(closed))
            call = self._plan.calls[key] = jaxcompat.traced_like(first, fun, operands)
        outs = self._writer.splice(call, operands, first, keep_source=False)
        self._writer.env.update(zip(group.results, outs, strict=True))


def _key(group: _CheckpointGroup, operands: Sequence[Var]) -> Hashable:
    """Return a key that is equal for groups of the same equations, from the same source lines."""
    fresh = count()
    numbers: dict[Atom, int] = dict(zip(operands, fresh, strict=False))
    eqns: list[Hashable] = []
    for eqn in group.eqns:
        ins = [(v.aval, value_key(v.val)) if type(v) is Literal else numbers[v] for v in eqn.invars]
        source = eqn.source_info.traceback, eqn.source_info.name_stack
        eqns.append((eqn.primitive, _parameters(eqn), *ins, eqn.ctx, *source))
        numbers.update(zip(eqn.outvars, fresh, strict=False))
    results = [numbers[v] for v in group.results]
    return (*(v.aval for v in operands), *eqns, *results)


def _parameters(eqn: JaxprEqn) -> Hashable:
    """Return a key for parameters, in which jaxprs and functions are equal only to themselves."""
    try:
        opaque = eqn.effects or holds_jaxpr(eqn.params.values())
        return tuple(map(id, eqn.params.values())) if opaque else parameters_key(eqn)[0]
    except Unkeyable:
        return tuple(map(id, eqn.params.values()))


# --- named values ---------------------------------------------------------------------------------
# Name values of a program, as `checkpoint_name` in its source would.


def name_values(program: Program, names: Mapping[Var, str]) -> Program:
    """Return a program in which variables, at any depth, are passed through `checkpoint_name`."""

    def visitor(writer: Writer) -> RewriteRule:
        def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
            if not any(v in names for v in eqn.outvars):
                return None
            outs = writer.add(eqn)
            new = [v for v in outs if v in names]
            labels = [names[v] for v in new]
            named = writer.trace(
                lambda *values: list(map(checkpoint_name, values, labels)), new, eqn
            )
            by_old = dict(zip(new, named, strict=True))
            return [by_old.get(v, v) for v in outs]

        return rule

    return program.replace(jaxpr=rewrite(program.jaxpr, visitor))


# --- constrained values ---------------------------------------------------------------------------
# Add sharding constraints to values, as `with_sharding_constraint` in the source would.


def constrain_values(
    program: Program, shardings: Mapping[Var, jax.sharding.NamedSharding | None]
) -> Program:
    """Return a program in which variables, at any depth, have these shardings.

    A variable that is the result of a constraint gets another constraint in its place.

    Args:
        program: The program.
        shardings: The shardings of results of its equations; None removes a constraint.
    """

    def visitor(writer: Writer) -> RewriteRule:
        def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
            wanted = [v for v in eqn.outvars if v in shardings]
            if not wanted:
                return None
            is_constraint = eqn.primitive.name == "sharding_constraint"
            outs = list(eqn.invars) if is_constraint else writer.add(eqn)
            by_old = dict(zip(eqn.outvars, outs, strict=True))
            wanted = [v for v in wanted if shardings[v] is not None]
            if not wanted:
                return outs
            placed = [shardings[v] for v in wanted]
            new = writer.trace(
                lambda *values: list(map(jax.lax.with_sharding_constraint, values, placed)),
                [by_old[v] for v in wanted],
                eqn,
            )
            by_old |= dict(zip(wanted, new, strict=True))
            return [by_old[v] for v in eqn.outvars]

        return rule

    return program.replace(jaxpr=rewrite(program.jaxpr, visitor))
