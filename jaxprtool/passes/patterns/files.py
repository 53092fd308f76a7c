"""The rewrites that a Python file defines, for pipelines to name and for `--rewrite` to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from jaxprtool.errors import JaxprToolError, PluginError, described
from jaxprtool.ir.programs.program import Program
from jaxprtool.passes.framework import registry
from jaxprtool.passes.framework.base import Pass
from jaxprtool.passes.framework.pipeline import Pipeline, Step
from jaxprtool.passes.patterns.define import Rewrite
from jaxprtool.passes.patterns.definition import Match


def load_rewrites(path: str) -> list[Rewrite]:
    """Return the rewrites in a Python file, including those that it imports, in order.

    Raises PluginError if the file cannot be imported or has none, and the error of an invalid one.
    """
    if not Path(path).is_file():
        raise PluginError(f"no file {path}")
    if Path(path).suffix != ".py":
        raise PluginError(f"{path} is not a Python file", "rewrites must be in a file.py")
    try:
        module = registry.import_file(Path(path), "jaxprtool_rewrites")
    except JaxprToolError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{path} cannot be imported: {described(error)}", "see --traceback for the place"
        ) from error
    found = list(dict.fromkeys(v for v in vars(module).values() if isinstance(v, Rewrite)))
    if not found:
        raise PluginError(f"{path} has no rewrites", "define one with @jaxprtool.rewrite(...)")
    return found


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
            for made in load_rewrites(path):
                taken = registry.available().get(made.name)
                if made.name in self._passes or (taken and taken.origin != __name__):
                    raise PluginError(
                        f"rewrite '{made.name}' of {path} has the name of another pass",
                        "give it another name with rewrite(..., name=...)",
                    )
                fields: dict[str, object] = {
                    "__doc__": made.__doc__ or CountingRewrite.__doc__,
                    "__module__": __name__,
                    "name": made.name,
                    "rewrite": made,
                    "found": [],
                }
                self._passes[made.name] = type(made.name, (CountingRewrite,), fields)
        for cls in self._passes.values():
            registry.register(cls)

    def before(self, pipeline: Pipeline) -> Pipeline:
        """Return a pipeline that begins with the rewrites it does not name itself, in order."""
        named = {each.name for each in pipeline.passes()}
        first = [Step(each()) for name, each in self._passes.items() if name not in named]
        return Pipeline((*first, *pipeline.steps)) if first else pipeline

    def matches(self) -> dict[str, list[Match]]:
        """Return the matches of each rewrite so far."""
        return {name: list(each.found) for name, each in self._passes.items()}
