"""The Python face of jaxprtool: loading, tracing and splitting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxprtool.api.targets import find
from jaxprtool.ir.programs.program import Program, Programs
from jaxprtool.loading.trace import StaticArguments, bind_arguments, trace
from jaxprtool.passes.unzip import Unzip
from jaxprtool.primitives import VARIABLE

__all__ = [
    "Program",
    "Programs",
    "load",
    "trace",
    "unzip",
]


def load(
    target: str,
    args: str | None = None,
    *,
    factory: bool = False,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Program:
    """Return the Program that the command line would make of TARGET and --args.

    `target` is `package.module:attr.path` or `path/file.py:attr.path`, or a file with a program
    in it. `args` is an argument list as text, such as `"f32[8,3], training=static(False)"`;
    without it the target's own example arguments are used. Raises a `JaxprToolError` that says
    what is wrong with either.
    """
    static: StaticArguments = {"static_argnums": static_argnums, "static_argnames": static_argnames}
    return find(target, args, factory, **static).trace()


def unzip(
    fun: Callable,
    *,
    tag: str | None = VARIABLE,
    key_args: int | tuple[int, ...] | str | None = "auto",
    auto: bool = False,
    known: int | tuple[int, ...] | None = None,
) -> Callable[..., tuple[Program, Program]]:
    """Return a function that splits `fun` in two, for the arguments that it is called with.

    `unzip(fun)(*args, **kwargs)` gives `(init, apply)`. `init(*keys)` gives the values that `fun`
    sows under `tag`, as nested dicts by scope and name; `apply(variables, *others, **kwargs)` gives
    what `fun` gives, and takes no keys. `key_args` are the positions of the keys, the first unless
    given; arguments that are `static(...)` count. Raises ValueError for variables that do not cut
    the keys from the results, or that share a name.

    With `auto` nothing need be sown: the variables are the fewest bytes that cut the keys from the
    results, named as in the source. Unless `key_args` are given, the keys are all that are such by
    type, wherever they are in the arguments: an argument of keys alone is one of `init` as it is,
    by position or by keyword; any other key is a positional one, and None for `apply`.

    With `known`, positions too, the variables are what is computed from these arguments alone and
    needed with the others: partial evaluation.

    The contract is that of Oryx's function of this name (2020-2023).
    """

    def unzipped(*args: object, **kwargs: Any) -> tuple[Program, Program]:
        program, call = trace(fun, *args, **kwargs), bind_arguments(fun, args, kwargs, (), ())

        def placed(numbers: Any) -> Any:
            if numbers is None or not call.static_args:
                return numbers
            if numbers == "auto":
                if auto:
                    return numbers
                numbers = 0
            numbers = (numbers,) if isinstance(numbers, int) else numbers
            return tuple(map(call.position, numbers))

        keys = placed(key_args) if known is None else None
        parts = Unzip(tag, keys, auto, placed(known)).unzipped(program)
        return parts.init, parts.apply

    return unzipped
