"""The rewrite of the pass `ragged` as a function: jaxprs on examples of different lengths.

`all_lanes` rewrites the jaxpr of one example for all examples; a `Kind` is the layout of the values
of all examples: `Packed`, `Lanes`, or `Shared` by all. `RaggedContext.lengths` computes a size of
each example.
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
