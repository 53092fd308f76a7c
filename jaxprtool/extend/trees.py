"""Pytrees of arguments and results: their structures, the paths of their leaves, what fits them.

`filled` puts flat values into a structure of a `Program`, which may have leaves that are no arrays,
and `structure` returns the one of a value. `matched_leaves` flattens an argument for a structure,
or raises `Mismatch`.
"""

from jaxprtool.ir.basics.paths import paths, unique
from jaxprtool.ir.programs.matching import Mismatch, matched_leaves
from jaxprtool.ir.programs.static_leaf import StaticLeaf
from jaxprtool.ir.programs.trees import filled, leaf_paths, structure

__all__ = [
    "Mismatch",
    "StaticLeaf",
    "filled",
    "leaf_paths",
    "matched_leaves",
    "paths",
    "structure",
    "unique",
]
