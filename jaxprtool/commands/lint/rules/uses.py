"""Arguments, lines and donations that have no effect, and random keys that are used twice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import numpy as np

from jaxprtool.commands.lint.graph import (
    LintedProgram,
    Node,
    Scope,
    Value,
    ancestors,
    is_same,
    origin,
)
from jaxprtool.commands.lint.lint import Found, lint_rule
from jaxprtool.commands.memory.donatable import donatable
from jaxprtool.ir.dataflow import live_part
from jaxprtool.ir.documents import in_bytes, plural, some
from jaxprtool.ir.equations import is_inexact, size_of
from jaxprtool.ir.program import Program, bytes_of_values, covering, path_parts
from jaxprtool.jaxcompat import name_stack

# --- unused ---------------------------------------------------------------------------------------
# Arguments, lines and donations that have no effect.

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


_BAD_STATE = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example({"w": "f32[1024,1024]", "velocity": "f32[1024,1024]"}, "f32[8,1024]")
    @jax.jit
    def f(state, x):  # JT304
        slope = jax.grad(lambda w: jnp.square(x @ w).mean())(state["w"])
        velocity = 0.9 * state["velocity"] + slope
        return {"w": state["w"] - 0.1 * velocity, "velocity": velocity}
"""

_GOOD_STATE = """
    from functools import partial
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example({"w": "f32[1024,1024]", "velocity": "f32[1024,1024]"}, "f32[8,1024]")
    @partial(jax.jit, donate_argnames="state")
    def f(state, x):
        slope = jax.grad(lambda w: jnp.square(x @ w).mean())(state["w"])
        velocity = 0.9 * state["velocity"] + slope
        return {"w": state["w"] - 0.1 * velocity, "velocity": velocity}
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
    members = set(nodes)
    return all(reader in members for node in nodes for out in node.outs for reader in out.readers)


def _named(nodes: list[Node]) -> str:
    return some(dict.fromkeys(node.name for node in nodes), 3)


@lint_rule("JT303", "unusable-donation", bad=_BAD_DONATION, good=_GOOD_DONATION)
def unusable_donations(program: LintedProgram) -> Iterator[Found]:
    """An argument is donated, but no result can use its memory.

    The result needs new memory, and the argument is deleted all the same. The message says why no
    result can use it.
    """
    sizes = {value.name: value.bytes or 0 for value in program.about.arguments}
    for donation in program.donations.unused:
        yield Found(
            None,
            f"the donated {donation.argument}, {donation.type}, cannot be used: {donation.reason}",
            "return a result of its type, or do not donate it",
            "{bytes} that are not saved",
            bytes=sizes[donation.argument],
            argument=donation.argument,
        )


@lint_rule("JT304", "missing-donation", bad=_BAD_STATE, good=_GOOD_STATE)
def missing_donations(program: LintedProgram) -> Iterator[Found]:
    """A function under `jax.jit` returns the next value of an argument that it does not donate.

    Results have the types and paths of the argument, and are computed from it element by element:
    `params` and the new ones. Both are in memory, unless the caller donates the old one, which it
    may not read afterwards. In a recorded run, the caller may have dropped it in the line of the
    call; then types are enough. A finding saves 1 MiB or more of the peak that `memory` estimates.
    """
    if not isinstance(program.program, Program):
        return
    missing = donatable(program.program)
    if missing is None:
        return
    names = some(missing.arguments, 3)
    saves = f"saves up to {in_bytes(missing.saved_bytes)} at the peak"
    if missing.is_dropped:
        message = f"the caller drops {names} in the line of the call, and it is not donated"
        advice = f"{missing.option} of jax.jit {saves}"
    else:
        message = f"results have the types and paths of {names}, which is not donated"
        advice = f"if the caller does not use it again, {missing.option} of jax.jit {saves}"
    yield Found(
        None,
        message,
        advice,
        "{bytes} at the peak",
        bytes=missing.saved_bytes,
        argument=missing.arguments[0],
    )


# --- keys -----------------------------------------------------------------------------------------
# Random keys that are used twice.

#: The number of values that a key is compared with.
_MOST_ALIKE = 256

_KEYS_BAD = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("key(0)", "f32[512]")
    def f(key, x):
        noise = jax.random.normal(key, (512,))
        mask = jax.random.bernoulli(key, 0.5, (512,))  # JT602
        return jnp.where(mask, x + noise, 0.0)
"""

_KEYS_GOOD = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("key(0)", "f32[512]")
    def f(key, x):
        for_noise, for_mask = jax.random.split(key)
        noise = jax.random.normal(for_noise, (512,))
        mask = jax.random.bernoulli(for_mask, 0.5, (512,))
        return jnp.where(mask, x + noise, 0.0)
"""


@lint_rule("JT602", "key-reuse", bad=_KEYS_BAD, good=_KEYS_GOOD, kind="wrong")
def reused_keys(program: LintedProgram) -> Iterator[Found]:
    """A random key is used twice, for draws or splits.

    Draws from the same key are equal or depend on each other. So are the keys that it is split
    into. `fold_in` of the same key with the same number gives the same key, as does `key` of the
    same seed. In a loop, a key from outside the loop gives the same numbers in each iteration.
    """
    users, keys = (
        defaultdict[Hashable, list[tuple[Node, Node | None]]](list),
        _RandomKeyNames(program),
    )
    for node in program.nodes:
        key = keys.used(node)
        if key is None:
            continue
        earlier = next((e for e in users[key.name] if not _may_reuse(program, e[0], node)), None)
        users[key.name].append((node, key.made))
        if earlier is not None:
            yield _reuse(program, earlier, (node, key.made))
        elif _repeats(node, key.roots) and not _is_recomputed(program, node):
            yield Found(
                node,
                "a key from outside of this loop is used in each iteration",
                "split it before, and scan over the keys, or fold_in the iteration",
                "the same random numbers in each iteration",
            )


_CONSTANT_BAD = """
    import jax, jax.numpy as jnp
    import jaxprtool


    def loss(w, x):
        noise = jax.random.normal(jax.random.key(0), x.shape)  # JT604
        return jnp.square((x + noise) @ w).mean()


    @jaxprtool.example("f32[16]", "f32[64,16]")
    def f(w, x):
        return w - 0.1 * jax.grad(loss)(w, x)
"""

_CONSTANT_GOOD = """
    import jax, jax.numpy as jnp
    import jaxprtool


    def loss(w, x, key):
        noise = jax.random.normal(key, x.shape)
        return jnp.square((x + noise) @ w).mean()


    @jaxprtool.example("f32[16]", "f32[64,16]", "key(0)")
    def f(w, x, key):
        return w - 0.1 * jax.grad(loss)(w, x, key)
"""


@lint_rule("JT604", "constant-noise", bad=_CONSTANT_BAD, good=_CONSTANT_GOOD, kind="wrong")
def constant_noise(program: LintedProgram) -> Iterator[Found]:
    """A training step draws the same random numbers in each call, because no argument is its key.

    A key that is made of a number, or that the function closes over, is a constant of the compiled
    function: dropout drops the same elements, and noise is a constant. The rule reports functions
    that take a gradient. Parameters may be initialized with such a key.
    """
    seen = set[Hashable]()  # a checkpoint draws again for the backward pass
    for node in program.nodes if program.has_backward else ():
        place = program.frame(node)
        if node.traits.draws and place not in seen and all(map(_is_constant, node.ins)):
            seen.add(place)
            yield Found(
                node,
                "these random numbers are the same in each call: their key is a constant",
                "take the key as an argument, and split it or fold_in the number of the step",
                "noise that is no noise",
            )


def _is_constant(value: Value) -> bool:
    """Return True if no argument, loop or branch has a part in a value."""
    reached = list(ancestors(value, _MOST_ALIKE))
    return len(reached) < _MOST_ALIKE and not any(map(_varies, reached))


def _varies(value: Value) -> bool:
    """Return True for an argument of a scope that is not a constant, and a result of a loop."""
    if value.node is not None:
        return bool(value.node.inner)
    is_argument = value.scope is not None and value.constant is None
    return is_argument and value.outer is None


def _reuse(
    program: LintedProgram, earlier: tuple[Node, Node | None], later: tuple[Node, Node | None]
) -> Found:
    """Return the finding about a key that is used again, or is made again and used."""
    is_made = later[1] is not None and later[1] is not earlier[1]
    first, node = (pair[is_made] or pair[0] for pair in (earlier, later))
    place = program.frame(first)
    at = "" if place is None else f", first at {program.frames.text(place)}"
    cost = "random numbers that are equal or correlated"
    if not is_made:
        return Found(node, f"this key is used again{at}", _ONCE, cost)
    what = "fold_in of the same key with the same number" if _folds(node) else "the same seed"
    return Found(node, f"{what} gives the same key{at}", f"{_OTHER}, or {_ONCE}", cost)


_ONCE = "split it, and use each of its keys once"
_OTHER = "use another number"


def _folds(node: Node) -> bool:
    return node.name == "random_fold_in"


class _RandomKey(NamedTuple):
    """A key that an equation uses.

    Attributes:
        name: Equal for equal keys.
        roots: The values that it is computed from.
        made: The equation that makes it of a number.
    """

    name: Hashable
    roots: list[Value]
    made: Node | None


class _RandomKeyNames:
    """Names keys, so that equal keys have the same name."""

    def __init__(self, program: LintedProgram) -> None:
        self._program = program
        self._values = defaultdict[Hashable, list[Value]](list)

    def used(self, node: Node) -> _RandomKey | None:
        """Return the key that an equation draws from or splits; None for other equations."""
        words = node.traits.key_words
        if node.name == "random_split" or (node.traits.draws and words < 2):
            return self._identity(node.ins[0]) if node.ins else None
        if not node.traits.draws:
            return None
        parts = [self._number(value) for value in node.ins]  # the words, and the counts
        return _RandomKey(
            tuple(name for name, _ in parts), [r for _, roots in parts for r in roots], None
        )

    def _identity(self, key: Value) -> _RandomKey:
        """Return the name of a key, and the values that it, or what it is a part of, comes from.

        Keys are unpacked from an array by static slices, wrapped from words and unwrapped again,
        and made of another key or a seed, and a number.
        """
        parts: list[Hashable] = []
        value = key
        while True:
            node = value.node
            if value.outer is not None:
                value = value.outer
            elif node is None:
                break
            elif node.traits.gives in ("same", "layout") or _is_wrapping(node):
                value = node.ins[0]
            elif node.name == "slice":
                parts.append((node.eqn.params["start_indices"], node.eqn.params["limit_indices"]))
                value = node.ins[0]
            else:
                break
        if node is not None and (_folds(node) or node.name == "random_seed"):
            name, roots = self._number(node.ins[-1])
            if _folds(node):
                base = self._identity(node.ins[0])
                name, roots = (base.name, name), [*base.roots, *roots]
            return _RandomKey((node.name, name, tuple(parts)), roots, node)
        return _RandomKey((self._representative(value), tuple(parts)), [value], None)

    def _number(self, value: Value) -> tuple[Hashable, list[Value]]:
        """Return a name for a number, equal for equal ones, and the values it is computed from."""
        array = self._program.array(value)
        if array is not None:
            return (array.shape, array.astype(np.int64).tobytes()), []
        roots = [root for root in ancestors(value) if root.node is None or root.node.inner]
        return self._representative(value), [root for root in roots if root.outer is None]

    def _representative(self, value: Value) -> Hashable:
        """Return the first value that is equal to a value."""
        value = origin(value)
        alike = self._values[None if value.node is None else value.node.name]
        if value.node is not None:
            for other in alike[:_MOST_ALIKE]:
                if is_same(value, other):
                    return other
        alike.append(value)
        return value


def _is_wrapping(node: Node) -> bool:
    """Return True if an equation makes a key of words, or words of a key."""
    wraps = node.traits.key_words > 0 and not node.traits.draws
    return wraps or node.name == "random_unwrap"


def _may_reuse(program: LintedProgram, one: Node, two: Node) -> bool:
    """Return True if two equations do not both run, or if one recomputes the other."""
    if (_is_recomputed(program, one) or _is_recomputed(program, two)) and program.frames.stack(
        one.path
    ) == program.frames.stack(two.path):
        return True
    if program.has_backward and one.has_rule != two.has_rule and _draw_alike(one, two):
        # The rule of a function's derivative draws its numbers again, and calls the function.
        return True
    return _are_exclusive(one.scope, two.scope)


def _draw_alike(one: Node, two: Node) -> bool:
    """Return True if two equations draw the same numbers from the same key."""
    types = [[v.aval for v in node.eqn.outvars] for node in (one, two)]
    return one.name == two.name and types[0] == types[1]


def _is_recomputed(program: LintedProgram, node: Node) -> bool:
    """Return True if an equation may compute something again, for the backward pass."""
    return node.is_backward or (node.is_checkpointed and program.has_backward)


def _are_exclusive(one: Scope, two: Scope) -> bool:
    """Return True for scopes in different branches of the same equation."""
    branches = dict(_branches(one))
    return any(branches.get(node, number) != number for node, number in _branches(two))


def _branches(scope: Scope) -> Iterator[tuple[Node, int]]:
    while scope.parent is not None:
        if scope.parent.held is not None and scope.parent.held.kind == "branch":
            yield scope.parent, scope.number_of_body
        scope = scope.parent.scope


def _repeats(node: Node, roots: list[Value]) -> bool:
    """Return True if a key comes from outside of a loop around the equation that uses it."""
    loop = node.scope.loop
    if loop is None:
        return False
    inside, scope = {node.scope}, node.scope
    while scope.parent is not None and scope.parent is not loop:
        scope = scope.parent.scope
        inside.add(scope)
    return not any(root.scope in inside for root in roots)
