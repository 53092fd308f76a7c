"""From a function to its program, and analyses of it: `jit`, `mask` and `browse` use this module.

Tracing: `bind_arguments` splits the arguments of a call into traced and static ones, and
`trace_call` returns its `Program`. `read_args`, `read_strings` and `ParameterTypes.read` read the
types of arguments. `evaluated` evaluates a jaxpr, or writes its equations if JAX is tracing;
`at_once` evaluates immediately, even then. `with_lifted` turns traced values that a function closes
over into arguments of its program. `pipeline.run(program, observer)` calls an `Observer` at each
step of a pipeline.

Pytrees of arguments and results: `filled` builds a tree from flat values and a structure of a
`Program`, which may have leaves that are not arrays, and `structure` returns the structure of a
value. `matched_leaves` flattens an argument that matches a structure, and raises `Mismatch`
otherwise.

Analyses: `DefUse` has the definitions and uses of the variables of one body. `DataFlow` leads from
a variable to its definition and its uses, through bodies; a `Holder` is an equation that holds a
body. `backward_slice` and `forward_slice` find the equations that values depend on, or that depend
on them. `changes` compares a program with the result of a pass; `left_to_partitioner` names the
parts that XLA partitions over devices.
"""

from jaxprtool.ir.arguments import Mismatch, matched_leaves
from jaxprtool.ir.dataflow import DataFlow, DefUse, Holder, Start, backward_slice, forward_slice
from jaxprtool.ir.differences import Changes, changes
from jaxprtool.ir.meshes import left_to_partitioner
from jaxprtool.ir.program import CLOSED_OVER, with_lifted
from jaxprtool.ir.trees import StaticLeaf, filled, leaf_paths, paths, structure, unique
from jaxprtool.jaxcompat import at_once, hide_from_tracebacks
from jaxprtool.jaxcompat.mapping import evaluated
from jaxprtool.loading import Static
from jaxprtool.loading.argspec import read_args, read_results, read_strings, require_sequence
from jaxprtool.loading.load import ParameterTypes, TypedValue
from jaxprtool.loading.trace import bind_arguments, function_name, trace_call
from jaxprtool.passes import Observer, Step

__all__ = [
    "CLOSED_OVER",
    "Changes",
    "DataFlow",
    "DefUse",
    "Holder",
    "Mismatch",
    "Observer",
    "ParameterTypes",
    "Start",
    "Static",
    "StaticLeaf",
    "Step",
    "TypedValue",
    "at_once",
    "backward_slice",
    "bind_arguments",
    "changes",
    "evaluated",
    "filled",
    "forward_slice",
    "function_name",
    "hide_from_tracebacks",
    "leaf_paths",
    "left_to_partitioner",
    "matched_leaves",
    "paths",
    "read_args",
    "read_results",
    "read_strings",
    "require_sequence",
    "structure",
    "trace_call",
    "unique",
    "with_lifted",
]
