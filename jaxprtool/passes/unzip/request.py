"""The split for the command line, which also refuses likely mistakes.

From Python, `unzip` follows Oryx's contract, under which a function that sows nothing has no
variables, and an argument of any type may be used as a key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxprtool.errors import ArgumentsError, did_you_mean
from jaxprtool.ir.core.equations import equations, type_of
from jaxprtool.ir.programs.program import Program, type_check
from jaxprtool.ir.programs.program_signature import top_jaxpr
from jaxprtool.ir.programs.trees import filled
from jaxprtool.passes.unzip import Unzip, UnzipError
from jaxprtool.passes.unzip.programs import Unzipped
from jaxprtool.primitives import VARIABLE, sow_p

_HINT = "name only arguments that are keys with --key-args"


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
            ArgumentsError: For positions of no argument, or of one that is not a key, and for a tag
                under which nothing is sown.
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
            hint = error.hint
            if self.tag is None and VARIABLE not in tags:
                hint = "--auto chooses variables where none are declared"
            raise UnzipError(error.message, hint) from error

    def _keys(self, program: Program, position: Callable[[int], int]) -> tuple[int, ...]:
        """Return the positional arguments of the program that are keys. Raises ArgumentsError."""
        args, _ = filled(program.in_tree, range(len(program.in_avals)))
        key_args = self.key_args
        if key_args is None:
            key_args = (0,) if args else ()
        try:
            positions = tuple(map(position, key_args))
        except ArgumentsError as error:
            raise ArgumentsError(error.message, _HINT) from None
        for leaf in jax.tree.leaves([args[each] for each in positions]):
            aval, name = program.in_avals[leaf], program.arg_names[leaf]
            # Keys of both types, and integers from which keys are created.
            scalar_types = (jax.dtypes.prng_key, jnp.integer)
            if not any(jnp.issubdtype(aval.dtype, scalar_type) for scalar_type in scalar_types):
                message = (
                    f"argument '{name}' of {program.name} is {type_of(aval)}, which is not a key"
                )
                raise ArgumentsError(message, f"{_HINT}; --known takes arguments of any type")
        return positions
