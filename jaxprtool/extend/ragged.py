"""The rewrite of the pass `ragged` as a function: jaxprs on examples of different lengths.

`ragged_jaxpr` rewrites the jaxpr of one example for all examples; a `Kind` is the layout of the
values of all examples: `Packed`, `Batched`, or `Shared` by all. `RaggedContext.lengths` computes a
size of each example.
"""

from jaxprtool.passes.mapping.ragged import (
    Batched,
    Kind,
    Packed,
    RaggedContext,
    Shared,
    Sizes,
    ragged_jaxpr,
)

__all__ = ["Batched", "Kind", "Packed", "RaggedContext", "Shared", "Sizes", "ragged_jaxpr"]
