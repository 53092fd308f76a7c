"""Pipelines: passes run one after the other, read from text such as `unzip, apply.dce`.

The text is a Python expression list that is parsed and never evaluated. Each item names a pass,
with its options as literals: `dce`, `batch(axis_size=8)`. Where an earlier pass has made several
programs, `apply.dce` runs on the one called `apply` alone, and a bare `dce` on each of them.

After every pass the result is type-checked, so that a program is never ill typed without the name
of the pass that broke it.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxprtool import expressions
from jaxprtool.errors import (
    CheckError,
    JaxprToolError,
    PipelineError,
    PluginError,
    described,
    did_you_mean,
)
from jaxprtool.passes import registry
from jaxprtool.passes.base import Pass, build

if TYPE_CHECKING:
    from jaxprtool.ir.program import Program, Programs


@dataclass(frozen=True)
class Step:
    """A pass, and the name of the one program that it is for; None means every program."""

    transform: Pass
    only: str | None = None

    def __str__(self) -> str:
        return f"{self.only}.{self.transform}" if self.only else str(self.transform)


class Observer:
    """What someone who watches a pipeline overrides: called around each pass on each program."""

    def before(self, step: Step, program: Program) -> None:
        """`step` is about to run on `program`."""

    def after(
        self, step: Step, program: Program, result: Program | Programs, seconds: float
    ) -> None:
        """`step` has made `result` of `program` in `seconds`, the type check not counted."""


@dataclass(frozen=True)
class Pipeline:
    """Passes in order; called with a Program it gives the rewritten one (or several, by name)."""

    steps: tuple[Step, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Pipeline:
        """Read a pipeline. Raises PipelineError for what is malformed, and names what is near."""
        source = expressions.read(text, "the pipeline", PipelineError)
        if source.keywords:
            name, node = source.keywords[0]
            raise source.fail(
                node, f"option '{name}' belongs to no pass", "write PASS(option=value)"
            )
        return cls(tuple(_step(source, node) for node in source.args))

    def __str__(self) -> str:
        return ", ".join(map(str, self.steps))

    @property
    def bound_axes(self) -> tuple[tuple[Any, int], ...]:
        """The named axes that its passes bind: a function is traced for them with these free."""
        axes: dict[Any, int] = {}
        for step in reversed(self.steps):  # of one name, the first to bind it has its say
            axes.update(step.transform.bound_axes)
        return tuple(axes.items())

    def __call__(self, program: Program | Programs) -> Program | Programs:
        """The program after every pass, each of which is type-checked; see `run`."""
        return self.run(program)

    def run(
        self,
        program: Program | Programs,
        observer: Observer | None = None,
        *,
        check: bool = True,
    ) -> Program | Programs:
        """Run the passes, telling `observer` of each.

        Raises CheckError, unless `check` is False, if a pass gives an ill-typed program, and
        PipelineError if a step is for a program that is not there.
        """
        observer = observer or Observer()
        result = program
        for step in self.steps:
            result = _run_step(step, result, observer, check)
        return result


def _run_step(
    step: Step, state: Program | Programs, observer: Observer, check: bool
) -> Program | Programs:
    if not isinstance(state, Mapping):
        if step.only is not None:
            raise PipelineError(
                f"there is no program '{step.only}' for '{step}': there is only one"
            )
        return _run_pass(step, state, observer, check)
    if step.only is not None and step.only not in state:
        names = ", ".join(state)
        hint = did_you_mean(step.only, state)
        raise PipelineError(
            f"there is no program '{step.only}' for '{step}'; there are: {names}", hint
        )
    results: dict[str, Program] = {}
    for name, program in state.items():
        if step.only not in (None, name):
            results[name] = program
            continue
        made = _run_pass(step, program, observer, check)
        if isinstance(made, Mapping):
            results.update({f"{name}.{part}": each for part, each in made.items()})
        else:
            results[name] = made
    return type(state)(results)


def _run_pass(step: Step, program: Program, observer: Observer, check: bool) -> Program | Programs:
    from jaxprtool.ir.program import type_check  # imports JAX, which reading a pipeline does not

    observer.before(step, program)
    start = time.perf_counter()
    result = _apply(step, program)
    seconds = time.perf_counter() - start
    for each in result.values() if isinstance(result, Mapping) else [result]:
        try:
            if check:
                type_check(each)
        except CheckError as error:
            raise CheckError(f"pass '{step}' broke the program: {error.message}") from error
    observer.after(step, program, result, seconds)
    return result


def _apply(step: Step, program: Program) -> Program | Programs:
    """What a pass makes of a program. What a plug-in raises is its own fault, and says whose."""
    from jaxprtool.ir.program import Program, Programs

    try:
        result = step.transform(program)
    except JaxprToolError:
        raise
    except Exception as error:
        raise PluginError(
            f"pass '{step}' failed on {program.name}: {described(error)}", "--traceback shows where"
        ) from error
    if not isinstance(result, Program | Programs):
        raise PluginError(f"pass '{step}' gave no Program, but {type(result).__name__}")
    return result


def _step(source: expressions.Source, node: ast.expr) -> Step:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    call = node
    if isinstance(node, ast.Call):
        call = node.func
        args = [source.literal(a) for a in node.args]
        for keyword in node.keywords:
            if keyword.arg is None:
                raise source.fail(node, "unpacking with '**' is not allowed in the pipeline")
            if keyword.arg in kwargs:
                raise source.fail(node, f"option '{keyword.arg}' is given twice")
            kwargs[keyword.arg] = source.literal(keyword.value)
    only, _, name = _dotted(call).rpartition(".")
    if not name:
        raise source.fail(
            node, f"'{source.segment(node)}' is no pass", "a pass is NAME or NAME(option=value)"
        )
    return Step(build(registry.find(name), args, kwargs), only or None)


def _dotted(node: ast.expr) -> str:
    """`init.forward.dce` from its nodes; empty for anything but names joined by dots."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (prefix := _dotted(node.value)):
        return f"{prefix}.{node.attr}"
    return ""
