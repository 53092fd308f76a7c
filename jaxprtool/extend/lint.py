"""Types and functions for rules of `jaxprtool lint`.

    @lint_rule("XY101", "slow-thing", bad=BAD, good=GOOD)
    def slow_things(program): ...

`program` is a `LintedProgram`: its `nodes` are the equations that its results depend on, at every
depth, with calls opened. The function yields a `Found` for each finding. A package lists its
modules of rules in the entry-point group `jaxprtool.lint`.
"""

from jaxprtool.commands.lint.findings import Found, LintRule, lint_rule
from jaxprtool.commands.lint.graph import LintedProgram, Node, Scope, Value, ancestors, ends, origin

__all__ = [
    "Found",
    "LintRule",
    "LintedProgram",
    "Node",
    "Scope",
    "Value",
    "ancestors",
    "ends",
    "lint_rule",
    "origin",
]
