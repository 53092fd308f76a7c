"""Rewrites from patterns: `@jaxprtool.rewrite`, and the files that `--rewrite` loads."""

from jaxprtool.passes.patterns.define import NamedRewrites, Rewrite, load_rewrites, rewrite
from jaxprtool.passes.patterns.definition import Match

__all__ = ["Match", "NamedRewrites", "Rewrite", "load_rewrites", "rewrite"]
