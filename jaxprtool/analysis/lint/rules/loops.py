"""Loops that stack results nobody reads or are unrolled, and branches that all run under vmap."""

from __future__ import annotations

from collections.abc import Iterator

from jaxprtool.analysis.lint.findings import Found
from jaxprtool.analysis.lint.graph import Node, Value
from jaxprtool.analysis.lint.linted_program import LintedProgram, ends
from jaxprtool.analysis.lint.table import lint_rule
from jaxprtool.ir.basics.quantities import plural
from jaxprtool.ir.core.equations import type_of
from jaxprtool.ir.core.structured import Scan, copies_of_body
from jaxprtool.jaxcompat.source_locations import selects_branches

#: Branches of fewer operations may as well both run.
LEAST_OPERATIONS = 1000

_BAD_STACK = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[64]", "f32[100,64]")
    def f(start, xs):
        def step(h, x):
            h = jnp.tanh(h + x)
            return h, h

        _, hs = jax.lax.scan(step, start, xs)  # JT502
        return hs[-1]
"""

_GOOD_STACK = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[64]", "f32[100,64]")
    def f(start, xs):
        def step(h, x):
            return jnp.tanh(h + x), None

        h, _ = jax.lax.scan(step, start, xs)
        return h
"""

_BAD_BRANCH = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[16,64]", "f32[64,64]")
    def f(xs, w):
        def one(x):
            return jax.lax.cond(x[0] > 0, lambda x: jnp.tanh(x @ w), lambda x: x, x)  # JT503

        return jax.vmap(one)(xs)
"""

_GOOD_BRANCH = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[16,64]", "f32[64,64]")
    def f(xs, w):
        def one(x):
            return jax.lax.cond(x[0] > 0, lambda x: jnp.tanh(x @ w), lambda x: x, x)

        return jax.lax.map(one, xs)
"""


@lint_rule("JT502", "stack-for-last", bad=_BAD_STACK, good=_GOOD_STACK)
def stacks_for_last(program: LintedProgram) -> Iterator[Found]:
    """A scan stacks a result of every iteration, but only the last one is read."""
    for node in program.of("scan"):
        held = node.held
        if held is None or not isinstance(held.view, Scan) or not isinstance(held.view.length, int):
            continue
        length = held.view.length
        last = 0 if held.view.reverse else length - 1
        for value in node.outs[-len(held.view.ys) :] if held.view.ys else ():
            read = ends(value, ("same",))
            if length > 1 and read and all(_is_row(reader, last) for _, reader in read):
                yield Found(
                    node,
                    f"the stack {type_of(value.aval)} of {length:,} iterations is read only at the "
                    "last one",
                    "carry the value through the loop, and return the carry",
                    "{bytes} of rows that nothing reads",
                    bytes=value.bytes // length * (length - 1) * node.scope.runs,
                )


def _is_row(reader: Node | None, row: int) -> bool:
    """Return True if an equation slices this one row."""
    if reader is None or reader.name != "slice":
        return False
    params = reader.eqn.params
    return (params["start_indices"][0], params["limit_indices"][0]) == (row, row + 1)


@lint_rule("JT503", "branch-under-vmap", bad=_BAD_BRANCH, good=_GOOD_BRANCH)
def branches_under_vmap(program: LintedProgram) -> Iterator[Found]:
    """`vmap` turned a `cond` into a select, so that all branches run for every batch element.

    It does so if the predicate differs between batch elements.
    """
    seen = set[Node]()
    for node in program.of("select_n"):
        if node.is_backward or not selects_branches(node.eqn):
            continue
        if not any(word in program.expression(node) for word in ("cond(", "switch(")):
            continue  # JAX's own functions have branches inside too
        nodes = _only_for(node) - seen
        seen |= nodes
        operations = sum(each.operations for each in nodes)
        if operations >= LEAST_OPERATIONS:
            yield Found(
                node,
                f"vmap turned this cond into a select: all {len(node.ins) - 1} branches run",
                "use jax.lax.map, sort the batch by branch, or choose outside of vmap",
                "{flops} in branches that all run",
                flops=operations,
            )


def _only_for(select: Node, most: int = 10_000) -> set[Node]:
    """Return the equations whose results only the cases of a select depend on."""
    found = set[Node]()
    todo: list[Value] = list(select.ins[1:])
    while todo and len(found) < most:
        node = todo.pop().node
        if node is None or node in found:
            continue
        readers = [reader for out in node.outs for reader in out.live_readers]
        within = all(
            r in found or (r.name == "select_n" and r.ins[0] is select.ins[0]) for r in readers
        )
        if within and not any(out.is_result for out in node.outs):
            found.add(node)
            todo += node.ins
    return found


# --- unrolled scans -------------------------------------------------------------------------------

#: Fewer copies of a body, or equations in all, compile fast enough.
LEAST_COPIES, LEAST_EQUATIONS = 8, 100

#: The equations for each coefficient of a polynomial, which has no body: a product and a sum.
POLYNOMIAL = 2

_BAD_UNROLL = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[4,32]", "f32[256,32,32]")
    def f(x, layers):
        def layer(x, w):
            return jnp.tanh(x @ w) + jnp.sin(x), None

        return jax.lax.scan(layer, x, layers, unroll=64)[0]  # JT504
"""

_GOOD_UNROLL = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[4,32]", "f32[256,32,32]")
    def f(x, layers):
        def layer(x, w):
            return jnp.tanh(x @ w) + jnp.sin(x), None

        return jax.lax.scan(layer, x, layers, unroll=4)[0]
"""


@lint_rule("JT504", "unrolled-scan", bad=_BAD_UNROLL, good=_GOOD_UNROLL)
def unrolled_scans(program: LintedProgram) -> Iterator[Found]:
    """The option `unroll` of a loop makes XLA compile its body again and again.

    With `unroll=True`, XLA compiles it once for each iteration. `jax.lax.fori_loop` and
    `jnp.polyval` have the option too.
    """
    for node in program.where(lambda node: "unroll" in node.eqn.params):
        copies = copies_of_body(node.eqn)
        size = sum(1 for inner in node.inner for _ in inner.walk()) or POLYNOMIAL
        if copies >= LEAST_COPIES and copies * size >= LEAST_EQUATIONS:
            yield Found(
                node,
                f"unroll={node.eqn.params['unroll']} makes XLA compile this loop's "
                f"{plural(size, 'equation')} {copies:,} times",
                "unroll a few iterations, or none",
                f"{(copies - 1) * size:,} equations more to lower and compile",
            )
