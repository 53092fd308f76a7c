"""Python functions that a program calls while it runs, and stubs that stand for them in files."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.ir.equations import equations
from jaxprtool.ir.rewrite import map_equations
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import AnyJaxpr, ClosedJaxpr, JaxprEqn, Params

#: What to do about a program that cannot be written for its callbacks.
HINT = "-p drop_checks removes checks and prints; --callbacks stub writes callbacks that raise"

#: What to do about a batching rule of `custom_vmap`. It cannot be written as what it traces to: it
#: is told the size of the axis and may do anything with it. Traced with a symbolic size, a rule
#: that asks for `size == 4` is told False without a word.
BATCHING_HINT = (
    "--callbacks stub writes a rule that raises; inline(calls=('custom_vmap',)) leaves it out, and "
    "the function's body is then what is batched"
)


@dataclass(frozen=True)
class Stub:
    """A function that is not there, and raises when it is called.

    Attributes:
        name: The name of the function.
        source: A digest of its source, comments left out; "" if that is not known.
    """

    name: str
    source: str = ""

    def __call__(self, *operands: Any) -> Any:
        raise RuntimeError(self.message)

    @property
    def message(self) -> str:
        """What calling the stub raises."""
        return f"the function {self.name} was left out when the program was written"


def are_stubs(callbacks: str) -> bool:
    """Whether callbacks are written as stubs, of the choice "refuse" or "stub"."""
    if callbacks not in ("refuse", "stub"):
        raise ValueError(f"callbacks is 'refuse' or 'stub', not {callbacks!r}")
    return callbacks == "stub"


def callback_name(callback: object) -> str:
    """The module and the qualified name of the function in a parameter `callback`."""
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
    """The rule of a custom_vmap call, for a message."""
    return f"the batching rule {callback_name(eqn.params['rule'])}, a Python function"


def custom_vmap_params(body: ClosedJaxpr, rule: Stub, operands: int, results: int) -> Params:
    """The parameters of a custom_vmap call whose rule is not there, and asks for no structures."""
    return {"call": body, "rule": rule, **jaxcompat.flat_custom_vmap_trees(operands, results)}


def stubbed(eqn: JaxprEqn) -> JaxprEqn:
    """The equation with a stub in place of its callback or batching rule, if it has one."""
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
    """Return a jaxpr with a stub in place of each callback and batching rule."""

    def rule(eqn: JaxprEqn) -> list[JaxprEqn] | None:
        new = stubbed(eqn)
        return None if new is eqn else [new]

    return map_equations(jaxpr, rule)


def is_check(eqn: JaxprEqn) -> bool:
    """Whether an equation gives nothing, and has no effect but those of checks or debugging."""
    if eqn.outvars or not eqn.effects:
        return False
    return all(map(jaxcompat.is_check_effect, eqn.effects))
