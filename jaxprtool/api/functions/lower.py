"""`xla_computation`, formerly in JAX: the HLO of a function; and `make_jaxpr`.

Both accept any object with a shape and a dtype as an argument. Free named axes (`axis_env`) are
axes of replicas, as in `pmap`: collectives over them have replica groups, and the computation is
for one replica per combination of indices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError
from jaxprtool.formats import lowering
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.trees import filled
from jaxprtool.jaxcompat import Aval
from jaxprtool.loading.trace import BoundCall, bind_arguments, function_name, trace_call

#: With `tuple_args=None`, more arguments than this are passed as one tuple.
MOST_SEPARATE_ARGUMENTS = 100

Indices = int | Sequence[int]
AxisEnv = Sequence[tuple[Hashable, int]]


def make_jaxpr(
    fun: Callable,
    static_argnums: Indices = (),
    axis_env: AxisEnv | None = None,
    return_shape: bool = False,
) -> Callable:
    """Return a function from the arguments of `fun` to the closed jaxpr of `fun`.

    Arguments at positions in `static_argnums` are passed to `fun` unchanged; `axis_env` has named
    axes and their sizes. With `return_shape`, it returns a pair: the jaxpr, and a
    `jax.ShapeDtypeStruct` for each result, in the tree of the results. Raises the errors of
    `trace`.
    """

    @functools.wraps(fun)
    def make(*args: object, **kwargs: object) -> object:
        call = replace(bind_arguments(fun, args, kwargs, static_argnums), shared=None)
        program = trace_call(function_name(fun), fun, call, axis_env)
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

    static_argnums: positions of arguments that are passed to `fun` unchanged.
    axis_env: names and sizes of axes for collectives, `[('i', 4), ('j', 2)]`. in_parts, out_parts:
      prefixes of the trees of the positional arguments and of the results, with `PartitionSpec(2,
      1)`, the number of parts per dimension, or None for replicated values.
    backend: the platform to lower for (cpu, gpu, tpu), whether or not this machine has it.
    tuple_args: whether all arguments are passed as one tuple; None for more than a hundred.
    instantiate_const_outputs: without effect, as in JAX since 2021: constant results are always
    part of the computation.
    return_shape: whether to return a pair: the computation, and a `jax.ShapeDtypeStruct` for each
    result, in the tree of the results.
    donate_argnums: positions of arguments whose memory may be reused for results.

    The returned function raises ArgumentsError for arguments, parts and positions that do not fit
    `fun`, UserFunctionError if `fun` raises, UnsupportedError for a program that JAX cannot lower,
    and BackendError for an unknown platform.
    """

    @functools.wraps(fun)
    def compute(*args: object, **kwargs: object) -> object:
        call = replace(bind_arguments(fun, args, kwargs, static_argnums), shared=None)
        program = trace_call(function_name(fun), fun, call, axis_env)
        lowering.require_sizes(program)
        donated = _donated_leaves(donate_argnums, len(args), call)
        module = lowering.module(program, backend, donated=donated, keep_unused=True)
        jaxcompat.rename_module(module, f"xla_computation_{program.name}")
        if in_parts is not None or out_parts is not None:
            ins = _partitions("in_parts", in_parts, call.args, program.arg_names, program.in_avals)
            results = filled(program.out_tree, program.out_avals)
            outs = _partitions(
                "out_parts", out_parts, results, program.out_names, program.out_avals
            )
            jaxcompat.partition_module(module, ins, outs)
        count = len(program.in_avals)
        in_tuple = count > MOST_SEPARATE_ARGUMENTS if tuple_args is None else tuple_args
        with lowering.reported(program, "written as HLO"):
            built = jaxcompat.xla_computation(module, in_tuple, return_tuple=True)
        return (built, _shapes(program)) if return_shape else built

    return compute


def _shapes(program: Program) -> object:
    """Return the types of the results, in their tree."""
    return filled(
        program.out_tree,
        [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in program.out_avals],
    )


def _donated_leaves(positions: Indices, count: int, call: BoundCall) -> list[int]:
    """Return the flat positions of the arguments at `positions`, out of `count` arguments."""
    wanted = [positions] if isinstance(positions, int) else list(positions)
    for position in wanted:
        if not -count <= position < count:
            raise ArgumentsError(
                f"donate_argnums has {position}, but the function has {count} positional arguments"
            )
    chosen = sorted({call.position(position) for position in wanted})
    tree = jax.tree.structure((call.args, call.kwargs))
    args, _ = filled(tree, range(tree.num_leaves))
    return [leaf for position in chosen for leaf in jax.tree.leaves(args[position])]


# --- partitions -------------------------------------------------------------------------------


def _partitions(
    option: str, parts: object, tree: object, names: Sequence[str], avals: Sequence[Aval]
) -> list[str | None]:
    """Return the HLO sharding of each flat value; None for all if there are no parts."""
    if parts is None:
        return [None] * len(names)
    try:
        flat = jax.tree.leaves(
            jax.tree.broadcast(parts, tree, is_leaf=_is_partition), is_leaf=_is_partition
        )
    except (ValueError, TypeError) as error:
        detail = " ".join(str(error).split())[:200]
        raise ArgumentsError(f"{option} is not a prefix of the tree of values: {detail}") from error
    flat += [None] * (len(names) - len(flat))  # keyword arguments
    return [_sharding(option, *each) for each in zip(flat, names, avals, strict=True)]


def _is_partition(node: object) -> bool:
    return node is None or isinstance(node, PartitionSpec)


def _sharding(option: str, parts: Any, name: str, aval: Aval) -> str:
    """Return `{devices=[2,1]0,1}`: device numbers in row-major order over a grid of parts."""
    if parts is None:
        return "{replicated}"
    counts = [1 if part is None else part for part in parts] if _is_partition(parts) else [parts]
    if not _is_partition(parts) or not all(type(n) is int and n > 0 for n in counts):
        raise ArgumentsError(
            f"{option} has {parts} for {name}; it must be a PartitionSpec of numbers, or None",
            "PartitionSpec(2, 1) splits the first dimension in two; for mesh axes use jax.jit",
        )
    if len(counts) != len(aval.shape):
        raise ArgumentsError(
            f"{option} has {parts} for {name}, which has {len(aval.shape)} dimensions"
        )
    devices = ",".join(map(str, range(math.prod(counts))))
    return f"{{devices=[{','.join(map(str, counts))}]{devices}}}"
