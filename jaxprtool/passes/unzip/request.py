"""The split for the command line, which also explains likely mistakes.

It gives the programs of `jaxprtool.unzip`, which follows Oryx's contract: an argument of any type
may be used as a key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxprtool.errors import ArgumentsError, did_you_mean
from jaxprtool.ir.core.equations import equations, type_of
from jaxprtool.ir.programs.program import Program, type_check
from jaxprtool.ir.programs.program_signature import top_jaxpr
from jaxprtool.ir.programs.trees import filled
from jaxprtool.passes.unzip import Unzip, UnzipError
from jaxprtool.passes.unzip.keys import is_of
from jaxprtool.passes.unzip.programs import Unzipped
from jaxprtool.primitives import VARIABLE, sow_p

_HINT = "name the arguments that are keys with --key-args"


@dataclass(frozen=True)
class Request:
    """The requested options; None for unspecified ones. Positions are those of the function.

    Attributes:
        key_args: The positions of keys.
        tag: The tag that variables are sown under.
        auto: True to choose the variables, instead of those that are sown.
        known: Instead of keys, the positions of the arguments that init takes.
    """

    key_args: tuple[int, ...] | None
    tag: str | None
    auto: bool
    known: tuple[int, ...] | None

    def split(self, program: Program, position: Callable[[int], int]) -> Unzipped:
        """Return init and apply, and the variables between them.

        Args:
            program: The program of the function.
            position: Converts the function's position of an argument to the program's.

        Raises:
            ArgumentsError: For positions of no argument, and for a tag under which nothing is sown.
            UnzipError: As `Unzip` does.
        """
        if self.known is not None:
            parts = Unzip(known=tuple(map(position, self.known))).unzipped(program)
        elif self.auto:
            keys = "auto" if self.key_args is None else self._keys(program, position)
            parts = Unzip(key_args=keys, auto=True).unzipped(program)
        else:
            parts = self._split_at_sown(program, self._keys(program, position))
        for part in (parts.init, parts.apply):
            type_check(part, program)
        return parts

    def _split_at_sown(self, program: Program, keys: tuple[int, ...]) -> Unzipped:
        found = equations(top_jaxpr(program))
        tags = {eqn.params["tag"] for eqn in found if eqn.primitive is sow_p}
        if self.tag is not None and self.tag not in tags:
            there = f"available: {', '.join(sorted(tags))}" if tags else None
            message = f"{program.name} sows nothing under the tag '{self.tag}'"
            raise ArgumentsError(message, did_you_mean(self.tag, tags) or there)
        try:
            return Unzip(tag=self.tag or VARIABLE, key_args=keys).unzipped(program)
        except UnzipError as error:
            hint = error.hint or self._hint(program, keys)
            if self.tag is None and VARIABLE not in tags:
                hint = "--auto chooses variables where none are declared"
            raise UnzipError(error.message, hint) from error

    def _keys(self, program: Program, position: Callable[[int], int]) -> tuple[int, ...]:
        """Return the positional arguments of the program that are keys. Raises ArgumentsError."""
        args, _ = _positions(program)
        key_args = self.key_args
        if key_args is None:
            key_args = (0,) if args else ()
        try:
            return tuple(map(position, key_args))
        except ArgumentsError as error:
            raise ArgumentsError(error.message, _HINT) from None

    def _hint(self, program: Program, keys: tuple[int, ...]) -> str | None:
        """Return a hint that names an argument that cannot be a key, if none was asked for."""
        args, _ = _positions(program)
        for leaf in jax.tree.leaves([args[key] for key in keys if self.key_args is None]):
            aval = program.in_avals[leaf]
            # Keys of both types, and integers from which keys are created.
            if not (is_of(aval, jax.dtypes.prng_key) or is_of(aval, jnp.integer)):
                return f"'{program.arg_names[leaf]}' is {type_of(aval)}, not a key: {_HINT}"
        return None


def _positions(program: Program) -> Any:
    return filled(program.in_tree, range(len(program.in_avals)))
