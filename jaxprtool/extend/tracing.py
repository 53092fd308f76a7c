"""For functions that trace a user's function, rewrite it, and evaluate the result, as `jit` does.

`bind_arguments` sorts the arguments of a call, and `trace_call` makes its `Program`. Types that
stand for arguments are read by `read_args`, `read_strings` and `ParameterTypes.read`. `evaluated`
evaluates a jaxpr within what JAX is tracing; `at_once` computes without regard to that. Values that
JAX traces and the function closes over are arguments of a program `with_lifted` ones.
"""

from jaxprtool.ir.programs.lifted import CLOSED_OVER, with_lifted
from jaxprtool.jaxcompat import at_once, evaluated, hide_from_tracebacks
from jaxprtool.loading.argspec import read_args, read_results, read_strings, require_sequence
from jaxprtool.loading.example import Static
from jaxprtool.loading.parameter_types import ParameterTypes, TypedValue
from jaxprtool.loading.trace import bind_arguments, function_name, trace_call

__all__ = [
    "CLOSED_OVER",
    "ParameterTypes",
    "Static",
    "TypedValue",
    "at_once",
    "bind_arguments",
    "evaluated",
    "function_name",
    "hide_from_tracebacks",
    "read_args",
    "read_results",
    "read_strings",
    "require_sequence",
    "trace_call",
    "with_lifted",
]
