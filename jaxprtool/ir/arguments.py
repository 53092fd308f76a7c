"""The arguments of a call: matched with the structure of a program, and state changed in place.

To JAX these objects are pytrees, and a function changes copies of them. A function whose copies
have changed when it returns also returns their new state, together with its result in a `Changed`;
a call of its program then changes the caller's objects. Flax is not imported here: a caller with
such objects has imported it.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.tree_util import GetAttrKey, PyTreeDef, keystr

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError
from jaxprtool.ir.dataflow import DefUse
from jaxprtool.ir.regions import Call, view
from jaxprtool.ir.trees import (
    DESCRIBED_AS_TUPLES,
    Opaque,
    Placeholder,
    StaticLeaf,
    Tree,
    description,
    filled,
    is_no_array,
    node,
    one_level,
    paths,
    release,
    unique,
)
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Literal, Var

# --- state ----------------------------------------------------------------------------------------
# State that a function changes in place: that of Flax NNX objects among its arguments.

#: An internal attribute of NNX objects: the trace in which the object was created.
_OWN = "_pytree__state"

_MISSING: Any = object()


@dataclass(frozen=True)
class StateChange:
    """The change of objects.

    Attributes:
        argument_keys: The arguments with the objects: positions, without static ones, and keywords.
        before: The structure of these arguments, as a list, before the call.
        after: Their structure after it.
        sources: For each leaf of `after`, the leaf of `before` that it is, or its path in the
            state.
        keeps_shapes: Whether all leaves that change keep their shape.
    """

    argument_keys: tuple[int | str, ...]
    before: PyTreeDef
    after: PyTreeDef
    sources: tuple[int | str, ...]
    keeps_shapes: bool


@dataclass(frozen=True)
class Changed:
    """The result of a function, and the state of the objects that it changed, by path."""

    result: Any
    state: dict[str, Any]
    change: StateChange

    def applied(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Change the objects among the arguments of a call, and return the result.

        Returns `self` if the arguments do not have the function's structure any more. Raises
        ArgumentsError if the new state is batched, but an object is not.
        """
        change = self.change
        try:
            objects = [args[p] if isinstance(p, int) else kwargs[p] for p in change.argument_keys]
        except LookupError:
            return self
        leaves, tree = jax.tree.flatten(_held(objects))
        if tree != change.before:
            return self
        if change.keeps_shapes:
            self._require_shapes(leaves)
        new = [leaves[s] if isinstance(s, int) else self.state[s] for s in change.sources]
        for old, after in zip(objects, release(jax.tree.unflatten(change.after, new)), strict=True):
            _updated(old, after)
        return self.result

    def value_updates(
        self, leaves: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[tuple[int, str]] | None:
        """Return the Variables that change, if a function changes nothing but their values.

        Args:
            leaves: The Variables and other leaves of the arguments (`variable_leaves`).
            args: The arguments by position, without static ones.
            kwargs: The arguments by name.

        Returns:
            The index of each such Variable in `leaves`, with the path of its value in the state.
            They hold for all arguments of the same structure. None if more changes.
        """
        change = self.change
        # Equal static attributes may still be of different types: 1 and True.
        if change.before != change.after or str(change.before) != str(change.after):
            return None
        objects = [args[p] if isinstance(p, int) else kwargs[p] for p in change.argument_keys]
        positions = iter([i for i, leaf in enumerate(leaves) if _is_variable(leaf)])
        updates: list[tuple[int, str]] = []
        start = 0
        for leaf in jax.tree.leaves(objects, is_leaf=_is_variable):
            position = next(positions) if _is_variable(leaf) else None
            end = start + len(jax.tree.leaves(_held(leaf)))
            for i, source in enumerate(change.sources[start:end], start):
                if source == i:
                    continue
                if isinstance(source, int) or position is None or not _has_plain_value(leaf):
                    return None
                updates.append((position, source))
            start = end
        return updates

    def _require_shapes(self, leaves: Sequence[Any]) -> None:
        for source, leaf in zip(self.change.sources, leaves, strict=True):
            if isinstance(source, int) or jnp.shape(self.state[source]) == jnp.shape(leaf):
                continue
            old, new = (list(jnp.shape(value)) for value in (leaf, self.state[source]))
            raise ArgumentsError(
                f"{source} has shape {old}, but its new value has shape {new}",
                "map an object that the function changes in place with in_axes=0",
            )


jax.tree_util.register_pytree_with_keys(
    Changed,
    lambda node: (
        ((GetAttrKey("result"), node.result), (GetAttrKey("state"), node.state)),
        node.change,
    ),
    lambda change, children: Changed(children[0], children[1], change),
)
DESCRIBED_AS_TUPLES.add(Changed)


def result_paths(out: object) -> tuple[str, ...]:
    """Return the path of each flat result; `updated.model.w` for the new state of an argument."""
    if not isinstance(out, Changed):
        return paths("result", out)
    return unique(
        (*paths("result", out.result), *(f"updated.{path}" for path in sorted(out.state)))
    )


# --- objects --------------------------------------------------------------------------------------


def _classes(*names: str) -> tuple[type, ...]:
    """Return NNX classes by name; none if Flax is not imported."""
    nnx = sys.modules.get("flax.nnx")
    return tuple(cls for name in names if (cls := getattr(nnx, name, None)) is not None)


@lru_cache(maxsize=1024)
def _is_subclass(cls: type, *names: str) -> bool | None:
    """Return True for a subclass of an NNX class, and None if only `isinstance` knows, slowly.

    It says that some traced values, and objects of other classes of Flax, are Variables too.
    """
    if issubclass(cls, _classes(*names)):
        return True
    from_flax = any(base.__module__.startswith("flax.") for base in cls.__mro__)
    return None if from_flax or issubclass(cls, jax.core.Tracer) else False


def _is_instance(node: object, *names: str) -> bool:
    cls: Any = type(node)
    answer = _is_subclass(cls, *names)
    return isinstance(node, _classes(*names)) if answer is None else answer


@lru_cache(maxsize=1024)
def _is_variable_class(cls: type) -> bool | None:
    return _is_subclass(cls, "Variable")


def _is_variable(node: object) -> bool:
    # Called for each node of the arguments of a call.
    cls: Any = type(node)
    answer = _is_variable_class(cls)
    return isinstance(node, _classes("Variable")) if answer is None else answer


def _has_plain_value(variable: Any) -> bool:
    """Return True for a Variable of its own class, not of a traced one, that holds one array."""
    cls: Any = type(variable)
    if not _is_variable_class(cls):
        return False
    return isinstance(variable.get_raw_value(), jax.Array | np.ndarray)


def _is_object(node: object) -> bool:
    return _is_instance(node, "Variable", "Pytree")


def has_objects(tree: Any) -> bool:
    """Return True if a tree has NNX objects that a function could change."""
    if "flax.nnx" not in sys.modules:
        return False
    return any(map(_is_object, jax.tree.leaves(tree, is_leaf=_is_object)))


def uses_objects(fun: Any) -> bool:
    """Return True for an NNX transformation, and for a function of a module that imports NNX."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    fun = getattr(fun, "func", fun)  # a partial
    if type(fun).__module__.startswith("flax.nnx"):
        return True
    namespace = getattr(inspect.unwrap(fun), "__globals__", {})
    return any(value is nnx for value in namespace.values())


def variable_leaves(tree: Any) -> list[Any]:
    """Return the NNX Variables and other leaves of a tree; none if no NNX object is in it."""
    if not has_objects(tree):
        return []
    return [
        leaf
        for leaf in jax.tree.leaves(tree, is_leaf=_is_variable)
        if _is_variable(leaf) or not is_no_array(leaf)  # held leaves
    ]


def shared_variables(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Return, for each Variable or other leaf, the index of the first leaf that is the same object.

    The tuple is empty if no Variable occurs twice among these leaves.
    """
    first: dict[int, int] = {}
    indices = tuple(
        first.setdefault(id(leaf), i) if _is_variable(leaf) else i for i, leaf in enumerate(leaves)
    )
    return indices if indices != tuple(range(len(indices))) else ()


def sharing(tree: Any, shared: Sequence[int]) -> Any:
    """Return a tree in which Variables are shared as they are in another tree.

    Objects held in its structure become leaves again.
    """
    leaves, structure = jax.tree.flatten(
        tree, is_leaf=lambda node: isinstance(node, StaticLeaf) or _is_variable(node)
    )
    # This copies Variables, so it must come before they are shared.
    released = [release(leaf) for leaf in leaves if not isinstance(leaf, StaticLeaf)]
    in_order = iter([released[i] for i in shared] if shared else released)
    return structure.unflatten(
        [leaf.value if isinstance(leaf, StaticLeaf) else next(in_order) for leaf in leaves]
    )


def _held(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: StaticLeaf(leaf) if is_no_array(leaf) else leaf, tree)


# --- calls ----------------------------------------------------------------------------------------


def call_tracked(
    fun: Callable,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    names: Sequence[str],
    static: Sequence[bool] = (),
) -> Any:
    """Call a function, and return its result, with the state of objects that it changed.

    Args:
        fun: The function.
        args: Its arguments by position. Their objects are the trace's own.
        kwargs: Its arguments by name.
        names: The name of each positional argument.
        static: Which positional arguments are static.
    """
    static = [*static, *[False] * (len(args) - len(static))]
    dynamic = [(name, arg) for name, arg, no in zip(names, args, static, strict=False) if not no]
    arguments: list[tuple[int | str, str, Any]] = [
        *((i, name, arg) for i, (name, arg) in enumerate(dynamic)),
        *((name, name, arg) for name, arg in sorted(kwargs.items())),
    ]
    arguments = [argument for argument in arguments if has_objects(argument[2])]
    objects = [argument[2] for argument in arguments]
    leaves, before = jax.tree.flatten(_held(objects))
    out = fun(*args, **kwargs)
    pairs, after = jax.tree_util.tree_flatten_with_path(_held(objects))
    numbers = {id(leaf): i for i, leaf in reversed(list(enumerate(leaves)))}
    state: dict[str, Any] = {}
    sources: list[int | str] = []
    paths_by_id: dict[int, str] = {}
    for key_path, leaf in pairs:
        if id(leaf) in numbers:
            sources.append(numbers[id(leaf)])
            continue
        path = paths_by_id.setdefault(
            id(leaf), arguments[key_path[0].idx][1] + keystr(key_path[1:])
        )
        state[path] = leaf
        sources.append(path)
    if not state and before == after:
        return out
    argument_keys = tuple(place for place, _, _ in arguments)
    keeps_shapes = before == after and all(
        jnp.shape(old) == jnp.shape(new) for old, (_, new) in zip(leaves, pairs, strict=True)
    )
    return Changed(
        out, state, StateChange(argument_keys, before, after, tuple(sources), keeps_shapes)
    )


def without_unchanged(jaxpr: AnyJaxpr, out: Changed, in_tree: PyTreeDef) -> tuple[AnyJaxpr, Any]:
    """Drop the state that is an unchanged argument: `nnx.jit` returns all state of its objects.

    Args:
        jaxpr: The closed jaxpr of a function.
        out: Its result: a tree of types.
        in_tree: The structure of its arguments.

    Returns:
        The jaxpr without these results, and its new result.
    """
    args, kwargs = filled(in_tree, range(in_tree.num_leaves))
    change = out.change
    objects = [args[p] if isinstance(p, int) else kwargs[p] for p in change.argument_keys]
    leaf_of = {jaxpr.invars[arg]: i for i, arg in enumerate(jax.tree.leaves(objects))}
    first = len(jaxpr.outvars) - len(out.state)
    origins = dict(
        zip(sorted(out.state), map(_ArgumentOrigins(jaxpr), jaxpr.outvars[first:]), strict=True)
    )
    same = {path: leaf_of[var] for path, var in origins.items() if var in leaf_of}
    sources = tuple(same.get(s, s) if isinstance(s, str) else s for s in change.sources)
    state = {path: value for path, value in out.state.items() if path not in same}
    kept = [
        var
        for path, var in zip(sorted(out.state), jaxpr.outvars[first:], strict=True)
        if path not in same
    ]
    jaxpr = jaxcompat.replace_jaxpr(jaxpr, outvars=[*jaxpr.outvars[:first], *kept])
    if change.before == change.after and sources == tuple(range(len(sources))):
        return jaxpr, out.result
    return jaxpr, Changed(out.result, state, replace(change, sources=sources))


class _ArgumentOrigins:
    """Finds the argument of a jaxpr that a variable is, through calls that forward it, or None.

    An argument that a call donates is deleted, so a result that forwards it is another array.
    """

    def __init__(self, jaxpr: AnyJaxpr):
        body = jaxcompat.open_jaxpr(jaxpr)
        self._arguments = set(body.invars)
        self._defined = DefUse(body.eqns)

    def __call__(self, atom: Atom) -> Var | None:
        while not isinstance(atom, Literal) and atom not in self._arguments:
            call = self._defined.equation(atom)
            if call is None or not isinstance(seen := view(call), Call):
                return None
            inner = _ArgumentOrigins(seen.body)(seen.body.outvars[call.outvars.index(atom)])
            if inner is None:
                return None
            position = list(seen.body.invars).index(inner)
            if any(seen.operand_params.get("donated_invars", ())[position : position + 1]):
                return None
            atom = seen.operands[position]
        return None if isinstance(atom, Literal) else atom


def _updated(old: Any, new: Any) -> Any:
    """Update an object in place with the state of another, and return it or its replacement."""
    if old is new:
        return old
    if _is_variable(old) and type(old) is type(new):
        if old.get_raw_value() is not new.get_raw_value():
            old.update_from_state(new)
        return old
    if _is_object(old) and type(old) is type(new):
        for name in [name for name in vars(old) if name not in vars(new)]:
            object.__delattr__(old, name)
        for name, value in vars(new).items():
            mine = vars(old).get(name, _MISSING)
            if name != _OWN and (updated := _updated(mine, value)) is not mine:
                object.__setattr__(old, name, updated)
        return old
    if not has_objects(old):
        return (
            old
            if is_no_array(old) and is_no_array(new) and StaticLeaf(old) == StaticLeaf(new)
            else new
        )
    return _updated_container(old, new)


def _updated_container(old: Any, new: Any) -> Any:
    (keys, mine, tree), (new_keys, theirs, new_tree) = map(one_level, (old, new))
    if keys != new_keys:
        return new
    updated = [_updated(*pair) for pair in zip(mine, theirs, strict=True)]
    same = all(a is b for a, b in zip(updated, mine, strict=True))
    return old if same and tree == new_tree else new_tree.unflatten(updated)


# --- matching -------------------------------------------------------------------------------------
# Match the arguments of a call with the structure that a program takes.
#
# A program that was read from a file does not have the classes of its arguments' nodes. Such a node
# matches any container that has the same children: under the same keys if both have keys, and
# otherwise in order. A result of that class is then built with the class of the argument, if its
# own data occur in the arguments too, or are literals. All other nodes must be as in JAX: of the
# same class, with equal auxiliary data.

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
