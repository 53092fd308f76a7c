"""Derivatives of functions of flat arguments along given directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.ir.program import Program
from tests.programs.values import on_device


def is_inexact(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def places(program: Program) -> tuple[list[int], list[int]]:
    """Return the indices of the inexact arguments, and of the inexact results."""
    ins, outs = (
        [i for i, aval in enumerate(avals) if is_inexact(aval)]
        for avals in (program.in_avals, program.out_avals)
    )
    return ins, outs


def function_of(program: Program) -> Callable[[Sequence[Any]], list[Any]]:
    """Return a program as a function of the list of its flat arguments."""
    return lambda args: list(jaxcompat.jaxpr_as_fun(program.jaxpr)(*args))


@dataclass(frozen=True)
class Derivative:
    """A derivative of a function of flat arguments and results, along given directions.

    In reverse mode, directions are cotangents of the inexact results, and the derivative has a
    value for each inexact argument. In forward mode it is the other way round.
    """

    mode: str
    at: list[int]
    outs: list[int]

    def __call__(
        self, function: Callable[..., list[Any]], args: list[Any], directions: list[Any]
    ) -> list[Any]:
        def restricted(*xs: Any) -> list[Any]:
            full = list(args)
            for i, x in zip(self.at, xs, strict=True):
                full[i] = x
            results = function(full)
            return [jnp.asarray(results[i]) for i in self.outs]

        primals = [on_device(args[i]) for i in self.at]
        if self.mode == "reverse":
            return list(jax.vjp(restricted, *primals)[1](directions))
        return list(jax.jvp(restricted, primals, directions)[1])

    def directed(self, args: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """Return the values that have a direction."""
        reverse = self.mode == "reverse"
        return [(results if reverse else args)[i] for i in (self.outs if reverse else self.at)]

    def derived(self, args: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """Return the values that have a derivative."""
        return Derivative(_OTHER[self.mode], self.at, self.outs).directed(args, results)


_OTHER = {"reverse": "forward", "forward": "reverse"}


def random_direction(x: Any, rng: np.random.RandomState) -> Any:
    value = rng.uniform(0.5, 1.5, x.shape)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        value = value + 1j * rng.uniform(0.5, 1.5, x.shape)
    return np.asarray(value, x.dtype)


@dataclass(frozen=True)
class SecondDerivative(Derivative):
    """The derivative by all arguments of the derivative by the first, both in reverse mode."""

    def __call__(
        self, function: Callable[..., list[Any]], args: list[Any], directions: list[Any]
    ) -> list[Any]:
        first = Derivative("reverse", self.at[:1], self.outs)
        second = Derivative("reverse", self.at, [0])
        return second(lambda xs: first(function, xs, directions[:-1]), args, directions[-1:])

    def directed(self, args: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        return [*(results[i] for i in self.outs), args[self.at[0]]]

    def derived(self, args: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        return [args[i] for i in self.at]
