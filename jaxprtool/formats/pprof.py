"""Profiles of samples by call stack, for pprof and speedscope."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple

from jaxprtool import jaxcompat
from jaxprtool.ir import source_text
from jaxprtool.jaxcompat.source_locations import UserFrame


class Sample(NamedTuple):
    """A row of a profile.

    Attributes:
        frames: The calls, innermost first.
        name: The name of the callee.
        values: A number per kind of sample.
    """

    frames: Sequence[UserFrame]
    name: str
    values: Sequence[int]


class _Numbering(dict[Any, int]):
    """Consecutive numbers for keys, from 1 on."""

    def __init__(self) -> None:
        self._next = count(1)

    def __missing__(self, key: Hashable) -> int:
        self[key] = next(self._next)
        return self[key]


def pprof_profile(
    name: str, sample_types: Sequence[tuple[str, str]], samples: Iterable[Sample]
) -> bytes:
    """Return a profile, compressed.

    Args:
        name: The name of the profiled program.
        sample_types: The sampled values with their units: `("flops", "count")`. The first is the
            default.
        samples: The rows. The callee is the innermost function of each.
    """
    strings, functions, locations = _Numbering(), _Numbering(), _Numbering()
    strings[""] = 0
    rows = []
    for sample in samples:
        innermost = functions["", sample.name]
        places = [locations[innermost, 0]]
        for frame in sample.frames:
            function = functions[source_text.path(frame.file), frame.function]
            places.append(locations[function, frame.line])
        rows.append({"location_id": places, "value": list(map(int, sample.values))})
    document = {
        "sample_type": [
            {"type": strings[label], "unit": strings[unit]} for label, unit in sample_types
        ],
        "sample": rows,
        "location": [
            {"id": number, "line": [{"function_id": function, "line": line}]}
            for (function, line), number in locations.items()
        ],
        "function": [
            {"id": number, "name": strings[called], "filename": strings[file]}
            for (file, called), number in functions.items()
        ],
        "comment": [strings[name]],
        "default_sample_type": strings[sample_types[0][0]],
    }
    return jaxcompat.pprof({**document, "string_table": list(strings)})
