"""Pytrees of arguments and results: their structures, the paths of their leaves, and matching.

`filled` builds a tree from flat values and a structure of a `Program`, which may have leaves that
are not arrays, and `structure` returns the structure of a value. `matched_leaves` flattens an
argument that matches a structure, and raises `Mismatch` otherwise.
"""

from jaxprtool.ir.matching import Mismatch, matched_leaves
from jaxprtool.ir.paths import paths, unique
from jaxprtool.ir.trees import StaticLeaf, filled, leaf_paths, structure

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
