"""Functions inside a program: `run/update:loss` is what `loss` computes in `update`.

A function under `jax.jit`, and the body of a loop or branch, has a jaxpr of its own. Any other
function is traced into its caller: its equations are those whose tracebacks contain it, for each
call of it. Equations of backward passes have the same tracebacks, but are not part of the function.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax.sharding import AxisType

from jaxprtool import jaxcompat
from jaxprtool.errors import TargetError, UnsupportedError, did_you_mean
from jaxprtool.ir.documents import plural, some
from jaxprtool.ir.equations import holders, part_of, variables
from jaxprtool.ir.frames import Frames, frames_now
from jaxprtool.ir.notation.signatures import UserNames
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import regions, sub_jaxprs
from jaxprtool.ir.scopes import Part, ScopeCall, ScopeReader, is_backward
from jaxprtool.ir.trees import structure, unique
from jaxprtool.jaxcompat import AnyJaxpr, Atom, DropVar, Jaxpr, JaxprEqn, Literal

#: The number of functions that an error lists.
_LISTED = 8


@dataclass(frozen=True, eq=False)
class InnerFunction:
    """A function inside a program.

    Attributes:
        jaxpr: What it computes. Its variables are those of the program.
        place: Where it is called: `jit at train.py:20`.
        part: The part of a gradient that it is: "forward", "backward", or "".
        residuals: Its results that only the backward part reads.
    """

    jaxpr: AnyJaxpr
    place: str
    part: str = ""
    residuals: frozenset[Atom] = frozenset()


def inner_function(program: Program, name: str) -> tuple[Program, str]:
    """Return a function inside a program, as a program of the values that it takes and returns.

    Args:
        program: The program.
        name: The name of the function, or `loss#2` for the second one of this name. Without a
            number, a backward part of a gradient is taken only if there is nothing else.

    Returns:
        The function, and a note if it is the forward part of a gradient, or "".

    Raises:
        TargetError: If the program has no such function, or several.
        UnsupportedError: If the function is mapped over devices by the program.
    """
    wanted, _, number = name.partition("#")
    functions = list(_bodies(program, wanted)) or list(_traced_calls(program, wanted))
    if not functions:
        names = list(_names(program))
        there = f"it has {some(names, _LISTED)}" if names else "it has none"
        hint = did_you_mean(wanted, names) or there
        raise TargetError(f"{program.name} has no function '{wanted}' inside", hint)
    if number:
        if not (number.isdigit() and 0 < int(number) <= len(functions)):
            counted = plural(len(functions), "function")
            message = f"{program.name} has {counted} of the name '{wanted}', and no '{name}'"
            raise TargetError(message, _listing(wanted, functions))
        chosen = [functions[int(number) - 1]]
    else:
        chosen = [function for function in functions if function.part != "backward"] or functions
    if len(chosen) > 1:
        message = f"{program.name} has {len(functions)} functions of the name '{wanted}'"
        raise TargetError(message, _listing(wanted, functions))
    note = ""
    if chosen[0].part == "forward":
        note = (
            f"this is the forward part of {wanted} in a gradient: what the backward part reads are "
            "results too, and custom derivative rules are no longer there"
        )
    return _as_program(program, wanted, chosen[0]), note


def _listing(name: str, functions: Sequence[InnerFunction]) -> str:
    """Return how to choose one of several functions, with their lines."""
    entries = (
        f"{name}#{i} ({', '.join(filter(None, (function.place, function.part)))})"
        for i, function in enumerate(functions, 1)
    )
    return f"write {some(entries, _LISTED)}"


# --- finding --------------------------------------------------------------------------------------


def _jaxprs(program: Program) -> Iterator[tuple[Jaxpr, str]]:
    """Yield the jaxpr of a program and those in it, each once, with the part of a gradient."""
    todo = deque([(jaxcompat.open_jaxpr(program.jaxpr), "")])
    seen: set[Jaxpr] = set()
    while todo:
        jaxpr, part = todo.popleft()
        if jaxpr not in seen:
            seen.add(jaxpr)
            yield jaxpr, part
            for eqn, inside in holders(jaxpr):
                todo += [(body, _part(eqn, part)) for _, body in inside]


def _part(eqn: JaxprEqn, around: str) -> str:
    """Return the part of a gradient that an equation is in, given that of the equations around."""
    if around == "backward" or is_backward(eqn):
        return "backward"
    return around or ("forward" if "jvp(" in jaxcompat.name_stack(eqn) else "")


def _bodies(program: Program, name: str) -> Iterator[InnerFunction]:
    """Yield the jaxprs of a name that equations hold, each once."""
    frames = frames_now(program.roots, chosen=False)
    seen: set[Jaxpr] = set()
    for jaxpr, part in _jaxprs(program):
        for eqn, inside in holders(jaxpr):
            for path, body in inside:
                names = {str(eqn.params.get("name", "")), body.debug_info.func_name}
                if body not in seen and name in names:
                    seen.add(body)
                    held = dict(sub_jaxprs(eqn))[path]
                    yield InnerFunction(held, frames.named([eqn]), _part(eqn, part))


def _traced_calls(program: Program, name: str) -> Iterator[InnerFunction]:
    """Yield the calls of a function, or the scopes of a name, that were traced into a jaxpr."""
    reader, frames = ScopeReader(program.roots), frames_now(program.roots)
    for jaxpr, part in _jaxprs(program):
        groups = list(_scopes_of(reader.calls(jaxpr, is_whole=True), name)) or [
            [eqn for eqn in jaxpr.eqns if name in reader.functions(eqn)]
        ]
        for group in groups:
            # A function with equations in no gradient takes the gradient itself, of another one.
            # Constants are in no gradient.
            whole = any(not _part(eqn, part) and variables(eqn.invars) for eqn in group)
            eqns = [eqn for eqn in group if whole or _part(eqn, part) != "backward"]
            if any(type(v) is not DropVar for eqn in eqns for v in eqn.outvars):
                place = _call_line(eqns[0], name, frames)
                in_gradient = "" if whole else "forward"
                residuals = frozenset[Atom]() if whole else _residuals(jaxpr)
                yield InnerFunction(part_of(jaxpr, eqns, name), place, in_gradient, residuals)


def _residuals(jaxpr: Jaxpr) -> frozenset[Atom]:
    """Return the values that only the backward part of a jaxpr reads."""
    backward, others = set[Atom](), set[Atom](variables(jaxpr.outvars))
    for eqn in jaxpr.eqns:
        (backward if is_backward(eqn) else others).update(variables(eqn.invars))
    return frozenset(backward - others)


def _call_line(eqn: JaxprEqn, name: str, frames: Frames) -> str:
    """Return the line of the call of a function that an equation comes from."""
    lines = frames.of(eqn)
    inside = [i for i, frame in enumerate(lines) if _plain(frame.function) == name]
    return frames.text(lines[min(inside[-1] + 1, len(lines) - 1)]) if inside else "a scope"


def _scopes_of(parts: Sequence[Part], name: str) -> Iterator[list[JaxprEqn]]:
    """Yield the equations of each outermost scope of a name."""
    for part in parts:
        if isinstance(part, ScopeCall):
            if _plain(part.name) == name:
                yield list(_equations(part))
            else:
                yield from _scopes_of(part.parts, name)


def _plain(scope: str) -> str:
    """Return the name of a scope without its class: `loss` of `GPT.loss`."""
    return scope.rpartition(".")[2]


def _equations(part: Part) -> Iterator[JaxprEqn]:
    if isinstance(part, ScopeCall):
        for child in part.parts:
            yield from _equations(child)
    else:
        yield part


def _names(program: Program) -> dict[str, None]:
    """Return the names of the functions that the equations of a program come from."""
    reader = ScopeReader(program.roots)
    names = dict[str, None]()
    for jaxpr, _ in _jaxprs(program):
        for eqn in jaxpr.eqns:
            names.update(dict.fromkeys(sorted(reader.functions(eqn))))
    names.pop(program.name, None)
    return names


# --- the program ----------------------------------------------------------------------------------


def _as_program(program: Program, name: str, function: InnerFunction) -> Program:
    """Return a function inside a program as a program of flat arguments, with the user's names."""
    closed = jaxcompat.close_jaxpr(function.jaxpr)
    inner, top = jaxcompat.open_jaxpr(closed), jaxcompat.open_jaxpr(program.jaxpr)
    _require_unmapped(program, name, inner)
    names = UserNames(top, set(), program.arg_names, program.roots)
    operands = _operands(program)

    def named(v: Atom) -> str:
        while v not in names and v in operands:
            v = operands[v]
        return names[v]

    count = len(inner.outvars)
    results = inner.debug_info.result_paths or ()
    if len(results) != count:
        results = ["result"] if count == 1 else [f"result[{i}]" for i in range(count)]
    if function.residuals:
        results = [
            f"residual[{i}]" if v in function.residuals else name
            for i, (v, name) in enumerate(zip(inner.outvars, results, strict=True))
        ]
    return program.replace(
        name=name,
        jaxpr=closed,
        in_tree=structure((tuple(range(len(inner.invars))), {})),
        out_tree=structure(tuple(range(count)) if count != 1 else 0),
        arg_names=unique([*map(named, inner.invars)]),
        out_names=unique(results),
        jit=None,
        bounds=(),
        sharded=(),
        after_call=(),
    )


def _operands(program: Program) -> dict[Atom, Atom]:
    """Return what the first call of each body passes for its arguments."""
    operands = dict[Atom, Atom]()
    for jaxpr, _ in _jaxprs(program):
        for eqn, _ in holders(jaxpr):
            inside = regions(eqn)
            passed = () if inside is None else inside.arguments_by_operand
            for atom, arguments in zip(eqn.invars, passed, strict=False):
                if type(atom) is not Literal:
                    operands.update((v, atom) for _, v in arguments if v not in operands)
    return operands


def _require_unmapped(program: Program, name: str, inner: Jaxpr) -> None:
    """Raise UnsupportedError for a function of the shards of a `shard_map` or `pmap`."""
    effects = jaxcompat.without_named_axes(inner.effects, [axis for axis, _ in program.axis_env])
    meshes = (getattr(getattr(v.aval, "sharding", None), "mesh", None) for v in inner.invars)
    manual = any(AxisType.Manual in getattr(mesh, "axis_types", ()) for mesh in meshes)
    if manual or any(jaxcompat.only_names_axes([effect]) for effect in effects):
        raise UnsupportedError(
            f"{name} runs on the shards of a shard_map or pmap of {program.name}, so it is no "
            "program of its own"
        )
