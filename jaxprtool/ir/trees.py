"""Tree structures as plain data, to write down, to compare, and to make again.

JAX's `PyTreeDef` holds the Python types of its nodes. A program that is read from a file may have
had nodes of a type that this process does not know; in its place stands an `Opaque` node, which
has the same children and remembers the type's name.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

#: Longer descriptions of a custom node's own data are cut, and told apart by a digest.
_LONGEST_AUX = 160


@dataclass(frozen=True)
class Tree:
    """A tree structure: "leaf", "none", "tuple", "list", "dict", "OrderedDict" or "custom".

    `keys` are those of a dict, one for each child. Of a custom node, `type_name` is the qualified
    name of its type and `aux` a description of its own data.
    """

    kind: str
    children: tuple[Tree, ...] = ()
    keys: tuple[Any, ...] = ()
    type_name: str = ""
    aux: str = ""


LEAF, NONE = Tree("leaf"), Tree("none")


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Opaque:
    """A node in place of one whose type is not at hand."""

    type_name: str
    aux: str
    children: tuple[Any, ...]

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[str, str]]:
        return self.children, (self.type_name, self.aux)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, str], children: Sequence[Any]) -> Opaque:
        return cls(*names, tuple(children))


def describe(tree: Any) -> Tree:
    """The plain description of a `PyTreeDef`."""
    node = tree.node_data()
    if node is None:
        return LEAF
    kind, data = node
    children = tuple(map(describe, tree.children()))
    if kind is type(None):
        return NONE
    if kind in (tuple, list):
        return Tree(kind.__name__, children)
    if kind in (dict, OrderedDict) and all(map(_is_literal, data)):
        return Tree(kind.__name__, children, keys=tuple(data))
    if kind is Opaque:
        return Tree("custom", children, type_name=data[0], aux=data[1])
    name = f"{kind.__module__}.{kind.__qualname__}"
    return Tree("custom", children, type_name=name, aux="" if data is None else _short(data))


def build(tree: Tree) -> Any:
    """The `PyTreeDef` of a description; custom nodes are `Opaque`."""
    return jax.tree.structure(_example(tree))


def same_tree(a: Any, b: Any) -> bool:
    """Whether two `PyTreeDef`s are the same, an `Opaque` node being what it stands for."""
    return a == b or describe(a) == describe(b)


def leaf_paths(tree: Any, names: Sequence[str]) -> list[str]:
    """The way down to each leaf of a `PyTreeDef`, as `first/w`, from the leaves' names.

    The names are those of a program, such as `params['first'].w`, of which as much counts as the
    leaf is deep: an `Opaque` node does not know what its children are called.
    """
    leaves = jax.tree.leaves_with_path(jax.tree.unflatten(tree, range(tree.num_leaves)))
    paths = []
    for (keys, _), name in zip(leaves, names, strict=True):
        own = [jax.tree_util.keystr((key,), simple=True) for key in keys]
        steps = _steps(name)
        paths.append("/".join(steps[-len(keys) :] if 0 < len(keys) <= len(steps) else own))
    return paths


def _steps(name: str) -> list[str]:
    """The keys and attributes in a name: of `params['first'].w`, `first` and `w`."""
    try:
        node = ast.parse(name, mode="eval").body
    except (SyntaxError, RecursionError, ValueError):
        return []
    steps: list[str] = []
    while True:
        match node:
            case ast.Attribute():
                steps.append(node.attr)
            case ast.Subscript(slice=ast.Constant(value=key)):
                steps.append(str(key))
            case _:
                return steps[::-1]
        node = node.value


def _example(tree: Tree) -> Any:
    children = tuple(map(_example, tree.children))
    match tree.kind:
        case "leaf":
            return 0
        case "none":
            return None
        case "tuple":
            return children
        case "list":
            return list(children)
        case "dict":
            return dict(zip(tree.keys, children, strict=True))
        case "OrderedDict":
            return OrderedDict(zip(tree.keys, children, strict=True))
        case "custom":
            return Opaque(tree.type_name, tree.aux, children)
    raise ValueError(f"no kind of tree node: {tree.kind}")


def _is_literal(key: Any) -> bool:
    """Whether a dict's key can be written down and read as a Python literal."""
    try:
        return bool(ast.literal_eval(repr(key)) == key)
    except (ValueError, SyntaxError, RecursionError):
        return False


def _short(data: Any) -> str:
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(data))
    if len(text) <= _LONGEST_AUX:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{text[:_LONGEST_AUX]}... {digest}"
