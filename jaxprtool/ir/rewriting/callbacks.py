"""Callbacks: the Python functions that a program calls as it runs, and their stubs in files."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.ir.core.equations import equations
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.rewriting.rewrite import map_equations
from jaxprtool.jaxcompat import AnyJaxpr, ClosedJaxpr, JaxprEqn, Params

#: The hint for a program that cannot be written because of its callbacks.
HINT = "-p drop_checks removes checks and prints; --callbacks stub writes callbacks that raise"

#: The hint for a batching rule of `custom_vmap`. A rule cannot be written as a jaxpr, since it may
#: depend on the size of the axis: traced with a symbolic size, `size == 4` is silently False.
BATCHING_HINT = (
    "--callbacks stub writes a rule that raises; inline(calls=('custom_vmap',)) removes the "
    "rule, and the function's body is batched instead"
)


@dataclass(frozen=True)
class Stub:
    """A placeholder for a Python function, which raises when it is called.

    Attributes:
        name: The name of the function.
        source: A digest of its source without comments; "" if unknown.
    """

    name: str
    source: str = ""

    def __call__(self, *operands: Any) -> Any:
        raise RuntimeError(self.message)

    @property
    def message(self) -> str:
        """The message of the exception that a call raises."""
        return f"the function {self.name} was omitted when the program was written"


def are_stubs(callbacks: str) -> bool:
    """Return True for the option "stub" and False for "refuse"."""
    if callbacks not in ("refuse", "stub"):
        raise ValueError(f"callbacks must be 'refuse' or 'stub', not {callbacks!r}")
    return callbacks == "stub"


def callback_name(callback: object) -> str:
    """Return the module and qualified name of the function in a parameter `callback`."""
    if isinstance(callback, Stub):
        return callback.name
    function = _function(callback)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _function(callback: object) -> Any:
    """Return the user's function in a parameter `callback`."""
    function = jaxcompat.callback_function(callback)
    while isinstance(function, functools.partial):
        function = function.func
    return function


def stub(callback: object) -> Stub:
    """Return a stub of the function in a parameter `callback`."""
    if isinstance(callback, Stub):
        return callback
    return Stub(callback_name(callback), _source_digest(_function(callback)))


def _source_digest(function: Any) -> str:
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return ""
    try:
        source = ast.unparse(ast.parse(source))
    except SyntaxError:  # a lambda in the middle of an expression
        source = source.strip()
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def batching_rule(eqn: JaxprEqn) -> str:
    """Describe the batching rule of a `custom_vmap` call, for a message."""
    return f"the batching rule {callback_name(eqn.params['rule'])}, a Python function"


def custom_vmap_params(body: ClosedJaxpr, rule: Stub, operands: int, results: int) -> Params:
    """Return the parameters of a `custom_vmap` call with a stub for its rule and flat pytrees."""
    return {"call": body, "rule": rule, **jaxcompat.flat_custom_vmap_trees(operands, results)}


def stubbed(eqn: JaxprEqn) -> JaxprEqn:
    """Replace the callback or batching rule of an equation, if it has one, by a stub."""
    if eqn.primitive.name == "custom_vmap_call":
        rule, counts = stub(eqn.params["rule"]), (len(eqn.invars), len(eqn.outvars))
        return eqn.replace(params=custom_vmap_params(eqn.params["call"], rule, *counts))
    held = eqn.params.get("callback")
    if held is None or not traits(eqn).callback or isinstance(held, Stub):
        return eqn
    return eqn.replace(params={**eqn.params, "callback": stub(held)})


def has_stubs(jaxpr: AnyJaxpr) -> bool:
    """Return True if a callback or a batching rule in a jaxpr, at any depth, is a stub."""
    return any(
        isinstance(value, Stub)
        for eqn in equations(jaxcompat.open_jaxpr(jaxpr))
        for value in (eqn.params.get("callback"), eqn.params.get("rule"))
    )


def with_stubs(jaxpr: AnyJaxpr) -> AnyJaxpr:
    """Replace each callback and batching rule of a jaxpr, at any depth, by a stub."""

    def rule(eqn: JaxprEqn) -> list[JaxprEqn] | None:
        new = stubbed(eqn)
        return None if new is eqn else [new]

    return map_equations(jaxpr, rule)


def is_check(eqn: JaxprEqn) -> bool:
    """Return True if an equation has no results, and only the effects of checks or debugging."""
    if eqn.outvars or not eqn.effects:
        return False
    return all(map(jaxcompat.is_check_effect, eqn.effects))
