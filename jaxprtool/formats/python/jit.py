"""The decorator of an emitted function whose original is under `jax.jit`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.formats.python.arguments import Signature
from jaxprtool.formats.python.expressions import Expression, Name, call
from jaxprtool.ir.jit_options import JitOptions
from jaxprtool.ir.program import Program


def jit_decorator(
    program: Program, options: JitOptions, called: Signature, results: Any
) -> Expression:
    """`jax.jit`, or a call of it with the options of a program.

    Args:
        program: The program, whose flat arguments and results are told something.
        options: What they are told.
        called: How the emitted function takes the arguments.
        results: The flat positions of the results, in the tree that the function returns.

    Raises:
        UnsupportedError: For options of a part of an argument, where only the whole can have any.
    """
    arguments = _Arguments(program, called)
    told: dict[str, Any] = {}
    donated = [asked.donated for asked in options.of_arguments(program.arguments)]
    if any(donated):
        told |= arguments.donation(donated)
    placements = [asked.placement for asked in options.of_arguments(program.arguments)]
    if any(placement is not None for placement in placements):
        told["in_shardings"] = arguments.placed(placements)
    placements = [asked.placement for asked in options.of_results(program.results)]
    if any(placement is not None for placement in placements):
        told["out_shardings"] = jax.tree.map(lambda i: placements[i], results)
    if options.keep_unused:
        told["keep_unused"] = True
    if jaxcompat.inline_as_word(options.inline):
        inline = options.inline  # a member of jax.Inline since 0.12
        told["inline"] = inline if inline is True else Name(f"jax.Inline.{inline.name}")
    if options.compiler_options:
        told["compiler_options"] = dict(options.compiler_options)
    return call("jax.jit", **told) if told else Name("jax.jit")


class _Arguments:
    """The arguments of an emitted function, each with the flat positions of its leaves."""

    def __init__(self, program: Program, called: Signature):
        self._program = program
        names = [p.lstrip("*") for p in called.parameters if p != "*"]
        star = next((i for i, p in enumerate(called.parameters) if p.startswith("*")), len(names))
        self._positions: list[list[int]] = []
        self._keywords: dict[str, list[int]] = {}
        for name in names:
            leaves = {
                i: found[1]
                for i, place in enumerate(called.places)
                if (found := re.match(rf"{name}(?!\w)(?:\[(\d+)\])?", place))
            }
            if f"*{name}" in called.parameters:
                last = max((int(index) for index in leaves.values()), default=-1)
                for number in range(last + 1):
                    self._positions.append([i for i in leaves if leaves[i] == str(number)])
            elif name in called.parameters[:star]:
                self._positions.append(list(leaves))
            else:
                self._keywords[name] = list(leaves)

    def donation(self, donated: Sequence[bool]) -> dict[str, Any]:
        """`donate_argnums` and `donate_argnames`."""
        numbers = [i for i, leaves in enumerate(self._positions) if self._whole(leaves, donated)]
        names = [name for name, leaves in self._keywords.items() if self._whole(leaves, donated)]
        told: dict[str, Any] = {}
        if numbers:
            told["donate_argnums"] = numbers[0] if len(numbers) == 1 else tuple(numbers)
        if names:
            told["donate_argnames"] = names[0] if len(names) == 1 else tuple(names)
        return told

    def _whole(self, leaves: Sequence[int], donated: Sequence[bool]) -> bool:
        flags = {donated[i] for i in leaves}
        if flags == {True, False}:
            self._refuse(leaves, "donates a part of an argument")
        return flags == {True}

    def placed(self, placements: Sequence[Any]) -> Any:
        """`in_shardings`."""
        for name, leaves in self._keywords.items():
            if any(placements[i] is not None for i in leaves):
                self._refuse(leaves, f"has a sharding for the keyword argument {name}")
        args, _ = jax.tree.unflatten(self._program.in_tree, range(len(placements)))
        flat = len(args) != len(self._positions)
        each: list[Any] = []
        for number, leaves in enumerate(self._positions):
            found = [placements[i] for i in leaves]
            if all(placement == found[0] for placement in found):
                each.append(found[0] if found else None)
            elif not flat and _is_plain(args[number]):
                each.append(jax.tree.map(lambda i: placements[i], args[number]))
            else:
                self._refuse(leaves, "has several shardings for one argument of a class")
        return tuple(each)

    def _refuse(self, leaves: Sequence[int], what: str) -> None:
        names = ", ".join(self._program.arg_names[i] for i in leaves[:3])
        raise UnsupportedError(
            f"{self._program.name} cannot be written as Python: its jit {what} ({names})",
            "a .jaxpr file keeps it: --to jaxpr",
        )


def _is_plain(tree: Any) -> bool:
    """Whether a tree is of dicts, lists and tuples alone."""
    if type(tree) is dict:
        return all(map(_is_plain, tree.values()))
    return all(map(_is_plain, tree)) if type(tree) in (tuple, list) else isinstance(tree, int)
