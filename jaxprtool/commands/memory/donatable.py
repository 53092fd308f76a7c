"""Find arguments that a jitted function could donate, and the peak memory that it saves.

    for entry in donatable(program):
        entry.argument, entry.option, entry.saved_bytes

A training step takes a state and returns the next one. If the caller drops the old one, XLA can
write the new one to its memory, but only if the argument is donated. An argument can be donated if
results have the types and paths of its leaves, and no other argument fits them as well. These
results must be new values of the leaves: computed from them element by element, or by replacing
elements. Gradients have the types and paths of parameters too, but are computed in a backward pass.
An argument that the recorded caller dropped in the line of its call needs only results of its
types. One that it kept is left out.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

from jaxprtool.commands.memory.estimate import Memory, memory
from jaxprtool.ir import source_text
from jaxprtool.ir.documents import document
from jaxprtool.ir.donation import donations
from jaxprtool.ir.equations import size_of
from jaxprtool.ir.program import JitOptions, Program, path_parts
from jaxprtool.ir.regions import regions
from jaxprtool.ir.scopes import is_backward
from jaxprtool.ir.symbols import symbols_of
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import Atom, Aval, Jaxpr, JaxprEqn, Literal, open_jaxpr

#: A donation that saves less is not advised.
LEAST_SAVED = 1 << 20

#: The part of the bytes of an argument that must have new values among the results.
_NEW_PART = 0.9


@document()
@dataclass(frozen=True)
class Donatable:
    """Arguments that could be donated.

    Attributes:
        arguments: Their names: `state`.
        option: The option of `jax.jit` that donates them, and what is donated already:
            `donate_argnames="state"`.
        saved_bytes: The bytes by which the estimated peak falls.
        is_dropped: Whether the recorded caller dropped all of them in the line of its call.
    """

    arguments: tuple[str, ...]
    option: str
    saved_bytes: int
    is_dropped: bool


@dataclass(frozen=True)
class _DonationCandidate:
    """An argument of a function.

    Attributes:
        name: Its name.
        number: Its position; None for a keyword argument.
        leaves: The positions of its leaves among the flat arguments.
        is_dropped: Whether the recorded caller dropped all its leaves in the line of its call.
    """

    name: str
    number: int | None
    leaves: range
    is_dropped: bool


def donatable(program: Program, estimate: Memory | None = None) -> Donatable | None:
    """Return the arguments that a function could donate to lower its peak, or None.

    Only a function under `jax.jit` can donate arguments. A donation that saves less than
    `LEAST_SAVED` is not returned.

    Args:
        program: The program.
        estimate: Its memory, if known.
    """
    options = program.jit
    if options is None or symbols_of(program.jaxpr) or not program.jaxpr.eqns:
        return None
    sizes = [size_of(aval) or 0 for aval in program.in_avals]
    chosen = _chosen(program, options, sizes)
    positions = {i for argument in chosen for i in argument.leaves}
    if sum(sizes[i] for i in positions) < LEAST_SAVED:
        return None
    donating = program.replace(jit=options.donating(program.arguments, positions))
    lent = set(donations(donating).by_result.values())
    chosen = [argument for argument in chosen if lent.issuperset(argument.leaves)]
    positions = {i for argument in chosen for i in argument.leaves}
    wanted = options.donating(program.arguments, positions)
    donating = program.replace(jit=wanted)
    if not chosen:
        return None
    now = memory(program) if estimate is None else estimate
    saved = now.peak_bytes - memory(donating).peak_bytes
    if saved < LEAST_SAVED:
        return None
    names = tuple(argument.name for argument in chosen)
    asked = [option.donated for option in wanted.of_arguments(program.arguments)]
    donated = [a for a in _arguments(program) if a.leaves and all(asked[i] for i in a.leaves)]
    option = _option(donated, _parameters(program))
    return Donatable(names, option, saved, all(a.is_dropped for a in chosen))


def _option(arguments: Sequence[_DonationCandidate], parameters: ast.arguments | None) -> str:
    """Return the option of `jax.jit`, given the parameters of the function, if they are known.

    JAX refuses the names of positional-only parameters. Its positions count static arguments, which
    a program does not have: without the parameters they are those of a function without any.
    """
    names = [argument.name for argument in arguments]
    only = [] if parameters is None else [parameter.arg for parameter in parameters.posonlyargs]
    if all(name.isidentifier() and name not in only for name in names):
        return f'donate_argnames="{names[0]}"' if len(names) == 1 else f"donate_argnames={names}"
    after = [] if parameters is None else [parameter.arg for parameter in parameters.args]
    places = {name: place for place, name in enumerate([*only, *after])}
    numbers = [places.get(argument.name, argument.number) for argument in arguments]
    return f"donate_argnums={numbers[0] if len(numbers) == 1 else tuple(numbers)}"


#: Where a function is defined, in JAX's debug information: `step at /home/me/train.py:6`.
_DEFINED = re.compile(r"(.*) at (.*):(\d+)")


def _parameters(program: Program) -> ast.arguments | None:
    """Return the parameters of a program's function in its source; None if that is not there."""
    match = _DEFINED.fullmatch(program.jaxpr.debug_info.func_src_info or "")
    try:
        tree = ast.parse(source_text.file_text(match[2]) if match else "")
    except (SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and match and node.name == match[1]:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first <= int(match[3]) <= node.lineno:
                return node.args
    return None


def _chosen(
    program: Program, options: JitOptions, sizes: Sequence[int]
) -> list[_DonationCandidate]:
    """Return the arguments that are not donated, and whose new values are results."""
    donated = [option.donated for option in options.of_arguments(program.arguments)]
    fates = dict(program.after_call)
    kept = {i for i, name in enumerate(program.arg_names) if fates.get(name) == "kept"}
    free = [
        argument
        for argument in _arguments(program)
        if argument.leaves and not any(donated[i] or i in kept for i in argument.leaves)
    ]
    taken = set(donations(program).by_result)
    chosen, candidates = [], list[tuple[_DonationCandidate, list[tuple[int, ...]]]]()
    kinds = Counter(_kind(aval) for i, aval in enumerate(program.out_avals) if i not in taken)
    for argument in free:
        wanted = Counter(_kind(program.in_avals[i]) for i in argument.leaves)
        if wanted - kinds or sum(sizes[i] for i in argument.leaves) < LEAST_SAVED:
            continue
        if argument.is_dropped:
            chosen.append(argument)
            kinds -= wanted
        else:
            candidates.append((argument, _same_trees(program, options, argument, taken)))
    if not any(trees for _, trees in candidates):
        return chosen
    sources = _sources(open_jaxpr(program.jaxpr))
    fits = {
        argument.leaves: [tree for tree in trees if _is_new(argument, tree, sources, sizes)]
        for argument, trees in candidates
    }
    chosen += _matched([(argument, fits[argument.leaves]) for argument, _ in candidates])
    return sorted(chosen, key=lambda argument: argument.leaves.start)


def _matched(
    candidates: Sequence[tuple[_DonationCandidate, Sequence[tuple[int, ...]]]],
) -> list[_DonationCandidate]:
    """Return the arguments with results of their own.

    Arguments that want the same results are all left out unless there is a result for each: of
    `average(params, mean)` with one result, which is the old one is unknown.
    """
    chosen = []
    rest = [(argument, list(trees)) for argument, trees in candidates if trees]
    while rest:
        group = [rest.pop(0)]
        for _, trees in group:  # grows
            group += [other for other in rest if set(other[1]) & set(trees)]
            rest = [other for other in rest if other not in group]
        owners: dict[tuple[int, ...], int] = {}
        if all(_assigned(i, group, owners, set()) for i in range(len(group))):
            chosen += [argument for argument, _ in group]
    return chosen


def _assigned(
    number: int,
    group: Sequence[tuple[_DonationCandidate, Sequence[tuple[int, ...]]]],
    owners: dict[tuple[int, ...], int],
    tried: set[tuple[int, ...]],
) -> bool:
    """Give an argument a result, moving others if needed; return False if there is none."""
    for tree in group[number][1]:
        if tree not in tried:
            tried.add(tree)
            if tree not in owners or _assigned(owners[tree], group, owners, tried):
                owners[tree] = number
                return True
    return False


def _arguments(program: Program) -> list[_DonationCandidate]:
    """Return the arguments of a function, in order."""
    arguments_tree, keywords = program.in_tree.children()
    positional = arguments_tree.children()
    counts = [tree.num_leaves for tree in (*positional, *keywords.children())]
    _, keys = keywords.node_data() or (dict, [])
    ends = list(accumulate(counts))
    firsts = [path_parts(name)[0] for name in program.arg_names]
    owners = Counter(first for first, _ in {(firsts[end - 1], end) for end in ends if end})
    fates, arguments = dict(program.after_call), []
    for number, (count, end) in enumerate(zip(counts, ends, strict=True)):
        leaves = range(end - count, end)
        names = {firsts[i] for i in leaves}
        name = names.pop() if len(names) == 1 else ""
        name = name if owners[name] == 1 else f"argument {number}"  # as in `def f(*args)`
        is_dropped = all(fates.get(program.arg_names[i]) == "dropped" for i in leaves)
        is_positional = number < len(positional)
        if not is_positional:  # its path begins with `kwargs` in `def f(**kwargs)`
            name = keys[number - len(positional)]
        arguments.append(
            _DonationCandidate(name, number if is_positional else None, leaves, is_dropped)
        )
    return arguments


def _kind(aval: Aval) -> tuple[object, ...]:
    """Return what must be equal for a result to use an argument's memory."""
    names = "shape", "dtype", "memory_space"
    return tuple(getattr(aval, name, None) for name in names)


def _same_trees(
    program: Program, options: JitOptions, argument: _DonationCandidate, taken: set[int]
) -> list[tuple[int, ...]]:
    """Return the results with the types and paths of the leaves of an argument.

    The path of a single array says nothing, so that it is no evidence of a next state.
    """
    paths = [path_parts(program.arg_names[i])[1:] for i in argument.leaves]
    if len(paths) == 1 and not paths[0]:
        return []
    groups = defaultdict[tuple[str, ...], dict[tuple[str, ...], int]](dict)
    for position, name in enumerate(program.out_names):
        parts = path_parts(name)
        for steps in range(len(parts) + 1):
            groups[parts[:steps]][parts[steps:]] = position
    asked, returned = (
        [option.placement for option in values]
        for values in (
            options.of_arguments(program.arguments),
            options.of_results(program.results),
        )
    )
    trees = []
    for results in groups.values():
        if results.keys() != set(paths):
            continue
        tree = tuple(results[path] for path in paths)
        pairs = list(zip(argument.leaves, tree, strict=True))
        if (
            taken.isdisjoint(tree)
            and all(_kind(program.in_avals[i]) == _kind(program.out_avals[j]) for i, j in pairs)
            and all(None in (asked[i], returned[j]) or asked[i] == returned[j] for i, j in pairs)
        ):
            trees.append(tree)
    return trees


# --- new values -----------------------------------------------------------------------------------
# Find the arguments of which each result is a new value.


def _is_new(
    argument: _DonationCandidate,
    tree: Sequence[int],
    sources: Sequence[frozenset[int]],
    sizes: Sequence[int],
) -> bool:
    """Return True if results are new values of nearly all bytes of an argument."""
    pairs = zip(argument.leaves, tree, strict=True)
    new = sum(sizes[i] for i, result in pairs if i in sources[result])
    return new >= _NEW_PART * sum(sizes[i] for i in argument.leaves)


def _sources(jaxpr: Jaxpr) -> list[frozenset[int]]:
    """Return the positions of the arguments of which each result of a jaxpr is a new value."""
    return _NewValues().of(jaxpr)


#: The positions of arguments.
_Positions: TypeAlias = frozenset[int]

_NOWHERE: _Positions = frozenset()


class _NewValues:
    """Follows values through equations that compute each element of the elements at its place."""

    def __init__(self) -> None:
        self._bodies: dict[int, tuple[Jaxpr, list[_Positions]]] = {}

    def of(self, jaxpr: Jaxpr) -> list[_Positions]:
        """Return the positions of arguments for each result of a jaxpr; visits each body once."""
        if id(jaxpr) not in self._bodies:
            env: dict[object, _Positions] = {
                var: frozenset((i,)) for i, var in enumerate(jaxpr.invars)
            }
            for eqn in jaxpr.eqns:
                if not is_backward(eqn):
                    env.update(zip(eqn.outvars, self._of_equation(eqn, env), strict=True))
            self._bodies[id(jaxpr)] = jaxpr, _looked_up(env, jaxpr.outvars)
        return self._bodies[id(jaxpr)][1]

    def _of_equation(self, eqn: JaxprEqn, env: Mapping[object, _Positions]) -> list[_Positions]:
        operands = _looked_up(env, eqn.invars)
        about, inside = traits(eqn), regions(eqn)
        results = [_NOWHERE] * len(eqn.outvars)
        if about.elementwise:
            shaped = zip(operands, eqn.invars, strict=True)
            shape = getattr(eqn.outvars[0].aval, "shape", None)
            alike = [s for s, atom in shaped if getattr(atom.aval, "shape", None) == shape]
            results = [_NOWHERE.union(*alike)] * len(eqn.outvars)
        elif about.updates or about.gives in ("same", "cast"):
            results[0] = operands[0]
        elif inside is not None:
            for body, region in zip(inside.jaxprs, inside.regions, strict=True):
                for place, positions in zip(region.outs, self.of(body), strict=True):
                    if place is not None:
                        new = (operands[region.ins[position]] for position in positions)
                        results[place] = results[place].union(*new)
        return results


def _looked_up(env: Mapping[object, _Positions], atoms: Sequence[Atom]) -> list[_Positions]:
    return [_NOWHERE if isinstance(atom, Literal) else env.get(atom, _NOWHERE) for atom in atoms]
