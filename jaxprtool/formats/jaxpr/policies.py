"""The policies of `jax.checkpoint`, which are functions: those that JAX itself defines, by name.

`checkpoint_policies.dots_saveable` is one; `checkpoint_policies.save_only_these_names('a', 'b')`
makes one. What it was made with is found again in the closure of the function that it is, or, in
JAX 0.10, in the fields of an object.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import Parameter
from types import CodeType, FunctionType
from typing import Any, TypeAlias

from jaxprtool.formats.jaxpr.values import (
    Encode,
    Unwritable,
    add_class,
    add_maker,
    add_name,
    call,
)
from jaxprtool.ir.checkpoint_policies import MAKERS, POLICIES

Policy: TypeAlias = Callable[..., Any]


def _sample(make: Callable[..., Policy]) -> Policy:
    """A policy of those that `make` makes; every argument is the name of its parameter."""
    named = inspect.signature(make).parameters.values()
    args = [p.name for p in named if p.kind is not Parameter.KEYWORD_ONLY]
    return make(*args, **{p.name: [p.name] for p in named if p.kind is Parameter.KEYWORD_ONLY})


def _family(policy: Policy) -> CodeType | type:
    """What the policies that one function makes have in common: their code, or their class."""
    return policy.__code__ if isinstance(policy, FunctionType) else type(policy)


_SAMPLES = {name: _sample(make) for name, make in MAKERS.items()}
_FAMILIES = {_family(sample): name for name, sample in _SAMPLES.items()}


def _arguments(policy: Policy) -> dict[str, Any]:
    """What a policy was made with; sets of names as tuples in order."""
    if isinstance(policy, FunctionType):
        cells = zip(policy.__code__.co_freevars, policy.__closure__ or (), strict=True)
        found = {name: cell.cell_contents for name, cell in cells}
    else:
        found = vars(policy)
    sets = (set, frozenset)
    return {k: tuple(sorted(v)) if isinstance(v, sets) else v for k, v in found.items()}


def _encode(policy: Policy, encode: Encode) -> str:
    for name, known in POLICIES.items():
        if policy is known or (not isinstance(policy, FunctionType) and policy == known):
            return f"checkpoint_policies.{name}"
    name = _FAMILIES.get(_family(policy), "")
    if not name:
        raise Unwritable(f"a Python function ({getattr(policy, '__qualname__', policy)})")
    found = _arguments(policy)
    kinds = [p.kind for p in inspect.signature(MAKERS[name]).parameters.values()]
    if kinds == [Parameter.VAR_POSITIONAL]:
        items = [encode(item) for names in found.values() for item in names]
        return call(f"checkpoint_policies.{name}", *items)
    return call(f"checkpoint_policies.{name}", **{k: encode(v) for k, v in found.items()})


for _name, _value in POLICIES.items():
    add_name(f"checkpoint_policies.{_name}", _value)
    add_class(type(_value), _encode)
for _name, _maker in MAKERS.items():
    add_maker(f"checkpoint_policies.{_name}", _maker)
    add_class(type(_SAMPLES[_name]), _encode)
