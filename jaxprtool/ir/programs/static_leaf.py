"""Leaves that are not arrays: held in the structure of a tree, like static arguments.

A function in an Equinox module, a string, an object: it is not traced, and a program is specific to
it. In a program's structures it is a `StaticLeaf` node without children, so that structures that
hold different objects are different. The user passes and gets the objects themselves.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import PyTreeDef

#: Longer descriptions are cut, and distinguished by a digest.
_LONGEST = 160

#: The types that a file can hold as they are.
LITERALS = (bool, int, float, complex, str, bytes)


@dataclass(frozen=True)
class Placeholder:
    """A placeholder, in a program from a file, for an object that the file describes."""

    text: str

    def __repr__(self) -> str:
        return self.text


class StaticLeaf:
    """A leaf that is not an array; equal to another if their objects are equal and of one type.

    A `Placeholder` is equal to the object that it describes.
    """

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StaticLeaf):
            return NotImplemented
        a, b = self.value, other.value
        if a is b:
            return True
        if isinstance(a, Placeholder) or isinstance(b, Placeholder):
            return description(a) == description(b)
        if type(a) is not type(b):
            return False
        if type(a) in LITERALS:
            return repr(a) == repr(b)  # distinguishes -0.0 from 0.0, and NaN from other values
        try:
            return bool(a == b)
        except Exception:  # other packages' objects may raise in comparisons
            return False

    def __hash__(self) -> int:
        return hash(repr(self.value)) if type(self.value) in LITERALS else hash(StaticLeaf)

    def __repr__(self) -> str:
        return f"StaticLeaf({description(self.value)})"


jax.tree_util.register_pytree_node(StaticLeaf, lambda held: ((), held), lambda held, _: held)


def is_no_array(leaf: object) -> bool:
    """Return True if a leaf cannot be an array: it is not a number, and has no dtype."""
    if isinstance(leaf, bool | int | float | complex):
        return False
    return not (hasattr(leaf, "dtype") or hasattr(leaf, "__jax_array__"))


def release(tree: PyTreeDef) -> Any:
    """Return a tree in which held objects are leaves again."""
    return jax.tree.map(
        lambda leaf: leaf.value if isinstance(leaf, StaticLeaf) else leaf,
        tree,
        is_leaf=lambda node: isinstance(node, StaticLeaf),
    )


def description(value: object) -> str:
    """Return the repr of an object, without its address and cut to a maximal length."""
    if isinstance(value, Placeholder):
        return value.text
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    if len(text) <= _LONGEST:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{text[:_LONGEST]}... {digest}"
