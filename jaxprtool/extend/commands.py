"""Types and functions for rules of `jaxprtool cost` and `jaxprtool lint`.

The table "cost": `rule(eqn)` returns the `Work` of one run of an equation, or None if it is
unknown. Bytes are computed from the fusion of equations, unless the rule returns some.

Rules of `jaxprtool lint`:

    @lint_rule("XY101", "slow-thing", bad=BAD, good=GOOD)
    def slow_things(program): ...

`program` is a `LintedProgram`: its `nodes` are the equations that its results depend on, at every
depth, with calls opened. The function yields a `Found` for each finding. A package lists its
modules of rules in the entry-point group `jaxprtool.lint`.
"""

from jaxprtool.commands.cost.rules import Work
from jaxprtool.commands.lint.graph import LintedProgram, Node, Scope, Value, ancestors, ends, origin
from jaxprtool.commands.lint.lint import Found, LintRule, lint_rule

__all__ = [
    "Found",
    "LintRule",
    "LintedProgram",
    "Node",
    "Scope",
    "Value",
    "Work",
    "ancestors",
    "ends",
    "lint_rule",
    "origin",
]
