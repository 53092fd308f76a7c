"""Arrange equations in a tree of the layers and functions around them.

    forward
      GPT
        Block_0
          LayerNorm_0    18 equations
          ...
    backward
      GPT
        Block_3
    apply_updates

A name scope, such as the modules of Flax Linen and Haiku open, is a level of the tree. So is a
function that equations come from: the user's own, or a library function that it calls. These are
the layers of models without scopes, such as Flax NNX's and Equinox's. The gradient of a function
has two parts, forward and backward. The tree is of one jaxpr; bodies of its equations have their
own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, takewhile
from typing import NamedTuple, TypeAlias, TypeVar

from jaxprtool import jaxcompat
from jaxprtool.ir.backends import cached_method
from jaxprtool.ir.frames import Frames, Root, SourceNames, frames_now
from jaxprtool.jaxcompat import Jaxpr, JaxprEqn
from jaxprtool.jaxcompat.source_locations import UserFrame


@dataclass(frozen=True, eq=False)
class ScopeCall:
    """Equations that belong together: one call of a layer or of a function.

    Attributes:
        name: Its name, unique among its siblings.
        parts: Its equations and the scopes in it, in order.
    """

    name: str
    parts: tuple[Part, ...]


#: The content of a scope.
Part: TypeAlias = ScopeCall | JaxprEqn


class _ScopeLevel(NamedTuple):
    """A scope that an equation is in.

    Attributes:
        name: The name of the scope.
        site: Where it is called from; None if that does not distinguish it from others.
        position: Where in the function the equation comes from; None if that is unknown.
        own: Whether it is one of the user's functions.
    """

    name: str
    site: UserFrame | None = None
    position: UserFrame | None = None
    own: bool = False


T = TypeVar("T")

#: An equation, or a part of its description, with the scopes around it.
_Row: TypeAlias = tuple[tuple[_ScopeLevel, ...], T]


class NameScopes(NamedTuple):
    """The name scopes of an equation, the outermost first, and the transformations around them."""

    transforms: tuple[str, ...]
    scopes: tuple[str, ...]


class ScopeReader:
    """Reads the scopes of jaxprs, each source location once.

    Args:
        roots: The folders of the user's files, as a `Program` has them.
    """

    def __init__(self, roots: Sequence[Root] = ()) -> None:
        self._frames, self._sources = frames_now(roots, chosen=False), SourceNames()
        self._levels: dict[object, tuple[_ScopeLevel, ...]] = {}
        self._names: dict[tuple[str, bool], NameScopes] = {}

    def parts(self, jaxpr: Jaxpr) -> tuple[Part, ...]:
        """Return the equations of a jaxpr, in order, as a tree by scope.

        A scope has at least two equations, and is not the only part of the scope around it.
        """
        return _tidy(self.calls(jaxpr))

    def calls(self, jaxpr: Jaxpr, is_whole: bool = False) -> list[Part]:
        """Return the equations of a jaxpr, in order, as a tree of all scopes and calls.

        Args:
            jaxpr: The open jaxpr.
            is_whole: Whether a call stays one that is differentiated only in part, or in part under
                `jax.checkpoint`. The parts of a gradient are then no scopes.
        """
        name = jaxpr.debug_info.func_name
        functions = [self._functions(eqn) for eqn in jaxpr.eqns]
        if is_whole:
            functions = _with_callers(functions, name)
            functions = [path[_depth_of(name, path) :] for path in functions]
        else:
            functions = self._without_common(functions, name)
            functions = [tuple(map(_no_part, path)) for path in functions]
        names = [self._name_scopes(eqn, not is_whole) for eqn in jaxpr.eqns]
        paths = _with_name_scopes(list(zip(names, functions, strict=True)))
        return self._tree(list(zip(paths, jaxpr.eqns, strict=True)), 0)

    def paths(self, jaxpr: Jaxpr) -> list[tuple[str, ...]]:
        """Return the names of the scopes around each equation of a jaxpr, the outermost first."""
        return list(_paths(self.parts(jaxpr), ()))

    def _functions(self, eqn: JaxprEqn) -> tuple[_ScopeLevel, ...]:
        """Return the user's functions, and the library functions behind them."""
        traceback = eqn.source_info.traceback
        if traceback not in self._levels:
            frames = self._frames.of(eqn)[::-1]
            self._levels[traceback] = tuple(function_levels(frames, self._frames))
        return self._levels[traceback]

    def functions(self, eqn: JaxprEqn) -> set[str]:
        """Return the names of the functions that an equation comes from, without their classes."""
        return {level.name.rpartition(".")[2] for level in self._functions(eqn)}

    def _name_scopes(self, eqn: JaxprEqn, gradients: bool) -> NameScopes:
        key = text, _ = jaxcompat.name_stack(eqn), gradients
        if key not in self._names:
            self._names[key] = name_scopes(text, gradients)
        return self._names[key]

    # --- the tree

    def _without_common(
        self, paths: list[tuple[_ScopeLevel, ...]], function: str
    ) -> list[tuple[_ScopeLevel, ...]]:
        """Return paths without the functions that all equations with a known place come from.

        Calls of a function that is called several times are kept, but not the jaxpr's own
        `function`.
        """
        placed = [path for path in paths if path]
        common = _common(placed)
        depth = _depth_of(function, common)
        rows = [(path, None) for path in placed]
        while depth < len(common) and len(list(self._calls(rows, depth))) == 1:
            depth += 1
        return [path[depth:] for path in paths]

    def _tree(self, rows: Sequence[_Row[JaxprEqn]], depth: int) -> list[Part]:
        """Return equations, each with its levels, as a tree, below the first `depth` levels."""
        parts: list[Part] = []
        for run in self._calls(rows, depth):
            path, eqn = run[0]
            if len(path) <= depth:
                parts.append(eqn)
            else:
                parts.append(ScopeCall(path[depth].name, tuple(self._tree(run, depth + 1))))
        return parts

    def _calls(self, rows: Iterable[_Row[T]], depth: int) -> Iterator[list[_Row[T]]]:
        """Split equations, given with their levels, into those of one call each.

        Adjacent equations belong to the same call if they are called from the same place. A
        function that returns to the position where it began is called again, as layers in a loop
        are, unless that position is in a loop of its own.
        """
        run: list[_Row[T]] = []
        key, began, moved = None, None, False
        for row in rows:
            level = row[0][depth] if len(row[0]) > depth else None
            here = level and level[:2]
            again = moved and began is not None and level is not None and level.position == began
            if run and (level is None or here != key or (again and not self._in_loop(began))):
                yield run
                run = []
            if not run:
                key, began, moved = here, level and level.position, False
            elif level is not None:
                moved |= level.position != began
            run.append(row)
        if run:
            yield run

    @cached_method
    def _in_loop(self, position: UserFrame | None) -> bool:
        """Return True if a function may return to a position without being called again."""
        return position is not None and self._sources.repeated(position)


class ScopePaths:
    """The paths of scopes around the equations of jaxprs.

    Args:
        jaxprs: The open jaxprs: those of all bodies of a program.
        roots: The folders of the user's files, as a `Program` has them.
    """

    def __init__(self, jaxprs: Iterable[Jaxpr], roots: Sequence[Root]) -> None:
        self._paths: dict[int, tuple[str, ...]] = {}
        reader = ScopeReader(roots)
        for jaxpr in jaxprs:
            for eqn, path in zip(jaxpr.eqns, reader.paths(jaxpr), strict=True):
                if path:
                    self._paths[id(eqn)] = path

    def of(self, eqns: Iterable[JaxprEqn]) -> tuple[str, ...]:
        """Return the scopes of an equation, preceded by those whose bodies contain it."""
        path: tuple[str, ...] = ()
        for eqn in eqns:
            path += self._paths.get(id(eqn), ())
        return path


def _paths(parts: Iterable[Part], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the path of each equation of a tree, in order."""
    for part in parts:
        if isinstance(part, ScopeCall):
            yield from _paths(part.parts, (*path, part.name))
        else:
            yield path


# --- name scopes ------------------------------------------------------------------------------

#: The backward part of a gradient.
_BACKWARD = "backward"

#: The parts of a gradient by the transformation around a scope; the first match counts.
_PASSES = {"transpose": _BACKWARD, "jvp": "forward"}

_WRAPPED = re.compile(r"(jvp|transpose|vmap)\((.*)\)")


def name_scopes(text: str, gradients: bool = True) -> NameScopes:
    """Split `outer/transpose(jvp(GPT))/Block_0` into scopes and transformations.

    Without `gradients`, the transformations are dropped.
    """
    transforms: tuple[str, ...] = ()
    scopes: list[str] = []
    for part in text.split("/") if text else ():
        around: list[str] = []
        while wrapped := _WRAPPED.fullmatch(part):
            around.append(wrapped[1])
            part = wrapped[2]
        passes = [name for wrapper, name in _PASSES.items() if gradients and wrapper in around][:1]
        if scopes:
            scopes += passes
        else:
            transforms = (*transforms, *passes)
        if part:
            scopes.append(part)
    return NameScopes(transforms, tuple(scopes))


def _no_part(level: _ScopeLevel) -> _ScopeLevel:
    """Return a function that is named as a part of a gradient with parentheses: `forward()`."""
    return level._replace(name=f"{level.name}()") if level.name in _PASSES.values() else level


def is_differentiated(eqn: JaxprEqn) -> bool:
    """Return True if an equation belongs to a gradient."""
    return "jvp(" in jaxcompat.name_stack(eqn)


def is_backward(eqn: JaxprEqn) -> bool:
    """Return True if an equation belongs to the backward part of a gradient."""
    names = jaxcompat.name_stack(eqn)
    return "transpose(" in names and any(map(_is_transposed, names.split("/")))


def _is_transposed(part: str) -> bool:
    while wrapped := _WRAPPED.fullmatch(part):
        if wrapped[1] == "transpose":
            return True
        part = wrapped[2]
    return False


def _in_scopes(
    rows: Sequence[tuple[tuple[str, ...], tuple[_ScopeLevel, ...]]],
) -> list[tuple[_ScopeLevel, ...]]:
    """Return the levels of equations in one outermost scope, given their scopes and functions.

    The scope is inside the functions that all of them come from. It replaces the function that
    opens it, as Flax Linen's `GPT.__call__` opens the scope GPT, and library functions around that.
    """
    around = _common([levels for _, levels in rows])
    opener = _plain(re.sub(r"_\d+$", "", rows[0][0][0]))
    opened = next((i for i, level in enumerate(around) if _plain(level.name) == opener), None)
    while opened and not around[opened - 1].own:
        opened -= 1
    depth = len(around) if opened is None else opened
    return [
        (
            *levels[:depth],
            _ScopeLevel(scopes[0], None if opened is None else levels[opened].site),
            *map(_ScopeLevel, scopes[1:]),
        )
        for scopes, levels in rows
    ]


def _with_name_scopes(
    rows: Sequence[tuple[NameScopes, tuple[_ScopeLevel, ...]]],
) -> list[tuple[_ScopeLevel, ...]]:
    """Return the levels of equations in order, given their name scopes and functions."""
    paths: list[tuple[_ScopeLevel, ...]] = []
    for (transforms, outermost), run in groupby(rows, lambda row: (row[0][0], row[0][1][:1])):
        group = list(run)
        around = [_ScopeLevel(name) for name in transforms]
        if outermost:
            inside = _in_scopes([(scopes.scopes, levels) for scopes, levels in group])
        else:
            inside = [levels for _, levels in group]
        paths += [(*around, *levels) for levels in inside]
    return paths


def compiled_scopes(
    rows: Mapping[T, tuple[NameScopes, tuple[_ScopeLevel, ...]]], function: str
) -> dict[T, tuple[str, ...]]:
    """Return the scopes around compiled operations, as `ScopeReader` returns those of equations.

    The calls of a layer are not distinguished, since the operations have no order.

    Args:
        rows: The name scopes of each operation, and its functions.
        function: The name of the compiled function.
    """
    placed = [path for _, path in rows.values() if path]
    # XLA drops the call stack of some operations: they have that of one with the same scopes.
    named = {scopes: path for scopes, path in rows.values() if path}
    levels = {key: path or named.get(scopes, ()) for key, (scopes, path) in rows.items()}
    common = _common(placed)
    depth = _depth_of(function, common)
    while depth < len(common) and len({path[depth].site for path in placed}) == 1:
        depth += 1
    order = sorted(rows, key=lambda key: (rows[key][0].transforms, rows[key][0].scopes[:1]))
    paths = _with_name_scopes([(rows[key][0], levels[key][depth:]) for key in order])
    return {
        key: tuple(level.name for level in path) for key, path in zip(order, paths, strict=True)
    }


def _with_callers(
    paths: Sequence[tuple[_ScopeLevel, ...]], function: str
) -> list[tuple[_ScopeLevel, ...]]:
    """Return the functions of the equations of a `function`, with the callers that JAX leaves out.

    It traces the body of `jax.checkpoint` without its callers. Equations that do not come from
    `function` are in the functions that the equations before and after them are both in.
    """
    placed = [i for i, path in enumerate(paths) if _depth_of(function, path)]
    filled = list(paths)
    for first, last in pairwise(placed):
        around = [
            level
            for level, other in zip(paths[first], paths[last], strict=False)
            if level[:2] == other[:2]
        ]
        for i in range(first + 1, last):
            filled[i] = (*around, *paths[i])
    return filled


def _depth_of(function: str, common: Sequence[_ScopeLevel]) -> int:
    """Return the number of the functions around all equations, up to the given function."""
    indices = [i for i, level in enumerate(common) if level.name.rpartition(".")[2] == function]
    return indices[-1] + 1 if indices else 0


def _plain(name: str) -> str:
    """Return the name of a module for comparison: `resnet` for `res_net` and `hk.nets.ResNet`."""
    return name.rpartition(".")[2].replace("_", "").lower()


# --- functions --------------------------------------------------------------------------------


def function_levels(frames: Sequence[UserFrame], reader: Frames) -> Iterator[_ScopeLevel]:
    """Yield the functions of frames that are levels of their own, the outermost first."""
    indices = [i for i, frame in enumerate(frames) if reader.is_users(frame.file)]
    first = indices[0] if indices else 0
    last = indices[-1] if indices else -1
    site = None
    for i, frame in enumerate(frames):
        # Frames in program files have only the beginning of an expression, which others may share.
        whole = (frame.line, frame.column) != (frame.end_line, frame.end_column)
        position = frame if whole else None
        is_own = reader.is_users(frame.file)
        if i >= first and (is_own or i > last):
            name = frame.function.removesuffix(".__call__")
            inner = name.rpartition("<locals>.")[2]
            name = inner if is_own else name.replace("<locals>.", "")
            private = name.startswith("_") or "._" in name
            if "<" not in inner and (is_own or not private):
                yield _ScopeLevel(name, site, position, is_own)
        site = position


def _common(paths: Iterable[tuple[_ScopeLevel, ...]]) -> list[_ScopeLevel]:
    """Return the levels that all paths begin with, compared by name."""
    return [
        levels[0]
        for levels in takewhile(
            lambda levels: len({level.name for level in levels}) == 1,
            zip(*paths, strict=False),
        )
    ]


# --- the tree ---------------------------------------------------------------------------------


def _tidy(parts: Sequence[Part], backward: bool = False) -> tuple[Part, ...]:
    """Return a tree without scopes of one equation, or of only one scope, with unique names."""
    tidied: list[Part] = []
    for part in parts:
        if isinstance(part, ScopeCall):
            inside = _tidy(part.parts, backward or part.name == _BACKWARD)
            if len(inside) == 1 and isinstance(inside[0], ScopeCall):
                part = ScopeCall(_joined(part.name, inside[0].name), inside[0].parts)
            else:
                part = ScopeCall(part.name, inside) if len(inside) > 1 else inside[0]
        tidied.append(part)
    return _numbered(tidied, backward)


def _numbered(parts: Sequence[Part], backward: bool) -> tuple[Part, ...]:
    """Append a number to each name that several parts have, in the order of the calls.

    A backward pass visits them in reverse, so that the last has the first number there.
    """
    names = Counter(part.name for part in parts if isinstance(part, ScopeCall))
    numbers = Counter[str]()
    result: list[Part] = []
    for part in reversed(parts) if backward else parts:
        if isinstance(part, ScopeCall) and names[part.name] > 1:
            numbers[part.name] += 1
            part = ScopeCall(f"{part.name} #{numbers[part.name]}", part.parts)
        result.append(part)
    return tuple(reversed(result) if backward else result)


def _joined(outer: str, inner: str) -> str:
    """Return the name of a scope and the only scope in it."""
    inner = inner.partition(" #")[0]
    return outer if outer == inner else f"{outer}/{inner}"
