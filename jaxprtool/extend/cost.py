"""For rules of the table "cost".

`rule(eqn)` returns the `Work` of one run of an equation, or None if it is not known. Bytes are
counted by what is fused, unless the rule gives some.
"""

from jaxprtool.analysis.cost.work import Work

__all__ = ["Work"]
