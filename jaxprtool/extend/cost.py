"""Types and functions for rules of the table "cost".

`rule(eqn)` returns the `Work` of one run of an equation, or None if it is unknown. Bytes are
computed from the fusion of equations, unless the rule returns some.
"""

from jaxprtool.commands.cost.rules import Work

__all__ = ["Work"]
