"""Arguments, lines and donations that have no effect."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from jaxprtool.analysis.lint.findings import Found
from jaxprtool.analysis.lint.graph import Node
from jaxprtool.analysis.lint.linted_program import LintedProgram
from jaxprtool.analysis.lint.table import lint_rule
from jaxprtool.ir.basics.quantities import plural, some
from jaxprtool.ir.core.equations import is_inexact, size_of
from jaxprtool.ir.dataflow.slicing import live_part
from jaxprtool.ir.programs.program_signature import bytes_of_values, covering, path_parts
from jaxprtool.jaxcompat import name_stack

#: Smaller unused arguments (a key, a flag, a step count) are part of a function's interface.
LEAST_BYTES = 1 << 10

#: A dead line with fewer operations is not reported.
LEAST_OPERATIONS = 1000

_BAD_ARGUMENT = """
    import jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example({"w": "f32[64,64]", "bias": "f32[64,64]"}, "f32[8,64]")
    def f(params, x):  # JT301
        return jnp.tanh(x @ params["w"]).sum()
"""

_GOOD_ARGUMENT = """
    import jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example({"w": "f32[64,64]", "bias": "f32[64,64]"}, "f32[8,64]")
    def f(params, x):
        return jnp.tanh(x @ params["w"] + params["bias"].sum(0)).sum()
"""

_BAD_LINE = """
    import jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[64,64]", "f32[8,64]")
    def f(w, x):
        scores = x @ w.T  # JT302
        return jnp.tanh(x @ w).sum()
"""

_GOOD_LINE = """
    import jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[64,64]", "f32[8,64]")
    def f(w, x):
        scores = x @ w.T
        return jnp.tanh(x @ w).sum() + scores.max()
"""

_BAD_DONATION = """
    from functools import partial
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example({"w": "f32[64,64]"}, "f32[8,64]")
    @partial(jax.jit, donate_argnums=0)
    def f(params, x):  # JT303
        return {"w": params["w"].astype(jnp.bfloat16) + x.sum().astype(jnp.bfloat16)}
"""

_GOOD_DONATION = """
    from functools import partial
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example({"w": "f32[64,64]"}, "f32[8,64]")
    @partial(jax.jit, donate_argnums=0)
    def f(params, x):
        return {"w": params["w"] + x.sum()}
"""


@lint_rule("JT301", "unused-argument", bad=_BAD_ARGUMENT, good=_GOOD_ARGUMENT)
def unused_arguments(program: LintedProgram) -> Iterator[Found]:
    """No result and no effect depends on an argument with 1 KiB or more of numbers.

    An unused weight is never trained. The caller keeps it in memory, and sends it to the device
    unless `jit` drops it. Parts of a parameter are reported only for the first parameter of a loss
    or of a program with a gradient, because other functions may use the other fields of a state.
    """
    about = program.about
    if not about.outputs:
        return
    live = live_part(about.jaxpr).arguments
    # The gradient of a linear function does not depend on its argument, but is not zero.
    read = [program.has_backward and bool(value.readers) for value in program.top.arguments]
    numbers = [
        not (flag or is_read) and is_inexact(var) and (size_of(var.aval) or 0) > 0
        for flag, is_read, var in zip(live, read, about.jaxpr.invars, strict=True)
    ]
    names = [value.name for value in about.arguments]
    trained = names[:1] if program.is_loss or program.has_backward else []
    first = {_parameter(name) for name in trained}
    parameters = set(map(_parameter, names))
    used = {_parameter(name) for name, flag in zip(names, live, strict=True) if flag}
    for path, positions in covering(names, numbers).items():
        # A state has leaves for other functions.
        if _parameter(path) in used - first:
            continue
        values = [about.arguments[i] for i in positions]
        size = bytes_of_values(values)
        if size is None or size < LEAST_BYTES or used.isdisjoint(parameters):
            continue
        what = values[0].type if len(values) == 1 else plural(len(values), "array")
        yield Found(
            None,
            f"no result depends on {path} ({what})",
            "use it, or drop it from the arguments",
            "{bytes} that the caller stores and sends to the device",
            bytes=size,
            argument=path,
        )


def _parameter(name: str) -> str:
    """Return the parameter of a function that an argument is a part of."""
    return path_parts(name)[0]


@lint_rule("JT302", "dead-line", bad=_BAD_LINE, good=_GOOD_LINE)
def dead_lines(program: LintedProgram) -> Iterator[Found]:
    """No result and no effect depends on anything that a line computes.

    XLA removes the line, but JAX traces and lowers it. It is often the sign of a mistake: another
    variable is used instead of its result.
    """
    live, dead = set[tuple[str, int]](), defaultdict[tuple[str, int], list[Node]](list)
    if all(node.is_live for node in program.every):
        return
    for node in program.every:
        frame = program.frame(node)
        if frame is not None:
            place = frame.file, frame.line
            live.add(place) if node.is_live else dead[place].append(node)
    for place in dead.keys() - live:
        nodes = [node for node in dead[place] if not _in_dead_loop(node)]
        if not nodes or not program.frames.is_own(place[0]) or any(map(_is_differentiated, nodes)):
            continue
        operations = sum(node.operations for node in nodes)
        if operations >= LEAST_OPERATIONS and _is_last(nodes):
            yield Found(
                nodes[-1],
                f"nothing uses what this line computes ({_named(nodes)})",
                "remove it, or use its result",
                "{flops} that are traced and lowered, until XLA removes them",
                flops=operations,
            )


def _is_differentiated(node: Node) -> bool:
    """Return True if an equation is in a gradient, whose forward part leaves dead values."""
    return any("jvp(" in name_stack(eqn) for eqn in node.path)


def _in_dead_loop(node: Node) -> bool:
    parent = node.scope.parent
    return parent is not None and not parent.is_live


def _is_last(nodes: list[Node]) -> bool:
    """Return True if only the line itself reads what it computes: it is the last one."""
    own = set(nodes)
    return all(reader in own for node in nodes for out in node.outs for reader in out.readers)


def _named(nodes: list[Node]) -> str:
    return some(dict.fromkeys(node.name for node in nodes), 3)


@lint_rule("JT303", "unusable-donation", bad=_BAD_DONATION, good=_GOOD_DONATION)
def unusable_donations(program: LintedProgram) -> Iterator[Found]:
    """An argument is donated, but no result can use its memory.

    The result needs new memory, and the argument is deleted all the same. The message says why no
    result can use it.
    """
    sizes = {value.name: value.bytes or 0 for value in program.about.arguments}
    for each in program.donations.unused:
        yield Found(
            None,
            f"the donated {each.argument}, {each.type}, cannot be used: {each.reason}",
            "return a result of its type, or do not donate it",
            "{bytes} that are not saved",
            bytes=sizes[each.argument],
            argument=each.argument,
        )
