"""Python loops that become as many copies of their body."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from jaxprtool import jaxcompat
from jaxprtool.analysis.lint.findings import Found
from jaxprtool.analysis.lint.graph import Node, Scope
from jaxprtool.analysis.lint.linted_program import LintedProgram
from jaxprtool.analysis.lint.table import lint_rule
from jaxprtool.ir.basics.quantities import plural
from jaxprtool.ir.core.traits import traits
from jaxprtool.jaxcompat.source_locations import UserFrame

#: Fewer iterations, or equations in all, compile fast enough.
LEAST_ITERATIONS, LEAST_EQUATIONS = 8, 200

#: The share of the equations of a loop that must repeat.
SHARE = 0.9

_BAD = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[32,64,64]", "f32[8,64]")
    def f(layers, x):
        for w in layers:  # JT501
            x = x + jax.nn.gelu(x @ w)
        return x
"""

_GOOD = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[32,64,64]", "f32[8,64]")
    def f(layers, x):
        def layer(x, w):
            return x + jax.nn.gelu(x @ w), None

        return jax.lax.scan(layer, x, layers)[0]
"""


@lint_rule("JT501", "unrolled-loop", bad=_BAD, good=_GOOD)
def unrolled_loops(program: LintedProgram) -> Iterator[Found]:
    """A Python loop is unrolled into the same equations again and again.

    JAX traces and lowers them once per iteration, and XLA compiles them all. The time that XLA
    takes often grows faster than the number of iterations.
    """
    for scope in program.top.inside():
        if len(scope.nodes) >= LEAST_EQUATIONS:
            yield from _in_scope(program, scope)


def _in_scope(program: LintedProgram, scope: Scope) -> Iterator[Found]:
    by_loop = defaultdict[tuple[str, int], list[Node]](list)
    for node in scope.nodes:
        if node.is_live and not node.is_backward and not _is_outlined(node):
            for place in _loops(program, node):
                by_loop[place].append(node)
    taken = set[Node]()
    for (file, line), nodes in sorted(by_loop.items(), key=lambda each: -len(each[1])):
        count = _iterations(nodes)
        if not count or len(taken.intersection(nodes)) * 2 > len(nodes):
            continue  # a loop in the iterations of another
        taken.update(nodes)
        each = len(nodes) // count
        yield Found(
            UserFrame(file, line, "", 0, line, 0),
            f"a Python loop is unrolled: {count} iterations of {plural(each, 'equation')}",
            "use jax.lax.scan over stacked values, or the pass roll (-p roll)",
            f"{len(nodes) - each:,} equations more to trace, lower and compile",
        )


def _is_outlined(node: Node) -> bool:
    """Return True if an equation is in a call that XLA compiles once, by the pass `outline`."""
    calls = (eqn for eqn in node.around if traits(eqn).call == "jit")
    return any(jaxcompat.mark_of(eqn) != "plain" for eqn in calls)


def _loops(program: LintedProgram, node: Node) -> dict[tuple[str, int], None]:
    """Return the loops of the user's files that lead to an equation, by file and line."""
    frames = program.user_frames(node)
    return {(f.file, line): None for f in frames for line in program.sources.loops(f)}


def _iterations(nodes: list[Node]) -> int:
    """Return how often most equations of a loop repeat; 0 if too few do, or too rarely."""
    if len(nodes) < LEAST_EQUATIONS:
        return 0
    counts = Counter(_key(node) for node in nodes)
    by_count = Counter[int]()
    for number in counts.values():
        by_count[number] += number
    count = max(by_count, key=lambda number: by_count[number])
    if count < LEAST_ITERATIONS:
        return 0
    # The first iteration has fewer equations in a gradient, and some repeat in each iteration.
    alike = sum(total for number, total in by_count.items() if number >= LEAST_ITERATIONS)
    return count if alike >= SHARE * len(nodes) else 0


def _key(node: Node) -> tuple[object, ...]:
    types = tuple((value.shape, value.dtype) for value in node.outs)
    return node.eqn.source_info.traceback, node.eqn.primitive, types
