"""Varying sizes: symbolic dimensions, arguments that are sizes, lengths of examples, and padding.

`symbols_of` and `sizes_by_symbol` find the symbols of a jaxpr or of types. `value_of` evaluates a
size. `found_sizes` solves for the sizes of given arguments, and `chosen_sizes` checks sizes that a
user chose. `Program.specialized` replaces symbols by sizes. A `SizeBound` or `LengthsBound` of an
argument is in `Program.bounds`. A `jaxprtool.Ragged` is a batch of examples of different lengths.

The pass `mask` as a function: `masked(program, {'n': 512})` returns a program that takes arguments
padded to 512 rows, and the number of rows in use. `check_sizes` checks that all sizes up to the
bounds satisfy the constraints of the program. `Bounds.shape` is the padded shape of a symbolic one.

The tables "mask" and "mask_bodies": `rule(context, eqn, *operands)` of "mask" applies an equation
to `Padded` operands, and returns its padded results: arrays, or `Filled` if the contents of their
padding are known. `MaskContext.apply` keeps padding out of derivatives. A primitive with the trait
`elementwise` needs no rule. `rule(builder, eqn)` of "mask_bodies", for equations that hold jaxprs,
is a rule of the domain of masked programs; see `extend.mapping`. A loop or branch that has a view
needs no rule.
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
from jaxprtool.passes.mapping.mask import (
    Bounds,
    Filled,
    MaskBodyBuilder,
    MaskContext,
    MaskDomain,
    Padded,
    check_sizes,
    masked,
)
from jaxprtool.passes.mapping.mask.table import Facts

__all__ = [
    "MOST",
    "MOST_SIZES",
    "Bound",
    "Bounds",
    "Facts",
    "Filled",
    "LengthsBound",
    "MaskBodyBuilder",
    "MaskContext",
    "MaskDomain",
    "Padded",
    "SizeBound",
    "Sizes",
    "check_sizes",
    "check_symbols",
    "chosen_sizes",
    "found_sizes",
    "is_symbolic_dimension",
    "known_array",
    "masked",
    "ragged_parts",
    "sizes_by_symbol",
    "symbolic_sizes",
    "symbols_of",
    "unchecked",
    "value_of",
    "written_lengths",
]
