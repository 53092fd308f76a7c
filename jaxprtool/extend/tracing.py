"""Functions to trace a user's function, rewrite it, and evaluate the result, as `jit` does.

`bind_arguments` splits the arguments of a call into traced and static ones, and `trace_call`
returns its `Program`. `read_args`, `read_strings` and `ParameterTypes.read` read the types of
arguments. `evaluated` evaluates a jaxpr, or writes its equations if JAX is tracing; `at_once`
evaluates immediately, even then. `with_lifted` turns traced values that a function closes over into
arguments of its program.
"""

from jaxprtool.ir.program import CLOSED_OVER, with_lifted
from jaxprtool.jaxcompat import at_once, hide_from_tracebacks
from jaxprtool.jaxcompat.mapping import evaluated
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
