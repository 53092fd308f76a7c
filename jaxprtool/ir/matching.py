"""Match the arguments of a call with the structure that a program takes.

A program that was read from a file does not have the classes of its arguments' nodes. Such a node
matches any container that has the same children: under the same keys if both have keys, and
otherwise in order. A result of that class is then built with the class of the argument, if its own
data occur in the arguments too, or are literals. All other nodes must be as in JAX: of the same
class, with equal auxiliary data.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.tree_util import PyTreeDef, keystr

from jaxprtool.ir.state import Changed
from jaxprtool.ir.trees import (
    Opaque,
    Placeholder,
    StaticLeaf,
    Tree,
    description,
    filled,
    is_no_array,
    node,
    one_level,
    release,
)

#: The number of characters of an object that an error shows.
_LONGEST = 80

_DICTS = ("dict", "OrderedDict")


class Mismatch(Exception):
    """Arguments of another structure; the message names the first path that differs."""


@dataclass
class MatchedArguments:
    """A call's arguments, by position and by name, their leaves, and the values of stand-ins."""

    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    leaves: list[Any] = field(default_factory=list)
    nodes: dict[Tree, PyTreeDef] = field(default_factory=dict)
    classes: dict[str, type] = field(default_factory=dict)
    objects: dict[str, object] = field(default_factory=dict)

    def result(self, tree: PyTreeDef, leaves: Sequence[Any]) -> Any:
        """Return the results as a tree, with the caller's objects in place of stand-ins.

        Objects among the arguments whose new state is a result are updated.
        """
        result = release(self._known(jax.tree.unflatten(tree, leaves)))
        return result.applied(self.args, self.kwargs) if isinstance(result, Changed) else result

    def _known(self, value: object) -> Any:
        return jax.tree.map(
            self._node, value, is_leaf=lambda part: isinstance(part, Opaque | StaticLeaf)
        )

    def _node(self, value: object) -> Any:
        if isinstance(value, StaticLeaf):
            return StaticLeaf(self.objects.get(description(value.value), value.value))
        if not isinstance(value, Opaque):
            return value
        _, parts, tree = one_level(value)
        described = node(tree, ())
        structure = self.nodes.get(described) or self._of_class(described, tree)
        return jax.tree.unflatten(structure, map(self._known, parts))

    def _of_class(self, described: Tree, tree: PyTreeDef) -> PyTreeDef:
        """Return the structure of an Opaque node, with its class if that and its data are known."""
        cls = self.classes.get(described.type_name)
        try:
            data = ast.literal_eval(described.aux)
        except (ValueError, SyntaxError):
            return tree
        if cls is None or description(data) != described.aux:
            return tree
        return jax.tree_util.PyTreeDef.from_node_data_and_children(
            jax.tree_util.default_registry, (cls, data), tree.children()
        )


def matched(
    tree: PyTreeDef, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> MatchedArguments:
    """Match a call's arguments with `tree`, the structure of `(args, kwargs)`.

    `names` are the paths of its leaves. Raises Mismatch for arguments of another structure.
    """
    wanted, keywords = filled(tree, range(tree.num_leaves))
    numbers, by_name = tree.children()
    roots = [_root(example, names, f"args[{i}]") for i, example in enumerate(wanted)]
    args, kwargs = _by_position(roots, args, {**kwargs}, keywords)
    for name in (*keywords, *kwargs):
        if name not in kwargs:
            raise Mismatch(f"the keyword argument '{name}' is missing")
        if name not in keywords:
            raise Mismatch(f"the program takes no keyword argument '{name}'")
    arguments = MatchedArguments(args, kwargs)
    for triple in zip(numbers.children(), wanted, args, roots, strict=True):
        _match(arguments, *triple)
    for name, part in zip(keywords, by_name.children(), strict=True):
        _match(arguments, part, keywords[name], kwargs[name], name)
    return arguments


def matched_leaves(tree: PyTreeDef, value: object, path: str) -> list[Any]:
    """Return the leaves of a value that has a given structure.

    Args:
        tree: The structure.
        value: The value.
        path: The name of the value, for errors.

    Raises:
        Mismatch: If the value has another structure.
    """
    arguments = MatchedArguments()
    _match(arguments, tree, filled(tree, range(tree.num_leaves)), value, path)
    return arguments.leaves


def _by_position(
    roots: Sequence[str],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    keywords: Mapping[str, object],
) -> tuple[list[Any], dict[str, Any]]:
    """Return a call's positional arguments, including those passed by name, and all others.

    `roots` are the names of the positional arguments.
    """
    left = roots[len(args) :]
    by_name = [name for name in left if name in kwargs and name not in keywords]
    if len(args) + len(by_name) != len(roots):
        arguments = "positional argument" + "s" * (len(roots) != 1)
        missing = [name for name in left if name not in by_name]
        lacks = f": {', '.join(missing)} is missing" if len(missing) == 1 else ""
        raise Mismatch(
            f"the program takes {len(roots)} {arguments}, not {len(args) + len(by_name)}{lacks}"
        )
    return [*args, *(kwargs.pop(name) for name in by_name)], kwargs


def _root(example: object, names: Sequence[str], otherwise: str) -> str:
    """Return the name of a whole argument: `params` for `params['w']`."""
    for path, i in jax.tree.leaves_with_path(example)[:1]:
        rest = keystr(path)
        if names[i].endswith(rest):
            return names[i][: len(names[i]) - len(rest)]
    return otherwise


def _match(
    arguments: MatchedArguments, tree: PyTreeDef, example: object, value: object, path: str
) -> None:
    """Match a value with the part of the structure at `path`; `example` is one such value."""
    keys, parts, _ = one_level(example)
    given_keys, given_parts, given_tree = one_level(value)
    wanted, actual = node(tree, keys), node(given_tree, given_keys)
    if wanted.held is not None:
        _match_held(arguments, wanted.held, value, path)
        return
    is_other = wanted.kind == actual.kind == "leaf" and is_no_array(value)
    if is_other or not _fits(wanted, actual, tree, given_tree):
        raise Mismatch(f"{path} must be {_named(wanted)}, not {_shown(actual, value)}")
    if wanted.kind == "leaf":
        arguments.leaves.append(value)
        return
    if wanted.kind == "custom" and wanted.type_name == actual.type_name:
        _match_data(arguments, wanted, actual, tree, given_tree, path)
    if (wanted.keys and actual.keys) or wanted.kind in _DICTS:
        by_key = dict(zip(given_keys, given_parts, strict=True))
        given_parts = _by_name(wanted, keys, parts, by_key, path)
    elif len(parts) != len(given_parts):
        raise Mismatch(f"{path} must have {len(parts)} entries, not {len(given_parts)}")
    children = zip(tree.children(), parts, given_parts, map(str, keys), strict=True)
    for part, one, other, key in children:
        _match(arguments, part, one, other, path + key)


def _fits(wanted: Tree, actual: Tree, tree: PyTreeDef, given_tree: PyTreeDef) -> bool:
    """Return True if a node may replace another, apart from its children and its data."""
    if wanted.kind != "custom":
        return wanted.kind == actual.kind
    if actual.kind in ("leaf", "none", "held"):
        return False
    return tree.node_data()[0] is Opaque or wanted.type_name == actual.type_name


def _match_held(arguments: MatchedArguments, wanted: StaticLeaf, leaf: object, path: str) -> None:
    value = leaf.value if isinstance(leaf, StaticLeaf) else leaf
    if wanted != StaticLeaf(value):
        raise Mismatch(
            f"{path} is not an array, so its value is fixed: it must be {_short(wanted.value)}, "
            f"not {_short(value)}"
        )
    if isinstance(wanted.value, Placeholder):
        arguments.objects[wanted.value.text] = value


def _match_data(
    arguments: MatchedArguments,
    wanted: Tree,
    actual: Tree,
    tree: PyTreeDef,
    given_tree: PyTreeDef,
    path: str,
) -> None:
    """Refuse a node with other auxiliary data, and record the node that an Opaque node matches."""
    is_opaque = [structure.node_data()[0] is Opaque for structure in (tree, given_tree)]
    data = (
        (wanted.aux, actual.aux) if any(is_opaque) else (tree.node_data(), given_tree.node_data())
    )
    if data[0] != data[1]:
        raise Mismatch(
            f"{path}, of class {wanted.type_name}, must have the auxiliary data "
            f"{wanted.aux[:_LONGEST]}, not {actual.aux[:_LONGEST]}"
        )
    if is_opaque == [True, False]:
        arguments.nodes[wanted] = given_tree
        arguments.classes[wanted.type_name] = given_tree.node_data()[0]


def _by_name(
    wanted: Tree, keys: Sequence[Any], parts: Sequence[Any], entries: Mapping[Any, Any], path: str
) -> list[Any]:
    """Return the given children in the order of `keys`. Those without leaves may be missing."""
    by_name = {_simple(key): (key, part) for key, part in entries.items()}
    children = []
    for key, part in zip(keys, parts, strict=True):
        if _simple(key) in by_name:
            children.append(by_name.pop(_simple(key))[1])
        elif wanted.kind == "custom" and not jax.tree.leaves(part):
            children.append(part)
        else:
            raise Mismatch(f"{path}{key} is missing")
    for key, _ in by_name.values():
        raise Mismatch(f"{path}{key} is not an entry of the argument")
    return children


def _simple(key: object) -> str:
    return keystr((key,), simple=True)


def _named(tree: Tree) -> str:
    """Describe a node by the name of its class."""
    if tree.kind in ("leaf", "none"):
        return "an array" if tree.kind == "leaf" else "None"
    name = tree.type_name.rpartition(".")[2] or tree.kind
    return f"a{'n' * (name[0] in 'AEIOUaeiou')} {name}"


def _shown(tree: Tree, value: object) -> str:
    if isinstance(value, StaticLeaf):
        return _short(value.value)
    return _short(value) if tree.kind == "leaf" and is_no_array(value) else _named(tree)


def _short(value: object) -> str:
    text = description(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
