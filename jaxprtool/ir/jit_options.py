"""What `jax.jit` was told about the function that a program was traced from.

It is kept by the names and types of arguments and results, so that no pass has to care for it:
what is said of the argument `x:f32[8]` holds as long as the program has an argument of this name
and type, and is forgotten where a pass drops `x` or makes it an `f32[32,8]`. What concerns the
function as a whole holds for whatever passes make of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxprtool.jaxcompat import TracedOptions

if TYPE_CHECKING:
    from jaxprtool.ir.program import Program


@dataclass(frozen=True)
class ValueOptions:
    """What is asked of one argument or result.

    `placement` is a sharding, a `jax.experimental.layout.Format`, or None.
    """

    name: str
    shape: tuple[Any, ...]
    dtype: Any
    placement: Any = None
    donated: bool = False


@dataclass(frozen=True)
class JitOptions:
    """The options of a function under `jax.jit`; values of which nothing is asked are left out."""

    arguments: tuple[ValueOptions, ...] = ()
    results: tuple[ValueOptions, ...] = ()
    compiler_options: tuple[tuple[str, Any], ...] = ()
    keep_unused: bool = False
    inline: Any = False

    @classmethod
    def from_traced(cls, program: Program, told: TracedOptions) -> JitOptions:
        """The options of a program of which JAX was told this, value by value."""
        placed = zip(program.arg_names, program.in_avals, told.in_placements, strict=True)
        given = zip(program.out_names, program.out_avals, told.out_placements, strict=True)
        arguments = (
            _options(*value, donated) for value, donated in zip(placed, told.donated, strict=True)
        )
        results = (_options(*value) for value in given)
        return cls(
            tuple(filter(_asks, arguments)),
            tuple(filter(_asks, results)),
            told.compiler_options,
            told.keep_unused,
            told.inline,
        )

    def of_arguments(self, program: Program) -> list[ValueOptions]:
        """What is asked of each flat argument of a program."""
        return _matched(self.arguments, program.arg_names, program.in_avals)

    def of_results(self, program: Program) -> list[ValueOptions]:
        """What is asked of each flat result of a program."""
        return _matched(self.results, program.out_names, program.out_avals)

    def keywords(self, program: Program) -> dict[str, Any]:
        """The keyword arguments for `jax.jit` of a function from flat arguments to a list."""
        arguments, results = self.of_arguments(program), self.of_results(program)
        told: dict[str, Any] = {"keep_unused": self.keep_unused, "inline": self.inline}
        told["donate_argnums"] = tuple(i for i, o in enumerate(arguments) if o.donated)
        if any(o.placement is not None for o in arguments):
            told["in_shardings"] = tuple(o.placement for o in arguments)
        if any(o.placement is not None for o in results):
            told["out_shardings"] = [o.placement for o in results]
        if self.compiler_options:
            told["compiler_options"] = dict(self.compiler_options)
        return told


def jit_keywords(program: Program) -> dict[str, Any]:
    """The keyword arguments for `jax.jit` of a program's flat function; none if it had no jit."""
    return {} if program.jit is None else program.jit.keywords(program)


def _options(name: str, aval: Any, placement: Any = None, donated: bool = False) -> ValueOptions:
    return ValueOptions(name, *_type(aval), placement, donated)


def _type(aval: Any) -> tuple[tuple[Any, ...], Any]:
    return tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", None)


def _asks(value: ValueOptions) -> bool:
    return value.donated or value.placement is not None


def _matched(
    known: Sequence[ValueOptions], names: Sequence[str], avals: Sequence[Any]
) -> list[ValueOptions]:
    by_value = {(value.name, value.shape, value.dtype): value for value in known}
    plain = [_options(*pair) for pair in zip(names, avals, strict=True)]
    return [by_value.get((value.name, value.shape, value.dtype), value) for value in plain]
