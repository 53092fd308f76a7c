"""Profiles in the format of pprof, which jaxlib writes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from typing import Any

from jax._src.lib import _jax


def pprof(profile: Mapping[str, Any]) -> bytes:
    """Return a profile, compressed, from the JSON form of its protocol buffer.

    The format is https://github.com/google/pprof/blob/main/proto/profile.proto.
    """
    return gzip.compress(_jax.json_to_pprof_profile(json.dumps(profile)), mtime=0)


def read_pprof(data: bytes) -> str:
    """Return the JSON form of a profile from `pprof`."""
    return str(_jax.pprof_profile_to_json(gzip.decompress(data)))
