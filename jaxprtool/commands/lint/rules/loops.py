"""Loops that stack what nobody reads, call Python or are unrolled; branches under vmap."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxprtool.commands.cost.rules import trip_count
from jaxprtool.commands.lint.graph import LintedProgram, Node, Scope, Value, ends, origin
from jaxprtool.commands.lint.lint import Found, lint_rule
from jaxprtool.ir.documents import plural
from jaxprtool.ir.equations import type_of
from jaxprtool.ir.regions import Regions, Scan, copies_of_body
from jaxprtool.jaxcompat.source_locations import UserFrame, selects_branches

# --- loops ----------------------------------------------------------------------------------------
# Loops that stack results nobody reads or are unrolled, and branches that all run under vmap.

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


_BAD_HISTORY = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[64]", "f32[64,64]", "f32[256,64]")
    def f(h, w, xs):
        def step(carry, inputs):
            h, history = carry
            t, x = inputs
            h = jnp.tanh(h @ w + x)
            history = history.at[t].set(h)
            seen = jnp.arange(256) <= t
            scores = jnp.where(seen, history @ x, -1e9)  # JT505
            return (h, history), jax.nn.softmax(scores) @ history

        start = h, jnp.zeros((256, 64))
        return jax.lax.scan(step, start, (jnp.arange(256), xs))[1]
"""

_GOOD_HISTORY = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[64]", "f32[64,64]", "f32[256,64]")
    def f(h, w, xs):
        def step(h, x):
            h = jnp.tanh(h @ w + x)
            return h, h

        _, history = jax.lax.scan(step, h, xs)
        seen = jnp.tril(jnp.ones((256, 256), bool))
        scores = jnp.where(seen, xs @ history.T, -1e9)
        return jax.nn.softmax(scores) @ history
"""

#: Rows that nothing reads and that are smaller together cost next to nothing.
LEAST_STACK_BYTES = 1 << 10


@lint_rule("JT502", "stack-for-last", bad=_BAD_STACK, good=_GOOD_STACK)
def stacks_for_last(program: LintedProgram) -> Iterator[Found]:
    """A scan stacks a result of every iteration, but only the last one is read."""
    for node in program.of("scan"):
        loop = node.held
        if loop is None or not isinstance(loop.view, Scan) or not isinstance(loop.view.length, int):
            continue
        length = loop.view.length
        last = 0 if loop.view.reverse else length - 1
        for value in node.outs[-len(loop.view.ys) :] if loop.view.ys else ():
            unread = (value.bytes - value.bytes // max(length, 1)) * node.scope.runs
            read = ends(value, ("same",))
            if (
                unread >= LEAST_STACK_BYTES
                and read
                and all(_is_row(reader, last) for _, reader in read)
            ):
                yield Found(
                    node,
                    f"the stack {type_of(value.aval)} of {length:,} iterations is read only at the "
                    "last one",
                    "carry the value through the loop, and return the carry",
                    "{bytes} of rows that nothing reads",
                    bytes=unread,
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
        operations = sum(case_node.operations for case_node in nodes)
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
    nodes = set[Node]()
    todo: list[Value] = list(select.ins[1:])
    while todo and len(nodes) < most:
        node = todo.pop().node
        if node is None or node in nodes:
            continue
        readers = [reader for out in node.outs for reader in out.live_readers]
        within = all(
            r in nodes or (r.name == "select_n" and r.ins[0] is select.ins[0]) for r in readers
        )
        if within and not any(out.is_result for out in node.outs):
            nodes.add(node)
            todo += node.ins
    return nodes


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


#: Loops of fewer iterations keep a window, and a smaller history costs next to nothing.
LEAST_HISTORY, LEAST_HISTORY_BYTES = 16, 1 << 20


@lint_rule("JT505", "history-in-loop", bad=_BAD_HISTORY, good=_GOOD_HISTORY)
def histories(program: LintedProgram) -> Iterator[Found]:
    """A loop carries a row for each iteration, and each iteration goes through all of them.

    With T iterations these are T² rows. The rule reports what can be avoided: a carry that is
    copied to add a row; a product of all rows, of which one is new; and what no later iteration
    depends on, so that it can be computed after the loop for all iterations at once.
    """
    for node in program.of("scan"):
        view = None if node.held is None or node.is_backward else node.held.view
        if not isinstance(view, Scan) or not isinstance(view.length, int):
            continue
        body, first = node.inner[0], len(view.consts)
        for number in range(len(view.carry)):
            history = _history(body.arguments[first + number], body.results[number], view.length)
            if history is not None:
                yield from _of_history(history, body.results[: len(view.carry)], view.length)


class _History(NamedTuple):
    """A carry to which each iteration adds a row.

    Attributes:
        old: The carry.
        new: The carry of the next iteration.
        axis: The axis of the rows.
        copying: The equation that copies all rows; None if the row is written in place.
    """

    old: Value
    new: Value
    axis: int
    copying: Node | None


def _history(old: Value, new: Value, length: int) -> _History | None:
    """Return a carry to which each iteration adds a row; None for any other."""
    added, axis = origin(new).node, None
    copying = _joined(added, old, 1)
    if added is not None and added.traits.updates and added.eqn.params.get("update_jaxpr") is None:
        base, numbers = origin(added.ins[0]), added.eqn.params.get("dimension_numbers")
        copying = _joined(base.node, old, 2)  # of `roll`
        axes = [i for i, size in enumerate(added.ins[1].shape) if size != old.shape[i]]
        if numbers is not None:  # a scatter
            axes = [*numbers.scatter_dims_to_operand_dims]
        axis = axes[0] if base is old and len(axes) == 1 else None
    if copying is not None:
        axis = copying.eqn.params["dimension"]
    if axis is None or length < LEAST_HISTORY or old.shape[axis] < length:
        return None
    return _History(old, new, axis, copying)


def _joined(node: Node | None, old: Value, count: int) -> Node | None:
    """Return an equation if it joins two values, so many of which are parts of another one."""
    if node is None or node.name != "concatenate" or len(node.ins) != 2:
        return None
    parts = [origin(part, ("same", "part")) for part in node.ins]
    return node if parts.count(old) == count else None


def _of_history(history: _History, carries: list[Value], length: int) -> Iterator[Found]:
    """Yield the first finding in a loop with a history."""
    old, rows = history.old, history.old.shape[history.axis]
    what, count = f"all {rows:,} rows of {type_of(old.aval)}", f"each of {length:,} iterations"
    if old.scope is None or old.bytes * old.scope.runs < LEAST_HISTORY_BYTES:
        return
    if history.copying is not None:
        yield Found(
            history.copying,
            f"{count} copies {what} to add one",
            "write it in place, history.at[t].set(row), or return it: scan stacks what it returns",
            "{bytes} that are copied",
            bytes=old.bytes * old.scope.runs,
        )
        return
    needed = {value.node for value in _behind(carries)}
    for value in (old, history.new):
        for form, reader in ends(value, ("same", "cast")):
            if reader is None or not (reader.traits.bilinear or reader.traits.reduces):
                continue
            if reader not in needed:
                yield Found(
                    reader,
                    f"{count} reads {what}, and no later one depends on it",
                    "return the row: scan stacks what it returns. Then compute this after the "
                    "loop, for all iterations at once",
                    "{bytes} that are read, most of them again and again",
                    bytes=old.bytes * old.scope.runs,
                )
                return
            if _is_row_wise(reader, form, history.axis):
                yield Found(
                    reader,
                    f"{count} multiplies {what}, of which one is new",
                    "multiply the new row, and carry the products",
                    "{flops} on rows that were multiplied before",
                    flops=reader.operations // rows * (rows - 1),
                )
                return


def _behind(values: list[Value]) -> list[Value]:
    """Return the values of a scope that some of its values are computed from."""
    reached = dict.fromkeys(values)
    todo = [*values]
    for value in todo:
        for other in () if value.node is None else value.node.ins:
            if other not in reached:
                reached[other] = None
                todo.append(other)
    return todo


def _is_row_wise(product: Node, form: Value, axis: int) -> bool:
    """Return True for a product of each row with the same operand in all iterations."""
    if product.name != "dot_general" or form not in product.ins:
        return False
    side = product.ins.index(form)
    contracted, batch = product.eqn.params["dimension_numbers"]
    other = product.ins[1 - side]
    is_same = other.outer is not None or (other.node is None and other.constant is not None)
    return is_same and axis not in (*contracted[side], *batch[side])


# --- copied carries -------------------------------------------------------------------------------
# Carries that XLA copies in each iteration.

#: Smaller carries, and loops that copy less in all, are not worth a finding.
LEAST_CARRY_BYTES, LEAST_COPIED_BYTES = 1 << 10, 1 << 20

#: The copies that XLA for CPUs makes in an iteration: one to read from, and one to update.
COPIES = 2

_BAD_CARRY = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[10000]", "i32[1000]")
    def f(x, indices):
        def step(x, i):
            old = x[i]
            return x.at[i].set(0.0), old  # JT506

        return jax.lax.scan(step, x, indices)
"""

_GOOD_CARRY = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[10000]", "i32[1000]")
    def f(x, indices):
        def step(x, i):
            x = x.at[i].multiply(0.5)
            return x, x[i]

        return jax.lax.scan(step, x, indices)
"""


@lint_rule("JT506", "carry-copied", bad=_BAD_CARRY, good=_GOOD_CARRY)
def copied_carries(program: LintedProgram) -> Iterator[Found]:
    """A scan writes elements of its carry, and reads the old carry for something else.

    XLA updates a carry in place only if all reads of the old one come first. A read that the write
    does not depend on may come later, so XLA for CPUs copies the whole carry twice in each
    iteration. On TPUs it does so less often: `memory --compiled --backend tpu:v5e:2x2` names the
    copies. From JAX 0.12 on, `jax.lax.optimization_barrier` of the read and the index puts the read
    first.
    """
    for node in program.of("scan"):
        view = None if node.held is None or node.is_backward else node.held.view
        if not isinstance(view, Scan) or not isinstance(view.length, int):
            continue
        if copies_of_body(node.eqn) != 1 or view.length < LEAST_HISTORY:
            continue
        body, first = node.inner[0], len(view.consts)
        for number in range(len(view.carry)):
            old, new = body.arguments[first + number], body.results[number]
            copied = COPIES * old.bytes * body.runs
            write = _first_update(new, old)
            is_large = old.bytes >= LEAST_CARRY_BYTES and copied >= LEAST_COPIED_BYTES
            if write is None or not (is_large and _is_native(old.dtype)):
                continue
            read = _unordered_read(node, old, write, number)
            if read is not None:
                frame = program.frame(read)
                place = "" if frame is None else f" at line {frame.line}"
                yield Found(
                    write,
                    f"XLA copies the carry {type_of(old.aval)} {COPIES} times in each of "
                    f"{view.length:,} iterations: {read.name}{place} needs its old elements, and "
                    "the write does not wait for it",
                    "read the new carry, or, from JAX 0.12 on, let the index wait: old, i = "
                    "jax.lax.optimization_barrier((old, i))",
                    "{bytes} that XLA for CPUs copies",
                    bytes=copied,
                )


def _is_native(dtype: Any) -> bool:
    """Return True for a dtype that CPUs compute in; XLA converts others such as bf16 first."""
    return isinstance(dtype, np.dtype) and dtype.isbuiltin == 1


def _first_update(new: Value, old: Value) -> Node | None:
    """Return the first equation that writes elements of a carry; None if others change it."""
    write: Node | None = None
    value = origin(new, ("same",))
    while value is not old:
        write = value.node
        if write is None or not write.traits.updates:
            return None
        value = origin(write.ins[0], ("same",))
    return write


def _unordered_read(loop: Node, old: Value, write: Node, number: int) -> Node | None:
    """Return an equation that reads an old carry, and that a write to it does not depend on.

    Only equations that another result of the loop depends on count.

    Args:
        loop: The loop.
        old: The carry.
        write: The equation that writes to it.
        number: The number of the carry.
    """
    before = {value.node for value in _behind([*write.ins])}
    for read in old.live_readers:
        if read is write or read in before or read.inner or read.name == "optimization_barrier":
            continue
        if any(_is_used(loop, i) for i in _reached(read, write, loop) if i != number):
            return read
    return None


def _reached(read: Node, write: Node, loop: Node) -> Iterator[int]:
    """Yield the numbers of the results of a loop's body that depend on an equation."""
    values = set(read.outs)
    for node in loop.inner[0].nodes:
        if node is not write and not values.isdisjoint(node.ins):
            values |= {*node.outs}
    return (i for i, result in enumerate(loop.inner[0].results) if result in values)


def _is_used(loop: Node, number: int) -> bool:
    """Return True if a result of a loop is read outside of it, or is one of the program's."""
    result = loop.outs[number]
    return bool(result.live_readers) or (result.is_result and loop.scope.parent is None)


# --- callbacks ------------------------------------------------------------------------------------
# Calls of Python functions from inside loops, and from branches under vmap.

_CALLBACK_BAD = """
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

_CALLBACK_GOOD = """
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


@lint_rule("JT601", "callback-in-loop", bad=_CALLBACK_BAD, good=_CALLBACK_GOOD)
def callbacks_in_loops(program: LintedProgram) -> Iterator[Found]:
    """A loop prints or calls a Python function in each iteration.

    In each iteration, the device sends values to the host, and may have to wait for it.
    """
    for node in program.where(lambda node: node.traits.callback):
        loops, in_branch = _around(node.scope)
        runs, is_counted = node.scope.runs, all(trip_count(loop) is not None for loop in loops)
        if not loops or (is_counted and runs < 2):
            continue
        calls = f"at most {runs:,}" if in_branch else f"{runs:,}"
        iterations = "some iterations" if in_branch else "each iteration"
        yield Found(
            node,
            f"{node.name} in a loop calls the host "
            + (f"{calls} times" if is_counted else f"in {iterations}"),
            "call it once after the loop, on stacked values, or remove it",
            f"{calls} calls to the host, which send it {{bytes}}"
            if is_counted
            else f"a call to the host in {iterations}, which sends it {{bytes}}",
            bytes=sum(value.bytes for value in (*node.ins, *node.outs)) * runs,
        )


def _around(scope: Scope) -> tuple[list[Regions], bool]:
    """Return the loops around a scope, and whether it is in a branch that may not be taken."""
    loops, in_branch = list[Regions](), False
    while scope.parent is not None and scope.parent.held is not None:
        control = scope.parent.held
        if control.kind == "loop":
            loops.append(control)
        in_branch |= control.kind == "branch"
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
            inside = (node, *(nested for inner in node.inner for nested in inner.walk()))
            yield from ((callback, cond) for callback in inside if callback.traits.callback)


def _functions(program: LintedProgram, node: Node) -> set[tuple[str, str]]:
    return {(frame.file, frame.function) for frame in program.frames.stack(node.path)}


# --- unrolled -------------------------------------------------------------------------------------
# Python loops that become as many copies of their body.

#: Fewer iterations, or equations in all, compile fast enough.
LEAST_ITERATIONS, LEAST_UNROLLED_EQUATIONS = 8, 200

#: The share of the equations of a loop that must repeat.
SHARE = 0.9

_UNROLLED_BAD = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[32,64,64]", "f32[8,64]")
    def f(layers, x):
        for w in layers:  # JT501
            x = x + jax.nn.gelu(x @ w)
        return x
"""

_UNROLLED_GOOD = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[32,64,64]", "f32[8,64]")
    def f(layers, x):
        def layer(x, w):
            return x + jax.nn.gelu(x @ w), None

        return jax.lax.scan(layer, x, layers)[0]
"""


@lint_rule("JT501", "unrolled-loop", bad=_UNROLLED_BAD, good=_UNROLLED_GOOD)
def unrolled_python_loops(program: LintedProgram) -> Iterator[Found]:
    """A Python loop is unrolled into the same equations again and again.

    JAX traces and lowers them once per iteration, and XLA compiles them all. The time that XLA
    takes often grows faster than the number of iterations.
    """
    for scope in program.top.inside():
        if len(scope.nodes) >= LEAST_UNROLLED_EQUATIONS:
            yield from _in_scope(program, scope)


def _in_scope(program: LintedProgram, scope: Scope) -> Iterator[Found]:
    by_loop = defaultdict[tuple[str, int], list[Node]](list)
    for node in scope.nodes:
        if node.is_live and not node.is_backward and not node.is_outlined:
            for place in _loops(program, node):
                by_loop[place].append(node)
    taken = set[Node]()
    for (file, line), nodes in sorted(by_loop.items(), key=lambda item: -len(item[1])):
        count = _iterations(nodes)
        if not count or len(taken.intersection(nodes)) * 2 > len(nodes):
            continue  # a loop in the iterations of another
        taken.update(nodes)
        per_iteration = len(nodes) // count
        yield Found(
            UserFrame(file, line, "", 0, line, 0),
            f"a Python loop is unrolled: {count} iterations of {plural(per_iteration, 'equation')}",
            "use jax.lax.scan over stacked values, or the pass roll (-p roll)",
            f"{len(nodes) - per_iteration:,} equations more to trace, lower and compile",
        )


def _loops(program: LintedProgram, node: Node) -> dict[tuple[str, int], None]:
    """Return the loops of the user's files that lead to an equation, by file and line."""
    frames = program.user_frames(node)
    return {(f.file, line): None for f in frames for line in program.sources.loops(f)}


def _iterations(nodes: list[Node]) -> int:
    """Return how often most equations of a loop repeat; 0 if too few do, or too rarely."""
    if len(nodes) < LEAST_UNROLLED_EQUATIONS:
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
