"""The computation of a program as `xla_computation` of JAX 2022 made it.

Unlike the lowering of `jax.jit`, it keeps unused arguments, and its result is always a tuple.
Arguments and results may be split into parts, arguments donated, or passed as one tuple.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError
from jaxprtool.formats import lowering
from jaxprtool.ir.core.equations import type_of
from jaxprtool.ir.notation.partition_specs import SpecReader
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.trees import filled
from jaxprtool.jaxcompat import Aval

#: With `tuple_args=None`, more arguments than this are passed as one tuple.
MOST_SEPARATE_ARGUMENTS = 100


@dataclass(frozen=True)
class OptionNames:
    """How errors name options: by default as parameters of `xla_computation`."""

    in_parts: str = "in_parts"
    out_parts: str = "out_parts"
    donated: str = "donate_argnums"


@dataclass(frozen=True)
class XlaComputation:
    """The options of `xla_computation`.

    Attributes:
        in_parts: A prefix of the tree of positional arguments, with a `PartitionSpec` of numbers of
            parts, or None for replicated values.
        out_parts: The same for the results.
        tuple_args: Whether all arguments are passed as one tuple; None for more than a hundred.
        donated: The positions of arguments whose memory results may reuse, among the positional
            ones of the program.
        names: How errors name these options.
    """

    in_parts: object = None
    out_parts: object = None
    tuple_args: bool | None = False
    donated: tuple[int, ...] = ()
    names: OptionNames = OptionNames()

    def module(self, program: Program, platform: str | None = None) -> Any:
        """Return the StableHLO module of a program in JAX's MLIR bindings.

        Raises ArgumentsError for parts and positions that do not fit it, and the errors of
        `lowering.module`.
        """
        args, _ = filled(program.in_tree, range(len(program.arg_names)))
        for position in self.donated:
            if position >= len(args):
                raise ArgumentsError(
                    f"{self.names.donated} has {position}, but {program.name} has {len(args)} "
                    "positional arguments"
                )
        donated = jax.tree.leaves([args[position] for position in sorted(set(self.donated))])
        ins = _partitions(self.names.in_parts, self.in_parts, args, program.arguments)
        results = filled(program.out_tree, range(len(program.out_names)))
        outs = _partitions(self.names.out_parts, self.out_parts, results, program.results)
        module = lowering.module(program, platform, donated=donated, keep_unused=True)
        if self.in_parts is not None or self.out_parts is not None:
            jaxcompat.partition_module(module, ins, outs)
        return module

    def computation(self, program: Program, module: Any) -> Any:
        """Return the `XlaComputation` of jaxlib for a module of `module`."""
        lowering.require_sizes(program)
        count = len(program.in_avals)
        in_tuple = count > MOST_SEPARATE_ARGUMENTS if self.tuple_args is None else self.tuple_args
        with lowering.reported(program, "written as HLO"):
            return jaxcompat.xla_computation(module, in_tuple, return_tuple=True)


def result_types(program: Program) -> str:
    """Return the types of the results, in their tree: `{'y': f32[3], 'total': f32[]}`."""
    return repr(filled(program.out_tree, [_Shown(type_of(aval)) for aval in program.out_avals]))


class _Shown(str):
    """A text without quotes in the representation of a tree."""

    def __repr__(self) -> str:
        return str(self)


# --- parts --------------------------------------------------------------------------------------


def read_parts(text: str, option: str) -> object:
    """Return the tree of parts in a text: `(P(2, 1), None)`. It is never evaluated.

    Raises ArgumentsError for text that cannot be read, with its place.
    """
    positional, named = _PartReader(text, option).trees()
    if named or not positional:
        raise ArgumentsError(
            f"{option} takes parts by position, not '{text}'",
            "write (P(2, 1), None), with an entry for each argument or result",
        )
    return positional[0] if len(positional) == 1 else positional


class _PartReader(SpecReader):
    entries, examples = "numbers of parts", "P(2, 1)"

    def entry(self, node: ast.expr) -> Any:
        return self.source.literal(node)


def _partitions(
    option: str, parts: object, tree: object, values: Sequence[tuple[str, Aval]]
) -> list[str | None]:
    """Return the HLO sharding of each flat value; None for all if there are no parts."""
    if parts is None:
        return [None] * len(values)
    try:
        flat = jax.tree.leaves(
            jax.tree.broadcast(parts, tree, is_leaf=_is_partition), is_leaf=_is_partition
        )
    except (ValueError, TypeError) as error:
        detail = " ".join(str(error).split())[:200]
        raise ArgumentsError(f"{option} is not a prefix of the tree of values: {detail}") from error
    flat += [None] * (len(values) - len(flat))  # keyword arguments
    return [_sharding(option, part, *each) for part, each in zip(flat, values, strict=True)]


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
