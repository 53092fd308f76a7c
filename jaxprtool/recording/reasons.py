"""Find why JAX compiled a function again: the differences from its nearest earlier compilation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile

from jaxprtool.analysis.recorded_run import Argument, Reason, ReasonKind
from jaxprtool.ir.basics.paths import common_path, without_numbers
from jaxprtool.ir.basics.quantities import listed
from jaxprtool.recording import advice
from jaxprtool.recording.keys import STEP, Key, root

#: The maximum number of reasons of one kind for one argument; more are merged to one.
_MOST = 6

#: The text of an argument that was not given.
NOT_GIVEN = "not given"

#: The maximum length of the text of a value in a reason.
LIMIT = 70

#: The number of an object in a text of a static value.
_NUMBER = re.compile(r" #\d+\b")


def reasons(key: Key, earlier: Sequence[Key]) -> tuple[int, tuple[Reason, ...]]:
    """Return why a function was compiled again.

    Args:
        key: The key of the compilation.
        earlier: The keys of earlier compilations of the function in this process, in order.

    Returns:
        The index of the nearest earlier compilation (see `nearest`), and the differences from it.
        For the first compilation the index is -1, and there are no reasons.
    """
    if not earlier:
        return -1, ()
    index = nearest(key, earlier)
    before = earlier[index]
    found = [*_of_function(key, before, earlier), *_of_settings(key, before, earlier)]
    found += _of_arguments(key, before, earlier)
    found = found or [_of_cache(key, before)]
    return index, tuple(sorted(found, key=lambda each: _ORDER[each.kind]))


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


def nearest(key: Key, earlier: Sequence[Key]) -> int:
    """Return the index of the earlier key with the fewest differing parts.

    An argument is one part. Ties are broken by the number of differing leaves, and then by taking
    the latest key.
    """
    parts, size = key.parts, len(key.parts)
    distances = [max(size, len(each.parts)) - len(parts & each.parts) for each in earlier]
    least = min(distances)
    tied = [i for i, distance in enumerate(distances) if distance == least]
    if len(tied) == 1 or least == 0:
        return tied[-1]
    return min(reversed(tied), key=lambda i: _differing_leaves(key, earlier[i]))


def _differing_leaves(key: Key, other: Key) -> int:
    none: frozenset[int] = frozenset()
    count = 0
    for name in {part for part, _ in key.parts ^ other.parts if part.startswith("argument ")}:
        argument = name.removeprefix("argument ")
        mine, its = key.leaves.get(argument, none), other.leaves.get(argument, none)
        count += max(len(mine), len(its)) - len(mine & its)
    return count


# --- the function, static arguments and settings --------------------------------------------------


def _of_function(key: Key, before: Key, earlier: Sequence[Key]) -> Iterator[Reason]:
    function, old = key.function, before.function
    if function.number == old.number:
        return
    line = function.made or key.line
    again = advice.jit_once(key, earlier)
    # A variable that only one of them has belongs to a wrapper.
    earlier_values, values = (
        {name: text for name, text in each.closure.items() if name in other.closure}
        for each, other in ((old, function), (function, old))
    )
    closure = _changed(earlier_values, values)
    for name, was, now in closure:
        say = advice.closed_over(name, was, now, key, again)
        yield Reason("closure", name, was, now, line, say)
    if not closure:
        where = f" of {old.made}" if old.made and old.made != function.made else ""
        now = f"another {function.kind} object".replace("object object", "object")
        yield Reason("function", "", f"the {old.kind}{where}", now, line, again)


def _of_settings(key: Key, before: Key, earlier: Sequence[Key]) -> Iterator[Reason]:
    """Yield the differences of static arguments, options of `jax.jit`, and the context."""
    for name, was, now in _changed(before.statics, key.statics):
        was, now = _given(name, was, before), _given(name, now, key)
        values = {each.statics[name] for each in (*earlier, key) if name in each.statics}
        say = advice.static(name, was, now, values, key)
        yield Reason("static", name, *shown(was, now), key.line, say)
    for name, was, now in _changed(before.options, key.options):
        kind: ReasonKind = "sharding" if "sharding" in name else "function"
        yield Reason(kind, name, was, now, key.function.made or key.line)
    for name, was, now in _changed(before.context, key.context, absent="not set"):
        yield Reason("context", name, was, now, key.line)


def _given(name: str, text: str, key: Key) -> str:
    """Return the text of an argument; for one that was not given, its default."""
    of_function = key.function.kind in ("function", "lambda")  # no argument is bound
    default = key.function.closure.get(name) if of_function else None
    return f"{default} (default)" if text == NOT_GIVEN and default is not None else text


def _of_cache(key: Key, before: Key) -> Reason:
    if key.cleared != before.cleared:
        line = key.cleared_line or key.line
        return Reason("cache", "", "compiled", "JAX's cache was cleared", line)
    return Reason("cache", "", "compiled", "JAX's cache no longer had it", key.line)


def _changed(
    before: dict[str, str], after: dict[str, str], absent: str = NOT_GIVEN
) -> list[tuple[str, str, str]]:
    """Return the names whose texts differ, with both texts."""
    names = [*after, *(name for name in before if name not in after)]
    pairs = ((name, before.get(name, absent), after.get(name, absent)) for name in names)
    return [each for each in pairs if each[1] != each[2]]


def shown(before: str, after: str) -> tuple[str, str]:
    """Return short texts of two values that show the difference where possible.

    The numbers of objects are omitted if the values differ without them.
    """
    short = _NUMBER.sub("", before), _NUMBER.sub("", after)
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
    start = start and max(text.rfind(each, 0, start) for each in " (=") + 1
    end = start + LIMIT
    return "…" * (start > 0) + text[start:end] + "…" * (len(text) > end)


# --- arguments ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Difference:
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


def _of_arguments(key: Key, before: Key, earlier: Sequence[Key]) -> list[Reason]:
    new, old = _Nodes.differing(key, before)
    found = [*_of_structure(new, old, key, before), *_of_leaves(new, old, key, before)]
    groups: dict[object, list[_Difference]] = {}
    for each in found:
        groups.setdefault((each.kind, root(each.path), each.alike), []).append(each)
    joined = _joined(list(groups.values()))
    told = [_reason(group, key, new, old) for group in joined]
    # Sizes of several arguments may have to agree, so one advice covers all of them.
    shapes = [i for i, reason in enumerate(told) if reason.kind == "shape"]
    result = []
    for i, (group, reason) in enumerate(zip(joined, told, strict=True)):
        if i not in shapes:
            say = _advice(group, reason, key, before, earlier)
        elif i == shapes[0]:
            paths = [each.path for i in shapes for each in joined[i]]
            say = advice.shapes(paths, listed([told[i].path for i in shapes], 3), key, earlier)
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
    def differing(cls, key: Key, before: Key) -> tuple[_Nodes, _Nodes]:
        """Return the arguments of the function that differ, of both keys."""
        mine, its = key.leaves, before.leaves
        roots = {name for name in mine.keys() | its.keys() if mine.get(name) != its.get(name)}
        return cls._of(key, roots), cls._of(before, roots)

    @classmethod
    def _of(cls, key: Key, roots: set[str]) -> _Nodes:
        leaves = {each.path: each for each in key.arguments if root(each.path) in roots}
        texts = {path: text for path, text in key.structure.items() if root(path) in roots}
        return cls(leaves, texts)

    def text(self, path: str) -> str | None:
        """Return the type of a leaf or the text of a container, or None."""
        leaf = self.leaves.get(path)
        return self.texts.get(path) if leaf is None else leaf.type


def _of_structure(new: _Nodes, old: _Nodes, key: Key, before: Key) -> Iterator[_Difference]:
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
        was = _given(path, absent, before) if was is None else was.removeprefix("=")
        now = _given(path, absent, key) if now is None else now.removeprefix("=")
        yield _Difference("structure", path, was, now, (was, now), (was, now))
    for path, text in new.texts.items():
        was = old.texts.get(path, text)
        if text != was and text[:1] == "=" == was[:1]:
            texts = shown(was[1:], text[1:])
            yield _Difference("static", path, *texts, texts, texts)
    parents = {each for path in told for each in _ancestors(path)}
    for path in inner:
        if path not in parents and not any(each in replaced for each in _ancestors(path)):
            was, now = old.texts[path], new.texts[path]
            yield _Difference("structure", path, was, now, (was, now), (was, now))
    names, others = new.texts.get(""), old.texts.get("")
    if names and others and names != others and not any(path == root(path) for path in told):
        yield _Difference("structure", "", others, names, "", (others, names))


def _class(text: str) -> str:
    return text.partition("(")[0]


def _ancestors(path: str) -> list[str]:
    """Return the paths of the containers of a path, the outermost first."""
    return list(accumulate(STEP.findall(path)))[:-1]


def _of_leaves(new: _Nodes, old: _Nodes, key: Key, before: Key) -> Iterator[_Difference]:
    options_differ = key.options != before.options
    for path, leaf in new.leaves.items():
        was = old.leaves.get(path)
        if was is None or was == leaf:
            continue
        types = was.type, leaf.type
        if was.dtype != leaf.dtype:
            facets = was.dtype, leaf.dtype
            texts = facets if was.shape != leaf.shape else types
            yield _Difference("dtype", path, *texts, facets, facets)
        elif was.weak != leaf.weak:
            facets = f"{'~' * was.weak}{was.dtype}", f"{'~' * leaf.weak}{leaf.dtype}"
            texts = facets if was.shape != leaf.shape else types
            yield _Difference("weak_type", path, *texts, facets, facets)
        if was.shape != leaf.shape:
            alike = was.dtype == leaf.dtype and was.weak == leaf.weak
            texts = types if alike else _sizes(was, leaf)
            pairs = frozenset(_changed_sizes(was, leaf).values()) or texts
            yield _Difference("shape", path, *texts, pairs, _sizes(was, leaf))
        if was.sharding != leaf.sharding:
            texts = was.sharding or "not placed", leaf.sharding or "not placed"
            yield _Difference("sharding", path, *texts, texts, texts)
        if was.donated != leaf.donated and not options_differ:
            texts = ("donated", "not donated") if was.donated else ("not donated", "donated")
            yield _Difference("function", path, *texts, texts, texts)


def _sizes(was: Argument, now: Argument) -> tuple[str, str]:
    """Return the shapes of both: `[4,17]`."""
    shapes = (f"[{','.join(map(str, each.shape))}]" for each in (was, now))
    return next(shapes), next(shapes)


def _changed_sizes(was: Argument, now: Argument) -> dict[int, tuple[int | str, int | str]]:
    """Return both sizes of each axis that differs; empty if the ranks do."""
    if len(was.shape) != len(now.shape):
        return {}
    pairs = enumerate(zip(was.shape, now.shape, strict=True))
    return {axis: pair for axis, pair in pairs if pair[0] != pair[1]}


# --- merging of differences -----------------------------------------------------------------------


def _joined(groups: list[list[_Difference]]) -> list[list[_Difference]]:
    """Join groups if there are too many: first alike ones, then those of the same argument."""
    for common in (_alike, _of_argument):
        groups = _join_by(groups, common)
    return groups


def _alike(difference: _Difference) -> object:
    return difference.kind, difference.alike


def _of_argument(difference: _Difference) -> object:
    return difference.kind, root(difference.path)


def _join_by(
    groups: list[list[_Difference]], common: Callable[[_Difference], object]
) -> list[list[_Difference]]:
    found: dict[object, list[list[_Difference]]] = {}
    for group in groups:
        found.setdefault(common(group[0]), []).append(group)
    result = []
    for alike in found.values():
        many = len(alike) > _MOST or (common is _alike and len(alike) > 3)
        result += [[each for group in alike for each in group]] if many else alike
    return result


def _reason(group: list[_Difference], key: Key, new: _Nodes, old: _Nodes) -> Reason:
    """Return one reason for several differences, without line and advice."""
    first, count = group[0], len(group)
    if count == 1:
        return Reason(first.kind, first.path, first.before, first.after, "")
    known = new.leaves.keys() if first.kind in _OF_LEAVES else new.leaves.keys() | new.texts.keys()
    path = common([each.path for each in group], known)
    if len({(each.before, each.after) for each in group}) == 1:
        was, now = first.before, first.after
    elif len({each.alike for each in group}) > 1:
        return Reason(
            first.kind, path, f"{first.before}, …", f"{first.after}, … ({count} differ)", ""
        )
    elif first.kind == "shape":
        was, now = _common_sizes(group, new, old)
    else:
        was, now = first.facets
    arrays = all(each.path in new.leaves or each.path in old.leaves for each in group)
    unit = "arrays" if arrays else "places"
    return Reason(first.kind, path, was, f"{now} ({count} {unit})", "")


_OF_LEAVES = ("shape", "dtype", "weak_type", "sharding")


def _common_sizes(group: list[_Difference], new: _Nodes, old: _Nodes) -> tuple[str, str]:
    """Return one text for the shapes of several arrays, `[64,…]`, or for the sizes that differ."""
    pairs = [(old.leaves[each.path], new.leaves[each.path]) for each in group]
    changed = [_changed_sizes(*pair) for pair in pairs]
    if all(each == changed[0] for each in changed):
        return _common_shape([was for was, _ in pairs]), _common_shape([now for _, now in pairs])
    sizes = sorted({pair for each in changed for pair in each.values()}, key=str)
    before, after = (", ".join(f"size {pair[i]}" for pair in sizes) for i in (0, 1))
    return before, after


def _common_shape(leaves: Sequence[Argument]) -> str:
    """Return one text for several shapes, with `*` for sizes that differ, `…` for further axes."""
    sizes = [
        str(each[0]) if len(set(each)) == 1 else "*" for each in zip(*_shapes(leaves), strict=False)
    ]
    more = ["…"] if len({len(shape) for shape in _shapes(leaves)}) > 1 else []
    return f"[{','.join(sizes + more)}]"


def _shapes(leaves: Sequence[Argument]) -> list[tuple[int | str, ...]]:
    return [each.shape for each in leaves]


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
    group: list[_Difference], reason: Reason, key: Key, before: Key, earlier: Sequence[Key]
) -> str:
    """Return advice for a difference of arguments, or ""."""
    paths = [each.path for each in group]
    if reason.kind == "weak_type" or reason.kind == "dtype":
        return advice.types(paths, reason.kind, key, before)
    if reason.kind == "sharding" and group[0].before == "not placed" and not key.function.library:
        return f"jax.device_put before the first call places {reason.path} once"
    if reason.kind == "static":
        path = paths[0]
        values = {each.structure[path][1:] for each in (*earlier, key) if path in each.structure}
        texts = before.structure[path][1:], key.structure[path][1:]
        return advice.static(path, *texts, values, key) if len(group) == 1 else ""
    return ""
