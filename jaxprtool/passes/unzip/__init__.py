"""unzip: a function that declares variables becomes two, `init` and `apply`.

    def net(key, x):
        w = variable(jax.random.normal(key, (3, 8)), name="w")
        return jnp.tanh(x @ w)

    init, apply = unzip(net)(key, x)
    variables = init(key)              # {"w": ...}
    y = apply(variables, x)            # net(key, x), and takes no key

Arguments named by `key_args` are keys: the first, or with `auto` all that are keys by type. A value
that is computed from keys and constants alone, and sown under the tag, is a variable: a result of
init and an argument of apply. No other path may lead from a key to a result. Loops stack their
variables, scopes nest them (see `split` and `rules`).

The contract is that of Oryx's `unzip` (2020-2023), on jaxprs instead of tracers, and extended
to loops, branches and custom derivatives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxprtool.errors import ArgumentsError
from jaxprtool.ir.programs.program import Program, Programs
from jaxprtool.ir.rewriting.custom_rules import rules_followed
from jaxprtool.passes.framework.base import Pass
from jaxprtool.passes.unzip import custom_derivatives, rules  # noqa: F401  (they fill the table)
from jaxprtool.passes.unzip.auto import sow_cut
from jaxprtool.passes.unzip.binding_times import BindingTime, Context, Outcome, unzip_rules, whole
from jaxprtool.passes.unzip.keys import Arguments, at_positions, by_type
from jaxprtool.passes.unzip.programs import Unzipped, unzipped
from jaxprtool.passes.unzip.variables import CHOSEN, UnzipError, Variable
from jaxprtool.primitives import VARIABLE

__all__ = [
    "BindingTime",
    "Context",
    "Outcome",
    "Unzip",
    "UnzipError",
    "Unzipped",
    "Variable",
    "unzip_rules",
    "whole",
]


@dataclass(frozen=True)
class Unzip(Pass):
    """Split a function that declares variables into `init`, which computes them, and `apply`.

    A value that is computed from keys and constants alone, and named by `jaxprtool.variable`,
    is a variable: a result of `init` and an argument of `apply`, which takes no key. Loops
    stack their variables, scopes nest them.

    Args:
        tag: The tag that variables are sown under.
        key_args: The positional arguments that are keys. "auto": the first, or with `auto=True` all
            arguments that are keys by type.
        auto: Choose the variables: the values with the fewest bytes that cut the keys off from the
            results.
        known: Choose the variables for partial evaluation, with these arguments known before the
            others.

    Raises:
        UnsupportedError: If there is another path from a key to a result, which the message shows;
            if variables are sown an unknown number of times, as in a while loop; or if ordered
            effects belong to both programs.

    Note:
        `jaxprtool unzip TARGET` does the same, and lists the variables.

    Example:
        def f(key, x):
            w = jaxprtool.variable(jax.random.bits(key, (3,)), name="w")
            return w * x

        $ jaxprtool opt f.py:f --args "key(0), u32[3]" -p unzip
        # init
        { lambda ; a:key<fry>[]. let
            b:u32[3] = random_bits[bit_width=32 shape=(3,)] a
          in (b,) }

        # apply
        { lambda ; a:u32[3] b:u32[3]. let c:u32[3] = mul a b in (c,) }
    """

    name: ClassVar[str] = "unzip"
    group: ClassVar[str] = "split"
    preserves: ClassVar[bool] = False

    tag: str | None = VARIABLE
    key_args: int | tuple[int, ...] | str | None = "auto"
    auto: bool = False
    known: int | tuple[int, ...] | None = None

    def __call__(self, program: Program) -> Programs:
        parts = self.unzipped(program)
        return Programs({"init": parts.init, "apply": parts.apply})

    @rules_followed()
    def unzipped(self, program: Program) -> Unzipped:
        """Return init and apply, and the variables between them.

        Raises UnzipError if the variables do not cut keys from the results, if their names are
        missing or not unique, or if no argument is a key; ArgumentsError for unknown `key_args`;
        and UnsupportedError, which names the equation, for variables that cannot be extracted.
        """
        if self.tag is None:
            raise UnzipError("Must provide a tag to unzip.")
        if self.auto and self.known is not None:
            raise ArgumentsError(
                "auto and known exclude each other: auto chooses variables for keys, known for "
                "other arguments"
            )
        arguments = self._arguments(program)
        if not self.auto and self.known is None:
            return unzipped(program, self.tag, arguments)
        sown = sow_cut(program, arguments.marks, CHOSEN, self.known is not None)
        return unzipped(sown, CHOSEN, arguments)

    def _arguments(self, program: Program) -> Arguments:
        """Return the arguments that init takes, and the others."""
        early = self.key_args if self.known is None else self.known
        if isinstance(early, str):
            if early != "auto":
                raise ArgumentsError(
                    f"key_args must be a position, positions or 'auto', not {early!r}"
                )
            if self.auto:
                return by_type(program)
            early = 0
        return at_positions(program, (early,) if isinstance(early, int) else early or ())
