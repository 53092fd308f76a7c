"""The signature of an emitted function: the program's arguments and results as pytrees.

The function is called as the original is: `def loss(params, x)`, with what it uses of `params`
taken out by path. Where a node of a tree is of a type that a module importing only JAX cannot
read from or cannot make, the function takes or gives flat values instead, and its docstring says
so.
"""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey, keystr, tree_flatten_with_path

from jaxprtool.formats.python.expressions import ROOTS, plain
from jaxprtool.formats.python.naming import numbered
from jaxprtool.ir.program import Program
from jaxprtool.ir.trees import Tree, describe


@dataclass(frozen=True)
class Signature:
    """How a program is called.

    `parameters` are the texts between the parentheses, `call` an example of what a caller writes
    there. `places` has the expression of each flat argument, `leaves` those that are parameters
    themselves. `note` tells what is unlike the original, if anything is.
    """

    parameters: tuple[str, ...]
    call: tuple[str, ...]
    places: tuple[str, ...]
    note: str | None = None


def signature(program: Program) -> Signature:
    """The signature of the function that is emitted for a program."""
    count = program.in_tree.num_leaves
    args, kwargs = jax.tree.unflatten(program.in_tree, range(count))
    names = program.arg_names
    parameters: list[str] = []
    places = [""] * count
    rest: str | None = None
    for position, arg in enumerate(args):
        leaves = _leaves(arg)
        name, index = _parameter(leaves, names, position)
        if leaves is None:
            return _flat(program)
        if index is not None and index == position - len(parameters) and rest in (None, name):
            rest, root = name, f"{name}[{index}]"
        elif rest is None and name not in parameters:
            parameters.append(name)
            root = name
        else:
            return _flat(program)
        for i, access, _ in leaves:
            places[i] = root + access
    keywords = []
    for key, arg in kwargs.items():
        leaves = _leaves(arg)
        if leaves is None or not _is_name(key) or key in (*parameters, *ROOTS):
            return _flat(program)
        keywords.append(key)
        for i, access, _ in leaves:
            places[i] = key + access
    star = [f"*{rest}"] if rest else (["*"] if keywords else [])
    shown = [*parameters, *([f"*{rest}"] if rest else []), *(f"{k}={k}" for k in keywords)]
    return Signature((*parameters, *star, *keywords), tuple(shown), tuple(places))


def _leaves(tree: Any) -> list[tuple[int, str, str]] | None:
    """Each leaf with the text that reaches it, and with JAX's; None if one cannot be reached."""
    found = []
    for path, leaf in tree_flatten_with_path(tree)[0]:
        steps = [_step(key) for key in path]
        if None in steps:
            return None
        found.append((leaf, "".join(map(str, steps)), keystr(path)))
    return found


def _step(key: Any) -> str | None:
    if isinstance(key, SequenceKey):
        return f"[{key.idx}]"
    if isinstance(key, GetAttrKey):
        return f".{key.name}" if _is_name(key.name) else None
    if isinstance(key, DictKey) and type(key.key) in (str, int, bool):
        return f"[{plain(key.key)}]"
    return None


def _is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)


def _parameter(
    leaves: Sequence[tuple[int, str, str]] | None, names: Sequence[str], position: int
) -> tuple[str, int | None]:
    """What an argument's paths begin with: a name, and an index if that is `args[0]`."""
    roots = {names[i].removesuffix(path) for i, _, path in leaves or ()}
    root = roots.pop() if len(roots) == 1 else ""
    root = f"{root}_" if root in ROOTS else root
    found = re.fullmatch(r"(\w+)\[(\d+)\]", root)
    if found and _is_name(found[1]):
        return found[1], int(found[2])
    return (root if _is_name(root) else f"arg{position}"), None


def _flat(program: Program) -> Signature:
    parameters: list[str] = []
    for path in program.arg_names:
        free = (name for name in numbered(path) if name not in (*parameters, *ROOTS))
        parameters.append(next(free))
    note = "It takes its arguments flat: the leaves of the original's, in order."
    return Signature(tuple(parameters), tuple(parameters), tuple(parameters), note)


def local_names(places: Sequence[str]) -> list[str]:
    """A short name for each argument: `params["mlp"]["up"]` is `up`, or `mlp_up` beside others."""
    choices = [list(_wishes(place)) for place in places]
    chosen = [0] * len(places)
    while True:
        names = [choice[n] for choice, n in zip(choices, chosen, strict=True)]
        uses = Counter(names)
        longer = [
            n + 1 if uses[name] > 1 and n + 1 < len(choice) else n
            for name, n, choice in zip(names, chosen, choices, strict=True)
        ]
        if longer == chosen:
            return names
        chosen = longer


def _wishes(place: str) -> Iterator[str]:
    """Names for an argument, shortest first: its path's last word, the last two, with the first."""
    words = re.findall(r"\w+", place) or ["x"]
    for count in range(1, len(words)):
        last = words[-count:]
        if not last[0].isdigit():
            yield "_".join(last)
        yield "_".join([words[0], *last])
    yield "_".join(words)


# --- results ----------------------------------------------------------------------------------


def result_structure(program: Program) -> tuple[Any, str | None]:
    """The results as nested tuples, lists and dicts of indexes, and a note if they are flat."""
    indexes = iter(range(program.out_tree.num_leaves))
    tree = describe(program.out_tree)
    if _is_plain(tree):
        return _built(tree, indexes), None
    note = "It returns its results flat: the leaves of the original's, in order."
    return tuple(indexes), note


def _is_plain(tree: Tree) -> bool:
    return tree.kind not in ("custom", "held", "OrderedDict") and all(map(_is_plain, tree.children))


def _built(tree: Tree, indexes: Any) -> Any:
    if tree.kind == "leaf":
        return next(indexes)
    parts = [_built(child, indexes) for child in tree.children]
    if tree.kind == "dict":
        return dict(zip(tree.keys, parts, strict=True))
    if tree.kind == "none":
        return None
    return tuple(parts) if tree.kind == "tuple" else parts
