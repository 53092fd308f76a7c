"""Write a program, read it back, and compare.

python -m tests.formats.jaxpr.round_trips       counts all of JAX's own test programs
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.formats.jaxpr.read import parse_program
from jaxprtool.formats.jaxpr.write import program_file_text
from jaxprtool.ir.equations import equations
from jaxprtool.ir.equivalence import structural_difference
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.program import Program, type_check
from jaxprtool.ir.regions import sub_jaxprs
from jaxprtool.render.terminal.listing import listing
from tests.programs import Case, harness_programs, same


def round_trip(program: Program) -> Program:
    """Return the program after writing and reading. Raises AssertionError if it differs.

    It must be equivalent, with the same listing byte for byte and the same source locations, and
    its text must be the same when written again. Raises UnsupportedError if it cannot be written.
    """
    written = program_file_text(program)
    back = parse_program(written, f"{program.name}.jaxpr")
    type_check(back)
    assert structural_difference(program, back) is None, structural_difference(program, back)
    assert (back.name, back.arg_names) == (program.name, program.arg_names)
    assert (back.out_names, back.axis_env) == (program.out_names, program.axis_env)
    assert back.bounds == program.bounds
    assert locations(back.jaxpr) == locations(program.jaxpr)
    if binds_twice(written) or holds_operations(program.jaxpr):
        # Either JAX has copied a jaxpr together with its variables: both copies are shown, and
        # written, with the same names, and have separate variables when read. Or there are
        # operations with their own rules, which a file represents as calls with custom derivatives.
        written, program = (
            program_file_text(back),
            parse_program(program_file_text(back), "again.jaxpr"),
        )
    assert_same_listing(program, back)
    assert program_file_text(back) == written
    return back


def assert_same_listing(program: Program, back: Program) -> None:
    """Assert that both listings are the same, byte for byte.

    JAX 0.12 shows how its transformations arrived at the operand counts of a scan; a file has the
    counts only. Where these differ, they are ignored, as are line breaks.
    """
    before, after = (listing(p).plain() for p in (program, back))
    if before != after and "ft_in=" in before:
        before, after = (" ".join(_SCAN_TREES.sub("", s).split()) for s in (before, after))
    assert after == before


def holds_operations(jaxpr: Any) -> bool:
    """Return True if a program has operations with their own rules (`jax.experimental.hijax`)."""
    eqns = equations(jaxcompat.open_jaxpr(jaxpr))
    return any(eqn.primitive.name == jaxcompat.CALL_HIGH for eqn in eqns)


#: A variable with its type where it is bound; literals that contain letters are not variables.
_BINDER = re.compile(r"(?<![\w.])(?!nan:|inf:)([a-z]+):(?=[a-zA-Z])")


def binds_twice(written: str) -> bool:
    """Return True if two jaxprs in a program, or in a rule of it, bind the same variable."""
    bound = Counter(_BINDER.findall(written))
    return any(number > 1 for number in bound.values())


_SCAN_TREES = re.compile(r"\bft_in=.*?(?=\s+jaxpr=)", re.DOTALL)


def locations(jaxpr: Any) -> list[Any]:
    """Return the frames of each equation at every depth, with the names of files."""
    frames = frames_now()
    found: list[Any] = []
    for eqn in jaxpr.eqns:
        location = frames.location(eqn)
        each = [f for f in (location.frame, location.library) if f] if location else []
        named = [(frames.path(f.file), *f[1:4]) for f in each]
        found.append((named, jaxcompat.name_stack(eqn)))
        for _, body in sub_jaxprs(eqn):
            found += locations(body)
    return found


def prove_round_trip(case: Case, *, run: bool) -> str:
    """Round-trip a case, with `run` also compare results and gradients. Return the outcome."""
    with case.setting():
        before = case.program()
        try:
            after = round_trip(before)
        except UnsupportedError as error:
            return f"refused: {reason(error)}"
        if run:
            after = after.replace(in_tree=before.in_tree, out_tree=before.out_tree)
            verdict = same(before, after, case.arguments())
            assert not verdict.stepwise
    return "round trip"


def reason(error: UnsupportedError) -> str:
    """Return why a program is refused, without the locations that differ between programs."""
    return re.sub(r" at \S+:\d+", "", re.sub(r"\S+\.py:\d+(:\d+)?", "...", error.message))


def count(cases: Iterable[Case], *, run_every: int) -> Counter[str]:
    """Count the cases by outcome. Each `run_every`-th is also run, or none if it is 0.

    Raises AssertionError with all failures.
    """
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    for number, case in enumerate(cases):
        try:
            run = run_every > 0 and number % run_every == 0
            outcomes[prove_round_trip(case, run=run)] += 1
        except Exception as error:
            failures.append(f"{case.name}: {type(error).__name__}: {str(error)[:400]}")
        if number % 200 == 199:
            jax.clear_caches()
    assert not failures, f"{len(failures)} programs failed\n" + "\n".join(failures)
    return outcomes


if __name__ == "__main__":
    print(f"JAX {jax.__version__}")
    for outcome, number in count(harness_programs(1), run_every=0).most_common():
        print(f"{number:6}  {outcome}")
