"""Pipelines: passes run one after the other, parsed from text such as `unzip, apply.dce`.

The text is a Python expression list that is parsed and never evaluated. Each item names a pass,
with its options as literals: `dce`, `batch(axis_size=8)`. After a pass that returns several
programs, `apply.dce` runs only on the one named `apply`, and a bare `dce` on each of them. `-O1`
names a whole pipeline (see `levels`), whose passes are repeated until nothing changes.

After every pass the result is type-checked, so that an error in a program names the pass that
caused it.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import chain
from typing import TYPE_CHECKING, Any

from jaxprtool.errors import (
    CheckError,
    JaxprToolError,
    PipelineError,
    PluginError,
    described,
    did_you_mean,
)
from jaxprtool.ir.notation import expressions
from jaxprtool.passes.framework import registry
from jaxprtool.passes.framework.base import Pass, build
from jaxprtool.passes.framework.levels import MAX_ITERATIONS, levels

if TYPE_CHECKING:
    from jaxprtool.ir.programs.program import Program, Programs


@dataclass(frozen=True)
class Step:
    """A step of a pipeline.

    Attributes:
        transform: A pass, or a named pipeline.
        only: The name of the program that it runs on; None for every program.
    """

    transform: Pass | Pipeline
    only: str | None = None

    def __str__(self) -> str:
        text = str(self.transform)
        return f"{self.only}.{text.removeprefix('-')}" if self.only else text


class Observer:
    """Callbacks before and after each pass on each program, to be overridden."""

    def before(self, step: Step, program: Program) -> None:
        """Do something before `step` runs on `program`; nothing by default."""

    def after(
        self, step: Step, program: Program, result: Program | Programs, seconds: float
    ) -> None:
        """Do something after `step` has run on `program`; nothing by default.

        Args:
            step: The step.
            program: The program that it ran on.
            result: The result.
            seconds: The time that it took, in seconds, without the type check.
        """


@dataclass(frozen=True)
class Pipeline:
    """Passes that run one after the other; called with a Program, it returns the rewritten one.

    Attributes:
        steps: The passes, in order.
        max_iterations: The maximum number of times that they run. They are repeated as long as
            they change anything.
        name: The name of the pipeline in `levels`, such as `O1`; else "".
    """

    steps: tuple[Step, ...] = ()
    max_iterations: int = 1
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> Pipeline:
        """Parse a pipeline.

        Args:
            text: Passes separated by commas, such as `batch(axis_size=8), dce`.

        Raises:
            PipelineError: If the text is malformed, or a pass or an option does not exist.
        """
        source = expressions.read(text, "the pipeline", PipelineError)
        if source.keywords:
            name, node = source.keywords[0]
            raise source.fail(node, f"option '{name}' has no pass", "write PASS(option=value)")
        return cls(tuple(_step(source, node) for node in source.args))

    def __str__(self) -> str:
        return f"-{self.name}" if self.name else ", ".join(map(str, self.steps))

    def passes(self) -> Iterator[Pass]:
        """Yield its passes, including those of the pipelines that it names."""
        for step in self.flat():
            assert isinstance(step.transform, Pass)
            yield step.transform

    def flat(self) -> list[Step]:
        """Return its steps, with the pipelines that it names replaced by their steps."""
        nested = (
            step.transform.flat() if isinstance(step.transform, Pipeline) else [step]
            for step in self.steps
        )
        return list(chain.from_iterable(nested))

    @property
    def bound_axes(self) -> tuple[tuple[Hashable, int], ...]:
        """The named axes that its passes bind, which must be free when a function is traced."""
        axes: dict[Hashable, int] = {}
        for step in reversed(self.steps):  # the first pass to bind a name determines its size
            axes.update(step.transform.bound_axes)
        return tuple(axes.items())

    @property
    def partitions(self) -> bool:
        """Whether one of its passes shards values over the Auto axes of the mesh that is set."""
        return any(step.transform.partitions for step in self.steps)

    def __call__(self, program: Program | Programs) -> Program | Programs:
        """Return the program after every pass, each of which is type-checked; see `run`."""
        return self.run(program)

    def run(
        self,
        program: Program | Programs,
        observer: Observer | None = None,
        *,
        check: bool = True,
    ) -> Program | Programs:
        """Run the passes.

        Args:
            program: The program, or several by name.
            observer: Called before and after each pass on each program.
            check: Type-check every equation after each pass. If False, check only the types of the
                results.

        Returns:
            The rewritten program, or several by name.

        Raises:
            CheckError: If a pass returns an ill-typed program.
            PipelineError: If a step names a program that does not exist.
        """
        observer = observer or Observer()
        result = program
        # The last argument of each step that it left unchanged.
        settled: dict[int, Program | Programs] = {}
        for _ in range(self.max_iterations):
            before = result
            for i, step in enumerate(self.steps):
                if settled.get(i) is not result:
                    given, result = result, _run_step(step, result, observer, check)
                    if result is given:
                        settled[i] = result
            if result is before:
                break
        return result


def _run_step(
    step: Step, state: Program | Programs, observer: Observer, check: bool
) -> Program | Programs:
    if not isinstance(state, Mapping):
        if step.only is not None:
            raise PipelineError(f"no program '{step.only}' for '{step}': there is only one program")
        return _run_pass(step, state, observer, check)
    if step.only is not None and step.only not in state:
        names = ", ".join(state)
        hint = did_you_mean(step.only, state)
        raise PipelineError(f"no program '{step.only}' for '{step}'; available: {names}", hint)
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
    if len(results) == len(state) and all(results[name] is state[name] for name in state):
        return state
    return type(state)(results)


def _run_pass(step: Step, program: Program, observer: Observer, check: bool) -> Program | Programs:
    """Return the result of a pass on a program: the same object if it changes nothing."""
    # Imports JAX, which parsing a pipeline does not.
    from jaxprtool.ir.programs.program import Program, check_results, type_check

    if isinstance(step.transform, Pipeline):
        return step.transform.run(program, observer, check=check)
    observer.before(step, program)
    start = time.perf_counter()
    result = _apply(step, program)
    seconds = time.perf_counter() - start
    if _unchanged(program, result):
        observer.after(step, program, program, seconds)
        return program
    preserves = step.transform.preserves
    try:
        if check:
            for each in result.values() if isinstance(result, Mapping) else [result]:
                type_check(each, program, preserves=preserves)
        elif preserves and not step.transform.symbolic and isinstance(result, Program):
            check_results(result, program)
    except CheckError as error:
        raise CheckError(f"pass '{step}' produced an invalid program: {error.message}") from error
    observer.after(step, program, result, seconds)
    return result


def _unchanged(program: Program, result: Program | Programs) -> bool:
    if result is program:
        return True
    if isinstance(result, Mapping) or result.jaxpr is not program.jaxpr:
        return False
    names = (field.name for field in fields(program) if field.name != "jaxpr")
    return all(getattr(program, name) == getattr(result, name) for name in names)


def _apply(step: Step, program: Program) -> Program | Programs:
    """Return the result of a pass. An error of a plug-in becomes a PluginError that names it."""
    from jaxprtool.ir.basics.backends import failure_to_start
    from jaxprtool.ir.programs.program import Program, Programs

    try:
        result = step.transform(program)
    except JaxprToolError:
        raise
    except (Exception, SystemExit) as error:
        if failure := failure_to_start(error):
            raise failure from error
        raise PluginError(
            f"pass '{step}' failed on {program.name}: {described(error)}",
            "see --traceback for the place",
        ) from error
    if not isinstance(result, Program | Programs):
        raise PluginError(f"pass '{step}' returned {type(result).__name__}, not a Program")
    return result


def _level(name: str) -> Pipeline:
    """Return the pipeline of a row of `levels`."""
    repeated, last = (
        Pipeline.parse(text).steps for text in (levels[name].repeated, levels[name].last)
    )
    if not last:
        return Pipeline(repeated, MAX_ITERATIONS, name)
    return Pipeline((Step(Pipeline(repeated, MAX_ITERATIONS)), *last), name=name)


def _step(source: expressions.Source, node: ast.expr) -> Step:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
        if not isinstance(node, ast.Name) or node.id not in levels:
            known = ", ".join(f"-{name}" for name in levels)
            raise source.fail(
                node, f"'-{source.segment(node)}' is not a pipeline", f"available: {known}"
            )
    call = node.func if isinstance(node, ast.Call) else node
    only, _, name = _dotted(call).rpartition(".")
    if not name:
        raise source.fail(
            node,
            f"'{source.segment(node)}' is not a pass",
            "write a pass as NAME or NAME(option=value)",
        )
    if name in levels and call is node:
        return Step(_level(name), only or None)
    cls = registry.find(name)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    if isinstance(node, ast.Call):
        args = [source.literal(a) for a in node.args]
        for keyword in node.keywords:
            if keyword.arg is None:
                raise source.fail(node, "unpacking with '**' is not allowed in the pipeline")
            if keyword.arg in kwargs:
                raise source.fail(node, f"option '{keyword.arg}' is given twice")
            kwargs[keyword.arg] = _option(source, keyword.arg in cls.expressions, keyword.value)
    return Step(build(cls, args, kwargs), only or None)


#: The kinds of expressions that an option may be if the pass parses its text itself.
_EXPRESSIONS = ast.Name | ast.Attribute | ast.Call | ast.Tuple | ast.List | ast.Dict


def _option(source: expressions.Source, is_expression: bool, node: ast.expr) -> Any:
    """Return the value of an option: a literal, or the text that the pass parses itself."""
    if is_expression and isinstance(node, _EXPRESSIONS) and not _is_literal(node):
        return ast.unparse(node)
    return source.literal(node)


def _is_literal(node: ast.expr) -> bool:
    """Return True if a node has no names: all of it is a number, a text, or a display of them."""
    return not any(isinstance(each, ast.Name) for each in ast.walk(node))


def _dotted(node: ast.expr) -> str:
    """Return a dotted name such as `init.forward.dce` from its nodes; empty for other nodes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (prefix := _dotted(node.value)):
        return f"{prefix}.{node.attr}"
    return ""
