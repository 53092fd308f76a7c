"""Describe the structure of arguments: a text for each container, by path.

It is read from the PyTreeDef that JAX has made. Of the user's code, only `__repr__` of static
fields is called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from jax.tree_util import PyTreeDef

from jaxprtool.recording import libraries
from jaxprtool.recording.keys import STEP
from jaxprtool.recording.values import LIMIT, Values


class Structure:
    """The structure of arguments.

    Attributes:
        texts: The text of each container by its path; `=text` for a static field.
        leaves: The paths of the leaves.
    """

    def __init__(self, values: Values, names: Sequence[str] | None = None):
        self.texts: dict[str, str] = {}
        self.leaves: list[str] = []
        self._values, self._names = values, names

    def add(self, tree: PyTreeDef, path: str) -> None:
        """Add a tree at a path. Leaves are named by the given names, or else by their paths."""
        data = tree.node_data()
        if data is None:
            self.leaves.append(path if self._names is None else self._names[len(self.leaves)])
            return
        kind, aux = data
        if kind is type(None):
            self.texts[path] = "None"
            return
        if libraries.is_node_states(kind):
            self._add_module(tree, path)
            return
        children = tree.children()
        node = self._node(kind, aux, children, path)
        self.texts[path] = node.text
        if aux is not None and not issubclass(kind, tuple | list | dict):
            for name, value in _statics(kind, aux, node):
                self.texts[f"{path}{name}"] = f"={self._values(value)}"
        names, leaves = self._names, self.leaves
        for step, child in zip(node.steps, children, strict=True):
            if child.num_nodes > 1 or child.num_leaves == 0:
                self.add(child, f"{path}{step}")
            else:
                leaves.append(f"{path}{step}" if names is None else names[len(leaves)])

    def root(self, tree: PyTreeDef, name: str) -> str:
        """Return the name of the next argument: the given one, unless its leaves have another."""
        if self._names is None or tree.num_leaves == 0:
            return name
        first = self._names[len(self.leaves)]
        if tree.num_nodes == 1:
            return first
        found = STEP.match(first)
        return name if found is None or first.startswith(name) else found[0]

    def signature(self, names: Sequence[str]) -> None:
        """Add the names of the arguments."""
        self.texts[""] = f"({', '.join(names)})"

    def _node(self, kind: type, aux: Any, children: Sequence[PyTreeDef], path: str) -> _Node:
        """Return the description of a node: the steps to its children, its text, its statics."""
        count = len(children)
        if kind is dict:
            # Do not hash keys of other classes: that would call the user's code.
            plain = set(map(type, aux)) <= {str, int}
            return _dict_node(tuple(aux)) if plain else _Node.of(kind, [f"[{k!r}]" for k in aux])
        if issubclass(kind, dict):  # JAX puts the factory of a defaultdict before the keys
            keys = aux[1] if type(aux) is tuple and len(aux) == 2 else aux
            if isinstance(keys, tuple | list) and len(keys) == count:
                return _Node.of(kind, [f"[{key!r}]" for key in keys])
        node = _known_node(kind, count)
        return node or _Node.of(kind, list(self._named_steps(children, path)))

    def _named_steps(self, children: Sequence[PyTreeDef], path: str) -> Iterator[str]:
        """Yield the steps to children, read from the names of their leaves."""
        position, names = len(self.leaves), self._names
        for i, child in enumerate(children):
            found = None
            if names is not None and child.num_leaves and names[position].startswith(path):
                found = STEP.match(names[position], len(path))
            yield f"[{i}]" if found is None else found[0]
            position += child.num_leaves

    def _add_module(self, tree: PyTreeDef, path: str) -> None:
        """Add a module of Flax NNX, which JAX sees as a graph and a list of variables."""
        start = len(self.leaves)
        self.texts[path] = tree.node_data()[0].__name__  # type: ignore[index]
        try:
            paths = libraries.add_graph(tree, path, self.texts, self._values)
        except Exception:  # another release of Flax
            paths = []
        given = [path] * tree.num_leaves if self._names is None else self._names[start:]
        named = len(paths) == tree.num_leaves
        self.leaves += paths if named else islice(given, tree.num_leaves)


class _Node(NamedTuple):
    """A kind of node of JAX's trees.

    Attributes:
        steps: The steps of a path to its children: `['w']`, `[0]`, `.kernel`.
        text: Its text: `dict(ids, mask)`.
        statics: The steps to its static fields, if it is a dataclass.
    """

    steps: Sequence[str]
    text: str
    statics: Sequence[str] = ()

    @classmethod
    def of(cls, kind: type, steps: Sequence[str]) -> _Node:
        """Return the node of a class, with children at these steps."""
        fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
        statics = [f".{each.name}" for each in fields if _is_static(each)]
        if len(statics) + len(steps) != len(fields):
            # `register_dataclass` was told which fields are children.
            statics = [f".{each.name}" for each in fields if f".{each.name}" not in steps]
        return cls(steps, f"{kind.__name__}({_shown(steps)})", statics)


@lru_cache(1000)
def _dict_node(keys: tuple[str | int, ...]) -> _Node:
    return _Node.of(dict, [f"[{key!r}]" for key in keys])


@lru_cache(1000)
def _known_node(kind: type, count: int) -> _Node | None:
    """Return the node of a class whose children have known names, or None."""
    if kind is tuple or kind is list:
        return _Node.of(kind, [f"[{i}]" for i in range(count)])
    names = list(getattr(kind, "_fields", ()))
    if not names and dataclasses.is_dataclass(kind):
        names = [each.name for each in dataclasses.fields(kind) if not _is_static(each)]
    if not names or len(names) != count:
        return None
    return _Node.of(kind, [f".{name}" for name in names])


def _is_static(field: dataclasses.Field) -> bool:
    """Return True for a static field of JAX's, Equinox's and Flax's dataclasses."""
    return field.metadata.get("static") is True or field.metadata.get("pytree_node") is False


def _statics(kind: type, aux: Any, node: _Node) -> Iterator[tuple[str, Any]]:
    """Return the static fields of a node of the tree, by their steps of a path."""
    values = libraries.static_fields(kind, aux)
    if len(node.statics) == len(values):
        yield from zip(node.statics, values, strict=True)
    else:
        yield (".func" if kind.__name__ == "Partial" else ".<static>"), aux


def _shown(steps: Sequence[str]) -> str:
    """Return the steps to children as short text: `ids, mask`, `3`."""
    if steps and steps[0] == "[0]":
        return str(len(steps))
    text = ", ".join(each.strip(".[]'") for each in steps[:20])
    if len(steps) > 20 or len(text) > LIMIT:
        text = f"{text[:LIMIT]}… {len(steps)}"
    return text
