"""Calls of checks that can be pickled and sent to another Python; programs go as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

from jaxprtool.api.investigate.reduction.checks import Check, Values
from jaxprtool.formats.jaxpr.read import parse
from jaxprtool.formats.jaxpr.write import text
from jaxprtool.ir.programs.program import Program
from jaxprtool.passes.framework.registry import load_plugin

#: A function that can be pickled by its name.
_Function: TypeAlias = Callable[[Check, Program, Values], Any]


@dataclass(frozen=True)
class Call:
    """A call `function(check, program, values)`.

    Attributes:
        function: A function that can be pickled by its name.
        check: The check.
        program: The program.
        values: The known values of its arguments, by name.
        plugins: Files or modules with passes, to load before the call in another Python.
    """

    function: _Function
    check: Check
    program: Program
    values: Values
    plugins: Sequence[str]

    def __call__(self) -> Any:
        return self.function(self.check, self.program, self.values)

    def __reduce__(self) -> Any:
        x64 = bool(jax.config.jax_enable_x64)
        program = text(self.program, callbacks="stub")
        values = dict(self.values)
        return _received, (self.function, self.check, program, values, self.plugins, x64)


def _received(
    function: _Function,
    check: Check,
    program: str,
    values: Values,
    plugins: Sequence[str],
    x64: bool,
) -> Call:
    jax.config.update("jax_enable_x64", x64)
    for plugin in plugins:
        load_plugin(plugin)
    return Call(function, check, parse(program, "a candidate"), values, plugins)
