"""The places of a program that have to stay in a wide dtype, with the errors otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxprtool.execute.compare.measures import Measure
from jaxprtool.ir.basics.documents import AnyFloat, document
from jaxprtool.ir.basics.printed import Printed


@dataclass(frozen=True)
class KeptPlace:
    """A place that stays in the wide dtype.

    Attributes:
        name: The line or the scope.
        code: The source text of the line, if its file exists.
        error: The largest error if only this place is narrow, relative to the tolerated error;
            infinite if NaNs or infinities differ.
        without: The largest error if this place is narrow together with all that are not kept.
        cause: Why there is no error, in one line, if the program fails; else "".
    """

    name: str
    code: str
    error: AnyFloat
    without: AnyFloat
    cause: str = ""


@dataclass(frozen=True)
class Needs:
    """The estimated memory and work of a program.

    Attributes:
        peak_bytes: The bytes of memory at the peak.
        bytes: The bytes read and written.
        flops: The floating-point operations.
        narrow_flops: The floating-point operations in the narrow dtype.
    """

    peak_bytes: int
    bytes: int
    flops: int
    narrow_flops: int


@document(also=("within",))
@dataclass(frozen=True)
class Precision(Printed):
    """The places of a program that stay in the wide dtype.

    Attributes:
        name: The name of the program.
        dtype: The narrow dtype.
        by: The kind of places.
        places: The number of places that compute floats.
        kept: The places that have to stay in the wide dtype.
        pipeline: The pass, with these places.
        rtol: The relative tolerance.
        atol: The absolute tolerance, if a tolerance is given.
        narrow_error: The largest error if no place is kept, relative to the tolerated error.
        error: The same with the kept places, on all inputs.
        results: The difference of each result, on the input with the largest error.
        inputs: A description of the inputs.
        searched: The number of inputs of the search.
        checked: The number of other inputs that the result was compared on.
        runs: The number of programs that were compiled and compared.
        before: The memory and work of the program.
        after: The memory and work with the pass.
        failure: Why the program fails with the pass, or "".
    """

    name: str
    dtype: str
    by: Literal["line", "scope"]
    places: int
    kept: tuple[KeptPlace, ...]
    pipeline: str
    rtol: float
    atol: float | None
    narrow_error: AnyFloat
    error: AnyFloat
    results: tuple[Measure, ...]
    inputs: str
    searched: int
    checked: int
    runs: int
    before: Needs
    after: Needs
    failure: str = ""

    @property
    def within(self) -> bool:
        """Whether all results are within tolerance with the pass, on all inputs."""
        return not self.failure and all(each.within for each in self.results)
