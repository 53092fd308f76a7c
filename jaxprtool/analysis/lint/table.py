"""The open table of lint rules, filled by `lint_rule` and by plug-ins.

    @lint_rule("XY101", "slow-thing", bad=BAD, good=GOOD)
    def slow_things(program):
        \"\"\"What is found, and why it matters.\"\"\"
        yield Found(node, "…", "…", "copies of {bytes}", bytes=node.bytes)

A plug-in lists a module with its rules in the entry-point group `jaxprtool.lint`. The examples are
texts of modules with a function `f` that has arguments by `jaxprtool.example`. In the bad one, the
lines of the findings end in a comment with the code. Tests run them, and the documentation shows
them.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TypeAlias

from jaxprtool.analysis.lint.findings import Found, Kind
from jaxprtool.analysis.lint.linted_program import LintedProgram
from jaxprtool.errors import ArgumentsError, PluginError, described, did_you_mean

GROUP = "jaxprtool.lint"

#: The modules of our own rules.
_OWN = (
    *("callbacks", "constants", "dtypes", "gradients", "indexing", "keys", "loops", "numerics"),
    *("unrolled", "unused"),
)

#: The check of a rule: yields its findings in a program.
Check: TypeAlias = Callable[[LintedProgram], Iterable[Found]]


@dataclass(frozen=True)
class LintRule:
    """A rule.

    Attributes:
        code: Its code, which never changes: `JT101`.
        name: A name that says what it finds.
        about: What it finds and why that matters, in one paragraph.
        kind: Whether a finding makes results wrong, or is waste.
        bad: The text of a module in whose function `f` it finds something.
        good: The same module without the fault.
        check: Yields the findings in a program.
        module: The module that defines it.
    """

    code: str
    name: str
    about: str
    kind: Kind
    bad: str
    good: str
    check: Check
    module: str


lint_rules: dict[str, LintRule] = {}


def lint_rule(
    code: str, name: str, *, bad: str, good: str, kind: Kind = "waste"
) -> Callable[[Check], Check]:
    """Return a decorator that adds a function to the rules.

    The docstring of the function says what it finds, and why that matters.

    Args:
        code: Its code, which never changes: `XY101`.
        name: A name that says what it finds.
        bad: The text of a module in whose function `f` it finds something.
        good: The same module without the fault.
        kind: "wrong" if a finding makes results wrong, "waste" if it wastes memory or time.

    Raises:
        PluginError: If another module has a rule with this code.
    """

    def add(check: Check) -> Check:
        module = check.__module__
        if code in lint_rules and lint_rules[code].module != module:
            taken = lint_rules[code]
            raise PluginError(
                f"lint rule {code} of {module} has the code of '{taken.name}' of {taken.module}"
            )
        about = " ".join(inspect.cleandoc(check.__doc__ or "").split())
        texts = {"bad": textwrap.dedent(bad).lstrip(), "good": textwrap.dedent(good).lstrip()}
        lint_rules[code] = LintRule(code, name, about, kind, **texts, check=check, module=module)
        return check

    return add


def all_rules() -> list[LintRule]:
    """Return our own rules and those of installed plug-ins, in the order of their codes.

    Raises:
        PluginError: If a plug-in cannot be imported.
    """
    _load()
    return [lint_rules[code] for code in sorted(lint_rules)]


@cache
def _load() -> None:
    for module in _OWN:
        import_module(f"jaxprtool.analysis.lint.rules.{module}")
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except PluginError:
            raise
        except (Exception, SystemExit) as error:
            origin = point.dist.name if point.dist else point.module
            message = f"the lint rules of {origin} cannot be imported: {described(error)}"
            raise PluginError(message) from error


def _codes(given: str | Iterable[str]) -> tuple[str, ...]:
    parts = given.split(",") if isinstance(given, str) else given
    return tuple(filter(None, (part.strip() for part in parts)))


def chosen_rules(
    select: str | Iterable[str] = (), ignore: str | Iterable[str] = ()
) -> list[LintRule]:
    """Return the rules with codes that begin with one in `select`, and with none in `ignore`.

    Args:
        select: Codes, or their beginnings: `JT1`, or a text of them with commas. All rules if
            empty.
        ignore: The codes of rules to leave out, likewise.

    Raises:
        ArgumentsError: If no rule has a code that begins with one of them.
    """
    rules, select, ignore = all_rules(), _codes(select), _codes(ignore)
    codes = [rule.code for rule in rules]
    for given in (*select, *ignore):
        if not any(code.startswith(given) for code in codes):
            hint = did_you_mean(given, codes) or f"the codes are {', '.join(codes)}"
            raise ArgumentsError(f"no lint rule has the code '{given}'", hint)
    return [
        rule
        for rule in rules
        if (not select or rule.code.startswith(select)) and not rule.code.startswith(ignore)
    ]
