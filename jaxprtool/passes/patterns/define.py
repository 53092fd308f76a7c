"""`@jaxprtool.rewrite`: a pattern, its replacement and a condition; and files of rewrites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError, JaxprToolError, PluginError, described
from jaxprtool.ir.program import Program
from jaxprtool.passes.framework import pipeline
from jaxprtool.passes.framework.base import Pass
from jaxprtool.passes.framework.pipeline import Pipeline, Step
from jaxprtool.passes.patterns.definition import Check, Definition, Match, UserFunction
from jaxprtool.passes.patterns.search import Application

# --- define ---------------------------------------------------------------------------------------
# `@jaxprtool.rewrite`: a pattern, its replacement, and a condition.


def rewrite(*args: Any, check: Check | None = None, name: str | None = None, **kwargs: Any) -> Any:
    """Return a pass that replaces matches of one function by another function.

    Use it as a decorator of the pattern, with the types of the pattern's arguments. Then add the
    replacement and, if needed, a condition. The result is a pass: `program.apply(dense)`.

        @jaxprtool.rewrite(x="f32[...,n]", w="f32[n,m]", b="f32[m]")
        def dense(x, w, b):
            return jax.nn.relu(x @ w + b)

        @dense.to
        def _(x, w, b):
            return fast.dense_relu(x, w, b)

        @dense.check
        def _(match):
            return match.sizes["n"] % 128 == 0

    `rewrite(pattern, replacement, *types, check=None, name=None)` does the same in one call.

    A type is text such as `f32[n,d]`, or an example (an array, a `jax.ShapeDtypeStruct`, a number),
    and may be a pytree of these. It represents every dtype of its kind and every size; names are
    sizes that must be equal wherever they occur, and `f32[...,n]` has any number of dimensions
    before `n`. Arguments of the pattern match any value, also literals; everything else matches
    only an equal part.

    Args:
        args: The types of the pattern's positional arguments; or the pattern, the replacement, and
            then these types.
        check: Returns True if a match is to be replaced. By default all matches are.
        name: The name of the pass; by default the name of the pattern.
        kwargs: The types of the pattern's arguments by name.

    Returns:
        The `Rewrite`; or, without a pattern, a decorator that returns it.

    Raises:
        ArgumentsError: If a type cannot be parsed, or the types do not fit the pattern.
        UserFunctionError: If the pattern raises.
        PluginError: If the pattern has effects, computes nothing, leaves an argument unused, or has
            parts that share no value.
    """
    if args and callable(args[0]):
        if len(args) < 2 or not callable(args[1]):
            raise ArgumentsError(
                "rewrite(pattern, replacement, *types) takes two functions",
                "as a decorator it takes the types of the pattern's arguments",
            )
        pattern, replacement, *examples = args
        new = Rewrite(pattern, examples, kwargs, name)
        new.to(replacement)
        if check is not None:
            new.check(check)
        return new

    def decorate(pattern: UserFunction) -> Rewrite:
        new = Rewrite(pattern, args, kwargs, name)
        if check is not None:
            new.check(check)
        return new

    return decorate


class Rewrite(Definition, Pass):
    """Replace every match of a pattern: a pass, created by `jaxprtool.rewrite`.

    Plain calls are inlined before the search, in the program and in the pattern. If nothing
    matches, the result is the same program object.
    """

    name: str  # type: ignore[misc]
    #: Whether it preserves values is the user's responsibility.
    preserves: ClassVar[bool] = True

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __str__(self) -> str:
        return self.name

    def __call__(self, program: Program) -> Program:
        """Return the program with every match replaced.

        Raises PluginError if there is no replacement, or its types are not those of the pattern,
        and UserFunctionError if it raises.
        """
        return self.applied(program)[0]

    def matches(self, program: Program) -> list[Match]:
        """Return the matches that would be replaced, in the order of the program's bodies."""
        return self.applied(program)[1]

    def applied(self, program: Program) -> tuple[Program, list[Match]]:
        """Return the program with every match replaced, and the matches."""
        if self.replacement is None:
            raise PluginError(
                f"rewrite '{self.name}' has no replacement", f"decorate one with @{self.name}.to"
            )
        with jaxcompat.axes_bound(program.axis_env):
            application = Application(self, program.jaxpr)
        if not application.matches:
            return program, []
        return program.replace(jaxpr=application.result), application.matches


# --- files ----------------------------------------------------------------------------------------
# The rewrites that a Python file defines, for pipelines to name and for `--rewrite` to run.


def load_rewrites(path: str) -> list[Rewrite]:
    """Return the rewrites in a Python file, including those that it imports, in order.

    Raises PluginError if the file cannot be imported or has none, and the error of an invalid one.
    """
    if not Path(path).is_file():
        raise PluginError(f"no file {path}")
    if Path(path).suffix != ".py":
        raise PluginError(f"{path} is not a Python file", "rewrites must be in a file.py")
    try:
        module = pipeline.import_file(Path(path), "jaxprtool_rewrites")
    except JaxprToolError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{path} cannot be imported: {described(error)}", "see --traceback for the place"
        ) from error
    rewrites = list(dict.fromkeys(v for v in vars(module).values() if isinstance(v, Rewrite)))
    if not rewrites:
        raise PluginError(f"{path} has no rewrites", "define one with @jaxprtool.rewrite(...)")
    return rewrites


@dataclass(frozen=True)
class CountingRewrite(Pass):
    """A rewrite of a file, which records its matches."""

    rewrite: ClassVar[Rewrite]
    found: ClassVar[list[Match]]

    def __call__(self, program: Program) -> Program:
        program, matches = self.rewrite.applied(program)
        self.found.extend(matches)
        return program


class NamedRewrites:
    """The rewrites of some files, as passes that a pipeline may name, and their matches."""

    def __init__(self, paths: Sequence[str]):
        """Load and register the rewrites of files.

        Raises the errors of `load_rewrites`, and PluginError for a name that is in use.
        """
        self._passes: dict[str, type[CountingRewrite]] = {}
        for path in paths:
            for loaded in load_rewrites(path):
                taken = pipeline.available().get(loaded.name)
                if loaded.name in self._passes or (taken and taken.origin != __name__):
                    raise PluginError(
                        f"rewrite '{loaded.name}' of {path} has the name of another pass",
                        "give it another name with rewrite(..., name=...)",
                    )
                fields: dict[str, object] = {
                    "__doc__": loaded.__doc__ or CountingRewrite.__doc__,
                    "__module__": __name__,
                    "name": loaded.name,
                    "rewrite": loaded,
                    "found": [],
                }
                self._passes[loaded.name] = type(loaded.name, (CountingRewrite,), fields)
        for cls in self._passes.values():
            pipeline.register(cls)

    def before(self, pipeline: Pipeline) -> Pipeline:
        """Return a pipeline that begins with the rewrites it does not name itself, in order."""
        named = {instance.name for instance in pipeline.passes()}
        first = [Step(cls()) for name, cls in self._passes.items() if name not in named]
        return Pipeline((*first, *pipeline.steps)) if first else pipeline

    def matches(self) -> dict[str, list[Match]]:
        """Return the matches of each rewrite so far."""
        return {name: list(cls.found) for name, cls in self._passes.items()}
