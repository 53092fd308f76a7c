"""The open table of rules for writing equations, and helper functions that their lines use.

    @rule("python", "my_primitive")
    def _(eqn, x, y):
        yield call("jnp.hypot", x, y)

A rule takes an equation and a `Slot` for each operand, and yields expressions, most readable first.
The first expression that traces to exactly this equation is used, so a rule need not check its
proposals. It may depend on the parameters, the types, and literal operands that are 0 or 1;
equations equal in all of these are written alike. If no proposal fits, the primitive's `bind` is
written, provided that the primitive is public and its parameters are plain data.

An expression may contain a `PythonFunction` for a jaxpr of the equation. An expression wrapped in
`MultiResult`, which has the structure of its results, is used unchecked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.formats.python.expressions import Helper, Proposal, Slot
from jaxprtool.ir.equations import named
from jaxprtool.ir.rules import RuleTable, missing_plugin
from jaxprtool.jaxcompat import JaxprEqn

# --- table ----------------------------------------------------------------------------------------
# The open table of rules for writing the equations of each primitive.

PythonRule: TypeAlias = Callable[..., Iterable[Proposal]]

#: Rules by the primitive's name. Plug-ins add rules for their own primitives.
python_rules: RuleTable[PythonRule] = RuleTable()


def proposals(eqn: JaxprEqn, *operands: Slot) -> Iterable[Proposal]:
    """Return the table's proposals for an equation, most readable first."""
    rule = python_rules.get(eqn.primitive.name)
    return rule(eqn, *operands) if rule else ()


def unsupported(eqn: JaxprEqn, why: str) -> UnsupportedError:
    """Return the error for an equation that cannot be written as Python."""
    message = f"{named(eqn)} cannot be written as Python: {why}"
    name, module = eqn.primitive.name, jaxcompat.defining_module(eqn.primitive)
    hint = missing_plugin(name)
    if hint is None and module is not None and not module.startswith("jax."):
        hint = f"add a rule with @rule('python', {name!r}) to a module, and --plugin MODULE"
    return UnsupportedError(message, hint)


def nondefault_params(params: Mapping[str, Any], **defaults: object) -> dict[str, Any]:
    """Return the parameters that differ from these defaults, in this order."""
    return {k: params[k] for k, default in defaults.items() if params.get(k, default) != default}


# --- helpers --------------------------------------------------------------------------------------
# Helper functions that a module defines if its lines use them.

NAMED = Helper(
    "named",
    (),
    '''def named(name):
    """Give a function a name that this module cannot use."""

    def rename(function):
        function.__name__ = name
        return function

    return rename''',
)

FROM_HEX = Helper(
    "from_hex",
    ("jnp", "np"),
    '''def from_hex(text, dtype, *shape):
    """Return an array from its bytes."""
    return jnp.asarray(np.frombuffer(bytes.fromhex(text), dtype).reshape(shape))''',
)

#: No public function returns this by itself: `jnp.linalg.qr` transposes it.
GEQRF = Helper(
    "geqrf",
    ("jnp",),
    '''def geqrf(a):
    """Return LAPACK's QR decomposition: R with Householder vectors below it, and factors."""
    h, taus = jnp.linalg.qr(a, mode="raw")
    return h.mT, taus''',
)

#: `lax.cond` and `lax.switch` would convert or clamp the index.
BRANCH_AT = Helper(
    "branch_at",
    ("jax", "primitives"),
    '''def branch_at(index, functions, *operands, **params):
    """Call the function at an index, which is neither converted nor clamped."""
    traced = [jax.make_jaxpr(f, return_shape=True)(*operands) for f in functions]
    branches = tuple(jaxpr for jaxpr, _ in traced)
    results = primitives.cond_p.bind(index, *operands, branches=branches, **params)
    return jax.tree.unflatten(jax.tree.structure(traced[0][1]), results)''',
)

#: `lax.platform_dependent` would query it again for each branch.
PLATFORM_INDEX = Helper(
    "platform_index",
    ("jax", "lax"),
    '''def platform_index(*platforms):
    """Return which of these platforms the program is compiled for."""
    asked = jax.make_jaxpr(lambda: lax.platform_dependent(cpu=int, default=int))()
    return asked.eqns[0].primitive.bind(platforms=platforms)''',
)

#: The calls that `lax.custom_root` and `jax.linearize` leave: `jax.jit` would bind another
#: primitive.
CLOSED_CALL = Helper(
    "closed_call",
    ("jax", "primitives"),
    '''def closed_call(function):
    """Keep calls of a function where they are traced, instead of inlining them."""

    def call(*args):
        jaxpr, results = jax.make_jaxpr(function, return_shape=True)(*args)
        values = primitives.closed_call_p.bind(*args, call_jaxpr=jaxpr)
        return jax.tree.unflatten(jax.tree.structure(results), values)

    return call''',
)

#: Trace the call before marking it: under `set_xla_metadata` its body would be marked as well.
MARK_CALLS = Helper(
    "mark_calls",
    ("jax", "jaxpr_as_fun", "set_xla_metadata"),
    '''def mark_calls(**metadata):
    """Mark the calls of a function for XLA, but not the body of the function."""

    def decorate(function):
        def call(*args):
            jaxpr, results = jax.make_jaxpr(function, return_shape=True)(*args)
            with set_xla_metadata(**metadata):
                values = jaxpr_as_fun(jaxpr)(*args)
            return jax.tree.unflatten(jax.tree.structure(results), values)

        return call

    return decorate''',
)

#: The rules below receive symbolic zeros but are written for arrays.
JVP_BY = Helper(
    "jvp_by",
    ("SymbolicZero", "zeros_like_aval"),
    '''def jvp_by(*operands):
    """Make a jvp rule refuse to differentiate with respect to other operands."""

    def restrict(rule):
        def jvp(primals, tangents):
            given = []
            for i, tangent in enumerate(tangents):
                zero = isinstance(tangent, SymbolicZero)
                if not zero and i not in operands:
                    raise TypeError(
                        f"{rule.__name__} does not differentiate "
                        f"with respect to operand {i}"
                    )
                if zero and i in operands:
                    tangent = zeros_like_aval(tangent.aval)
                given.append(tangent)
            return rule(primals, tuple(given))

        jvp.__name__ = rule.__name__
        return jvp

    return restrict''',
)

FWD_BY = Helper(
    "fwd_by",
    (),
    '''def fwd_by(*operands):
    """Make a forward rule refuse to differentiate with respect to other operands."""

    def restrict(rule):
        def fwd(*primals):
            for i, primal in enumerate(primals):
                if primal.perturbed and i not in operands:
                    raise TypeError(
                        f"{rule.__name__} does not differentiate "
                        f"with respect to operand {i}"
                    )
            return rule(*[primal.value for primal in primals])

        fwd.__name__ = rule.__name__
        return fwd

    return restrict''',
)

BWD_OF_ARRAYS = Helper(
    "bwd_of_arrays",
    ("SymbolicZero", "jax", "zeros_like_aval"),
    '''def bwd_of_arrays(rule):
    """Give a backward rule arrays of zeros for symbolic zeros."""

    def array(ct):
        return zeros_like_aval(ct.aval) if isinstance(ct, SymbolicZero) else ct

    def bwd(residuals, cotangents):
        return rule(residuals, jax.tree.map(array, cotangents))

    bwd.__name__ = rule.__name__
    return bwd''',
)

#: Names that functions of a module never have.
HELPERS = frozenset(
    helper.name
    for helper in (
        NAMED,
        FROM_HEX,
        GEQRF,
        BRANCH_AT,
        PLATFORM_INDEX,
        CLOSED_CALL,
        MARK_CALLS,
        JVP_BY,
        FWD_BY,
        BWD_OF_ARRAYS,
    )
)
