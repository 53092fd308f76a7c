"""The policies of `jax.checkpoint` by name: policies, and functions that return policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

_MAKER_NAMES = (
    "offload_dot_with_no_batch_dims",
    "save_and_offload_only_these_names",
    "save_any_names_but_these",
    "save_anything_except_these_names",
    "save_from_both_policies",
    "save_only_these_names",
)

#: The functions that return a policy, by name.
POLICY_FACTORIES: dict[str, Callable[..., Any]] = {
    name: getattr(jax.checkpoint_policies, name) for name in _MAKER_NAMES
}

#: The policies themselves, by name; JAX 0.11 also has classes of policies there.
POLICIES: dict[str, Callable[..., Any]] = {
    name: policy
    for name, policy in vars(jax.checkpoint_policies).items()
    if not (name in POLICY_FACTORIES or name.startswith("_") or isinstance(policy, type))
}
