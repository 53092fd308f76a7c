"""Varying sizes: symbolic dimensions, arguments that are sizes, and lengths of examples.

`symbols_of` and `sizes_by_symbol` find the symbols of a jaxpr or of types. `value_of` evaluates a
size. `found_sizes` solves for the sizes of given arguments, and `chosen_sizes` checks sizes that a
user chose. `Program.specialized` replaces symbols by sizes. A `SizeBound` or `LengthsBound` of an
argument is in `Program.bounds`. A `jaxprtool.Ragged` is a batch of examples of different lengths.
"""

from jaxprtool.ir.program import MOST_SIZES
from jaxprtool.ir.ragged import known_array, ragged_parts, unchecked, written_lengths
from jaxprtool.ir.symbols import (
    MOST,
    Bound,
    LengthsBound,
    SizeBound,
    Sizes,
    check_symbols,
    chosen_sizes,
    found_sizes,
    sizes_by_symbol,
    symbolic_sizes,
    symbols_of,
    value_of,
)
from jaxprtool.jaxcompat import is_symbolic_dimension

__all__ = [
    "MOST",
    "MOST_SIZES",
    "Bound",
    "LengthsBound",
    "SizeBound",
    "Sizes",
    "check_symbols",
    "chosen_sizes",
    "found_sizes",
    "is_symbolic_dimension",
    "known_array",
    "ragged_parts",
    "sizes_by_symbol",
    "symbolic_sizes",
    "symbols_of",
    "unchecked",
    "value_of",
    "written_lengths",
]
