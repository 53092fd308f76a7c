"""Choose variables for a function that declares none, and name them.

The cut is the cheapest set of values that separates the values a function needs late from those it
gets early (see `flow` and `cut`): the set with the fewest bytes, and on a tie the one nearest to
its uses, so that the least work is left. A key is chosen only if the key itself is needed late.

The program is returned with a `sow` on each of these values, at any depth, under a tag of our own.
Then it is unzipped as if its author had written these.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import jax
from jax.extend.core import DebugInfo

from jaxprtool import jaxcompat
from jaxprtool.ir.backends import cached_method
from jaxprtool.ir.dataflow import DefUse
from jaxprtool.ir.equations import substitute, with_operands
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import Call, Scan, regions, view
from jaxprtool.ir.source_names import Range, SourceNames, range_of
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import ClosedJaxpr, JaxprEqn, Literal, Var
from jaxprtool.jaxcompat.source_locations import UserFrame, is_installed, is_users_file, user_frames
from jaxprtool.passes.cleanup.dce import Dce
from jaxprtool.passes.unzip.flow import (
    BIT,
    KEY,
    SINK,
    SOURCE,
    CutConstraints,
    FlowGraph,
    Location,
    bits_of,
    flow_of,
    hoisted,
    parts_of,
)
from jaxprtool.passes.unzip.split import (
    EARLY,
    READY,
    SEPARATOR,
    Context,
    Split,
    operand_of,
    split_body,
)
from jaxprtool.primitives import scope_of, sow_p

# --- auto -----------------------------------------------------------------------------------------
# Choose variables for a function that declares none: find a cut, and sow its values.

_LEAF = jax.tree.structure(0)


def sow_cut(program: Program, early: Sequence[bool], tag: str, computed_once: bool) -> Program:
    """Return the program with a cut between `early` arguments and its results sown under `tag`.

    `early` has an entry for each flat argument. The names are unique paths, joined by `SEPARATOR`.
    If `computed_once`, everything that depends only on early arguments is computed before the cut,
    except changes of a value to another layout or a wider type. Otherwise the early arguments are
    keys, and the values that are cheapest to store are sown. Dead code is removed. If there is no
    cut, nothing is sown.
    """
    program = Dce()(program)
    context = Context(tag=None)
    ins = [EARLY if flag else READY for flag in early]
    part = split_body(program.jaxpr, ins, context)
    if (body := hoisted(part, context)) is not part.body:
        program = Dce()(program.replace(jaxpr=body))
        part = split_body(program.jaxpr, ins, context)
    chosen = _CutValues()
    for location in _cut(part, early, CutConstraints(computed_once, context)):
        chosen.add(location)
    values = list(_values(chosen, (part,), (), context))
    names = iter(unique_names(values, program.arg_names, context))
    return program.replace(jaxpr=_sown(program.jaxpr, chosen, tag, names))


def _cut(part: Split, early: Sequence[bool], constraints: CutConstraints) -> list[Location]:
    """Return the locations of the values to sow; empty if there is no cut."""
    extra: float = 0 if constraints.once else KEY
    flow = flow_of(part, [extra if flag else 0 for flag in early], constraints)
    graph, locations = flow.graph, dict(flow.locations)
    for var, node in zip(part.body.invars, flow.ins, strict=True):
        if node is not None:
            graph.costs[node] = extra + BIT * bits_of(var.aval)
            graph.link(SOURCE, node)
            locations[node] = var
    for node in flow.outs:
        if node is not None:
            graph.link(node, SINK)
    try:
        keys = _cut_off_keys(graph)
        return [locations[node] for node in (*keys, *graph.minimum_cut())]
    except ValueError:
        return []  # unzip then reports the values that need a key


def _cut_off_keys(graph: FlowGraph) -> list[int]:
    """Return the keys that are needed late themselves, and remove keys from the choice.

    If they were chosen together with other values, they would be the only ones: all the rest can
    be computed from keys.
    """
    hard = {n for n in graph.nodes if graph.costs[n] >= KEY}
    keys = graph.part(hard).minimum_cut()
    late = graph.leading_to_sink(hard.difference(keys))
    for key in keys:
        for node in graph.after[key] & late:
            graph.unlink(key, node)
    for node in hard:
        graph.costs[node] = math.inf
    return keys


# --- the chosen values, body by body --------------------------------------------------------------


@dataclass
class _CutValues:
    """The chosen values of a body: its own variables, and those of the bodies inside."""

    own: set[Var] = field(default_factory=set)
    inner: dict[int, dict[int, _CutValues]] = field(default_factory=dict)

    def add(self, location: Location) -> None:
        if isinstance(location, Var):
            self.own.add(location)
        else:
            position, index, location = location
            bodies = self.inner.setdefault(position, {})
            bodies.setdefault(index, _CutValues()).add(location)


def _values(
    chosen: _CutValues, parts: tuple[Split, ...], calls: tuple[JaxprEqn, ...], context: Context
) -> Iterator[NestedValue]:
    """Yield the chosen values in program order: the order in which `_sown` sows them."""
    part = parts[-1]
    for var in part.body.invars:
        if var in chosen.own:
            yield NestedValue(parts, calls, var)
    for position, eqn in enumerate(part.body.eqns):
        for index, inside in sorted(chosen.inner.get(position, {}).items()):
            inner = parts_of(part, position, context)[index]
            yield from _values(inside, (*parts, inner), (*calls, eqn), context)
        for var in eqn.outvars:
            if var in chosen.own:
                yield NestedValue(parts, calls, var)


def _sown(body: ClosedJaxpr, chosen: _CutValues, tag: str, names: Iterator[str]) -> ClosedJaxpr:
    """Return a closed jaxpr with the chosen values sown; later equations use the sown values."""
    sown: dict[Var, Var] = {}
    eqns: list[JaxprEqn] = []

    def sow(values: Sequence[Var], context: object, source_info: object = None) -> None:
        for var in values:
            if var in chosen.own:
                sown[var] = Var(var.aval)
                params = {"tag": tag, "name": next(names), "mode": "strict", "tree": _LEAF}
                eqns.append(
                    jaxcompat.new_jaxpr_eqn(
                        [var], [sown[var]], sow_p, params, set(), source_info, context
                    )
                )

    sow(body.invars, body.eqns[0].ctx if body.eqns else None)
    for position, eqn in enumerate(body.eqns):
        eqn = with_operands(eqn, sown)
        if position in chosen.inner and (inside := regions(eqn)) is not None:
            bodies = list(inside.bodies)
            for index, within in sorted(chosen.inner[position].items()):
                bodies[index] = _sown(bodies[index], within, tag, names)
            eqn = inside.rebuild(bodies)
        eqns.append(eqn)
        sow(eqn.outvars, eqn.ctx, eqn.source_info)
    return jaxcompat.replace_jaxpr(body, outvars=substitute(body.outvars, sown), eqns=eqns)


# --- naming ---------------------------------------------------------------------------------------
# Name the values that have no name: after arguments, the user's source, and scopes.
#
# A value gets the first of these names that exists:
#
# *   the path of the argument that it is: `params['w']` becomes `params/w`;
# *   the name that it was sown or checkpointed under;
# *   the name that the user's source assigns it to, in the function that computes it, or else in
#     its caller, and so on outwards; a name in a library's source is nested under the first in the
#     user's own, unless the library's caller passes a name for it as a string;
# *   for a value in another layout, the name of the value;
# *   the parameter of a jitted function that it is passed to;
# *   the function that computes it.
#
# It is preceded by the `jax.named_scope`s around it. Names that are still equal are numbered.

_WORD = re.compile(r"[^\[\]'\"./~]+")
_SCOPE = re.compile(r"[^/~]+")
_TRANSFORM = re.compile(r"[\w.]+\(|\)")
_FUNCTION = re.compile(r"(\S+) at (.+):\d+")


@dataclass(frozen=True, eq=False)
class NestedValue:
    """A value of a program: the bodies around it, the calls that hold these, and its variable.

    The outermost body is first; `calls[i]` is an equation of `parts[i]` and holds `parts[i + 1]`.
    """

    parts: tuple[Split, ...]
    calls: tuple[JaxprEqn, ...]
    var: Var


def unique_names(
    values: Sequence[NestedValue], arg_names: Sequence[str], context: Context
) -> list[str]:
    """Return a unique name for each value, none of which is the scope of another.

    `arg_names` are those of the program's flat arguments. Scopes of `nest`, which precede the names
    of all variables inside, count for uniqueness but are not written.
    """
    namer = _Namer(arg_names, context)
    nests = [tuple(scope for call in v.calls if (scope := scope_of(call))) for v in values]
    paths = [(*nest, *namer.path(v)) for nest, v in zip(nests, values, strict=True)]
    pairs = zip(nests, _distinct(paths), strict=True)
    return [SEPARATOR.join(path[len(nest) :]) for nest, path in pairs]


def _distinct(paths: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Yield the paths, numbered where they would equal another path or its scope."""
    taken = {path[:depth] for path in paths for depth in range(1, len(path))}
    wanted = set(paths)
    numbers: dict[tuple[str, ...], int] = {}
    for path in paths:
        free = path
        while free in taken or (free is not path and free in wanted):
            numbers[path] = numbers.get(path, 0) + 1
            free = (*path[:-1], f"{path[-1]}_{numbers[path]}")
        taken.add(free)
        yield free


class _Namer:
    """Find names; reads each source file once, and visits each body once."""

    def __init__(self, arg_names: Sequence[str], context: Context):
        self.arg_names, self.context = arg_names, context
        self.sources = SourceNames()

    def path(self, value: NestedValue) -> tuple[str, ...]:
        """Return the scopes and the name of a value."""
        inner = self.made(value)
        eqns = [*inner.calls, *filter(None, [self.eqn(inner)])]
        stacks = (_TRANSFORM.sub("", jaxcompat.name_stack(eqn)) for eqn in eqns)
        scopes = tuple(scope for stack in stacks for scope in _SCOPE.findall(stack))
        name = self.name(inner) or (self.function(value),)
        return (*scopes, name[-1]) if scopes else name

    @cached_method
    def body(self, part: Split) -> DefUse:
        """Return the definitions and uses of a body."""
        return DefUse(part.body.eqns)

    def eqn(self, value: NestedValue) -> JaxprEqn | None:
        """Return the equation that computes a value; None for an argument of its body."""
        return self.body(value.parts[-1]).equation(value.var)

    def made(self, value: NestedValue) -> NestedValue:
        """Return the value in the innermost body that computes it."""
        part = value.parts[-1]
        if (eqn := self.eqn(value)) is None:
            return value
        if eqn.primitive.name == "squeeze":  # the second step of `first, second = operand`
            operand = NestedValue(value.parts, value.calls, eqn.invars[0])
            whole = self.eqn(operand)
            return operand if whole is not None and whole.primitive.name == "slice" else value
        for body in parts_of(part, self.body(part).definitions[value.var][0], self.context)[-1:]:
            outs = body.body.outvars
            inner = outs[eqn.outvars.index(value.var)] if len(outs) == len(eqn.outvars) else None
            if isinstance(inner, Var) and inner in self.body(body).definitions:
                return self.made(NestedValue((*value.parts, body), (*value.calls, eqn), inner))
        return value

    def name(self, value: NestedValue) -> tuple[str, ...] | None:
        """Return the name of a value, and its scopes."""
        value = self.made(value)
        eqn = self.eqn(value)
        if eqn is None:
            return self.argument(value)
        if traits(eqn).names_value and eqn.params["name"]:
            return (eqn.params["name"],)
        if (names := self.assigned(value, eqn)) is not None:
            return names
        source = operand_of(eqn, eqn.outvars.index(value.var))
        if source is not None and isinstance(operand := eqn.invars[source], Var):
            return self.name(NestedValue(value.parts, value.calls, operand))
        return self.parameter(value)

    def argument(self, value: NestedValue) -> tuple[str, ...] | None:
        """Return the name of an argument of the program, or that of a body argument's operand."""
        index = value.parts[-1].body.invars.index(value.var)
        if not value.calls:
            return tuple(_words(self.arg_names[index])) or None
        *_, call = value.calls
        operand = call.invars[_operand(call, value.parts[-1].body, index)]
        if isinstance(operand, Literal):
            return None
        return self.name(NestedValue(value.parts[:-1], value.calls[:-1], operand))

    # --- the source ---------------------------------------------------------------------------

    def assigned(self, value: NestedValue, eqn: JaxprEqn) -> tuple[str, ...] | None:
        """Return the name in the source; for a library's name, preceded by that in the user's."""
        others: dict[str, set[Range]] = {}
        for calls, user, _ in self.late_users(value):
            for caller in (*calls, user):
                for frame in user_frames(caller):
                    others.setdefault(frame.file, set()).add(range_of(frame))
        library_name: str | None = None
        for depth, (frame, result) in enumerate(_frames_of(value, eqn)):
            late = others.get(frame.file, set())
            if depth and range_of(frame) not in late and (name := self.sources.given(frame)):
                return tuple(_words(name))
            if (name := self.sources.assigned(frame, late, result)) is None:
                continue
            if not is_installed(frame.file):
                return (name,) if library_name is None else (name, library_name)
            library_name = library_name or name
        return None if library_name is None else (library_name,)

    def late_users(
        self, value: NestedValue
    ) -> Iterator[tuple[tuple[JaxprEqn, ...], JaxprEqn, Var]]:
        """Yield the equations that need a value late, their calls, and its variable there."""
        part, var = value.parts[-1], value.var
        for eqn in (part.body.eqns[i] for i in self.body(part).readers(var)):
            if not all(part.times[v].early for v in eqn.outvars):
                yield value.calls, eqn, var
                continue
            for i, out in enumerate(eqn.outvars):
                source = operand_of(eqn, i)
                if source is not None and eqn.invars[source] is var:
                    yield from self.late_users(NestedValue(value.parts, value.calls, out))
        if value.calls:
            outs = value.calls[-1].outvars
            for i, atom in enumerate(part.body.outvars[: len(outs)]):
                if atom is var:
                    yield from self.late_users(
                        NestedValue(value.parts[:-1], value.calls[:-1], outs[i])
                    )

    # --- names of functions and of their parameters -------------------------------------------

    def parameter(self, value: NestedValue) -> tuple[str, ...] | None:
        """Return the parameter of a user's jitted function that needs a value late."""
        for _, user, var in self.late_users(value):
            if not isinstance(called := view(user), Call):
                continue
            debug = called.body.debug_info
            if _file(debug) is None or len(debug.arg_names or ()) != len(user.invars):
                continue
            words = _words(debug.arg_names[user.invars.index(var)])
            if words:
                return (words[-1],)
        return None

    def function(self, value: NestedValue) -> str:
        """Return the function that computes a value."""
        eqn = self.eqn(value)
        if eqn is None:
            return "carry"
        if isinstance(view(eqn), Call) and "name" in eqn.params:
            words = _words(eqn.params["name"].strip("_"))
        else:
            frames = (frame for frame, _ in _frames_of(value, eqn))
            words = [w for frame in islice(frames, 1) for w in _words(frame.function)]
            words = [word for word in words if word[0] != "<"]
        return words[-1] if words else eqn.primitive.name


def _words(text: str) -> list[str]:
    """Return the names in a path, as `params['w']` or `outer/inner`."""
    return _WORD.findall(text)


def _frames_of(
    value: NestedValue, eqn: JaxprEqn
) -> Iterator[tuple[UserFrame, tuple[int, int] | None]]:
    """Yield the user's frames around a value's equation, the innermost first, through the calls.

    An equation only has the frames of its body. The frame of a call that returns the value comes
    with the index of the result, and the number of results.
    """
    var = value.var
    result = _unpacked(eqn, var)
    for frame in user_frames(eqn):
        yield frame, result
        result = None
    for call, part in zip(reversed(value.calls), reversed(value.parts), strict=False):
        result = None
        outs = part.body.outvars[: len(call.outvars)]
        if var in outs:
            index = outs.index(var)
            var, result = call.outvars[index], (index, len(call.outvars))
            if isinstance(loop := view(call), Scan):
                result = int(index >= len(loop.carry)), 2  # a pair of the carry and the rest
        for frame in user_frames(call):
            yield frame, result
            result = None


def _unpacked(eqn: JaxprEqn, var: Var) -> tuple[int, int] | None:
    """Return the index and count of a part in an unpacking such as `first, second = operand`."""
    match eqn.primitive.name:
        case "unstack" | "split" | "optimization_barrier":
            return eqn.outvars.index(var), len(eqn.outvars)
        case "slice":
            return eqn.params["start_indices"][0], eqn.invars[0].aval.shape[0]
    return None


def _operand(call: JaxprEqn, body: ClosedJaxpr, argument: int) -> int:
    """Return the position of the operand for an argument of one of a call's bodies."""
    inside = regions(call)
    region = None if inside is None else inside.region_of(jaxcompat.open_jaxpr(body))
    return argument if region is None else region.ins[argument]


def _file(debug: DebugInfo) -> str | None:
    """Return the file of a jaxpr's function, if it is known and the user's."""
    match = _FUNCTION.fullmatch(debug.func_src_info)
    return match[2] if match and is_users_file(match[2]) else None
