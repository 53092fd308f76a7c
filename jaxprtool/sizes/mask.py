"""`mask`, formerly in JAX, and `specialize`: functions on padded arrays, and at given sizes.

summed = jaxprtool.mask(jnp.sum, "f32[n]", "f32[]")
summed([jnp.array([3.0, 1.0, 4.0, 1.0, 5.0])], dict(n=3))    # 8.0
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np

from jaxprtool import Pass, Program
from jaxprtool.errors import ArgumentsError, PipelineError
from jaxprtool.extend import replace_jaxpr
from jaxprtool.extend.programs import CLOSED_OVER, TypedValue, filled, with_lifted
from jaxprtool.extend.sizes import (
    MOST_SIZES,
    check_sizes,
    check_symbols,
    chosen_sizes,
    found_sizes,
    masked,
    symbolic_sizes,
    symbols_of,
)
from jaxprtool.sizes.shapecheck import check_claim, traced_at_types

# --- mask -----------------------------------------------------------------------------------------
# `mask`, formerly in JAX: apply a function to padded arrays of any length.


def mask(fun: Callable, in_types: Any, out_types: Any = None) -> Callable:
    """Return `fun` as a function of padded arguments and their sizes.

    Call it with the arguments and the sizes, `masked(args, dict(n=3))`. Of an argument of type
    `f32[n,d]`, which may have any length, it uses the first 3 rows. The others never reach a result
    or a derivative. Sizes may be tracers, so it works under `jax.jit`, `jax.vmap` and `jax.grad`.
    `fun` is traced once for all sizes.

    Args:
        fun: The function.
        in_types: The types of the arguments, as for `shapecheck`: `"f32[n,d], i32[n]"`.
        out_types: The types of the results, which are checked; see `shapecheck`. If None, the
            logical types are returned instead.

    Returns:
        A function `masked(args, sizes, **kwargs)`. `args` is a list or a tuple of the positional
        arguments; a single argument of another type may be passed by itself. `sizes` maps each
        symbol along which the arguments are padded to its logical size; for other symbols, the
        arguments have no padding. The function returns the padded result if `out_types` is given,
        otherwise a pair: the padded result, and a tree of its logical types, each a
        `jax.ShapeDtypeStruct`. It raises ArgumentsError if arguments do not fit or a size is larger
        than the arguments, and CheckError if `out_types` are wrong.
    """
    return _MaskedFunction(fun, in_types, out_types)


class _MaskedFunction:
    """The function that `mask` returns, with a cache of its masked programs."""

    def __init__(self, fun: Callable, in_types: Any, out_types: Any):
        functools.update_wrapper(self, fun, updated=())
        self._fun, self._types, self._claim = fun, in_types, out_types
        self._program: Program | None = None
        self._masked: dict[Hashable, tuple[Program, Program]] = {}

    def __call__(self, args: Any, sizes: Mapping[str, Any], **kwargs: Any) -> Any:
        args = args if isinstance(args, list | tuple) else (args,)
        program, closed_over = self._traced()
        if closed_over:
            kwargs = {**kwargs, CLOSED_OVER: closed_over}
        leaves = program.matched(args, kwargs).leaves
        for (name, aval), value in zip(program.arguments, leaves, strict=True):
            TypedValue(name, value, aval).check_dtype(program.name)
        padded = found_sizes(program.name, program.arguments, list(map(np.shape, leaves)))
        _check_symbols(program, sizes)
        bounds = {symbol: padded[symbol] for symbol in sorted(sizes)}
        logical, program = self._programs(program, padded, bounds)
        result = program(*args, *(sizes[symbol] for symbol in bounds), **kwargs)
        any_padded = bool(symbolic_sizes(logical.out_avals))
        result, shapes = result if any_padded else (result, None)
        return result if self._claim is not None else (result, _types(logical, shapes))

    def _traced(self) -> tuple[Program, list[Any]]:
        """Return the program, and the tracers that it closes over, which are its last arguments."""
        if self._program is not None:
            return self._program, []
        program = traced_at_types(self._fun, self._types)
        if self._claim is not None:
            check_claim(program, self._claim)
        program, closed_over = _lifted(program)
        if not closed_over:  # otherwise the program is only valid for this call
            self._program = program
        return program, closed_over

    def _programs(
        self, program: Program, padded: Mapping[str, int], bounds: dict[str, int]
    ) -> tuple[Program, Program]:
        """Return the program specialized for all symbols but those in `bounds`, and its mask."""
        key = tuple(padded.items()), tuple(bounds)
        if program is not self._program or key not in self._masked:
            others = {symbol: n for symbol, n in padded.items() if symbol not in bounds}
            logical = program.specialized(others) if others else program
            check_sizes(logical, bounds)
            programs = logical, masked(logical, bounds)
            if program is not self._program:
                return programs
            if len(self._masked) == MOST_SIZES:
                del self._masked[next(iter(self._masked))]
            self._masked[key] = programs
        return self._masked[key]


def _lifted(program: Program) -> tuple[Program, list[Any]]:
    """Return a program in which constants that are tracers are arguments, and these tracers.

    The user may differentiate with respect to them, which JAX does not do for constants.
    """
    jaxpr = program.jaxpr
    consts = list(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    lifted = [pair for pair in consts if isinstance(pair[1], jax.core.Tracer)]
    if not lifted:
        return program, []
    kept = [pair for pair in consts if not isinstance(pair[1], jax.core.Tracer)]
    new = replace_jaxpr(
        jaxpr,
        constvars=[var for var, _ in kept],
        consts=[const for _, const in kept],
        invars=[*jaxpr.invars, *(var for var, _ in lifted)],
    )
    return with_lifted(program, new, len(lifted)), [const for _, const in lifted]


def _check_symbols(program: Program, sizes: Mapping[str, Any]) -> None:
    if not isinstance(sizes, Mapping) or not sizes:
        symbol = next(iter(program.symbols), "n")
        raise ArgumentsError(
            f"{program.name} takes sizes by symbol, such as {{'{symbol}': 3}}, not {sizes!r}"
        )
    check_symbols(f"mask: {program.name}", sizes, program.symbols)


def _types(program: Program, sizes: Any) -> Any:
    """Return the logical types of results."""
    shapes: Sequence[Any] = [aval.shape for aval in program.out_avals]
    if sizes is not None:
        result_shapes = program.out_tree.flatten_up_to(sizes)
        shapes = [
            old if new is None else new for old, new in zip(shapes, result_shapes, strict=True)
        ]
    types = [
        jax.ShapeDtypeStruct(tuple(map(_number, shape)), aval.dtype)
        for shape, aval in zip(shapes, program.out_avals, strict=True)
    ]
    return filled(program.out_tree, types)


def _number(size: Any) -> Any:
    return size if isinstance(size, jax.core.Tracer) else int(size)


# --- specialize -----------------------------------------------------------------------------------
# specialize: replace the symbols in the types of a program's arguments by sizes.
#
# program.apply("specialize(n=512)")
# program.apply("specialize(n=512, m='2*k')")


@dataclass(frozen=True)
class Specialize(Pass):
    """Replace symbolic sizes by numbers, as if the function were traced at these sizes.

    Symbols without a size stay symbolic, and so do those in an expression. A size must satisfy the
    constraints of the symbols (`jax.export.symbolic_shape`).

    Args:
        sizes: The size of each symbol, by its name: a number, n=512, or an expression of other
            symbols, m='2*n'.

    Raises:
        ArgumentsError: If a name is not a symbol of the program, or a size violates a constraint.
        UnsupportedError: If an equation would have a negative size.

    Note:
        JAX traces some functions to other equations if it knows a size (the number of iterations of
        a fori_loop, the gradient of a slice). The result keeps the equations of the symbolic trace,
        which compute the same.

    Example:
        def f(x):
            return x.mean()

        $ jaxprtool opt f.py:f --args "f32[n]" -p "specialize(n=4)"
        { lambda ; a:f32[4]. let
            b:f32[] = reduce_sum[axes=(0,) out_sharding=None] a
            c:f32[] = div b 4.0:f32[]
          in (c,) }
    """

    name: ClassVar[str] = "specialize"
    group: ClassVar[str] = "transform"
    symbolic: ClassVar[bool] = True
    more_options: ClassVar[str] = "sizes"

    sizes: dict[str, int | str]

    def __post_init__(self) -> None:
        if not self.sizes:
            raise PipelineError(
                "pass 'specialize' needs the size of a symbol", "specialize(n=512) sets n to 512"
            )

    def __call__(self, program: Program) -> Program:
        what = f"specialize: {program.name}"
        return program.specialized(chosen_sizes(what, symbols_of(program.jaxpr), self.sizes))
