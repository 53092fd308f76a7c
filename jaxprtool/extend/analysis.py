"""Analyses of a program: its dataflow, and the changes by a pass.

`DefUse` has the definitions and uses of the variables of one body. `DataFlow` leads from a variable
to its definition and its uses, through bodies; a `Holder` is an equation that holds a body.
`backward_slice` and `forward_slice` find the equations that values depend on, or that depend on
them. `changes` compares a program with the result of a pass; `left_to_partitioner` names the parts
that XLA partitions over devices.
"""

from jaxprtool.ir.dataflow import DataFlow, DefUse, Holder, Start, backward_slice, forward_slice
from jaxprtool.ir.differences import Changes, changes
from jaxprtool.ir.meshes import left_to_partitioner

__all__ = [
    "Changes",
    "DataFlow",
    "DefUse",
    "Holder",
    "Start",
    "backward_slice",
    "changes",
    "forward_slice",
    "left_to_partitioner",
]
