"""Find which donated arguments lend their memory to results, and why others cannot.

JAX pairs the results with the donated arguments of the same type, in order, and then with those of
the same number of elements. XLA accepts the latter if they also have the same number of bytes.
Arguments that the function does not read are dropped before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxprtool.ir.dataflow import live_part
from jaxprtool.ir.documents import document
from jaxprtool.ir.equations import donated_operands
from jaxprtool.ir.program import (
    JitOptions,
    NamedValue,
    Program,
    ProgramSignature,
    program_signature,
)
from jaxprtool.ir.trees import path_steps
from jaxprtool.jaxcompat import AnyJaxpr, open_jaxpr


@document()
@dataclass(frozen=True)
class UnusedDonation:
    """A donated argument whose memory no result can use.

    Attributes:
        argument: Its path.
        type: Its type.
        reason: The reason, as the end of a sentence.
    """

    argument: str
    type: str
    reason: str


@dataclass(frozen=True)
class Donations:
    """The donated arguments of a program.

    Attributes:
        by_result: For the position of each result that reuses an argument's memory, the position of
            the argument.
        unused: The donated arguments that no result can use.
    """

    by_result: dict[int, int]
    unused: tuple[UnusedDonation, ...]


def donations(program: Program | AnyJaxpr) -> Donations:
    """Return the donated arguments of a program, paired with results as JAX does."""
    options = program.jit if isinstance(program, Program) else None
    if options is None:
        return Donations({}, ())
    about = program_signature(program)
    arguments = [
        (value.name, v.aval) for v, value in zip(about.jaxpr.invars, about.arguments, strict=True)
    ]
    asked = [i for i, option in enumerate(options.of_arguments(arguments)) if option.donated]
    if not asked:
        return Donations({}, ())
    kept = [True] * len(arguments) if options.keep_unused else live_part(about.jaxpr).arguments
    by_result = _paired(about, [i for i in asked if kept[i]])
    lent = set(by_result.values())
    unused = (about.arguments[i] for i in asked if i not in lent)
    dropped = {about.arguments[i].name for i in asked if not kept[i]}
    unusable = (
        UnusedDonation(value.name, value.type, _reason(value, about.outputs, value.name in dropped))
        for value in unused
    )
    return Donations(by_result, tuple(unusable))


def _paired(about: ProgramSignature, donated: Sequence[int]) -> dict[int, int]:
    """Return the donated argument of each result: first of the same type, then of the same size."""
    jaxpr = about.jaxpr
    by_result = dict[int, int]()
    for key in (lambda value, aval: value.type, lambda value, aval: (value.bytes, aval.size)):
        free = defaultdict[object, list[int]](list)
        for position in donated:
            if position not in by_result.values():
                named = about.arguments[position], jaxpr.invars[position].aval
                free[key(*named)].append(position)
        for position, named in enumerate(zip(about.outputs, jaxpr.outvars, strict=True)):
            fitting = free[key(named[0], named[1].aval)] if position not in by_result else ()
            if fitting:
                by_result[position] = fitting.pop(0)
    return by_result


def with_donation_of_call(program: Program) -> Program:
    """Return a program that donates the operands that its only equation, a call, donates.

    `nnx.jit` and `eqx.filter_jit` trace to such a program: a call of their inner `jax.jit`.
    """
    jaxpr = open_jaxpr(program.jaxpr)
    if program.jit is not None or len(jaxpr.eqns) != 1:
        return program
    donated = {var for var, _ in donated_operands(jaxpr.eqns)}
    positions = [i for i, var in enumerate(jaxpr.invars) if var in donated]
    if not positions:
        return program
    options = JitOptions(keep_unused=bool(jaxpr.eqns[0].params["keep_unused"]))
    return program.replace(jit=options.donating(program.arguments, positions))


def donation_notes(name: str, unused: Sequence[UnusedDonation]) -> Iterator[str]:
    """Yield a note for each donated argument of a program that cannot be used."""
    for entry in unused:
        yield f"{name} cannot use the donated {entry.argument}, {entry.type}: {entry.reason}"


def _reason(argument: NamedValue, results: Sequence[NamedValue], is_dropped: bool) -> str:
    if is_dropped:
        return "the program does not read it"
    if any(result.type == argument.type for result in results):
        return "the results of this type reuse other donated arguments"
    steps = path_steps(argument.name)[-1:]
    shape = argument.type.partition("[")[2]
    alike = [result for result in results if steps and path_steps(result.name)[-1:] == steps]
    alike += [result for result in results if result.type.partition("[")[2] == shape]
    other = f"; {alike[0].name} is {alike[0].type}" if alike else ""
    return f"no result has this type{other}"
