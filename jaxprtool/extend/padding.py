"""Programs on padded arguments: what the pass `mask` does, for given bounds of symbols.

`masked(program, {'n': 512})` takes arguments of 512 rows and their number; `check_sizes` checks
that all sizes up to the bounds satisfy the constraints of the program. `Bounds.shape` is the padded
shape of a symbolic one.
"""

from jaxprtool.passes.mapping.mask import Bounds, check_sizes, masked

__all__ = ["Bounds", "check_sizes", "masked"]
