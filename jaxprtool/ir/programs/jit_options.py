"""The options of `jax.jit` for the function that a program was traced from.

They are stored by the names and types of arguments and results: an option of the argument
`x:f32[8]` holds as long as the program has an argument of this name and type. Options of the whole
function hold for every program that passes derive from it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxprtool.jaxcompat import Aval, DType, TracedOptions

#: The name and the abstract value of each argument, or result, in order.
Values = Sequence[tuple[str, Aval]]


@dataclass(frozen=True)
class ValueOptions:
    """The options of one argument or result.

    `placement` is a sharding, a `jax.experimental.layout.Format`, or None.
    """

    name: str
    shape: tuple[Any, ...]
    dtype: DType
    placement: Any = None
    donated: bool = False


@dataclass(frozen=True)
class JitOptions:
    """The options of a function under `jax.jit`; values without options are left out."""

    arguments: tuple[ValueOptions, ...] = ()
    results: tuple[ValueOptions, ...] = ()
    compiler_options: tuple[tuple[str, Any], ...] = ()
    keep_unused: bool = False
    inline: Any = False

    @classmethod
    def from_traced(cls, arguments: Values, results: Values, options: TracedOptions) -> JitOptions:
        """Return the options of a program from JAX's record of them, value by value."""
        taken = zip(arguments, options.in_placements, options.donated, strict=True)
        given = zip(results, options.out_placements, strict=True)
        return cls(
            tuple(filter(_has_options, (_options(*value, *asked) for value, *asked in taken))),
            tuple(filter(_has_options, (_options(*value, *asked) for value, *asked in given))),
            options.compiler_options,
            options.keep_unused,
            options.inline,
        )

    def placing(self, arguments: Values, placements: Sequence[Any]) -> JitOptions:
        """Return these options with placements of arguments that have none; None adds none."""
        pairs = zip(self.of_arguments(arguments), placements, strict=True)
        given = (
            replace(each, placement=each.placement if placement is None else placement)
            for each, placement in pairs
        )
        return replace(self, arguments=tuple(filter(_has_options, given)))

    def donating(self, arguments: Values, positions: Collection[int]) -> JitOptions:
        """Return these options with the arguments at some positions also donated."""
        asked = enumerate(self.of_arguments(arguments))
        given = (replace(each, donated=each.donated or i in positions) for i, each in asked)
        return replace(self, arguments=tuple(filter(_has_options, given)))

    def placed_by(self, change: Callable[[Any], Any]) -> JitOptions:
        """Return these options with a change of each sharding or layout."""
        arguments, results = (
            tuple(replace(each, placement=change(each.placement)) for each in values)
            for values in (self.arguments, self.results)
        )
        return replace(self, arguments=arguments, results=results)

    def of_arguments(self, arguments: Values) -> list[ValueOptions]:
        """Return the options of each of these arguments."""
        return _matched(self.arguments, arguments)

    def of_results(self, results: Values) -> list[ValueOptions]:
        """Return the options of each of these results."""
        return _matched(self.results, results)

    def keywords(self, arguments: Values, results: Values) -> dict[str, Any]:
        """Return the keyword arguments of `jax.jit` for a function of flat arguments."""
        taken, given = self.of_arguments(arguments), self.of_results(results)
        keywords: dict[str, Any] = {"keep_unused": self.keep_unused, "inline": self.inline}
        keywords["donate_argnums"] = tuple(i for i, o in enumerate(taken) if o.donated)
        if any(o.placement is not None for o in taken):
            keywords["in_shardings"] = tuple(o.placement for o in taken)
        if any(o.placement is not None for o in given):
            keywords["out_shardings"] = [o.placement for o in given]
        if self.compiler_options:
            keywords["compiler_options"] = dict(self.compiler_options)
        return keywords


def _options(name: str, aval: Aval, placement: Any = None, donated: bool = False) -> ValueOptions:
    return ValueOptions(name, *_type(aval), placement, donated)


def _type(aval: Aval) -> tuple[tuple[Any, ...], Any]:
    return tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", None)


def _has_options(value: ValueOptions) -> bool:
    return value.donated or value.placement is not None


def _matched(known: Sequence[ValueOptions], values: Values) -> list[ValueOptions]:
    by_value = {(value.name, value.shape, value.dtype): value for value in known}
    plain = [_options(*value) for value in values]
    return [by_value.get((value.name, value.shape, value.dtype), value) for value in plain]
