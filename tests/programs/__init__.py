"""Programs to test every pass on, and checks that a rewritten program equals the original.

    from tests.programs import harness_programs, random_programs, sample_programs, same

Each source of programs yields `Case`s: a name, a function and concrete arguments. `prove(case,
rewrite)` traces, rewrites, type-checks and compares.
"""

from tests.programs.case import Case
from tests.programs.harnesses import harness_programs, harness_share, skipped_harnesses
from tests.programs.random_programs import random_programs
from tests.programs.same import prove, same
from tests.programs.samples import sample_programs

__all__ = [
    "Case",
    "harness_programs",
    "harness_share",
    "prove",
    "random_programs",
    "same",
    "sample_programs",
    "skipped_harnesses",
]
