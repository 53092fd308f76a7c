"""The bytes that collectives move, by source line, in a profile."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from jaxprtool.analysis.profile import Profile
from jaxprtool.ir.hlo.collectives import collectives, moved_values
from jaxprtool.ir.source.frames import Frames


def with_collectives(profile: Profile, frames: Frames) -> Profile:
    """Add to each line the bytes of the results of its collectives on one device, in a call.

    Args:
        profile: The profile. One whose modules have no collectives is returned as it is.
        frames: Reads frames, and decides which files are the user's.
    """
    modules = () if profile.trace is None else profile.trace.modules.values()
    found = Counter[str]()
    for module in modules:
        for collective in collectives(module):
            runs = 1 if collective.count is None else collective.count
            for instruction, shape in moved_values(module, collective):
                location = frames.location_in(module.frames(instruction))
                found["" if location is None else frames.text(location.frame)] += shape.bytes * runs
    if not found:
        return profile
    lines = (replace(each, moved_bytes=found[each.name]) for each in profile.lines)
    return replace(profile, lines=tuple(lines), moved_bytes=found.total())
