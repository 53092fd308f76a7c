"""Rewrites from patterns: `@jaxprtool.rewrite`, and the files of them that `--rewrite` loads.

types.py       what the pattern's arguments are declared to be
tracing.py     pattern and replacement, traced
graphs.py      a pattern, and a body of a program, as graphs
search.py      where one fits in the other
definition.py  the user's functions, and what they are told of a match
plan.py        which matches are replaced, and the writing
define.py      `rewrite` and `Rewrite`
files.py       rewrites from a file
"""

from jaxprtool.passes.patterns.define import Rewrite, rewrite
from jaxprtool.passes.patterns.definition import Match
from jaxprtool.passes.patterns.files import NamedRewrites, load_rewrites

__all__ = ["Match", "NamedRewrites", "Rewrite", "load_rewrites", "rewrite"]
