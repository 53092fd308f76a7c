"""The decorator of an emitted function whose original is under `jax.jit`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.formats.python.expressions import CallExpression, Expression, Name, Slot, call
from jaxprtool.ir.programs.jit_options import JitOptions
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.trees import filled


def jit_decorator(program: Program, options: JitOptions, results: Any) -> Expression:
    """Return `jax.jit`, or a call of it with the options of a program.

    Args:
        program: The program, whose flat arguments and results the options refer to.
        options: The options.
        results: The results of the emitted function, with a slot for each one.

    Raises:
        UnsupportedError: For options of a part of an argument, if only the whole argument can have
            them.
    """
    args, kwargs = filled(program.in_tree, range(program.in_tree.num_leaves))
    taken = options.of_arguments(program.arguments)
    keywords = _donation(program, args, kwargs, [asked.donated for asked in taken])
    placements = [asked.placement for asked in taken]
    if any(placement is not None for placement in placements):
        for name, arg in kwargs.items():
            if any(placements[i] is not None for i in _positions(arg)):
                names = [program.arg_names[i] for i in _positions(arg)]
                raise _refusal(program, f"has a sharding for the keyword argument {name}", names)
        keywords["in_shardings"] = tuple(
            _prefix(program, arg, placements, "argument", program.arg_names) for arg in args
        )
    placements = [asked.placement for asked in options.of_results(program.results)]
    if any(placement is not None for placement in placements):
        keywords["out_shardings"] = _prefix(
            program, results, placements, "result", program.out_names
        )
    if options.keep_unused:
        keywords["keep_unused"] = True
    if jaxcompat.inline_as_word(options.inline):
        inline = options.inline  # a member of jax.Inline since 0.12
        keywords["inline"] = inline if inline is True else Name(f"jax.Inline.{inline.name}")
    if options.compiler_options:
        keywords["compiler_options"] = dict(options.compiler_options)
    return call("jax.jit", **keywords) if keywords else Name("jax.jit")


def _donation(
    program: Program, args: Sequence[Any], kwargs: dict[str, Any], donated: Sequence[bool]
) -> dict[str, Any]:
    """Return `donate_argnums` and `donate_argnames`."""

    def is_donated(arg: Any) -> bool:
        flags = {donated[i] for i in _positions(arg)}
        if flags == {True, False}:
            names = [program.arg_names[i] for i in _positions(arg)]
            raise _refusal(program, "donates a part of an argument", names)
        return flags == {True}

    keywords: dict[str, Any] = {}
    if numbers := tuple(i for i, arg in enumerate(args) if is_donated(arg)):
        keywords["donate_argnums"] = numbers[0] if len(numbers) == 1 else numbers
    if names := tuple(name for name, arg in kwargs.items() if is_donated(arg)):
        keywords["donate_argnames"] = names[0] if len(names) == 1 else names
    return keywords


def _prefix(
    program: Program, tree: Any, placements: Sequence[Any], what: str, names: Sequence[str]
) -> Any:
    """Return the placements of a tree of flat positions: one for all, or a tree of them."""
    positions = _positions(tree)
    found = [placements[i] for i in positions]
    if all(placement == found[0] for placement in found):
        return found[0] if found else None

    def inside(part: Any) -> Any:
        return _prefix(program, part, placements, what, names)

    if type(tree) in (tuple, list):
        return type(tree)(map(inside, tree))
    if type(tree) is dict:
        return {key: inside(part) for key, part in tree.items()}
    # The structure of an argument is unknown before the call.
    if isinstance(tree, CallExpression) and tree.function != Name("jax.tree.unflatten"):
        parts = {name: inside(part) for name, part in tree.kwargs.items()}
        return CallExpression(tree.function, tuple(map(inside, tree.args)), parts)
    message = f"has several shardings for one {what} of a class"
    raise _refusal(program, message, [names[i] for i in positions])


def _positions(tree: Any) -> list[int]:
    """Return the flat positions in a tree, including those in its calls."""
    found: list[int] = []
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, CallExpression):
            found += _positions((leaf.args, leaf.kwargs))
        elif isinstance(leaf, Slot | int):
            found.append(leaf.index if isinstance(leaf, Slot) else leaf)
    return found


def _refusal(program: Program, what: str, names: Sequence[str]) -> UnsupportedError:
    return UnsupportedError(
        f"{program.name} cannot be written as Python: its jit {what} ({', '.join(names[:3])})",
        "a .jaxpr file keeps it: --to jaxpr",
    )
