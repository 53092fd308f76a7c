"""`shapecheck`, formerly in JAX: claims about result types of a function, which are checked.

    @jaxprtool.shapecheck("f32[n,m], f32[m]", "f32[n]")
    def matvec(a, b):
        return a @ b

The claim is checked when the function is defined: it is traced once for all sizes, without creating
arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import jax

from jaxprtool import Program
from jaxprtool.errors import ArgumentsError, CheckError
from jaxprtool.extend.tracing import (
    bind_arguments,
    function_name,
    read_args,
    read_results,
    read_strings,
    require_sequence,
    trace_call,
)
from jaxprtool.sizes.claimed_types import other_structure, wrong_results

F = TypeVar("F", bound=Callable[..., Any])


def shapecheck(in_types: Any, out_types: Any) -> Callable[[F], F]:
    """Return a decorator that checks the result types of a function for given argument types.

    Args:
        in_types: The types of the arguments in the notation of the option `--args`, such as
            `"f32[n,d], i32[n]"`. Or a sequence with one entry per argument: a text, a
            `jax.ShapeDtypeStruct`, or a pytree of these. A size `_` is distinct from all others.
        out_types: The types of the results, `"f32[n]"` or `"f32[n], f32[]"`; or a pytree. Their
            symbols are those of the arguments, and `_` matches any size.

    Returns:
        A decorator that returns the function unchanged. It raises CheckError if a result has
        another type, which names the equation to blame; ArgumentsError for types that cannot be
        read; and UserFunctionError if the function raises during tracing.
    """

    def check(fun: F) -> F:
        check_claim(traced(fun, in_types), out_types)
        return fun

    return check


def traced(fun: Callable, in_types: Any) -> Program:
    """Return the program of a function for arguments of given types; see `shapecheck`."""
    kwargs: dict[str, Any] = {}
    if isinstance(in_types, str):
        args, kwargs = read_args(in_types)
    else:
        require_sequence(in_types)
        args = tuple(read_strings(list(in_types)))
    call = replace(bind_arguments(fun, args, kwargs), shared=None)
    return trace_call(function_name(fun), fun, call)


def check_claim(program: Program, out_types: Any) -> None:
    """Raise CheckError unless the results of a program are of these types; see `shapecheck`."""
    claimed = read_results(out_types, program.symbols)
    for leaf in jax.tree.leaves(claimed):
        if not hasattr(leaf, "shape"):
            raise ArgumentsError(f"{leaf!r} is not a type of a result: write types as 'f32[n,128]'")
    fault = other_structure(program, claimed)
    if fault is not None:
        raise CheckError(fault)
    wrong = wrong_results(program, claimed)
    if wrong:
        first, more = wrong[0], len(wrong) - 1
        raise CheckError(
            f"{first.name} of {program.name} is {first.type}, not {first.claimed}: {first.origin}",
            f"{more} more {'result has' if more == 1 else 'results have'} a different type"
            if more
            else None,
        )
