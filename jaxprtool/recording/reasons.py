"""Find why JAX compiled a function again, and how to avoid it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile

from jaxprtool.ir.documents import listed
from jaxprtool.ir.source_text import UNKNOWN
from jaxprtool.ir.trees import common_path, without_numbers
from jaxprtool.recording.describe import STEP, CacheKey, root
from jaxprtool.recording.recorded_run import Argument, Function, Reason, ReasonKind

# --- reasons --------------------------------------------------------------------------------------
# Find why JAX compiled a function again: the differences from its nearest earlier compilation.


def compiled_again(function: Function) -> tuple[str, Reason] | None:
    """Return that a function was compiled again, and what to do or else what differed.

    Returns:
        The phrase `step was compiled 6 times: pad batch to 64`, and the first reason with advice,
        or else the first one; None if the function was compiled once.
    """
    reasons = [reason for compilation in function.compilations for reason in compilation.reasons]
    if not reasons:
        return None
    advised = next((reason for reason in reasons if reason.advice), reasons[0])
    # The last advice on it has the most facts, such as all sizes.
    for reason in reasons:
        if reason.advice and (reason.kind, reason.path) == (advised.kind, advised.path):
            advised = replace(advised, advice=reason.advice)
    what = advised.advice or advised.path
    text = f"{function.name} was compiled {len(function.compilations):,} times"
    return text + (f": {what}" if what else ""), advised


#: The maximum number of reasons of one kind for one argument; more are merged to one.
_MOST = 6

#: The text of an argument that was not given.
NOT_GIVEN = "not given"

#: The maximum length of the text of a value in a reason.
LIMIT = 70

#: The number of an object in a text of a static value.
_OBJECT_NUMBER = re.compile(r" #\d+\b")


def recompile_advice(functions: Iterable[Function]) -> list[str]:
    """Return the lines that compiled functions again, for those with advice, with that advice."""
    again = filter(None, map(compiled_again, functions))
    return [
        text if reason.line in text else f"{reason.line}: {text}"
        for text, reason in again
        if reason.advice
    ]


def reasons(
    key: CacheKey, earlier: Sequence[CacheKey], *, foreign: bool = False
) -> tuple[int, tuple[Reason, ...]]:
    """Return why a function was compiled again.

    Args:
        key: The key of the compilation.
        earlier: The keys of earlier compilations of the function in this process, in order.
        foreign: Whether the program has primitives of another package than JAX, which cannot be
            masked.

    Returns:
        The index of the nearest earlier compilation (see `nearest`), and the differences from it.
        For the first compilation the index is -1, and there are no reasons.
    """
    if not earlier:
        return -1, ()
    index = nearest(key, earlier)
    old_key = earlier[index]
    why = [*_of_function(key, old_key, earlier), *_of_settings(key, old_key, earlier)]
    why += _of_arguments(key, old_key, earlier, foreign)
    why = why or [_of_cache(key, old_key)]
    return index, tuple(sorted(why, key=lambda reason: _ORDER[reason.kind]))


#: The order of reasons: those that a user can most likely fix come first.
_ORDER: dict[ReasonKind, int] = {
    "function": 0,
    "closure": 1,
    "static": 2,
    "structure": 3,
    "shape": 4,
    "dtype": 5,
    "weak_type": 6,
    "sharding": 7,
    "context": 8,
    "cache": 9,
}


def nearest(key: CacheKey, earlier: Sequence[CacheKey]) -> int:
    """Return the index of the earlier key with the fewest differing parts.

    An argument is one part. Ties are broken by the number of differing leaves, and then by taking
    the latest key.
    """
    parts, size = key.parts, len(key.parts)
    distances = [max(size, len(other.parts)) - len(parts & other.parts) for other in earlier]
    least = min(distances)
    tied = [i for i, distance in enumerate(distances) if distance == least]
    if len(tied) == 1 or least == 0:
        return tied[-1]
    return min(reversed(tied), key=lambda i: _differing_leaves(key, earlier[i]))


def _differing_leaves(key: CacheKey, other: CacheKey) -> int:
    none: frozenset[int] = frozenset()
    count = 0
    for name in {part for part, _ in key.parts ^ other.parts if part.startswith("argument ")}:
        argument = name.removeprefix("argument ")
        mine, its = key.leaves.get(argument, none), other.leaves.get(argument, none)
        count += max(len(mine), len(its)) - len(mine & its)
    return count


# --- the function, static arguments and settings --------------------------------------------------


def _of_function(key: CacheKey, old_key: CacheKey, earlier: Sequence[CacheKey]) -> Iterator[Reason]:
    function, old = key.function, old_key.function
    if function.number == old.number:
        return
    line = function.made or key.line
    again = jit_once(key, earlier)
    # A variable that only one of them has belongs to a wrapper.
    earlier_values, values = (
        {name: text for name, text in one.closure.items() if name in other.closure}
        for one, other in ((old, function), (function, old))
    )
    closure = _changed(earlier_values, values)
    for name, was, now in closure:
        say = closed_over_advice(name, was, now, key, again)
        yield Reason("closure", name, was, now, line, say)
    if not closure:
        where = f" of {old.made}" if old.made and old.made != function.made else ""
        now = f"another {function.kind} object".replace("object object", "object")
        yield Reason("function", "", f"the {old.kind}{where}", now, line, again)


def _of_settings(key: CacheKey, old_key: CacheKey, earlier: Sequence[CacheKey]) -> Iterator[Reason]:
    """Yield the differences of static arguments, options of `jax.jit`, and the context."""
    for name, was, now in _changed(old_key.statics, key.statics):
        was, now = _given(name, was, old_key), _given(name, now, key)
        values = {other.statics[name] for other in (*earlier, key) if name in other.statics}
        say = static_advice(name, was, now, values, key)
        yield Reason("static", name, *difference_texts(was, now), key.line, say)
    for name, was, now in _changed(old_key.options, key.options):
        kind: ReasonKind = "sharding" if "sharding" in name else "function"
        yield Reason(kind, name, was, now, key.function.made or key.line)
    for name, was, now in _changed(old_key.context, key.context, absent="not set"):
        yield Reason("context", name, was, now, key.line)


def _given(name: str, text: str, key: CacheKey) -> str:
    """Return the text of an argument; for one that was not given, its default."""
    of_function = key.function.kind in ("function", "lambda")  # no argument is bound
    default = key.function.closure.get(name) if of_function else None
    return f"{default} (default)" if text == NOT_GIVEN and default is not None else text


def _of_cache(key: CacheKey, old_key: CacheKey) -> Reason:
    if key.cleared != old_key.cleared:
        line = key.cleared_line or key.line
        return Reason("cache", "", "compiled", "JAX's cache was cleared", line)
    return Reason("cache", "", "compiled", "JAX's cache no longer had it", key.line)


def _changed(
    before: dict[str, str], after: dict[str, str], absent: str = NOT_GIVEN
) -> list[tuple[str, str, str]]:
    """Return the names whose texts differ, with both texts."""
    names = [*after, *(name for name in before if name not in after)]
    pairs = ((name, before.get(name, absent), after.get(name, absent)) for name in names)
    return [change for change in pairs if change[1] != change[2]]


def difference_texts(before: str, after: str) -> tuple[str, str]:
    """Return short texts of two values that show the difference where possible.

    The numbers of objects are omitted if the values differ without them.
    """
    short = _OBJECT_NUMBER.sub("", before), _OBJECT_NUMBER.sub("", after)
    same = short[0] == short[1]
    before, after = (before, after) if same else short
    if max(len(before), len(after)) <= LIMIT:
        return before, after
    if same:  # objects of the same text
        name = _class(before)[:LIMIT]
        return name, f"another {name}"
    pairs = zip(before, after, strict=False)
    start = max(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) - LIMIT // 3, 0)
    return _part(before, start), _part(after, start)


def _part(text: str, start: int) -> str:
    """Return a text from a position on, cut to the maximum length."""
    start = start and max(text.rfind(separator, 0, start) for separator in " (=") + 1
    end = start + LIMIT
    return "…" * (start > 0) + text[start:end] + "…" * (len(text) > end)


# --- arguments ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _KeyDifference:
    """A difference at one path.

    Attributes:
        kind: The kind of the reason.
        path: The path.
        before: The earlier text.
        after: The text now.
        alike: A key; differences with the same key may be merged to one reason.
        facets: `before` and `after` without the details that differ between merged differences.
    """

    kind: ReasonKind
    path: str
    before: str
    after: str
    alike: object
    facets: tuple[str, str]


def _of_arguments(
    key: CacheKey, old_key: CacheKey, earlier: Sequence[CacheKey], foreign: bool
) -> list[Reason]:
    new, old = _Nodes.differing(key, old_key)
    differences = [*_of_structure(new, old, key, old_key), *_of_leaves(new, old, key, old_key)]
    groups: dict[object, list[_KeyDifference]] = {}
    for difference in differences:
        groups.setdefault((difference.kind, root(difference.path), difference.alike), []).append(
            difference
        )
    joined = _joined(list(groups.values()))
    told = [_reason(group, key, new, old) for group in joined]
    # Sizes of several arguments may have to agree, so one advice covers all of them.
    shape_indices = [i for i, reason in enumerate(told) if reason.kind == "shape"]
    result = []
    for i, (group, reason) in enumerate(zip(joined, told, strict=True)):
        if i not in shape_indices:
            say = _advice(group, reason, key, old_key, earlier)
        elif i == shape_indices[0]:
            paths = [difference.path for i in shape_indices for difference in joined[i]]
            shown = listed([told[i].path for i in shape_indices], 3)
            say = shape_advice(paths, shown, key, earlier, foreign=foreign)
        else:
            say = ""
        result.append(replace(reason, line=key.line, advice=say))
    return result


@dataclass
class _Nodes:
    """The arguments of a key, by path.

    Attributes:
        leaves: The flat arguments.
        texts: The texts of containers and of static fields.
    """

    leaves: dict[str, Argument]
    texts: dict[str, str]

    @classmethod
    def differing(cls, key: CacheKey, old_key: CacheKey) -> tuple[_Nodes, _Nodes]:
        """Return the arguments of the function that differ, of both keys."""
        mine, its = key.leaves, old_key.leaves
        roots = {name for name in mine.keys() | its.keys() if mine.get(name) != its.get(name)}
        return cls._of(key, roots), cls._of(old_key, roots)

    @classmethod
    def _of(cls, key: CacheKey, roots: set[str]) -> _Nodes:
        leaves = {leaf.path: leaf for leaf in key.arguments if root(leaf.path) in roots}
        texts = {path: text for path, text in key.structure.items() if root(path) in roots}
        return cls(leaves, texts)

    def text(self, path: str) -> str | None:
        """Return the type of a leaf or the text of a container, or None."""
        leaf = self.leaves.get(path)
        return self.texts.get(path) if leaf is None else leaf.type


def _of_structure(
    new: _Nodes, old: _Nodes, key: CacheKey, old_key: CacheKey
) -> Iterator[_KeyDifference]:
    """Yield the differences of the structure; of nested ones, only the outermost."""
    replaced: set[str] = set()  # another class or a leaf
    inner: list[str] = []  # the same class with other children
    for path, text in new.texts.items():
        was = old.text(path)
        if path == "" or was is None or was == text:
            continue
        if text[0] == "=" == was[0]:
            continue
        if path not in old.leaves and _class(was) == _class(text):
            inner.append(path)
        else:
            replaced.add(path)
    replaced |= {path for path in old.texts if path in new.leaves}
    mine, its = new.leaves.keys() | new.texts.keys(), old.leaves.keys() | old.texts.keys()
    only = (mine ^ its) - {""}
    changed = replaced | only
    paths = dict.fromkeys([*new.texts, *new.leaves, *old.texts, *old.leaves])
    told = [path for path in paths if path in changed and changed.isdisjoint(_ancestors(path))]
    for path in told:
        was, now = old.text(path), new.text(path)
        absent = NOT_GIVEN if path == root(path) else "absent"
        was = _given(path, absent, old_key) if was is None else was.removeprefix("=")
        now = _given(path, absent, key) if now is None else now.removeprefix("=")
        yield _KeyDifference("structure", path, was, now, (was, now), (was, now))
    for path, text in new.texts.items():
        was = old.texts.get(path, text)
        if text != was and text[:1] == "=" == was[:1]:
            texts = difference_texts(was[1:], text[1:])
            yield _KeyDifference("static", path, *texts, texts, texts)
    parents = {ancestor for path in told for ancestor in _ancestors(path)}
    for path in inner:
        if path not in parents and not any(ancestor in replaced for ancestor in _ancestors(path)):
            was, now = old.texts[path], new.texts[path]
            yield _KeyDifference("structure", path, was, now, (was, now), (was, now))
    names, others = new.texts.get(""), old.texts.get("")
    if names and others and names != others and not any(path == root(path) for path in told):
        yield _KeyDifference("structure", "", others, names, "", (others, names))


def _class(text: str) -> str:
    return text.partition("(")[0]


def _ancestors(path: str) -> list[str]:
    """Return the paths of the containers of a path, the outermost first."""
    return list(accumulate(STEP.findall(path)))[:-1]


def _of_leaves(
    new: _Nodes, old: _Nodes, key: CacheKey, old_key: CacheKey
) -> Iterator[_KeyDifference]:
    options_differ = key.options != old_key.options
    for path, leaf in new.leaves.items():
        was = old.leaves.get(path)
        if was is None or was == leaf:
            continue
        types = was.type, leaf.type
        if was.dtype != leaf.dtype:
            facets = was.dtype, leaf.dtype
            texts = facets if was.shape != leaf.shape else types
            yield _KeyDifference("dtype", path, *texts, facets, facets)
        elif was.weak != leaf.weak:
            facets = f"{'~' * was.weak}{was.dtype}", f"{'~' * leaf.weak}{leaf.dtype}"
            texts = facets if was.shape != leaf.shape else types
            yield _KeyDifference("weak_type", path, *texts, facets, facets)
        if was.shape != leaf.shape:
            alike = was.dtype == leaf.dtype and was.weak == leaf.weak
            texts = types if alike else _sizes(was, leaf)
            pairs = frozenset(_changed_sizes(was, leaf).values()) or texts
            yield _KeyDifference("shape", path, *texts, pairs, _sizes(was, leaf))
        if was.sharding != leaf.sharding:
            texts = was.sharding or "not placed", leaf.sharding or "not placed"
            yield _KeyDifference("sharding", path, *texts, texts, texts)
        if was.donated != leaf.donated and not options_differ:
            texts = ("donated", "not donated") if was.donated else ("not donated", "donated")
            yield _KeyDifference("function", path, *texts, texts, texts)


def _sizes(was: Argument, now: Argument) -> tuple[str, str]:
    """Return the shapes of both: `[4,17]`."""
    shapes = (f"[{','.join(map(str, leaf.shape))}]" for leaf in (was, now))
    return next(shapes), next(shapes)


def _changed_sizes(was: Argument, now: Argument) -> dict[int, tuple[int | str, int | str]]:
    """Return both sizes of each axis that differs; empty if the ranks do."""
    if len(was.shape) != len(now.shape):
        return {}
    pairs = enumerate(zip(was.shape, now.shape, strict=True))
    return {axis: pair for axis, pair in pairs if pair[0] != pair[1]}


# --- merging of differences -----------------------------------------------------------------------


def _joined(groups: list[list[_KeyDifference]]) -> list[list[_KeyDifference]]:
    """Join groups if there are too many: first alike ones, then those of the same argument."""
    for common in (_alike, _of_argument):
        groups = _join_by(groups, common)
    return groups


def _alike(difference: _KeyDifference) -> object:
    return difference.kind, difference.alike


def _of_argument(difference: _KeyDifference) -> object:
    return difference.kind, root(difference.path)


def _join_by(
    groups: list[list[_KeyDifference]], common: Callable[[_KeyDifference], object]
) -> list[list[_KeyDifference]]:
    by_key: dict[object, list[list[_KeyDifference]]] = {}
    for group in groups:
        by_key.setdefault(common(group[0]), []).append(group)
    result = []
    for alike in by_key.values():
        many = len(alike) > _MOST or (common is _alike and len(alike) > 3)
        result += [[difference for group in alike for difference in group]] if many else alike
    return result


def _reason(group: list[_KeyDifference], key: CacheKey, new: _Nodes, old: _Nodes) -> Reason:
    """Return one reason for several differences, without line and advice."""
    first, count = group[0], len(group)
    if count == 1:
        return Reason(first.kind, first.path, first.before, first.after, UNKNOWN)
    known = new.leaves.keys() if first.kind in _OF_LEAVES else new.leaves.keys() | new.texts.keys()
    path = common([difference.path for difference in group], known)
    if len({(difference.before, difference.after) for difference in group}) == 1:
        was, now = first.before, first.after
    elif len({difference.alike for difference in group}) > 1:
        return Reason(
            first.kind, path, f"{first.before}, …", f"{first.after}, … ({count} differ)", UNKNOWN
        )
    elif first.kind == "shape":
        was, now = _common_sizes(group, new, old)
    else:
        was, now = first.facets
    arrays = all(
        difference.path in new.leaves or difference.path in old.leaves for difference in group
    )
    unit = "arrays" if arrays else "places"
    return Reason(first.kind, path, was, f"{now} ({count} {unit})", UNKNOWN)


_OF_LEAVES = ("shape", "dtype", "weak_type", "sharding")


def _common_sizes(group: list[_KeyDifference], new: _Nodes, old: _Nodes) -> tuple[str, str]:
    """Return one text for the shapes of several arrays, `[64,…]`, or for the sizes that differ."""
    pairs = [(old.leaves[difference.path], new.leaves[difference.path]) for difference in group]
    changed = [_changed_sizes(*pair) for pair in pairs]
    if all(axes == changed[0] for axes in changed):
        return _common_shape([was for was, _ in pairs]), _common_shape([now for _, now in pairs])
    sizes = sorted({pair for axes in changed for pair in axes.values()}, key=str)
    before, after = (", ".join(f"size {pair[i]}" for pair in sizes) for i in (0, 1))
    return before, after


def _common_shape(leaves: Sequence[Argument]) -> str:
    """Return one text for several shapes, with `*` for sizes that differ, `…` for further axes."""
    sizes = [
        str(axis[0]) if len(set(axis)) == 1 else "*" for axis in zip(*_shapes(leaves), strict=False)
    ]
    more = ["…"] if len({len(shape) for shape in _shapes(leaves)}) > 1 else []
    return f"[{','.join(sizes + more)}]"


def _shapes(leaves: Sequence[Argument]) -> list[tuple[int | str, ...]]:
    return [leaf.shape for leaf in leaves]


def common(paths: Sequence[str], known: Iterable[str]) -> str:
    """Return one path for several paths.

    It is the container of all `paths`, if it contains no other path of `known`: `params`. Else it
    has the range of the indices that differ: `layers[0..3].weight`, `batch[*]`. Several arguments
    are `a, b, …`.
    """
    roots = list(dict.fromkeys(map(root, paths)))
    if len(roots) > 1:
        return ", ".join(roots[:3]) + (", …" if len(roots) > 3 else "")
    steps = [STEP.findall(path) for path in paths]
    prefix = []
    for level in zip(*steps, strict=False):
        if len(set(level)) > 1:
            break
        prefix.append(level[0])
    container = "".join(prefix)
    inside = {path for path in known if container in _ancestors(path)}
    if inside <= set(paths):
        return container
    if len({without_numbers(path) for path in paths}) == 1:
        return common_path(paths)
    return f"{container}[*]"


# --- advice ---------------------------------------------------------------------------------------


def _advice(
    group: list[_KeyDifference],
    reason: Reason,
    key: CacheKey,
    old_key: CacheKey,
    earlier: Sequence[CacheKey],
) -> str:
    """Return advice for a difference of arguments, or ""."""
    paths = [difference.path for difference in group]
    if reason.kind == "weak_type" or reason.kind == "dtype":
        return weak_type_advice(paths, reason.kind, key, old_key)
    if reason.kind == "sharding" and not key.function.library:
        if group[0].before == "not placed":
            return f"jax.device_put before the first call places {reason.path} once"
        return (
            f"give {reason.path} one sharding in every call, by jax.device_put, or by "
            "out_shardings where a function returns it"
        )
    if reason.kind == "static":
        path = paths[0]
        values = {other.structure[path][1:] for other in (*earlier, key) if path in other.structure}
        texts = old_key.structure[path][1:], key.structure[path][1:]
        return static_advice(path, *texts, values, key) if len(group) == 1 else ""
    return ""


# --- advice ---------------------------------------------------------------------------------------
# Advice on how to avoid a compilation, given where one remedy is clearly right.
#
# No advice is given on code inside libraries.

#: The maximum number of leaves of an argument whose type is written out, and the maximum length of
#: that text.
_MOST_LEAVES, _LONGEST = 4, 60

#: Two sizes are padded to the larger one only if it is at most this many times the smaller one.
_MOST_PADDING = 32

#: Names of arguments that are a model or its state, whose sizes are not lengths of data.
_MODELS = {"self", "model", "params", "variables", "weights", "state", "train_state", "opt_state"}

_NUMERAL = re.compile(r"-?\d[\d_.]*(e[-+]?\d+)?", re.IGNORECASE)
_OBJECT = re.compile(r" #\d+\b")  # the number of an object in a text
_DTYPE = re.compile(r"(bf|f|i|u|c)(8|16|32|64|128)")
_LONG = {"bf": "bfloat", "f": "float", "i": "int", "u": "uint", "c": "complex"}


def jit_once(key: CacheKey, earlier: Sequence[CacheKey]) -> str:
    """Return advice for a function object that is created again for each call."""
    if key.function.library:
        return ""
    line, jit = key.function.made, key.function.wrapper or "jax.jit"
    if _is_loop(key):
        return f"call {jit} under jax.jit: outside of it, each new body is compiled"
    same_line = {other.function.number for other in (*earlier, key) if other.function.made == line}
    times = max(key.in_loop + 1, len(same_line)) if line else 0
    if times > 1:
        return f"{line} led to {times} calls of {jit}: make one, outside of any loop"
    return f"make the function and call {jit} once, and keep the result"


def _is_loop(key: CacheKey) -> bool:
    """Return True for a loop or a branch outside of `jit`."""
    return key.function.wrapper.startswith("jax.lax.")


def closed_over_advice(name: str, before: str, after: str, key: CacheKey, again: str) -> str:
    """Return advice for a closed-over variable whose value changed, or ""."""
    if _is_number(before) and _is_number(after) and not key.function.library:
        return f"make {name} an argument, unless a shape depends on it; {again}"
    return ""


def static_advice(name: str, before: str, after: str, values: set[str], key: CacheKey) -> str:
    """Return advice for a static argument that has had these values, or ""."""
    if key.function.library:
        return ""
    if before != after and _OBJECT.sub("", before) == _OBJECT.sub("", after):  # a new object
        if ".py:" in after:
            return f"make {name} once: JAX compares functions by identity"
        class_name = _OBJECT.sub("", after).partition("(")[0]
        return f"pass one {class_name}, or define __eq__ and __hash__ if the two are equal"
    if _is_loop(key) or not all(map(_is_number, values)):
        return ""
    if key.function.wrapper == "equinox.filter_jit":
        return f"pass jnp.asarray({name}), unless a shape depends on it"
    if len(values) > 2 and name.isidentifier():
        return f"{len(values)} values: do not make {name} static, unless a shape depends on it"
    return ""


def weak_type_advice(paths: Sequence[str], kind: str, key: CacheKey, old_key: CacheKey) -> str:
    """Return advice for arguments that differ in their weak types, or ""."""
    if key.function.library:
        return ""
    place, leaf = next((i, leaf) for i, leaf in enumerate(key.arguments) if leaf.path == paths[0])
    was = _at(old_key, place, paths[0])
    if was is None:
        return ""
    dtypes = sorted((was.dtype, leaf.dtype), key=lambda dtype: "iufbc".find(dtype[0]))
    if kind == "dtype" and not (was.weak and leaf.weak and dtypes[0][0] != dtypes[1][0]):
        return ""
    dtype = _long_dtype(dtypes[-1])
    if not dtype:
        return ""
    name = paths[0] if len(paths) == 1 else "value"
    return f"pass jnp.asarray({name}, jnp.{dtype}) in every call"


def _at(key: CacheKey, place: int, path: str) -> Argument | None:
    """Return the flat argument with a path, or None. Look first at the position `place`."""
    if place < len(key.arguments) and key.arguments[place].path == path:
        return key.arguments[place]
    return next((leaf for leaf in key.arguments if leaf.path == path), None)


def shape_advice(
    paths: Sequence[str],
    shown: str,
    key: CacheKey,
    earlier: Sequence[CacheKey],
    *,
    foreign: bool = False,
) -> str:
    """Return advice to compile once for arguments that differ in their sizes, or ""."""
    if _is_loop(key) or len(paths) > _MOST_LEAVES:
        return ""
    if any(root(path) in _MODELS for path in paths):
        return ""
    sizes = _VaryingSizes.found(paths, key, earlier)
    if sizes is None:
        return ""
    buckets = sizes.buckets()
    if not buckets:
        return ""
    typed = "" if foreign else _typed_call(paths, key, sizes, buckets)
    if typed:
        return typed
    if len(buckets) > 1:
        return f"pad {shown} to fixed sizes"
    [sizes_of_one] = buckets.values()
    if len(sizes_of_one) == 1:
        return f"pad {shown} to {sizes_of_one[0]}"
    return f"pad {shown} to a few sizes: {', '.join(map(str, sizes_of_one))}"


class _VaryingSizes:
    """The sizes that differ between calls, as symbols.

    Attributes:
        symbols: The symbol of each size that differs, by path and axis.
        seen: The values of each symbol in all calls.
    """

    def __init__(self) -> None:
        self.symbols: dict[tuple[str, int], str] = {}
        self.seen: dict[str, set[int]] = {}

    @classmethod
    def found(
        cls, paths: Sequence[str], key: CacheKey, earlier: Sequence[CacheKey]
    ) -> _VaryingSizes | None:
        """Return the sizes of arguments that varied; None if their ranks also varied."""
        result = cls()
        wanted = set(paths)
        places = {i: leaf.path for i, leaf in enumerate(key.arguments) if leaf.path in wanted}
        history = {
            path: [leaf.shape for other in (*earlier, key) if (leaf := _at(other, place, path))]
            for place, path in places.items()
        }
        names: dict[tuple[int | str, ...], str] = {}
        for path, shapes in history.items():
            if len({len(shape) for shape in shapes}) != 1:
                return None
            for axis, sizes in enumerate(zip(*shapes, strict=True)):
                if len(set(sizes)) > 1:
                    if not all(isinstance(size, int) for size in sizes):
                        return None
                    if sizes not in names:  # axes of the same sizes in all calls are one symbol
                        if len(names) == len(_SYMBOLS):
                            return None
                        names[sizes] = _SYMBOLS[len(names)]
                    symbol = names[sizes]
                    result.symbols[path, axis] = symbol
                    result.seen[symbol] = {n for n in sizes if isinstance(n, int)}
        return result

    def buckets(self) -> dict[str, tuple[int, ...]]:
        """Return the sizes to pad each symbol to; empty if that would be mostly padding."""
        sizes: dict[str, tuple[int, ...]] = {}
        for symbol, seen in self.seen.items():
            least, most = min(seen), max(seen)
            if least == 0 or (len(seen) == 2 and most > least * _MOST_PADDING):
                return {}
            powers = sorted({1 << (size - 1).bit_length() for size in seen})
            sizes[symbol] = (most,) if len(seen) == 2 else tuple(powers)
        return sizes


_SYMBOLS = "nmkp"


def _typed_call(
    paths: Sequence[str],
    key: CacheKey,
    sizes: _VaryingSizes,
    buckets: Mapping[str, tuple[int, ...]],
) -> str:
    """Return `jaxprtool.jit(step, types="batch=i32[4,n]", shapes={"n": 17})`, or "" if unknown."""
    function = key.function
    if function.kind != "function" or not function.name.isidentifier() or function.library:
        return ""
    if function.wrapper == "nnx.jit":  # the new state of modules would be lost
        return ""
    texts = []
    for name in dict.fromkeys(map(root, paths)):
        text = _type_text(name, key, sizes)
        if not text:
            return ""
        texts.append(f"{name}={text}")
    types = ", ".join(texts)
    if len(types) > _LONGEST:
        return ""
    shapes = ", ".join(
        f'"{symbol}": {bucket[0] if len(bucket) == 1 else bucket}'
        for symbol, bucket in buckets.items()
    )
    compiled = " once" if all(len(bucket) == 1 for bucket in buckets.values()) else " once per size"
    call = f'jaxprtool.jit({function.name}, types="{types}", shapes={{{shapes}}})'
    return f"{call} pads and compiles{compiled}"


def _type_text(name: str, key: CacheKey, sizes: _VaryingSizes) -> str:
    """Return the type of an argument of the function with symbols, or "" if it is a large tree."""
    leaves = [leaf for leaf in key.arguments if root(leaf.path) == name]
    inside = {path: text for path, text in key.structure.items() if root(path) == name}
    if not 1 <= len(leaves) <= _MOST_LEAVES or any(leaf.sharding for leaf in leaves):
        return ""
    if [leaf.path for leaf in leaves] == [name]:
        return _symbolic(leaves[0], sizes)
    if inside.keys() != {name}:
        return ""
    steps = [leaf.path.removeprefix(name) for leaf in leaves]
    types = [_symbolic(leaf, sizes) for leaf in leaves]
    kind = inside[name].partition("(")[0]
    if kind == "dict" and all(re.fullmatch(r"\['\w+'\]", step) for step in steps):
        pairs = zip(steps, types, strict=True)
        return "{" + ", ".join(f"{step[1:-1]}: {text}" for step, text in pairs) + "}"
    if kind in ("tuple", "list") and steps == [f"[{i}]" for i in range(len(steps))]:
        inner = ", ".join(types)
        return f"[{inner}]" if kind == "list" else f"({inner}{',' * (len(types) == 1)})"
    return ""


def _symbolic(leaf: Argument, sizes: _VaryingSizes) -> str:
    shape = (sizes.symbols.get((leaf.path, axis), size) for axis, size in enumerate(leaf.shape))
    return f"{leaf.dtype}[{','.join(map(str, shape))}]"


def _is_number(text: str) -> bool:
    return _NUMERAL.fullmatch(text) is not None


def _long_dtype(dtype: str) -> str:
    """Return `float32` for `f32`; "" for a dtype without a name in `jnp`."""
    if dtype == "bool":
        return "bool_"
    match = _DTYPE.fullmatch(dtype)
    return _LONG[match[1]] + match[2] if match else ""
