"""Open tables of rules by primitive, the plug-ins that add to them, and primitives in words.

    @rule(dce_rules, "my_primitive")
    def _(used_outputs, live_inputs, eqn): ...

Each table defines the arguments of its rules. A rule that is added later replaces an existing
one. Extensions name the table: see `jaxprtool.extend.rule`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from typing import Any, TypeVar

import jax

from jaxprtool.errors import PluginError, described
from jaxprtool.ir.backends import clear_caches

# --- rules ----------------------------------------------------------------------------------------
# Open tables of rules by primitive, and `rule`, the one decorator that adds to them.

R = TypeVar("R")


class RuleTable(dict[str, R]):
    """The rules of one pass or format, by the name of the primitive.

    If a rule is added for a primitive that may have been looked up before, with or without a rule,
    jaxprtool's caches are cleared.
    """

    def __init__(self) -> None:
        super().__init__()
        self._missed: set[str] = set()

    def get(self, primitive: str, default: Any = None) -> Any:
        """Return the rule of a primitive, or `default` if there is none.

        The installed plug-in that has rules for the primitive is imported first.

        Raises:
            PluginError: If it cannot be imported.
        """
        rule = super().get(primitive)
        if rule is None and primitive not in self._missed:
            load_rules_of(primitive)
            rule = super().get(primitive)
            if rule is None:
                self._missed.add(primitive)
        return default if rule is None else rule

    def __setitem__(self, primitive: str, function: R) -> None:
        if primitive in self or primitive in self._missed:
            clear_caches()
        super().__setitem__(primitive, function)


def rule(table: RuleTable[R], *primitives: str) -> Callable[[R], R]:
    """Return a decorator that adds a rule to a table.

    Args:
        table: The table.
        primitives: The names of the primitives that the rule is for.

    Returns:
        A function that puts its argument in the table, and returns it as it is.
    """

    def add(function: R) -> R:
        for primitive in primitives:
            table[primitive] = function
        return function

    return add


# --- plugins --------------------------------------------------------------------------------------
# Installed plug-ins that define how equations of other packages' primitives are written and read.
#
# A package lists each primitive that it has rules for in the entry-point group
# `jaxprtool.primitives`. Its module, which adds to the table of traits (`ir.traits`) and to
# tables of rules (`ir.rules`), is imported when a program with such a primitive is met.

GROUP = "jaxprtool.primitives"

#: The packages of this repository that have rules, with their primitives.
_KNOWN = {
    "jaxprtool-equinox": (
        *("linear_solve", "maybe_set", "noinline", "nonbatchable", "nondifferentiable_backward"),
        *("nontraceable", "select_if_vmap", "unvmap_all", "unvmap_any", "unvmap_max", "vprim"),
    ),
}


@cache
def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


@cache
def load_rules_of(primitive: str) -> None:
    """Import the plug-in that has rules for a primitive, if one is installed.

    Raises PluginError if it cannot be imported.
    """
    point = _installed().get(primitive)
    if point is None:
        return
    try:
        point.load()
    except (Exception, SystemExit) as error:
        origin = point.dist.name if point.dist else point.module
        message = f"the rules of '{primitive}' in {origin} cannot be imported: {described(error)}"
        raise PluginError(message) from error


def missing_plugin(primitive: str) -> str | None:
    """Return the hint to install the plug-in for a primitive; None if that would not help."""
    if primitive in _installed():
        return None
    package = next((name for name, primitives in _KNOWN.items() if primitive in primitives), None)
    return package and f"install the plug-in {package}, which has rules for '{primitive}'"


# --- primitive docs -------------------------------------------------------------------------------
# Describe a primitive in the words of the public JAX function that binds it.

#: ``:math:`x + y` `` and ``:func:`~jax.lax.add` ``.
_ROLE = re.compile(r":[\w:]+:`~?([^`]+)`")
_LINK = re.compile(r"`([^`<]+) <[^>]*>`_+")
#: LaTeX, and what a terminal shows for it; applied in order, so that inner braces go first.
_LATEX = (
    (re.compile(r"\\(?:math\w+|text)\{([^}]*)\}"), r"\1"),
    (re.compile(r"\\(?:left|right)\b *"), ""),
    (re.compile(r"\^\{([^{}]*)\}"), r"^\1"),
    (re.compile(r"\\frac\{([^{}]*)\}\{([^{}]*)\}"), r"\1 / (\2)"),
    (re.compile(r"\\overline\{([^{}]*)\}"), "\\1\N{COMBINING OVERLINE}"),
    (re.compile(r"\\sqrt\[3\]\{([^{}]*)\}"), "\N{CUBE ROOT}\\1"),
    (re.compile(r"\\sqrt\{([^{}]*)\}"), "\N{SQUARE ROOT}\\1"),
    (re.compile(r"\{([^{}]*\\over[^{}]*)\}"), r"\1"),
)
_SIGNS = {
    "Gamma": "\N{GREEK CAPITAL LETTER GAMMA}",
    "bmod": "mod",
    "geq": "\N{GREATER-THAN OR EQUAL TO}",
    "gg": ">>",
    "lceil": "\N{LEFT CEILING}",
    "leq": "\N{LESS-THAN OR EQUAL TO}",
    "lfloor": "\N{LEFT FLOOR}",
    "ll": "<<",
    "neg": "\N{NOT SIGN}",
    "neq": "\N{NOT EQUAL TO}",
    "oplus": "\N{CIRCLED PLUS}",
    "over": "/",
    "psi": "\N{GREEK SMALL LETTER PSI}",
    "rceil": "\N{RIGHT CEILING}",
    "rfloor": "\N{RIGHT FLOOR}",
    "times": "\N{MULTIPLICATION SIGN}",
    "vee": "\N{LOGICAL OR}",
    "wedge": "\N{LOGICAL AND}",
    "zeta": "\N{GREEK SMALL LETTER ZETA}",
}
_SIGN = re.compile(rf"\\({'|'.join(_SIGNS)})\b")
_ALIAS = re.compile(r"Alias of jax\.([\w.]+)\.")


@cache
def summary(primitive: str) -> str | None:
    """Return the first paragraph of the docstring of the public function that binds a primitive.

    Returns None if no public function has such a name.
    """
    for function in _functions(primitive):
        text = _paragraph(function)
        if alias := _ALIAS.fullmatch(text):
            text = _paragraph(attrgetter(alias[1])(jax))
        if text:
            return text
    return None


def _paragraph(function: object) -> str:
    text = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    for pattern, replacement in ((_ROLE, r"\1"), (_LINK, r"\1"), *_LATEX):
        text = pattern.sub(replacement, text)
    return _SIGN.sub(lambda sign: _SIGNS[sign[1]], text).replace("``", "")


def _functions(primitive: str) -> Iterator[object]:
    """Yield the public functions that may bind a primitive, the likeliest first."""
    name = primitive.replace("-", "_")
    random = name.removeprefix("random_")
    places = [
        *((jax.lax, alias) for alias in (name, f"{name}_loop", f"bitwise_{name}")),
        *((jax, alias) for alias in (name, name.removesuffix("_call"))),
        *((jax.random, alias) for alias in (random,) if alias != name),
        (jax.numpy, name),
    ]
    for module, alias in places:
        function = getattr(module, alias, None)
        if callable(function) and not inspect.ismodule(function):
            yield function
