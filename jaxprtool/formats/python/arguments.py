"""The signature of an emitted function: the program's arguments and results as pytrees.

The function is called like the original: `def loss(params, x)`. It accesses the leaves of `params`
by path, or by their flat index if a node has no key paths.

Results are pytrees too, although the module imports only JAX. A node of a class takes its structure
from an argument with the same structure (`state` of `step(state) -> state`); otherwise it is a
named tuple with the name and fields of the class, or a dict or tuple if its children are not
fields.
"""

from __future__ import annotations

import keyword
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey, keystr, tree_flatten_with_path

from jaxprtool.formats.python.expressions import (
    ROOTS,
    CallExpression,
    Expression,
    ModuleValue,
    Name,
    Slot,
    as_expression,
    call,
    plain,
)
from jaxprtool.formats.python.naming import identifier, numbered
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.static_leaf import LITERALS, StaticLeaf
from jaxprtool.ir.programs.trees import (
    DESCRIBED_AS_TUPLES,
    Opaque,
    SubstituteNode,
    filled,
    one_level,
)


@dataclass
class CallSignature:
    """The signature of a program.

    `parameters` are the texts between the parentheses, `call` an example of them in a call.
    `places` has the expression of each flat argument. `flattened` maps local names to expressions
    of the arguments whose leaves they hold.
    """

    parameters: list[str] = field(default_factory=list)
    call: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    flattened: dict[str, str] = field(default_factory=dict)

    def place(self, arg: Any, root: str) -> None:
        """Record the expression of each leaf of an argument, given that of the argument."""
        leaves = _leaves(arg)
        if leaves is None:
            name = self.free(f"{identifier(root)}_leaves")
            self.flattened[name] = root
            for at, leaf in enumerate(_with_held(arg)):
                if not isinstance(leaf, StaticLeaf):
                    self.places[leaf] = f"{name}[{at}]"
        for i, access, _ in leaves or ():
            self.places[i] = root + access

    def free(self, hint: str) -> str:
        """Return a name similar to the hint that no parameter has."""
        taken = (*self.parameters, *self.flattened, *ROOTS)
        return next(name for name in numbered(hint) if name not in taken)


def signature(program: Program) -> CallSignature:
    """Return the signature of the function that is emitted for a program."""
    count = program.in_tree.num_leaves
    args, kwargs = filled(program.in_tree, range(count))
    made = CallSignature(places=[""] * count)
    names = [_parameter(arg, program.arg_names, i) for i, arg in enumerate(args)]
    rest = _rest(names)
    for position, (arg, (name, _)) in enumerate(zip(args, names, strict=True)):
        if position < rest:
            name = made.free(name)
            made.parameters.append(name)
            made.place(arg, name)
        else:
            made.place(arg, f"{name}[{position - rest}]")
    made.call += made.parameters
    if rest < len(args):
        made.parameters.append(f"*{names[-1][0]}")
        made.call.append(made.parameters[-1])
    if all(_is_name(key) and key not in (*made.parameters, *ROOTS) for key in kwargs):
        if kwargs and rest == len(args):
            made.parameters.append("*")
        made.parameters += kwargs
        made.call += [f"{key}={key}" for key in kwargs]
        roots = {key: key for key in kwargs}
    else:
        others = made.free("keywords")
        made.parameters.append(f"**{others}")
        made.call.append(f"**{others}")
        roots = {key: f"{others}[{plain(key)}]" for key in kwargs}
    for key, arg in kwargs.items():
        made.place(arg, roots[key])
    return made


def _rest(names: Sequence[tuple[str, int | None]]) -> int:
    """Return the position of the first of the `*args`, determined by names and indexes."""
    for start in range(len(names)):
        name = names[start][0]
        behind = enumerate(names[start:])
        if all(found == (name, i) for i, found in behind):
            return start
    return len(names)


def _with_held(tree: Any) -> list[Any]:
    """Return the leaves of a caller's tree, including those held in its structure."""
    return jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, StaticLeaf))


def _leaves(tree: Any) -> list[tuple[int, str, str]] | None:
    """Return each leaf with its path in Python and in JAX; None if one has no Python path."""
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


def _parameter(arg: Any, names: Sequence[str], position: int) -> tuple[str, int | None]:
    """Return the start of an argument's paths: a name, and an index if it is `args[0]`."""
    leaves = _leaves(arg)
    if leaves is None:
        words = {re.split(r"\W", names[i])[0] for i in jax.tree.leaves(arg)}
    else:
        words = {names[i].removesuffix(path) for i, _, path in leaves}
    root = words.pop() if len(words) == 1 else ""
    root = f"{root}_" if root in ROOTS else root
    found = re.fullmatch(r"(\w+)\[(\d+)\]", root)
    if found and _is_name(found[1]):
        return found[1], int(found[2])
    return (root if _is_name(root) else f"arg{position}"), None


def local_names(places: Sequence[str]) -> list[str]:
    """Return a short unique name per argument: `params["mlp"]["up"]` is `up` or `mlp_up`."""
    choices = [list(_hints(place)) for place in places]
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


def _hints(place: str) -> Iterator[str]:
    """Yield names for an argument, shortest first: the last word, the last two, with the first."""
    words = re.findall(r"\w+", place) or ["x"]
    for count in range(1, len(words)):
        last = words[-count:]
        if not last[0].isdigit():
            yield "_".join(last)
        yield "_".join([words[0], *last])
    yield "_".join(words)


# --- results ----------------------------------------------------------------------------------


def result_structure(program: Program, called: CallSignature) -> tuple[Any, str | None]:
    """Return the results as nested containers of indexes, and a note on replaced classes."""
    args, kwargs = filled(program.in_tree, range(program.in_tree.num_leaves))
    results = _Results()
    roots = dict(zip(called.parameters, args, strict=False)) | kwargs
    for name, arg in roots.items():
        if name in called.parameters and not name.startswith("*"):
            results.note(arg, name)
    count = program.out_tree.num_leaves
    made = results.built(filled(program.out_tree, range(count)))
    if not results.classes:
        return made, None
    names = ", ".join(sorted(results.classes))
    return made, f"These results are named tuples of a class's fields: {names}."


class _Results:
    """Builds results. `known` has the expressions of nodes in arguments by their structure."""

    def __init__(self) -> None:
        self.known: dict[Any, tuple[str, Any]] = {}
        self.classes: set[str] = set()

    def note(self, tree: Any, text: str) -> None:
        """Record the nodes of classes in an argument that have a path."""
        keys, children, own = one_level(tree)
        if isinstance(tree, int):
            return
        if _is_class(own):
            self.known.setdefault(jax.tree.structure(tree), (text, tree))
        for key, child in zip(keys, children, strict=True):
            step = _step(key)
            if step is not None:
                self.note(child, text + step)

    def built(self, tree: Any) -> Any:
        """Return a tree of indexes in Python's containers and calls that build other nodes."""
        if isinstance(tree, int):
            return Slot(tree)
        if isinstance(tree, StaticLeaf):
            return tree.value if type(tree.value) in LITERALS else None
        keys, children, own = one_level(tree)
        if _is_class(own) and jax.tree.structure(tree) in self.known:
            return self._like_an_argument(tree)
        parts = [self.built(child) for child in children]
        if (tree.owner if isinstance(tree, SubstituteNode) else type(tree)) in DESCRIBED_AS_TUPLES:
            return tuple(parts)
        if not _is_class(own):
            return _container(tree, keys, parts)
        if isinstance(tree, OrderedDict):
            return call("OrderedDict", _dictionary(tree, parts))
        return self._class(tree, keys, parts)

    def _like_an_argument(self, tree: Any) -> Expression:
        """Return a node with the structure of an argument's node, including its held objects."""
        text, _ = self.known[jax.tree.structure(tree)]
        leaves = [
            Name(f"jax.tree.leaves({text})[{at}]") if isinstance(leaf, StaticLeaf) else Slot(leaf)
            for at, leaf in enumerate(_with_held(tree))
        ]
        return call("jax.tree.unflatten", call("jax.tree.structure", Name(text)), leaves)

    def _class(self, tree: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
        owner = tree.owner if isinstance(tree, SubstituteNode) else type(tree)
        class_name = tree.type_name if isinstance(tree, Opaque) else owner.__qualname__
        fields = [key.name if isinstance(key, GetAttrKey) else "" for key in keys]
        if all(_is_name(name) and not name.startswith("_") for name in fields):
            name = identifier(class_name.rpartition(".")[2])
            self.classes.add(name)
            made = call("namedtuple", name, fields)
            cls = ModuleValue((name, *fields), name, made)
            return CallExpression(cls, (), dict(zip(fields, parts, strict=True)))
        texts = [key.key if isinstance(key, DictKey) else None for key in keys]
        if all(type(text) is str for text in texts) and len(set(texts)) == len(texts):
            return dict(zip(texts, parts, strict=True))
        return tuple(parts)


def _is_class(tree: Any) -> bool:
    """Return True if the root of a structure is not a Python container."""
    data = tree.node_data()
    return data is not None and data[0] not in (type(None), tuple, list, dict)


def _container(tree: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
    if isinstance(tree, dict):
        return _dictionary([key.key for key in keys], parts)
    return None if tree is None else type(tree)(parts)


def _dictionary(keys: Iterable[object], parts: list[Any]) -> object:
    """Return a dict, or a tuple if a key has a user's class, which the module cannot name."""
    try:
        for key in keys:
            as_expression(key)
    except TypeError:
        return tuple(parts)
    return dict(zip(keys, parts, strict=True))
