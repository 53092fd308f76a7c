"""Describe a primitive in the words of the public JAX function that binds it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cache
from operator import attrgetter

import jax

#: ``:math:`x + y` `` and ``:func:`~jax.lax.add` ``.
_ROLE = re.compile(r":[\w:]+:`~?([^`]+)`")
_LINK = re.compile(r"`([^`<]+) <[^>]*>`_+")
#: `\mathrm{sin}`, and symbols by their names in LaTeX.
_UPRIGHT = re.compile(r"\\(?:math\w+|text)\{([^}]*)\}")
_SIGNS = {
    "times": "\N{MULTIPLICATION SIGN}",
    "wedge": "\N{LOGICAL AND}",
    "vee": "\N{LOGICAL OR}",
    "neg": "\N{NOT SIGN}",
    "oplus": "\N{CIRCLED PLUS}",
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
    for pattern in (_ROLE, _LINK, _UPRIGHT):
        text = pattern.sub(r"\1", text)
    return _SIGN.sub(lambda sign: _SIGNS[sign[1]], text).replace("``", "")


def _functions(primitive: str) -> Iterator[object]:
    """Yield the public functions that may bind a primitive, the likeliest first."""
    name = primitive.replace("-", "_")
    random = name.removeprefix("random_")
    places = [
        *((jax.lax, each) for each in (name, f"{name}_loop", f"bitwise_{name}")),
        *((jax, each) for each in (name, name.removesuffix("_call"))),
        *((jax.random, each) for each in (random,) if each != name),
        (jax.numpy, name),
    ]
    for module, each in places:
        found = getattr(module, each, None)
        if callable(found) and not inspect.ismodule(found):
            yield found
