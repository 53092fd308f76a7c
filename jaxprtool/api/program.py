"""Public functions for loading and splitting programs."""

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
    in_specs: str | None = None,
    out_specs: str | None = None,
) -> Program:
    """Return the Program that the command line loads for TARGET and --args.

    Args:
        target: A function, `package.module:attr.path` or `path/file.py:attr.path`, or a program
            file.
        args: The arguments as text: `"f32[8,3], training=static(False)"`. By default the target's
            example arguments.
        factory: Whether to call the target to get the function.
        static_argnums: Positions of arguments that are not traced.
        static_argnames: Names of arguments that are not traced.
        in_specs: Shardings of the arguments on the mesh of `jax.set_mesh`, as for `--in-specs`.
        out_specs: Shardings of the results, as for `--out-specs`.

    Raises:
        JaxprToolError: If the target or an argument is invalid.
    """
    static: StaticArguments = {"static_argnums": static_argnums, "static_argnames": static_argnames}
    return find(target, args, factory, in_specs=in_specs, out_specs=out_specs, **static).trace()


def unzip(
    fun: Callable,
    *,
    tag: str | None = VARIABLE,
    key_args: int | tuple[int, ...] | str | None = "auto",
    auto: bool = False,
    known: int | tuple[int, ...] | None = None,
) -> Callable[..., tuple[Program, Program]]:
    """Return a function that splits `fun` into init and apply for the arguments of its call.

    `unzip(fun)(*args, **kwargs)` returns `(init, apply)`. `init(*keys)` returns the values that
    `fun` sows under `tag`, as nested dicts by scope and name. `apply(variables, *others, **kwargs)`
    returns the results of `fun` and takes no keys.

    The contract is that of Oryx's function of this name (2020-2023).

    Args:
        fun: The function.
        tag: The tag of the variables; by default that of `variable`.
        key_args: The positions of the keys, `static(...)` arguments included. By default the first
            one. With `auto`, by default all arguments of a key type: an argument that consists of
            keys is an argument of `init`, by position or keyword; a key inside another argument is
            a positional argument of `init`, and None in `apply`.
        auto: Whether to choose the variables: the minimum cut, in bytes, between the keys and the
            results. They are named as in the source, and nothing need be sown.
        known: Positions of arguments, for partial evaluation. `init` takes these arguments, and the
            variables are the values that depend on them alone and that `apply` reads.

    Raises:
        ValueError: From the returned function, if the variables do not separate the keys from the
            results, or share a name.
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
