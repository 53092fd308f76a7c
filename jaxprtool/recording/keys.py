"""The cache key of one compilation: JAX looks up a compiled function by it.

JAX compiles again if the key differs from those of all earlier calls. `reasons` compares keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Literal

from jaxprtool.analysis.recorded_run import Argument

FunctionKind = Literal["function", "lambda", "partial", "method", "object"]


@dataclass(frozen=True)
class FunctionObject:
    """The Python function of a compilation.

    Attributes:
        number: A number that identifies the function object.
        jit: A number that identifies the result of `jax.jit`.
        made: The user's line that made the object or called `jit` on it, if it is known.
        kind: "function", "lambda", "partial", "method" or "object" (a callable of another class).
        closure: The closed-over variables, the defaults, the arguments bound by a `partial` or a
            method, and the globals that are numbers or strings, as text by name. The text is the
            value of a number or a string, the type of an array, and the class and identity of any
            other object.
        name: Its name; for a callable object, the name of its class.
        library: Whether it is defined in an installed package, so that the user cannot change it.
        wrapper: The library's function that called `jax.jit`: `equinox.filter_jit`, `nnx.jit`. For
            a loop outside of `jit`, the function that made it: `jax.lax.scan`. Else "".
    """

    number: int
    jit: int
    made: str
    kind: FunctionKind
    closure: dict[str, str]
    name: str = ""
    wrapper: str = ""
    library: bool = False


@dataclass(frozen=True)
class Key:
    """The cache key of a compilation.

    Attributes:
        function: The Python function.
        structure: The structure of the dynamic arguments, by path: `batch: dict(ids, mask)`, `None`
            for a None, `=0.1` for a value that is part of the structure, such as a static field of
            a dataclass. The entry "" has the names of the arguments: `(params, batch, key=)`.
        arguments: The flat arguments: their types, shardings and donation.
        statics: The static arguments by name, as text.
        options: The options of `jax.jit`: donated arguments, shardings, compiler options, as text.
        context: The settings of JAX that a trace depends on, by name, as text: `enable_x64`,
            `default_matmul_precision`, `mesh`, …
        cleared: The number of times that JAX's caches, or this function's, were cleared before.
        cleared_line: The user's line that cleared them last.
        in_loop: The number of earlier calls of `jit` by the same line.
        line: The user's line of the call.
    """

    function: FunctionObject
    structure: dict[str, str]
    arguments: tuple[Argument, ...]
    statics: dict[str, str]
    options: dict[str, str]
    context: dict[str, str]
    cleared: int = 0
    cleared_line: str = ""
    in_loop: int = 0
    line: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the key as values for the module `json`. An argument is a list."""
        found = {each: getattr(self, each) for each in _KEY_FIELDS}
        return {
            **found,
            "function": asdict(self.function),
            "arguments": [[getattr(a, each) for each in _ARGUMENT_FIELDS] for a in self.arguments],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Key:
        """Return the key that `to_json` wrote. Unknown fields of the document are ignored.

        Raises:
            KeyError, TypeError: If `to_json` did not write the document.
        """
        found = {each: document[each] for each in _KEY_FIELDS if each in document}
        function = {k: v for k, v in document["function"].items() if k in _FUNCTION_FIELDS}
        return cls(
            **found | {"function": FunctionObject(**function)},
            arguments=tuple(
                Argument(path, dtype, tuple(shape), *rest)
                for path, dtype, shape, *rest in document["arguments"]
            ),
        )

    @cached_property
    def parts(self) -> frozenset[tuple[str, int]]:
        """A hash of each part that JAX compares: the function, each argument, each setting.

        An argument of the function is one part, with all its leaves and its structure.
        """
        parts = {"function": hash(self.function.number)}
        parts |= {f"argument {name}": hash(each) for name, each in self.leaves.items()}
        named = {"static": self.statics, "option": self.options, "context": self.context}
        for kind, values in named.items():
            parts |= {f"{kind} {name}": hash(value) for name, value in values.items()}
        return frozenset(parts.items())

    @cached_property
    def leaves(self) -> dict[str, frozenset[int]]:
        """The hashes of the leaves and of the structure, by argument of the function."""
        found: dict[str, list[int]] = {}
        for path, text in self.structure.items():
            found.setdefault(root(path), []).append(hash((path, text)))
        for each in self.arguments:
            found.setdefault(root(each.path), []).append(hash(comparable(each)))
        return {name: frozenset(hashes) for name, hashes in found.items()}


def comparable(argument: Argument) -> tuple[Any, ...]:
    """Return the path of a flat argument, and the parts of it that JAX compares."""
    each = argument
    return each.path, each.dtype, each.shape, each.weak, each.sharding, each.donated


def root(path: str) -> str:
    """Return the argument of the function that a path is in: `params` of `params['w']`."""
    found = _ROOT.match(path)
    return path if found is None else found[0]


#: A step of a path: `params`, `['w']`, `.kernel`, `[0]`.
STEP = re.compile(r"""\[(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\]]*)\]|\.?[^.\[]+""")

_ROOT = re.compile(r"\w+")

_ARGUMENT_FIELDS = [each.name for each in fields(Argument)]
_FUNCTION_FIELDS = {each.name for each in fields(FunctionObject)}
_KEY_FIELDS = [each.name for each in fields(Key) if each.name != "arguments"]
