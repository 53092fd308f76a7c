"""Rewrites from patterns: `@jaxprtool.rewrite`, and the files that `--rewrite` loads."""

from jaxprtool.passes.patterns.define import Rewrite, rewrite
from jaxprtool.passes.patterns.definition import Match
from jaxprtool.passes.patterns.files import NamedRewrites, load_rewrites

__all__ = ["Match", "NamedRewrites", "Rewrite", "load_rewrites", "rewrite"]
