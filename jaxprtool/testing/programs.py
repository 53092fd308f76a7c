"""Parts that the assertions share: the program to check, and errors without inner frames."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from jaxprtool.errors import ArgumentsError, JaxprToolError
from jaxprtool.ir.programs.donation import with_donation_of_call
from jaxprtool.ir.programs.program import Program
from jaxprtool.loading.trace import trace

#: pytest leaves the frames of this module out of tracebacks.
__tracebackhide__ = True

P = ParamSpec("P")
R = TypeVar("R")


def program_of(program_or_function: object, args: Sequence[object]) -> Program:
    """Return a Program as it is, or trace a function with its arguments.

    Raises:
        ArgumentsError: If a Program is given with arguments, or the object is neither a Program nor
            a function.
        UserFunctionError: If the function raises.
    """
    if isinstance(program_or_function, Program):
        if args:
            raise ArgumentsError(f"{program_or_function.name} is a program: it takes no arguments")
        return program_or_function
    if not callable(program_or_function):
        kind = type(program_or_function).__name__
        raise ArgumentsError(f"expected a Program or a function, not an object of type {kind}")
    return with_donation_of_call(trace(program_or_function, *args))


def without_frames(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to raise its failures and usage errors without the frames below it."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except JaxprToolError as error:
            if error.hint:
                error.add_note(f"hint: {error.hint}")
            raise error.with_traceback(None)  # noqa: B904  (its own cause is kept)
        except AssertionError as error:
            failure: Any = error
        raise failure.with_traceback(None)

    return called
