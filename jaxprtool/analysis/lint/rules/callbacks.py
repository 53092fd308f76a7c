"""Calls of Python functions from inside loops, and from branches under vmap."""

from __future__ import annotations

from collections.abc import Iterator

from jaxprtool.analysis.cost.trip_counts import trip_count
from jaxprtool.analysis.lint.findings import Found
from jaxprtool.analysis.lint.graph import Node, Scope
from jaxprtool.analysis.lint.linted_program import LintedProgram
from jaxprtool.analysis.lint.table import lint_rule
from jaxprtool.ir.core.regions import Regions
from jaxprtool.jaxcompat.source_locations import selects_branches

_BAD = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[64]", "f32[100,64]")
    def f(start, xs):
        def step(h, x):
            h = jnp.tanh(h + x)
            jax.debug.print("h {}", h)  # JT601
            return h, None

        return jax.lax.scan(step, start, xs)[0]
"""

_GOOD = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[64]", "f32[100,64]")
    def f(start, xs):
        def step(h, x):
            return jnp.tanh(h + x), None

        h, _ = jax.lax.scan(step, start, xs)
        jax.debug.print("h {}", h)
        return h
"""


@lint_rule("JT601", "callback-in-loop", bad=_BAD, good=_GOOD)
def callbacks_in_loops(program: LintedProgram) -> Iterator[Found]:
    """A loop prints or calls a Python function in each iteration.

    In each iteration, the device sends values to the host, and may have to wait for it.
    """
    for node in program.where(lambda node: node.traits.callback):
        loops, in_branch = _around(node.scope)
        runs, known = node.scope.runs, all(trip_count(loop) is not None for loop in loops)
        if not loops or (known and runs < 2):
            continue
        calls = f"at most {runs:,}" if in_branch else f"{runs:,}"
        iterations = "some iterations" if in_branch else "each iteration"
        yield Found(
            node,
            f"{node.name} in a loop calls the host "
            + (f"{calls} times" if known else f"in {iterations}"),
            "call it once after the loop, on stacked values, or remove it",
            f"{calls} calls to the host, which send it {{bytes}}"
            if known
            else f"a call to the host in {iterations}, which sends it {{bytes}}",
            bytes=sum(value.bytes for value in (*node.ins, *node.outs)) * runs,
        )


def _around(scope: Scope) -> tuple[list[Regions], bool]:
    """Return the loops around a scope, and whether it is in a branch that may not be taken."""
    loops, in_branch = list[Regions](), False
    while scope.parent is not None and scope.parent.held is not None:
        held = scope.parent.held
        if held.kind == "loop":
            loops.append(held)
        in_branch |= held.kind == "branch"
        scope = scope.parent.scope
    return loops, in_branch


_BAD_EFFECT = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[16]")
    def f(xs):
        def one(x):
            warn = lambda: jax.debug.print("negative: {}", x)
            jax.lax.cond(x < 0, warn, lambda: None)  # JT603
            return jnp.sqrt(jnp.abs(x))

        return jax.vmap(one)(xs)
"""

_GOOD_EFFECT = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[16]")
    def f(xs):
        warn = lambda: jax.debug.print("negative: {}", xs)
        jax.lax.cond((xs < 0).any(), warn, lambda: None)
        return jax.vmap(lambda x: jnp.sqrt(jnp.abs(x)))(xs)
"""


@lint_rule("JT603", "effect-under-vmap", bad=_BAD_EFFECT, good=_GOOD_EFFECT, kind="wrong")
def effects_under_vmap(program: LintedProgram) -> Iterator[Found]:
    """A branch of a `cond` that `vmap` turned into a select prints, or calls a Python function.

    All branches run for every batch element, also those that the predicate does not choose, so the
    call is unconditional.
    """
    if not any(True for _ in program.where(lambda node: node.traits.callback)):
        return
    for scope in program.top.inside():
        for node, cond in _in_selected_branches(program, scope):
            yield Found(
                program.frame(cond),
                f"vmap turned this cond into a select: {node.name} runs for every batch element",
                "use jax.lax.map, or call it outside of vmap, on the whole batch",
                "a call whether or not its branch is chosen, which sends the host {bytes}",
                bytes=sum(value.bytes for value in node.ins) * node.scope.runs,
            )


def _in_selected_branches(program: LintedProgram, scope: Scope) -> Iterator[tuple[Node, Node]]:
    """Yield the callbacks in branches that all run, each with an equation of the `cond`.

    vmap computes the predicate of each branch, and then the branch. The frames of a branch end at
    its function, while what follows the `cond` is in the function that calls it.
    """
    cond, callers = None, set[tuple[str, str]]()
    for node in scope.nodes:
        if selects_branches(node.eqn):
            cond, callers = node, _functions(program, node)
        elif cond is not None and not callers.isdisjoint(_functions(program, node)):
            cond = None
        elif cond is not None and "cond(" in program.expression(cond).replace("switch(", "cond("):
            inside = (node, *(each for inner in node.inner for each in inner.walk()))
            yield from ((each, cond) for each in inside if each.traits.callback)


def _functions(program: LintedProgram, node: Node) -> set[tuple[str, str]]:
    return {(frame.file, frame.function) for frame in program.frames.stack(node.path)}
