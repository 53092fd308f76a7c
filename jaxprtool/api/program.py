"""Public functions for loading and splitting programs, and for lowering functions to HLO."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, ParamSpec

import jax

from jaxprtool import jaxcompat
from jaxprtool.api.targets import find_entry
from jaxprtool.errors import ArgumentsError
from jaxprtool.formats import lowering
from jaxprtool.formats.lowering import XlaComputation
from jaxprtool.ir.program import Program
from jaxprtool.ir.trees import filled
from jaxprtool.loading.target import methods_hint
from jaxprtool.loading.trace import (
    BoundCall,
    StaticArguments,
    bind_arguments,
    function_name,
    trace,
    trace_call,
)
from jaxprtool.passes.unzip import Unzip
from jaxprtool.primitives import VARIABLE

P = ParamSpec("P")

# --- program --------------------------------------------------------------------------------------
# Public functions for loading and splitting programs.


def show(fun: Callable | Program, /, *args: object, **kwargs: Any) -> None:
    """Print the program of `fun` on these arguments, as `print(trace(fun, *args))` does.

    Args:
        fun: A function, or a Program without arguments.
        *args: The arguments, as for `trace`.
        **kwargs: Keyword arguments, and the options of `trace`.

    Raises:
        ArgumentsError: If the arguments do not fit the function.
        UserFunctionError: If the function raises.
    """
    if isinstance(fun, str):
        raise ArgumentsError(
            "show takes a function, not the text of a TARGET",
            "print(jaxprtool.load(target, args)) shows the program of a TARGET",
        )
    if not isinstance(fun, Program):
        print(trace(fun, *args, **kwargs))
    elif args or kwargs:
        raise ArgumentsError("a Program has its arguments, so show takes no others")
    else:
        print(fun)


def _of_targets(load: Callable[P, Program]) -> Callable[P, Program]:
    """Let `load` say that it is `trace` that takes a function and arrays."""

    @functools.wraps(load)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Program:
        target = kwargs.get("target", args[0] if args else "")
        if callable(target):
            raise ArgumentsError(
                f"load takes the text of a TARGET, not a function: '{function_name(target)}'",
                f"jaxprtool.trace({function_name(target)}, *args) traces a function",
            )
        if not isinstance(target, str | os.PathLike):
            message = (
                f"load takes the text of a TARGET, not a value of type {type(target).__name__}"
            )
            hint = methods_hint(target, "its ")
            raise ArgumentsError(message, f"jaxprtool.trace traces {hint}" if hint else None)
        others = (*args[1:], kwargs.get("args"))
        if not all(isinstance(other, str | None) for other in others):
            raise ArgumentsError(
                'load takes arguments as text: "f32[8,3], f32[8]"',
                "jaxprtool.trace(fun, *args) traces a function on arrays",
            )
        return load(*args, **kwargs)

    return checked


@_of_targets
def load(
    target: str | os.PathLike[str],
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
    return find_entry(
        os.fspath(target), args, factory, in_specs=in_specs, out_specs=out_specs, **static
    ).trace()


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


# --- lower ----------------------------------------------------------------------------------------
# `xla_computation`, formerly in JAX: the HLO of a function; and `make_jaxpr`.
#
# Both accept any object with a shape and a dtype as an argument. Free named axes (`axis_env`) are
# axes of replicas, as in `pmap`: collectives over them have replica groups, and the computation is
# for one replica per combination of indices.

Indices = int | Sequence[int]
AxisEnv = Sequence[tuple[Hashable, int]]


def make_jaxpr(
    fun: Callable,
    static_argnums: Indices = (),
    axis_env: AxisEnv | None = None,
    return_shape: bool = False,
) -> Callable:
    """Return a function from the arguments of `fun` to the closed jaxpr of `fun`.

    The jaxpr is that of `jax.make_jaxpr`: a function under `jax.jit` is one equation.

    Args:
        fun: The function.
        static_argnums: Positions of arguments that are passed to `fun` unchanged.
        axis_env: Names and sizes of axes for collectives, `[('i', 4), ('j', 2)]`.
        return_shape: Whether to return a pair: the jaxpr, and a `jax.ShapeDtypeStruct` for each
            result, in the tree of the results.

    Raises:
        JaxprToolError: From the returned function, the errors of `trace`.
    """

    @functools.wraps(fun)
    def make(*args: object, **kwargs: object) -> object:
        call = replace(bind_arguments(fun, args, kwargs, static_argnums), shared=None)
        program = trace_call(function_name(fun), fun, call, axis_env, opens_jit=False)
        return (program.jaxpr, _shapes(program)) if return_shape else program.jaxpr

    return make


def xla_computation(
    fun: Callable,
    static_argnums: Indices = (),
    axis_env: AxisEnv | None = None,
    in_parts: object = None,
    out_parts: object = None,
    backend: str | None = None,
    tuple_args: bool | None = False,
    instantiate_const_outputs: bool | None = True,
    return_shape: bool = False,
    donate_argnums: Indices = (),
) -> Callable:
    """Return a function from the arguments of `fun` to the `XlaComputation` of `fun`.

    That object has `as_hlo_text()`, `as_serialized_hlo_module_proto()`, `as_hlo_dot_graph()` and
    `program_shape()`; its result is always a tuple, and unused arguments are kept.

    Args:
        fun: The function.
        static_argnums: Positions of arguments that are passed to `fun` unchanged.
        axis_env: Names and sizes of axes for collectives, `[('i', 4), ('j', 2)]`.
        in_parts: A prefix of the tree of the positional arguments, with `PartitionSpec(2, 1)`, the
            number of parts per dimension, or None for replicated values.
        out_parts: The same for the results.
        backend: The platform to lower for (cpu, gpu, tpu), whether or not this machine has it.
        tuple_args: Whether all arguments are passed as one tuple; None for more than a hundred.
        instantiate_const_outputs: Without effect, as in JAX since 2021: constant results are always
            part of the computation.
        return_shape: Whether to return a pair: the computation, and a `jax.ShapeDtypeStruct` for
            each result, in the tree of the results.
        donate_argnums: Positions of arguments whose memory may be reused for results.

    Raises:
        ArgumentsError: From the returned function, for arguments, parts and positions that do not
            fit `fun`.
        UserFunctionError: From the returned function, if `fun` raises.
        UnsupportedError: From the returned function, for a program that JAX cannot lower.
        BackendError: From the returned function, for an unknown platform.
    """

    @functools.wraps(fun)
    def compute(*args: object, **kwargs: object) -> object:
        call = replace(bind_arguments(fun, args, kwargs, static_argnums), shared=None)
        program = trace_call(function_name(fun), fun, call, axis_env)
        lowering.require_sizes(program)
        donated = _donated(donate_argnums, len(args), call)
        options = XlaComputation(in_parts, out_parts, tuple_args, donated)
        module = options.module(program, backend)
        jaxcompat.rename_module(module, f"xla_computation_{program.name}")
        built = options.computation(program, module)
        return (built, _shapes(program)) if return_shape else built

    return compute


def _shapes(program: Program) -> object:
    """Return the types of the results, in their tree."""
    return filled(
        program.out_tree,
        [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in program.out_avals],
    )


def _donated(positions: Indices, count: int, call: BoundCall) -> tuple[int, ...]:
    """Return the positions in the program of the arguments at `positions`, out of `count`."""
    wanted = [positions] if isinstance(positions, int) else list(positions)
    for position in wanted:
        if not -count <= position < count:
            raise ArgumentsError(
                f"donate_argnums has {position}, but the function has {count} positional arguments"
            )
    return tuple(call.position(position) for position in wanted)
