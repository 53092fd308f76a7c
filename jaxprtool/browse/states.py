"""The states of a program: as traced, and after each pass that changed it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from jaxprtool import Program, Programs
from jaxprtool.extend import top_jaxpr
from jaxprtool.extend.analysis import Changes, changes
from jaxprtool.extend.pipelines import Observer, Step


@dataclass(eq=False)
class State:
    """A program between two passes.

    Attributes:
        label: The pass that produced it, or its name.
        program: The program.
        before: The state from which it was produced; None if traced.
        after: The states produced from it.
    """

    label: str
    program: Program
    before: State | None = None
    after: list[State] = field(default_factory=list)

    @cached_property
    def changes(self) -> Changes:
        """The changes of the pass that produced this state."""
        if self.before is None:
            return Changes(frozenset(), frozenset())
        return changes(top_jaxpr(self.before.program), top_jaxpr(self.program))

    @cached_property
    def marks(self) -> Mapping[int, str]:
        """The marks of equations, by `id`, that a pass added or will remove."""
        removed = [each.changes.removed for each in self.after]
        goes = removed[0].intersection(*removed) if removed else frozenset()
        added = self.changes.added
        return {**dict.fromkeys(goes, "-"), **{k: "±" if k in goes else "+" for k in added}}

    @property
    def is_compared(self) -> bool:
        """Whether `marks` and `changes` are computed, which takes time for large programs."""
        return "marks" in vars(self)


class Recorder(Observer):
    """Records the states of the programs in a pipeline, in order of creation."""

    def __init__(self, program: Program):
        self.states = [State("traced", program)]
        self._latest = {id(program): self.states[0]}

    def after(
        self, step: Step, program: Program, result: Program | Programs, seconds: float
    ) -> None:
        before = self._latest[id(program)]
        if result is program:
            return
        several = isinstance(result, Mapping)
        for name, each in result.items() if isinstance(result, Mapping) else [("", result)]:
            state = State(f"{step} {name}" if several else str(step), each, before)
            before.after.append(state)
            self.states.append(state)
            self._latest[id(each)] = state
