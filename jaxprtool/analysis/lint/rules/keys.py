"""Random keys that are used twice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator

from jaxprtool.analysis.lint.findings import Found
from jaxprtool.analysis.lint.graph import Node, Scope, Value
from jaxprtool.analysis.lint.linted_program import LintedProgram
from jaxprtool.analysis.lint.table import lint_rule

_BAD = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("key(0)", "f32[512]")
    def f(key, x):
        noise = jax.random.normal(key, (512,))
        mask = jax.random.bernoulli(key, 0.5, (512,))  # JT602
        return jnp.where(mask, x + noise, 0.0)
"""

_GOOD = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("key(0)", "f32[512]")
    def f(key, x):
        for_noise, for_mask = jax.random.split(key)
        noise = jax.random.normal(for_noise, (512,))
        mask = jax.random.bernoulli(for_mask, 0.5, (512,))
        return jnp.where(mask, x + noise, 0.0)
"""


@lint_rule("JT602", "key-reuse", bad=_BAD, good=_GOOD, kind="wrong")
def reused_keys(program: LintedProgram) -> Iterator[Found]:
    """A random key is used twice, for draws or splits.

    Draws from the same key are equal or depend on each other. So are the keys that it is split
    into. In a loop, a key from outside the loop gives the same numbers in each iteration.
    """
    users = defaultdict[Hashable, list[Node]](list)
    for node in program.nodes:
        key = _key_used(node)
        if key is None:
            continue
        root, name = _identity(key)
        earlier = next((e for e in users[name] if not _may_reuse(program, e, node)), None)
        users[name].append(node)
        if earlier is not None:
            yield _reuse(program, earlier, node)
        elif _repeats(node, root) and not _is_recomputed(program, node):
            yield Found(
                node,
                "a key from outside of this loop is used in each iteration",
                "split it before, and scan over the keys, or fold_in the iteration",
                "the same random numbers in each iteration",
            )


def _reuse(program: LintedProgram, earlier: Node, node: Node) -> Found:
    place = program.frame(earlier)
    at = "" if place is None else f", first at {program.frames.text(place)}"
    return Found(
        node,
        f"this key is used again{at}",
        "split it, and use each of its keys once",
        "random numbers that are equal or correlated",
    )


def _key_used(node: Node) -> Value | None:
    """Return the key that an equation draws from or splits; None for other equations."""
    if node.name == "random_split" or (node.traits.draws and not node.traits.key_words):
        return node.ins[0] if node.ins else None
    return None


def _identity(key: Value) -> tuple[Value, Hashable]:
    """Return the value that a key is, or is a part of, and a name for the key.

    Keys are unpacked from an array by static slices, and wrapped from words and unwrapped again.
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
    return value, (value, tuple(parts))


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


def _repeats(node: Node, root: Value) -> bool:
    """Return True if a key comes from outside of a loop around the equation that uses it."""
    loop = node.scope.loop
    if loop is None or root.scope is None:
        return False
    scope: Scope | None = node.scope
    while scope is not None and scope.parent is not None:
        if scope is root.scope:
            return False
        if scope.parent is loop:
            return root.scope is not scope
        scope = scope.parent.scope
    return False
