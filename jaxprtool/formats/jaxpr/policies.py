"""The policies of `jax.checkpoint`, which are functions: those that JAX itself defines, by name.

`checkpoint_policies.dots_saveable` is one; `checkpoint_policies.save_only_these_names('a', 'b')`
makes one. What it was made with is found again in the closure of the function that it is, or, in
JAX 0.10, in the fields of an object.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import jax

from jaxprtool.formats.jaxpr.values import Encode, Unwritable, add_kind, add_maker, add_name
from jaxprtool.ir.checkpoint_policies import MAKERS, POLICIES

_policies = jax.checkpoint_policies
_some: Callable[..., bool] = _policies.dots_saveable
_other: Callable[..., bool] = _policies.dots_with_no_batch_dims_saveable

#: One policy of each family, to know the others by.
_SAMPLES: dict[str, Any] = {
    "offload_dot_with_no_batch_dims": _policies.offload_dot_with_no_batch_dims("a", "b"),
    "save_and_offload_only_these_names": _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["a"],
        names_which_can_be_offloaded=["b"],
        offload_src="c",
        offload_dst="d",
    ),
    "save_any_names_but_these": _policies.save_any_names_but_these("a"),
    "save_anything_except_these_names": _policies.save_anything_except_these_names("a"),
    "save_from_both_policies": _policies.save_from_both_policies(_some, _other),
    "save_only_these_names": _policies.save_only_these_names("a"),
}


def _family(policy: Any) -> Any:
    """What the policies of one family have in common: their code, or their class."""
    return policy.__code__ if isinstance(policy, FunctionType) else type(policy)


_FAMILIES = {_family(sample): name for name, sample in _SAMPLES.items()}


def _held(policy: Any) -> dict[str, Any]:
    """What a policy was made with; sets of names as tuples in order."""
    if isinstance(policy, FunctionType):
        cells = zip(policy.__code__.co_freevars, policy.__closure__ or (), strict=True)
        held = {name: cell.cell_contents for name, cell in cells}
    else:
        held = dict(vars(policy))
    sets = (set, frozenset)
    return {k: tuple(sorted(v)) if isinstance(v, sets) else v for k, v in held.items()}


def _spell(policy: Any, encode: Encode) -> str:
    for name, known in POLICIES.items():
        if policy is known or (not isinstance(policy, FunctionType) and policy == known):
            return f"checkpoint_policies.{name}"
    name = _FAMILIES.get(_family(policy), "")
    if not name:
        raise Unwritable(f"a Python function ({getattr(policy, '__qualname__', policy)})")
    held = _held(policy)
    kinds = [p.kind for p in inspect.signature(MAKERS[name]).parameters.values()]
    if kinds == [inspect.Parameter.VAR_POSITIONAL]:
        items = [encode(item) for names in held.values() for item in names]
    else:
        items = [f"{word}={encode(value)}" for word, value in held.items()]
    return f"checkpoint_policies.{name}({', '.join(items)})"


for _name, _value in POLICIES.items():
    add_name(f"checkpoint_policies.{_name}", _value)
    add_kind(type(_value), _spell)
for _name, _value in MAKERS.items():
    add_maker(f"checkpoint_policies.{_name}", _value)
    add_kind(type(_SAMPLES[_name]), _spell)
