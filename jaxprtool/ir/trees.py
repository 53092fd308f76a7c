"""Tree structures as plain data, the paths of their leaves, and leaves that are not arrays.

JAX's `PyTreeDef` holds the Python types of its nodes. A program that is read from a file may have
had nodes of a type that this process does not know. Such a node is replaced by an `Opaque` node,
which has the same children under the same keys, and the type's name.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import Any, Generic, NamedTuple, TypeVar

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, PyTreeDef, SequenceKey

# --- trees ----------------------------------------------------------------------------------------
# Tree structures as plain data, and leaves that are not arrays.


@dataclass(frozen=True)
class Tree:
    """A tree structure: "leaf", "none", "tuple", "list", "dict", "OrderedDict", "held", "custom".

    Attributes:
        kind: One of these.
        children: The structures of the children.
        keys: The keys of a dict, one for each child; for a custom node, its children's keys as JAX
            prints them (`.weight`), if it has any.
        type_name: The qualified name of a custom node's type.
        aux: A description of a custom node's auxiliary data.
        held: The leaf that a "held" node holds.
    """

    kind: str
    children: tuple[Tree, ...] = ()
    keys: tuple[Any, ...] = ()
    type_name: str = ""
    aux: str = ""
    held: StaticLeaf | None = None


LEAF, NONE = Tree("leaf"), Tree("none")

#: Classes of our own whose nodes are described as tuples of their children.
DESCRIBED_AS_TUPLES: set[type] = set()


@dataclass(frozen=True)
class Opaque:
    """A node that replaces one of an unknown type. `keys` are as in `Tree`."""

    type_name: str
    aux: str
    keys: tuple[str, ...]
    children: tuple[object, ...]

    def entries(self) -> Iterator[Any]:
        """Yield the keys of the children as JAX has them."""
        if self.keys:
            return map(_key, self.keys)
        return map(FlattenedIndexKey, range(len(self.children)))


jax.tree_util.register_pytree_with_keys(
    Opaque,
    lambda node: (zip(node.entries(), node.children, strict=True), _own(node)),
    lambda aux, children: Opaque(aux[0], aux[1], aux[2], tuple(children)),
    lambda node: (node.children, _own(node)),
)


def _own(node: Opaque) -> tuple[str, str, tuple[str, ...]]:
    return node.type_name, node.aux, node.keys


def _key(text: str) -> Any:
    """Return the key that JAX prints as `text`; a `Placeholder` if its class is unknown here."""
    if text.startswith(".") and text[1:].isidentifier():
        return GetAttrKey(text[1:])
    if text.startswith("[") and text.endswith("]"):
        try:
            value = ast.literal_eval(text[1:-1])
        except (ValueError, SyntaxError, RecursionError):
            return Placeholder(text)
        key = SequenceKey(value) if type(value) is int else DictKey(value)
        return key if str(key) == text else Placeholder(text)
    return Placeholder(text)


def one_level(node: object) -> tuple[list[Any], list[Any], PyTreeDef]:
    """Return the keys and children of a node, and the structure in which each child is a leaf."""
    pairs, tree = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda part: part is not node)
    return [path[0] for path, _ in pairs if path], [child for _, child in pairs], tree


# --- trees with other leaves than their classes expect --------------------------------------------


@dataclass(frozen=True)
class SubstituteNode:
    """A node that replaces one whose class does not accept the given children.

    A class may check its children in its constructor, and accept only arrays.

    Attributes:
        owner: The class.
        data: The node's own data.
        keys: The keys of its children as JAX has them.
        children: Its children.
    """

    owner: type
    data: Any
    keys: tuple[Any, ...]
    children: tuple[object, ...]


jax.tree_util.register_pytree_with_keys(
    SubstituteNode,
    lambda node: (zip(node.keys, node.children, strict=True), (node.owner, node.data, node.keys)),
    lambda aux, children: SubstituteNode(aux[0], aux[1], aux[2], tuple(children)),
    lambda node: (node.children, (node.owner, node.data, node.keys)),
)


def filled(tree: PyTreeDef, leaves: Iterable[Any]) -> Any:
    """Return a tree of a structure with other leaves, such as positions, types or marks.

    A node is a `SubstituteNode` if its class refuses or converts them. `structure` is the inverse.
    """
    leaves = list(leaves)
    result, is_made = _unflattened(tree, leaves)
    return result if is_made else _filled(tree, iter(leaves))


def _filled(tree: PyTreeDef, leaves: Iterator[Any]) -> Any:
    node_data = tree.node_data()
    if node_data is None:
        return next(leaves)
    children = [_filled(child, leaves) for child in tree.children()]
    cls, data = node_data
    if issubclass(cls, tuple) and cls is not tuple:  # a named tuple, whose constructor may check
        return tuple.__new__(cls, children)
    result, is_made = _unflattened(_rooted(cls, data, [_LEAF] * len(children)), children)
    return (
        result if is_made else SubstituteNode(cls, data, _keys(cls, len(children)), tuple(children))
    )


def _unflattened(tree: PyTreeDef, leaves: Sequence[Any]) -> tuple[Any, bool]:
    """Return a tree, and True if it was made, kept its leaves, and can be flattened."""
    try:
        result = jax.tree.unflatten(tree, leaves)
    except Exception:  # the constructor is the user's, and may raise anything
        return None, False
    try:
        kept = tree.flatten_up_to(result)
    except Exception:  # as for a node whose data are not equal to themselves
        return result, _flattens(result)
    return result, all(map(is_, kept, leaves))


def _flattens(node: object) -> bool:
    """Return True if a tree can be flattened: its classes may check their children there, too."""
    try:
        jax.tree.structure(node)
    except Exception:  # a user's class may raise anything
        return False
    return True


def _rooted(cls: type, data: object, children: Sequence[PyTreeDef]) -> PyTreeDef:
    return PyTreeDef.from_node_data_and_children(
        jax.tree_util.default_registry, (cls, data), children
    )


_LEAF = jax.tree.structure(0)


def _keys(cls: type, count: int) -> tuple[Any, ...]:
    """Return the keys of a class's children: of a dataclass its fields, without constructing it."""
    unknown = tuple(map(FlattenedIndexKey, range(count)))
    if not dataclasses.is_dataclass(cls):
        return unknown
    node, children = object.__new__(cls), [object() for _ in range(count)]
    fields = dataclasses.fields(cls)
    remaining = iter(children)
    for field in fields:
        metadata = field.metadata
        is_data = not metadata.get("static", False) and metadata.get("pytree_node", True)
        object.__setattr__(node, field.name, next(remaining, None) if is_data else None)
    try:
        keys, parts, _ = one_level(node)
    except Exception:  # as for a class that flattens other attributes than its fields
        return unknown
    return tuple(keys) if len(parts) == count and all(map(is_, parts, children)) else unknown


def structure(value: object) -> PyTreeDef:
    """Return the structure of a tree, with the owner of each `SubstituteNode` in it."""
    return _owned(jax.tree.structure(value))


def _owned(tree: PyTreeDef) -> PyTreeDef:
    node_data = tree.node_data()
    if node_data is None:
        return tree
    old = tree.children()
    children = list(map(_owned, old))
    cls, data = node_data if node_data[0] is not SubstituteNode else node_data[1][:2]
    if node_data[0] is not SubstituteNode and all(map(is_, old, children)):
        return tree
    return _rooted(cls, data, children)


# --- descriptions ---------------------------------------------------------------------------------


def describe(tree: PyTreeDef) -> Tree:
    """Return the plain description of a `PyTreeDef`."""
    return _described(tree, filled(tree, range(tree.num_leaves)))


def _described(tree: PyTreeDef, example: object) -> Tree:
    if tree.node_data() is None:
        return LEAF
    keys, parts, _ = one_level(example)
    children = tuple(map(_described, tree.children(), parts))
    return node(tree, keys, children)


def node(tree: PyTreeDef, keys: Sequence[object], children: tuple[Tree, ...] = ()) -> Tree:
    """Return the description of the root of a `PyTreeDef`, whose children have these keys."""
    if tree.node_data() is None:
        return LEAF
    node_type, data = tree.node_data()
    if node_type is SubstituteNode:
        node_type, data = data[:2]
    if node_type is type(None):
        return NONE
    if node_type is StaticLeaf:
        return Tree("held", held=data)
    if node_type in DESCRIBED_AS_TUPLES:
        return Tree("tuple", children)
    if node_type in (tuple, list):
        return Tree(node_type.__name__, children)
    if node_type in (dict, OrderedDict) and all(map(_is_literal, data)):
        return Tree(node_type.__name__, children, keys=tuple(data))
    if node_type is Opaque:
        return Tree("custom", children, type_name=data[0], aux=data[1], keys=data[2])
    name = f"{node_type.__module__}.{node_type.__qualname__}"
    aux = "" if data is None else description(data)
    return Tree("custom", children, type_name=name, aux=aux, keys=_key_texts(keys))


def _key_texts(keys: Sequence[object]) -> tuple[str, ...]:
    """Return the printed keys; none if they are only positions, or do not distinguish children."""
    texts = tuple(map(str, keys))
    are_distinct = len(set(texts)) == len(texts)
    return texts if are_distinct and not any(type(k) is FlattenedIndexKey for k in keys) else ()


def build_tree(tree: Tree) -> PyTreeDef:
    """Return the `PyTreeDef` of a description; custom nodes are `Opaque`."""
    return jax.tree.structure(_example(tree))


def same_tree(a: PyTreeDef, b: PyTreeDef) -> bool:
    """Return True if two `PyTreeDef`s are the same; an `Opaque` node equals the node it replaces.

    A custom node that was written without its children's keys equals one with keys, too.
    """
    return a == b or _alike(describe(a), describe(b))


def _alike(a: Tree, b: Tree) -> bool:
    if a.kind == "custom" and not (a.keys and b.keys):
        a, b = replace(a, keys=()), replace(b, keys=())
    bare = [replace(tree, children=()) for tree in (a, b)]
    return (
        bare[0] == bare[1]
        and len(a.children) == len(b.children)
        and all(map(_alike, a.children, b.children))
    )


def leaf_paths(tree: PyTreeDef) -> list[str]:
    """Return the path to each leaf of a `PyTreeDef`, as `first/w`."""
    leaves = jax.tree.leaves_with_path(filled(tree, range(tree.num_leaves)))
    return [jax.tree_util.keystr(keys, simple=True, separator="/") for keys, _ in leaves]


def _example(tree: Tree) -> Any:
    children = tuple(map(_example, tree.children))
    match tree.kind:
        case "leaf":
            return 0
        case "none":
            return None
        case "held":
            return tree.held
        case "tuple":
            return children
        case "list":
            return list(children)
        case "dict":
            return dict(zip(tree.keys, children, strict=True))
        case "OrderedDict":
            return OrderedDict(zip(tree.keys, children, strict=True))
        case "custom":
            return Opaque(tree.type_name, tree.aux, tree.keys, children)
    raise ValueError(f"unknown kind of tree node: {tree.kind}")


def _is_literal(key: object) -> bool:
    """Return True if a dict's key can be written and read as a Python literal."""
    try:
        return bool(ast.literal_eval(repr(key)) == key)
    except (ValueError, SyntaxError, RecursionError):
        return False


# --- static leaf ----------------------------------------------------------------------------------
# Leaves that are not arrays: held in the structure of a tree, like static arguments.
#
# A function in an Equinox module, a string, an object: it is not traced, and a program is specific
# to it. In a program's structures it is a `StaticLeaf` node without children, so that structures
# that hold different objects are different. The user passes and gets the objects themselves.

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


jax.tree_util.register_pytree_node(StaticLeaf, lambda leaf: ((), leaf), lambda leaf, _: leaf)


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


# --- paths ----------------------------------------------------------------------------------------
# Name the flat arguments and results of a program by readable paths.

T = TypeVar("T")


def paths(root: str, value: object) -> tuple[str, ...]:
    """Return the path of each leaf of a pytree with the name `root`: `result[0]['w']`."""
    leaves = jax.tree_util.tree_flatten_with_path(value)[0]
    return unique([root + jax.tree_util.keystr(path) for path, _ in leaves])


def unique(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names, with a number appended to each that occurred before: `x`, `x_2`."""
    seen: set[str] = set()
    numbers: dict[str, int] = {}  # next by name; a search is slow for thousands of equal names
    result = []
    for name in names:
        chosen, number = name, numbers.get(name, 1)
        while chosen in seen:
            number += 1
            chosen = f"{name}_{number}"
        numbers[name] = number
        seen.add(chosen)
        result.append(chosen)
    return tuple(result)


def path_steps(path: str) -> list[str]:
    """Return the keys and attributes in a path: `first` and `w` for `params['first'].w`.

    The list is empty for a text that is not a path.
    """
    try:
        node = ast.parse(path, mode="eval").body
    except (SyntaxError, RecursionError, ValueError):
        return []
    steps: list[str] = []
    while True:
        match node:
            case ast.Attribute():
                steps.append(node.attr)
            case ast.Subscript(slice=ast.Constant(value=key)):
                steps.append(str(key))
            case ast.Name():
                return steps[::-1]
            case _:
                return []
        node = node.value


#: A step of a path, however it is written: `qkv` in `['qkv']`, `.qkv` and `[qkv]`.
_STEP = re.compile(r"[^\[\]'\".]+")


def named_by_end(names: Iterable[str], end: str) -> list[str]:
    """Return the names that a user may mean by the end of a path.

    `qkv.kernel`, or `['qkv']['kernel']`, is the end of `params['blocks'][0]['qkv']['kernel']`.

    Args:
        names: Paths.
        end: One or more steps of a path.

    Returns:
        The paths that end so; if there are none, the parts of paths that do: `params['blocks']`.
    """
    names, steps = list(names), _STEP.findall(end)
    if all(map(str.isdigit, steps)):
        return []
    for candidates in (names, parts_of_paths(names)):
        each_once = dict.fromkeys(candidates)
        matches = [path for path in each_once if _STEP.findall(path)[-len(steps) :] == steps]
        if matches:
            return matches
    return []


def parts_of_paths(names: Iterable[str]) -> Iterator[str]:
    """Yield names, each followed by what precedes each of its steps."""
    for name in names:
        yield name
        for mark in re.finditer(r"[\[.]", name):
            yield name[: mark.start()]


#: The numbers that distinguish the layers of a pytree.
_NUMBER = re.compile(r"\d+")

#: The most numbers that are listed one by one.
_FEW_NUMBERS = 8


def without_numbers(path: str) -> str:
    """Return a path with `*` for each number, as it is for all layers: `params['Block_*']['w']`."""
    return _NUMBER.sub("*", path)


def common_path(names: Sequence[str]) -> str:
    """Return paths that differ only in numbers as one: `blocks[0..5].kernel`, `blocks[0,3].bias`.

    If some combinations of the numbers are missing, `*` replaces each number that differs.
    """
    numbers = [tuple(_NUMBER.findall(name)) for name in names]
    axes = [sorted(set(axis), key=int) for axis in zip(*numbers, strict=True)]
    is_whole = len(set(numbers)) == math.prod(map(len, axes))
    texts = iter([_numbers_text(axis) if is_whole or len(axis) == 1 else "*" for axis in axes])
    return _NUMBER.sub(lambda number: next(texts), names[0])


def _numbers_text(axis: Sequence[str]) -> str:
    """Return sorted numbers as text: `3`, `0..5`, `0,2,4`."""
    if len(axis) > 1 and int(axis[-1]) - int(axis[0]) + 1 == len(axis):
        return f"{axis[0]}..{axis[-1]}"
    return ",".join(axis) if len(axis) <= _FEW_NUMBERS else "*"


class Alike(NamedTuple, Generic[T]):
    """Items whose paths differ only in numbers.

    Attributes:
        path: The common path.
        items: The items, in their order.
    """

    path: str
    items: Sequence[T]


def alike(
    items: Iterable[T], path: Callable[[T], str], kind: Callable[[T], Hashable]
) -> list[Alike[T]]:
    """Group items whose paths differ only in numbers, ordered by the first item of each group.

    Args:
        items: The items.
        path: Returns the path of an item.
        kind: Returns what the items of a group have in common, such as their type.
    """
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault((without_numbers(path(item)), kind(item)), []).append(item)
    return [Alike(common_path(list(map(path, members))), members) for members in groups.values()]
