"""The rewrite of the pass `mask` as a function: programs on padded arguments.

`masked(program, {'n': 512})` returns a program that takes arguments padded to 512 rows, and the
number of rows in use. `check_sizes` checks that all sizes up to the bounds satisfy the constraints
of the program. `Bounds.shape` is the padded shape of a symbolic one.
"""

from jaxprtool.passes.mapping.mask import Bounds, check_sizes, masked

__all__ = ["Bounds", "check_sizes", "masked"]
