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

    `target` is `package.module:attr.path` or `path/file.py:attr.path`, or a program file. `args` is
    an argument list as text, such as `"f32[8,3], training=static(False)"`; by default the target's
    own example arguments. `in_specs` and `out_specs` are the texts of `--in-specs` and
    `--out-specs`, on the mesh of `jax.set_mesh`. Raises a `JaxprToolError` if either is invalid.
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
    `fun` sows under `tag`, as nested dicts by scope and name; `apply(variables, *others, **kwargs)`
    returns the results of `fun` and takes no keys. `key_args` are the positions of the keys, by
    default the first one; `static(...)` arguments count. Raises ValueError if the variables do not
    separate the keys from the results, or share a name.

    With `auto`, nothing need be sown: the variables are the cut with the fewest bytes that
    separates the keys from the results, named as in the source. By default, `key_args` are all keys
    by type, anywhere in the arguments: an argument that consists of keys is an argument of `init`,
    by position or keyword; any other key is a positional argument of `init`, and None for `apply`.

    With `known`, positions of arguments, the variables are the values computed from these arguments
    alone and used with the others: partial evaluation.

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
