"""Description of where two variants diverge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxprtool.execute.compare.body_runs import Executor
from jaxprtool.execute.compare.comparator import Comparator
from jaxprtool.execute.compare.divergence import DivergenceSearch, Found, Pair
from jaxprtool.execute.compare.measures import Measure, Tolerance, measured
from jaxprtool.execute.compare.variants import Variant
from jaxprtool.ir.basics.documents import document
from jaxprtool.ir.core.equations import all_jaxprs
from jaxprtool.ir.core.regions import regions
from jaxprtool.ir.core.structured import holds_jaxpr
from jaxprtool.ir.programs.program_signature import top_jaxpr
from jaxprtool.ir.programs.scalar_predicates import with_scalar_predicates
from jaxprtool.ir.source.frames import frames_now
from jaxprtool.ir.source.scopes import ScopePaths
from jaxprtool.jaxcompat import Atom, JaxprEqn, Literal


@document(without=("reference", "code", "at_call"), names={"step": "pass"})
@dataclass(frozen=True)
class Divergence:
    """The first equation at which a variant diverges from the reference.

    Attributes:
        reference: The name of the reference.
        variant: The name of the variant.
        step: The pass that causes the difference; "" if none does.
        place: The number of this pass, from 1; 0 if none.
        passes: The number of passes.
        found: Whether an equation was found.
        why: Why no equation was found, or "".
        strict: Whether it was found only by applying the tolerance to each element.
        within: Whether all results are within tolerance. The equation is then the first whose bits
            differ.
        primitive: The primitive of the equation.
        source: The user's line of the equation, followed by the library's.
        code: The source text of that line, if its file exists.
        scope: The scopes around the equation, as `cost --by scope` groups them.
        path: The enclosing equations, the outermost first.
        iteration: The iteration of each enclosing loop, from 0.
        counterpart: The equation of the variant, if it is a different one: `cos at model.py:7`.
        parameters: The parameters that differ.
        operands: The differences of its operands.
        results: The differences of its results.
        removed: The equations between these operands and results that only the reference has.
        added: The equations between them that only the variant has.
        at_call: Whether any of these equations is a call.
    """

    reference: str
    variant: str
    step: str = ""
    place: int = 0
    passes: int = 0
    found: bool = False
    why: str = ""
    strict: bool = False
    within: bool = False
    primitive: str = ""
    source: str = ""
    code: str = ""
    scope: str = ""
    path: tuple[str, ...] = ()
    iteration: tuple[int, ...] = ()
    counterpart: str = ""
    parameters: tuple[str, ...] = ()
    operands: tuple[Measure, ...] = ()
    results: tuple[Measure, ...] = ()
    removed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    at_call: bool = False


def find_divergence(
    variants: tuple[Variant, Variant],
    arguments: tuple[Sequence[Any], Sequence[Any]],
    results: tuple[Sequence[Any], Sequence[Any]] | None,
    tolerance: Tolerance,
    on_progress: Callable[[str], object] = lambda doing: None,
    positions: Sequence[tuple[int, int]] | None = None,
    exact: bool = False,
    executor: Callable[[Variant, Sequence[Any]], Executor] = Executor,
) -> Divergence:
    """Return the first equation at which a variant diverges from the reference.

    Args:
        variants: The reference and the other variant.
        arguments: The arguments of each.
        results: The results of each, if known.
        tolerance: The tolerance.
        on_progress: Called with progress messages.
        positions: The pairs of positions of corresponding arguments, if their order differs.
        exact: Whether all bits must be equal, instead of `tolerance`.
        executor: Returns an executor of the pieces of a variant.
    """
    first, second = (
        replace(each, program=with_scalar_predicates(each.program)) for each in variants
    )
    variants = first, second
    executors: Any = tuple(executor(*each) for each in zip(variants, arguments, strict=True))
    bodies: Any = tuple(each.program.jaxpr for each in variants)
    given = executors[0].arguments, executors[1].arguments
    names = variants[0].name, variants[1].name
    for strict in (True,) if exact else (False, True):
        comparator = Comparator(tolerance, strict, exact)
        search = DivergenceSearch(comparator, executors, on_progress)
        found = search.find(bodies, given, results, positions=positions)
        if found is not None:
            return _Describer(variants[0], found, tolerance).divergence(
                *names, strict and not exact
            )
    return Divergence(*names, why="every result is within tolerance")


class _Describer:
    """Describes a search result."""

    def __init__(self, variant: Variant, found: Found, tolerance: Tolerance):
        self._program, self._found, self._tolerance = variant.program, found, tolerance
        self._frames = frames_now(variant.program.roots)
        self._scopes = ScopePaths(all_jaxprs(top_jaxpr(variant.program)), variant.program.roots)

    def divergence(self, reference: str, variant: str, strict: bool) -> Divergence:
        found = self._found
        old, new = found.eqns
        path = tuple(each.eqn for each in found.path)
        shown = old or new
        if not found.results:
            return Divergence(reference, variant, why=_FUSED, path=self._frames.path_of(path))
        around = (*path, *((shown,) if shown is not None else ()))
        same = new is None or (old is not None and old.primitive.name == new.primitive.name)
        return Divergence(
            reference,
            variant,
            found=True,
            strict=strict,
            primitive="" if shown is None else str(shown.primitive.name),
            source=self._frames.line_of(around),
            code=self._frames.code_of(around),
            scope="/".join(self._scopes.of(around)),
            path=self._frames.path_of(path),
            iteration=tuple(each.iteration for each in found.path if each.iteration is not None),
            counterpart="" if same or new is None else self._frames.named((*path, new)),
            parameters=_other_parameters(old, new),
            operands=tuple(map(self._measured, found.operands)),
            results=tuple(map(self._measured, found.results)),
            removed=tuple(self._frames.named((*path, eqn)) for eqn in found.between[0]),
            added=tuple(self._frames.named((*path, eqn)) for eqn in found.between[1]),
            at_call=any(map(_is_call, (old, new, *found.between[0], *found.between[1]))),
        )

    def _measured(self, pair: Pair) -> Measure:
        (a, b), (old, new) = self._found.runs, pair
        return measured(self._name(old), a.value(old), b.value(new), self._tolerance)

    def _name(self, atom: Atom) -> str:
        """Return the name of a value of the reference: an argument, or the equation's."""
        path, body = self._found.path, self._found.runs[0].jaxpr
        while not isinstance(atom, Literal):
            definition = next((eqn for eqn in body.eqns if atom in eqn.outvars), None)
            if definition is not None:
                return self._frames.named([*(each.eqn for each in path), definition])
            if atom not in body.invars:
                return "a constant"
            place = body.invars.index(atom)
            if not path:
                return self._program.arg_names[place]
            atom, body, path = path[-1].operands[place], path[-1].around, path[:-1]
        return "a literal"


_FUSED = (
    "run with intermediate values as results, no equation differs: the variants differ only "
    "where the compiler fuses equations"
)


def _is_call(eqn: JaxprEqn | None) -> bool:
    held = None if eqn is None else regions(eqn)
    return held is not None and held.kind == "call"


def _other_parameters(old: JaxprEqn | None, new: JaxprEqn | None) -> tuple[str, ...]:
    """Return the differing parameters of two equations of one primitive, except for bodies."""
    if old is None or new is None or old.primitive is not new.primitive:
        return ()
    pairs = ((k, a, new.params.get(k)) for k, a in old.params.items() if not holds_jaxpr([a]))
    return tuple(f"{k}: {b} instead of {a}" for k, a, b in pairs if str(a) != str(b))
