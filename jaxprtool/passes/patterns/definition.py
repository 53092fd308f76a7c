"""The parts of a rewrite: the user's functions, and the types that they are declared for.

A `Definition` has the forms of a pattern at given types, its replacement there, and the user's
check.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import jax
import numpy as np

from jaxprtool.errors import (
    ArgumentsError,
    JaxprToolError,
    PluginError,
    UserFunctionError,
    described,
)
from jaxprtool.ir.basics import dtypes
from jaxprtool.ir.core.equations import named, type_of
from jaxprtool.jaxcompat import Aval, ClosedJaxpr, JaxprEqn
from jaxprtool.passes.cleanup.dce import dce_body
from jaxprtool.passes.patterns import types
from jaxprtool.passes.patterns.graphs import Pattern
from jaxprtool.passes.patterns.tracing import Traced
from jaxprtool.primitives import sow_p


@dataclass(frozen=True, eq=False)
class Match:
    """One place in a program where a pattern was found.

    Attributes:
        rewrite: The name of the rewrite.
        types: The type of each argument of the pattern, by its name (`q`, `params['w']`), with
            `.shape`, `.dtype` and `.ndim`.
        values: The values of those arguments that are constants: an array, or a NumPy scalar, also
            for an array filled with one number.
        sizes: The sizes that the pattern names, by name.
        equations: The equations of the program to replace.
        source: The user's source line of the last of these, `file.py:12`; None if unknown.
    """

    rewrite: str
    types: dict[str, Aval]
    values: dict[str, Any]
    sizes: dict[str, Any]
    equations: tuple[JaxprEqn, ...]
    source: str | None

    def __str__(self) -> str:
        """Return a text such as `attention(q: f32[8,64], k: f32[8,64]) at model.py:12`."""
        shown = ", ".join(
            f"{name}={self.values[name]}"
            if getattr(self.values.get(name), "shape", None) == ()
            else f"{name}: {type_of(aval)}"
            for name, aval in self.types.items()
        )
        return f"{self.rewrite}({shown})" + (f" at {self.source}" if self.source else "")


UserFunction = Callable[..., Any]
Check = Callable[[Match], bool]


class Definition:
    """A user's pattern, its replacement and its condition."""

    name: str

    def __init__(
        self,
        pattern: UserFunction,
        args: Sequence[object],
        kwargs: dict[str, object],
        name: str | None,
    ):
        self.name = name or getattr(pattern, "__name__", "rewrite").strip("<>")
        self.__doc__ = pattern.__doc__
        self.pattern = pattern
        self.replacement: UserFunction | None = None
        self.condition: Check | None = None
        given, self.arg_names = _arguments(self.name, pattern, args, kwargs)
        leaves, self.in_tree = jax.tree.flatten(given)
        self.declarations = [
            types.declared(leaf, f"argument {path} of rewrite '{self.name}'")
            for leaf, path in zip(leaves, self.arg_names, strict=True)
        ]
        self._skeletons: dict[Hashable, list[Pattern]] = {}
        self._check_pattern()

    def to(self, replacement: UserFunction) -> UserFunction:
        """Set the replacement of the pattern, as a decorator; it takes the same arguments."""
        self.replacement = replacement
        return replacement

    def check(self, condition: Check) -> Check:
        """Set the check, as a decorator: a function that returns True if a match is replaced."""
        self.condition = condition
        return condition

    def skeletons(self, floats: np.dtype | None, more: int, symbolic: bool) -> list[Pattern]:
        """Return the forms of the pattern at example types.

        The types have dtype `floats` for floats, and `more` dimensions for an ellipsis. With
        `symbolic`, forms with symbolic sizes are included.
        """
        key = floats, more, symbolic, dtypes.x64_enabled()
        if key not in self._skeletons:
            found = self._forms(types.example_sizes(self.declarations), floats, more)
            if symbolic:
                names = types.names_of(self.declarations)
                found += self._forms(types.symbolic_sizes(names), floats, more)
            self._skeletons[key] = found
        return self._skeletons[key]

    def _forms(self, sizes: dict[str, Any], floats: np.dtype | None, more: int) -> list[Pattern]:
        forms = []
        for weak in (False, True) if any(d.is_scalar for d in self.declarations) else (False,):
            avals = tuple(each.aval(sizes, floats, more, weak) for each in self.declarations)
            at = self.pattern_at(avals, None)
            forms += [] if at is None else at[1]
        return forms

    def pattern_at(
        self, avals: Sequence[Aval], like: JaxprEqn | None
    ) -> tuple[Traced, list[Pattern]] | None:
        """Return the pattern at these types, traced in the context of an equation, and its forms.

        Returns None where the pattern raises, or does not need all its arguments.
        """
        try:
            traced = Traced(self.pattern, self.in_tree, avals, like)
        except Exception:  # the user's function does not support these types
            return None
        forms = [form for form in map(Pattern, traced.forms()) if _fault(form) is None]
        return (traced, forms) if forms else None

    def replacement_at(
        self,
        avals: Sequence[Aval],
        like: JaxprEqn,
        match: Match,
        pattern: Traced,
        results: Sequence[Aval | None],
    ) -> ClosedJaxpr:
        """Return the jaxpr of the replacement at these types, with the wanted results.

        `results` are the types of all results, None for unwanted ones.
        """
        assert self.replacement is not None
        what = f"the replacement of rewrite '{self.name}'"
        try:
            made = Traced(self.replacement, self.in_tree, avals, like, results)
        except JaxprToolError:
            raise
        except Exception as error:
            raise UserFunctionError(
                f"{what} raised {described(error)} for {match}",
                f"exclude such matches with a check (@{self.name}.check)",
            ) from error
        if made.out_tree != pattern.out_tree:
            raise PluginError(
                f"{what} returns {made.out_tree}, but the pattern returns {pattern.out_tree}"
            )
        for new, old in zip(made.out_avals, results, strict=True):
            if old is not None and new != old:
                types_of = f"{type_of(new)}, but the pattern returns {type_of(old)}"
                raise PluginError(f"{what} returns {types_of}, for {match}")
        if made.closed.effects:
            raise PluginError(f"{what} has effects: {_shown_effects(made.closed)}")
        return dce_body(made.closed, [old is not None for old in results], instantiate=True)[0]

    def accepts(self, match: Match) -> bool:
        """Return True if the user's check, if any, accepts a match."""
        if self.condition is None:
            return True
        try:
            return bool(self.condition(match))
        except Exception as error:
            raise PluginError(
                f"the check of rewrite '{self.name}' raised {described(error)} for {match}"
            ) from error

    def _check_pattern(self) -> None:
        """Raise if the function is not a valid pattern."""
        sizes = types.example_sizes(self.declarations)
        avals = [each.aval(sizes) for each in self.declarations]
        what = f"the pattern of rewrite '{self.name}'"
        try:
            traced = Traced(self.pattern, self.in_tree, avals)
        except Exception as error:
            shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
            hint = f"it was traced with {shown}; use other sizes with f32[8,64]" if shown else None
            raise UserFunctionError(f"{what} raised {described(error)}", hint) from error
        if traced.closed.effects:
            raise PluginError(f"{what} has effects: {_shown_effects(traced.closed)}")
        form = Pattern(traced.closed)
        if fault := _fault(form):
            unused = list(compress(self.arg_names, [not flag for flag in form.used_inputs]))
            shown = f": {', '.join(unused)}" if unused and form.eqns else ""
            raise PluginError(f"{what} {fault}{shown}")


def _fault(form: Pattern) -> str | None:
    """Return why a graph is not a valid pattern; None if it is."""
    if not any(form.computed):
        return "computes nothing: its results are arguments or constants"
    if any(eqn.effects or eqn.primitive is sow_p for eqn in form.eqns):
        return "has effects, or calls sow"
    if not all(form.used_inputs):
        return "does not use all its arguments"
    if not form.is_connected():
        return "has parts that share no value; make each a separate pattern"
    return None


def _shown_effects(closed: ClosedJaxpr) -> str:
    return ", ".join(named(eqn) for eqn in closed.eqns if eqn.effects)


def _arguments(
    name: str, fun: UserFunction, args: Sequence[object], kwargs: dict[str, object]
) -> tuple[object, list[str]]:
    """Return the example arguments of a pattern as `(args, kwargs)`, and a name for each leaf."""
    try:
        bound = inspect.signature(fun).bind(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise ArgumentsError(
            f"the types given do not fit the pattern of rewrite '{name}': {error}"
        ) from None
    bound_values = []
    for parameter in bound.signature.parameters.values():
        value = bound.arguments.get(parameter.name, ())
        if parameter.kind is parameter.VAR_POSITIONAL:
            bound_values += [(f"{parameter.name}[{i}]", each) for i, each in enumerate(value)]
        elif parameter.name in bound.arguments and parameter.kind is not parameter.VAR_KEYWORD:
            bound_values.append((parameter.name, value))
    bound_values = bound_values[: len(bound.args)] + sorted(bound.kwargs.items())
    names = [
        path + jax.tree_util.keystr(inner)
        for path, value in bound_values
        for inner, _ in jax.tree_util.tree_flatten_with_path(value)[0]
    ]
    return (bound.args, bound.kwargs), names
