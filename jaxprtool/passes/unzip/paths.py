"""Report why variables do not cut off the keys: a path from a key to its use in apply."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby

from jaxprtool import jaxcompat
from jaxprtool.ir.core.equations import named
from jaxprtool.ir.core.structured import Call
from jaxprtool.ir.dataflow.def_use import DefUse
from jaxprtool.ir.source.frames import frames_now
from jaxprtool.jaxcompat import Atom, JaxprEqn, Literal, Var
from jaxprtool.passes.unzip.split import Split
from jaxprtool.passes.unzip.variables import UnzipError

#: The number of lines of source shown at either end of a long path.
SHOWN = 5


def check_cut(part: Split, tag: str, in_names: Sequence[str], out_names: Sequence[str]) -> None:
    """Raise UnzipError, with the path, if apply needs a key that passes through no variable.

    The path leads from the key to a result, or to an equation whose effect needs keys and other
    arguments.
    """
    for atom, known, name in zip(part.body.outvars, part.outs, out_names, strict=True):
        if not known.ready:
            raise _uncut(tag, *_path(part, atom), in_names, [name])
    if part.stuck:
        raise _uncut(tag, *_path_of(part, part.stuck[0]), in_names, [])


def _uncut(
    tag: str, start: int, steps: list[JaxprEqn], in_names: Sequence[str], end: list[str]
) -> UnzipError:
    shown = [_line(place, list(eqns)) for place, eqns in groupby(steps, _place)]
    if len(shown) > 2 * SHOWN + 1:
        shown[SHOWN:-SHOWN] = [f"({len(shown) - 2 * SHOWN} more)"]
    path = " -> ".join([in_names[start], *shown, *end])
    hint = None
    for eqn in steps:
        if eqn.primitive.name == "sow" and eqn.params["tag"] == tag:
            hint = f"the {named(eqn)} is not a variable: it depends on more than keys"
    return UnzipError(f"Variables do not cut dependence graph. {path}", hint)


def _place(eqn: JaxprEqn) -> str | None:
    """Return the line of the user's own source that an equation comes from."""
    return next(iter(frames_now().texts(eqn)), None)


def _line(place: str | None, eqns: Sequence[JaxprEqn]) -> str:
    """Return the equations of one line as text; calls by the names of their functions."""
    names = (eqn.params["name"] if eqn.primitive.name == "jit" else eqn.primitive for eqn in eqns)
    return ", ".join(map(str, names)) + ("" if place is None else f" at {place}")


def _path(part: Split, atom: Atom) -> tuple[int, list[JaxprEqn]]:
    """Return the argument that a value that is not ready comes from, and the path's equations."""
    invars = {v: i for i, v in enumerate(part.body.invars)}
    definitions = DefUse(part.body.eqns).definitions
    steps: list[list[JaxprEqn]] = []
    while atom not in invars:
        atom, inner = _before(part, definitions[atom][0], atom)
        steps.append(inner)
    return invars[atom], list(chain.from_iterable(reversed(steps)))


def _path_of(part: Split, eqn: JaxprEqn) -> tuple[int, list[JaxprEqn]]:
    """Return the path to an equation with an effect, into the body that holds the effect."""
    position = next(i for i, each in enumerate(part.body.eqns) if each is eqn)
    inner: list[JaxprEqn] = [eqn]
    operand = _unready(part, eqn)
    for body in part.parts.get(position, ()):
        if body.stuck and eqn.primitive.name in Call.primitives:
            index, inner = _path_of(body, body.stuck[0])
            operand = eqn.invars[index]
    start, steps = _path(part, operand)
    return start, [*steps, *inner]


def _before(part: Split, position: int, atom: Var) -> tuple[Var, list[JaxprEqn]]:
    """Return the operand that keeps a result from being ready, and the equations between."""
    eqn = part.body.eqns[position]
    if position in part.parts and eqn.primitive.name in Call.primitives:
        (body,) = part.parts[position]
        index, steps = _path(body, body.body.outvars[eqn.outvars.index(atom)])
        # Equations inside a library's own call have no line of user code.
        own = any(jaxcompat.user_frame(each) for each in steps)
        return eqn.invars[index], steps if own else [eqn]
    return _unready(part, eqn), [eqn]


def _unready(part: Split, eqn: JaxprEqn) -> Var:
    for atom in eqn.invars:
        if not isinstance(atom, Literal) and not part.times[atom].ready:
            return atom
    raise AssertionError(f"all operands of {named(eqn)} are ready")
