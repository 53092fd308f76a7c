"""Jaxprs on all examples of a batch at once, whose lengths differ: what the pass `ragged` does.

`all_lanes` rewrites the jaxpr of one example; a `Kind` says how the values of all examples are laid
out: `Packed`, `Lanes`, or `Shared` by all. `RaggedContext.lengths` computes a size of each example.
"""

from jaxprtool.passes.mapping.ragged import (
    Kind,
    Lanes,
    Packed,
    RaggedContext,
    Shared,
    Sizes,
    all_lanes,
)

__all__ = ["Kind", "Lanes", "Packed", "RaggedContext", "Shared", "Sizes", "all_lanes"]
