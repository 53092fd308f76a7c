"""Advice on how to avoid a compilation, given where one remedy is clearly right.

No advice is given on code inside libraries.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from jaxprtool.analysis.recorded_run import Argument
from jaxprtool.recording.keys import Key, root

#: The maximum number of leaves of an argument whose type is written out, and the maximum length of
#: that text.
_MOST_LEAVES, _LONGEST = 4, 60

#: Two sizes are padded to the larger one only if it is at most this many times the smaller one.
_MOST_PADDING = 32

#: Names of arguments that are a model or its state, whose sizes are not lengths of data.
_MODELS = {"self", "model", "params", "variables", "weights", "state", "train_state", "opt_state"}

_NUMBER = re.compile(r"-?\d[\d_.]*(e[-+]?\d+)?", re.IGNORECASE)
_OBJECT = re.compile(r" #\d+\b")  # the number of an object in a text
_DTYPE = re.compile(r"(bf|f|i|u|c)(8|16|32|64|128)")
_LONG = {"bf": "bfloat", "f": "float", "i": "int", "u": "uint", "c": "complex"}


def jit_once(key: Key, earlier: Sequence[Key]) -> str:
    """Return advice for a function object that is created again for each call."""
    if key.function.library:
        return ""
    line, jit = key.function.made, key.function.wrapper or "jax.jit"
    if _is_loop(key):
        return f"call {jit} under jax.jit: outside of it, each new body is compiled"
    same_line = {each.function.number for each in (*earlier, key) if each.function.made == line}
    times = max(key.in_loop + 1, len(same_line)) if line else 0
    if times > 1:
        return f"{line} led to {times} calls of {jit}: make one, outside of any loop"
    return f"make the function and call {jit} once, and keep the result"


def _is_loop(key: Key) -> bool:
    """Return True for a loop or a branch outside of `jit`."""
    return key.function.wrapper.startswith("jax.lax.")


def closed_over(name: str, before: str, after: str, key: Key, again: str) -> str:
    """Return advice for a closed-over variable whose value changed, or ""."""
    if _is_number(before) and _is_number(after) and not key.function.library:
        return f"make {name} an argument, unless a shape depends on it; {again}"
    return ""


def static(name: str, before: str, after: str, values: set[str], key: Key) -> str:
    """Return advice for a static argument that has had these values, or ""."""
    if key.function.library:
        return ""
    if before != after and _OBJECT.sub("", before) == _OBJECT.sub("", after):  # a new object
        if ".py:" in after:
            return f"make {name} once: JAX compares functions by identity"
        known = _OBJECT.sub("", after).partition("(")[0]
        return f"pass one {known}, or define __eq__ and __hash__ if the two are equal"
    if _is_loop(key) or not all(map(_is_number, values)):
        return ""
    if key.function.wrapper == "equinox.filter_jit":
        return f"pass jnp.asarray({name}), unless a shape depends on it"
    if len(values) > 2 and name.isidentifier():
        return f"{len(values)} values: do not make {name} static, unless a shape depends on it"
    return ""


def types(paths: Sequence[str], kind: str, key: Key, before: Key) -> str:
    """Return advice for arguments that differ in their weak types, or ""."""
    if key.function.library:
        return ""
    place, leaf = next((i, each) for i, each in enumerate(key.arguments) if each.path == paths[0])
    was = _at(before, place, paths[0])
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


def _at(key: Key, place: int, path: str) -> Argument | None:
    """Return the flat argument with a path, or None. Look first at the position `place`."""
    if place < len(key.arguments) and key.arguments[place].path == path:
        return key.arguments[place]
    return next((each for each in key.arguments if each.path == path), None)


def shapes(paths: Sequence[str], shown: str, key: Key, earlier: Sequence[Key]) -> str:
    """Return advice to compile once for arguments that differ in their sizes, or ""."""
    if _is_loop(key) or len(paths) > _MOST_LEAVES:
        return ""
    if any(root(path) in _MODELS for path in paths):
        return ""
    sizes = _Sizes.found(paths, key, earlier)
    if sizes is None:
        return ""
    buckets = sizes.buckets()
    if not buckets:
        return ""
    typed = _typed_call(paths, key, sizes, buckets)
    if typed:
        return typed
    if len(buckets) > 1:
        return f"pad {shown} to fixed sizes"
    [sizes_of_one] = buckets.values()
    if len(sizes_of_one) == 1:
        return f"pad {shown} to {sizes_of_one[0]}"
    return f"pad {shown} to a few sizes: {', '.join(map(str, sizes_of_one))}"


class _Sizes:
    """The sizes that differ between calls, as symbols.

    Attributes:
        symbols: The symbol of each size that differs, by path and axis.
        seen: The values of each symbol in all calls.
    """

    def __init__(self) -> None:
        self.symbols: dict[tuple[str, int], str] = {}
        self.seen: dict[str, set[int]] = {}

    @classmethod
    def found(cls, paths: Sequence[str], key: Key, earlier: Sequence[Key]) -> _Sizes | None:
        """Return the sizes of arguments that varied; None if their ranks also varied."""
        result = cls()
        wanted = set(paths)
        places = {i: each.path for i, each in enumerate(key.arguments) if each.path in wanted}
        history = {
            path: [found.shape for other in (*earlier, key) if (found := _at(other, place, path))]
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
        found: dict[str, tuple[int, ...]] = {}
        for symbol, seen in self.seen.items():
            least, most = min(seen), max(seen)
            if least == 0 or (len(seen) == 2 and most > least * _MOST_PADDING):
                return {}
            powers = sorted({1 << (size - 1).bit_length() for size in seen})
            found[symbol] = (most,) if len(seen) == 2 else tuple(powers)
        return found


_SYMBOLS = "nmkp"


def _typed_call(
    paths: Sequence[str], key: Key, sizes: _Sizes, buckets: Mapping[str, tuple[int, ...]]
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
        f'"{symbol}": {each[0] if len(each) == 1 else each}' for symbol, each in buckets.items()
    )
    compiled = " once" if all(len(each) == 1 for each in buckets.values()) else " once per size"
    call = f'jaxprtool.jit({function.name}, types="{types}", shapes={{{shapes}}})'
    return f"{call} pads and compiles{compiled}"


def _type_text(name: str, key: Key, sizes: _Sizes) -> str:
    """Return the type of an argument of the function with symbols, or "" if it is a large tree."""
    leaves = [each for each in key.arguments if root(each.path) == name]
    inside = {path: text for path, text in key.structure.items() if root(path) == name}
    if not 1 <= len(leaves) <= _MOST_LEAVES or any(each.sharding for each in leaves):
        return ""
    if [each.path for each in leaves] == [name]:
        return _symbolic(leaves[0], sizes)
    if inside.keys() != {name}:
        return ""
    steps = [each.path.removeprefix(name) for each in leaves]
    types = [_symbolic(each, sizes) for each in leaves]
    kind = inside[name].partition("(")[0]
    if kind == "dict" and all(re.fullmatch(r"\['\w+'\]", step) for step in steps):
        pairs = zip(steps, types, strict=True)
        return "{" + ", ".join(f"{step[1:-1]}: {each}" for step, each in pairs) + "}"
    if kind in ("tuple", "list") and steps == [f"[{i}]" for i in range(len(steps))]:
        inner = ", ".join(types)
        return f"[{inner}]" if kind == "list" else f"({inner}{',' * (len(types) == 1)})"
    return ""


def _symbolic(leaf: Argument, sizes: _Sizes) -> str:
    shape = (sizes.symbols.get((leaf.path, axis), size) for axis, size in enumerate(leaf.shape))
    return f"{leaf.dtype}[{','.join(map(str, shape))}]"


def _is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None


def _long_dtype(dtype: str) -> str:
    """Return `float32` for `f32`; "" for a dtype without a name in `jnp`."""
    if dtype == "bool":
        return "bool_"
    found = _DTYPE.fullmatch(dtype)
    return _LONG[found[1]] + found[2] if found else ""
