"""Rules for calls, custom derivatives, shard_map, loops, branches and linear solves."""

from __future__ import annotations

import builtins
import enum
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

import jax

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.formats.python.expressions import (
    CallExpression,
    Expression,
    Grouping,
    Helper,
    MultiResult,
    Name,
    Proposal,
    PythonFunction,
    Slot,
    call,
    dtype_name,
    literal,
)
from jaxprtool.ir.custom_rules import jvp_rule, rule_key, vjp_rule
from jaxprtool.ir.equations import equations, fields_of, named, without_defaults
from jaxprtool.ir.equivalence import Unkeyable, jaxpr_structure
from jaxprtool.ir.expansions import LIVE, without_live_objects
from jaxprtool.ir.kernel_calls import BlockDimension, KernelBlock, KernelScratch, kernel_call
from jaxprtool.ir.regions import CALLS, Cond, Scan, ShardMap, While, sub_jaxprs
from jaxprtool.ir.rules import RuleTable, missing_plugin, rule
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Aval, JaxprEqn, Literal
from jaxprtool.primitives import scope_of

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


# --- calls ----------------------------------------------------------------------------------------
# Rules for calls: jit, checkpoint, custom derivatives, shard_map.

_NUMPY = """
    clip floor_divide remainder true_divide tril triu outer cross append roll isclose allclose
    sinc hypot cumsum cumprod median percentile quantile nanmean histogram searchsorted convolve
    correlate polyval interp gcd lcm argsort sort fmod mod float_power logaddexp heaviside
    signbit nan_to_num trunc fix rint isposinf isneginf ravel frexp ldexp
"""
_NN = """
    relu relu6 silu swish gelu elu selu celu softplus leaky_relu hard_tanh hard_sigmoid hard_silu
    hard_swish log_sigmoid soft_sign squareplus mish glu softmax log_softmax
"""
_LINALG = "norm det inv slogdet solve"

#: Public functions that JAX defines with `jit` or custom derivatives, by the name of their call. A
#: call is written as one of them if it is exactly that call.
LIBRARY: dict[str, str] = {
    **{name: f"jnp.{name}" for name in _NUMPY.split()},
    **{name: f"jax.nn.{name}" for name in _NN.split()},
    **{name: f"jnp.linalg.{name}" for name in _LINALG.split()},
    "_where": "jnp.where",
    "_one_hot": "jax.nn.one_hot",
    "qr": "jnp.linalg.qr",
}

#: Additional keyword arguments of such functions, by the same name.
_MODES: dict[str, tuple[dict[str, str], ...]] = {
    "qr": ({"mode": "raw"}, {"mode": "complete"}, {"mode": "r"}),
    "searchsorted": ({"side": "right"},),
}

#: The maximum number of equations of a body that is compared with the library.
_LONGEST_LIBRARY_BODY = 60


@rule(python_rules, "jit")
def _jit(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    p, decorator = eqn.params, _jit_decorator(eqn.params)
    if len(p["jaxpr"].eqns) <= _LONGEST_LIBRARY_BODY:
        yield from _library(eqn, operands)
    scope = scope_of(eqn)
    # In a `nest` call only tracers are operands, and the call has no options.
    literals = any(isinstance(v, Literal) for v in eqn.invars)
    marks = call_marks(eqn)
    marked = () if marks is None else (CallExpression(MARK_CALLS, kwargs=marks),)
    if scope is None or literals or decorator != Name("jax.jit"):
        yield _call(eqn, p["jaxpr"], operands, *marked, decorator)
    else:
        nest = call("partial", Name("jaxprtool.nest"), scope=scope)
        yield _call(eqn, p["jaxpr"], operands, *marked, nest, scope=scope)


def call_marks(eqn: JaxprEqn) -> Mapping[str, Any] | None:
    """Return the XLA metadata of a `jit` call if its body has none, as `outline` marks calls.

    A call under `set_xla_metadata` has the metadata in its body as well.
    """
    marks = eqn.ctx.xla_metadata
    if not marks or eqn.primitive.name != "jit":
        return None
    body = jaxcompat.open_jaxpr(eqn.params["jaxpr"])
    inside = (inner.ctx.xla_metadata or {} for inner in equations(body))
    return marks if any(not marks.items() <= metadata.items() for metadata in inside) else None


def _library(eqn: JaxprEqn, operands: tuple[Slot, ...]) -> Iterator[Proposal]:
    """Yield a call of the public function that the equation may come from."""
    name = called_name(eqn)
    if name in LIBRARY:
        for mode in ({}, *_MODES.get(name, ())):
            yield call(LIBRARY[name], *operands, **mode)


def called_name(eqn: JaxprEqn) -> str:
    """Return the name of the function called by an equation."""
    name = eqn.params.get("name")
    if isinstance(name, str):
        return name
    body = next(jaxpr for _, jaxpr in sub_jaxprs(eqn))
    return jaxcompat.open_jaxpr(body).debug_info.func_name


def local_call(
    eqn: JaxprEqn, body: AnyJaxpr, operands: tuple[Slot, ...], name: str = "", **more: Any
) -> MultiResult:
    """Return the call of a function with this body; `more` are further fields of the function."""
    results = group(range(len(eqn.outvars)))
    parameters = tuple(range(len(operands)))
    name = name or called_name(eqn)
    function = PythonFunction(jaxcompat.close_jaxpr(body), name, parameters, results, **more)
    return MultiResult(CallExpression(function, operands), results)


def _call(
    eqn: JaxprEqn,
    body: AnyJaxpr,
    operands: tuple[Slot, ...],
    *decorators: Expression,
    scope: str | None = None,
) -> MultiResult:
    return local_call(
        eqn,
        body,
        operands,
        scope or "",
        decorators=decorators,
        kept=True,
        renamed=scope is None,
        key=(jaxcompat.open_jaxpr(body), tuple(map(repr, decorators))),
    )


def _jit_decorator(p: Mapping[str, Any]) -> Expression:
    keywords: dict[str, object] = {}
    for name in ("in_shardings", "out_shardings"):
        if not all(map(jaxcompat.is_unspecified, p[name])):
            shardings = [None if jaxcompat.is_unspecified(s) else s for s in p[name]]
            keywords[name] = group(shardings)
    donated = tuple(i for i, flag in enumerate(p["donated_invars"]) if flag)
    if donated:
        keywords["donate_argnums"] = group(donated)
    keywords |= nondefault_params(p, keep_unused=False)
    # A bool, or a member of `jax.Inline` in newer releases.
    if getattr(p["inline"], "name", "AUTO") != "AUTO" or p["inline"] is True:
        keywords["inline"] = p["inline"]
    if p["compiler_options_kvs"]:
        keywords["compiler_options"] = dict(p["compiler_options_kvs"])
    return call("jax.jit", **keywords) if keywords else Name("jax.jit")


@rule(python_rules, "remat2")
def _checkpoint(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    p = dict(eqn.params)
    if p["policy"] is not None:
        p["policy"] = _policy(eqn, p["policy"])
    if p["differentiated"]:
        # The call left for the backward pass, which `jax.checkpoint` itself never binds.
        bound = call("primitives.remat_p.bind", *operands, **dict(sorted(p.items())))
        yield MultiResult(bound, tuple(range(len(eqn.outvars))))
        return
    prevent = p["prevent_cse"]
    unlike = not all(prevent) if isinstance(prevent, tuple) else not prevent
    keywords = {"prevent_cse": prevent} if unlike else {}
    keywords |= nondefault_params(p, policy=None)
    checkpoint = Name("jax.checkpoint")
    decorator = call("partial", checkpoint, **keywords) if keywords else checkpoint
    yield _call(eqn, p["jaxpr"], operands, decorator)


def _policy(eqn: JaxprEqn, policy: object) -> Expression:
    for name, predefined in vars(jax.checkpoint_policies).items():
        if predefined is policy:
            return Name(f"jax.checkpoint_policies.{name}")
    raise unsupported(eqn, "its checkpoint policy is a custom Python function")


@rule(python_rules, "closed_call", "call", "eval_jaxpr")
def _plain_call(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    body = eqn.params[CALLS[eqn.primitive.name][0]]
    # Only calls of newer JAX releases have a public name; others are made from the body.
    yield _call(eqn, body, operands, *([CLOSED_CALL] if eqn.primitive.name == "eval_jaxpr" else []))


# --- custom derivatives -----------------------------------------------------------------------


@rule(python_rules, "custom_jvp_call")
def _custom_jvp(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    yield from _library(eqn, operands)
    jvp = jvp_rule(eqn)
    primals = range(len(operands) - eqn.params["num_consts"])
    results = group(range(len(eqn.outvars)))
    numbers = itertools.count(len(eqn.outvars))
    zeros = zip(eqn.outvars, jvp.out_zeros, strict=True)
    nothing = _symbolic_zero if eqn.params["symbolic_zeros"] else _zeros
    tangents = [nothing(v.aval) if zero else next(numbers) for v, zero in zeros]
    rule_function = PythonFunction(
        jvp.jaxpr,
        _own(jvp.name, f"{called_name(eqn)}_jvp"),
        (tuple(primals), tuple(i + len(primals) for i in primals)),
        (results, group(tangents)),
        ("primals", "tangents"),
        decorators=_restricted(eqn, JVP_BY, jvp.perturbed),
        raises=None if jvp.raises is None else _exception(jvp.raises),
    )
    yield _custom(eqn, "jvp", (rule_function,), operands, results)


def _own(name: str, otherwise: str) -> str:
    """Return the name of a rule, or `otherwise` if it is generic."""
    return name if name.isidentifier() and name not in ("jvp", "fwd", "bwd") else otherwise


def _exception(described: str) -> Expression:
    """Return the constructor call for an exception given as the last line of a traceback."""
    name, _, message = described.partition(": ")
    exception = getattr(builtins, name, None)
    if isinstance(exception, type) and issubclass(exception, Exception):
        return call(name, *([message] if message else []))
    return call("RuntimeError", described)


def _restricted(eqn: JaxprEqn, by: Helper, perturbed: tuple[bool, ...]) -> tuple[Expression, ...]:
    """Return the decorator of a rule with symbolic zeros that may reject some operands."""
    operands = [i for i, may in enumerate(perturbed) if may]
    return (CallExpression(by, tuple(operands)),) if eqn.params["symbolic_zeros"] else ()


def _custom(
    eqn: JaxprEqn,
    kind: str,
    rules: tuple[PythonFunction, ...],
    operands: tuple[Slot, ...],
    results: Grouping,
) -> MultiResult:
    """Return the call of a function with custom derivatives of the kind "jvp" or "vjp"."""
    closed_over = [const for r in rules if r.raises is None for const in r.jaxpr.consts]
    if any(isinstance(const, jax.core.Tracer) for const in closed_over):
        raise unsupported(eqn, "a custom rule closes over a traced value")
    count = eqn.params["num_consts"]
    keywords = {"symbolic_zeros": True} if rules[0].decorators else {}
    body = eqn.params["call_jaxpr"]
    function = PythonFunction(
        jaxcompat.close_jaxpr(body),
        called_name(eqn),
        tuple(range(count, len(operands))),
        results,
        captured=range(count),
        decorators=(Name(f"jax.custom_{kind}"),),
        rules=((f"def{kind}", rules, keywords),),
        kept=not count,
        # If a pass changed the body, the rule still calls the original function.
        key=(called_name(eqn), rule_key(eqn), _structure(body)),
    )
    pairs = zip(eqn.invars[count:], operands[count:], strict=True)
    return MultiResult(
        CallExpression(function, tuple(_array(atom, slot) for atom, slot in pairs)), results
    )


def _structure(body: AnyJaxpr) -> object:
    try:
        return jaxpr_structure(body)
    except Unkeyable:
        return jaxcompat.open_jaxpr(body)


def _array(atom: Atom, slot: Slot) -> Expression | Slot:
    """Return an operand of a custom function; a literal as an array, as JAX may not convert it."""
    if not isinstance(atom, Literal) or atom.aval.dtype == jax.dtypes.float0:
        return slot
    return call("jnp.asarray", literal(atom).typed)


def _zeros(aval: Aval) -> Expression:
    dtype = aval.to_tangent_aval().dtype
    module = "np" if dtype == jax.dtypes.float0 else "jnp"
    return call(f"{module}.zeros", aval.shape, dtype)


def _symbolic_zero(aval: Aval) -> Expression:
    tangent = aval.to_tangent_aval()
    return call("SymbolicZero", call("jax.core.ShapedArray", tangent.shape, tangent.dtype))


@rule(python_rules, "custom_vjp_call")
def _custom_vjp(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    vjp = vjp_rule(eqn)
    raises = None if vjp.raises is None else _exception(vjp.raises)
    outs, kept = range(len(eqn.outvars)), len(vjp.forwarded)
    num_computed = vjp.forwarded.count(None)
    # A residual that the body does not return is passed to the rule as an argument.
    numbers = itertools.count()
    returned = 0 if raises else len(vjp.fwd.outvars)
    residuals = [next(numbers) if i is None else returned + i for i in vjp.forwarded]
    forward = PythonFunction(
        vjp.fwd,
        _own(vjp.fwd_name, f"{called_name(eqn)}_fwd"),
        () if raises else tuple(range(len(operands) - eqn.params["num_consts"])),
        (group([i + num_computed for i in outs]), tuple(residuals)),
        ("*primals",) if raises else (),
        decorators=_restricted(eqn, FWD_BY, vjp.perturbed),
        raises=raises,
    )
    numbers = itertools.count()
    backward = PythonFunction(
        vjp.bwd,
        _own(vjp.bwd_name, f"{called_name(eqn)}_bwd"),
        (tuple(range(kept)), group([i + kept for i in outs])),
        tuple(None if zero else next(numbers) for zero in vjp.in_zeros),
        ("residuals", "cotangents"),
        decorators=(BWD_OF_ARRAYS,) if forward.decorators else (),
        raises=raises,
    )
    yield _custom(eqn, "vjp", (forward, backward), operands, group(outs))


@rule(python_rules, *LIVE)
def _live(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    yield from proposals(without_live_objects(eqn), *operands)


# --- shard_map --------------------------------------------------------------------------------


@rule(python_rules, "shard_map")
def _shard_map(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    p, mapped = eqn.params, ShardMap.of(eqn)
    out_specs = mapped.out_specs
    said: dict[str, object] = {
        "mesh": mapped.mesh,
        "in_specs": mapped.in_specs,
        "out_specs": out_specs[0] if len(out_specs) == 1 else out_specs,
    }
    manual = frozenset(p.get("newly_manual_axes", p.get("manual_axes", ())))
    if manual != frozenset(mapped.mesh.axis_names):
        said["axis_names"] = manual
    said |= nondefault_params(p, check_vma=True)
    yield local_call(
        eqn,
        mapped.body,
        operands,
        passed=range(len(operands)),
        decorators=(call("jax.shard_map", **said),),
        setting=partial(jaxcompat.inside_shard_map, **p),
    )


# --- kernels --------------------------------------------------------------------------------------
# Rules for kernels of Pallas: their grids, blocks and options by public names.

#: The names of Pallas's public modules in a module that is written.
_PALLAS = {
    "jax.experimental.pallas": "pl",
    "jax.experimental.pallas.tpu": "pltpu",
    "jax.experimental.pallas.tpu_sc": "plsc",
    "jax.experimental.pallas.triton": "plgpu",
    "jax.experimental.pallas.mosaic_gpu": "mgpu",
}


@rule(python_rules, "program_id", "num_programs")
def _program_id(eqn: JaxprEqn) -> Iterator[Proposal]:
    yield call(f"pl.{eqn.primitive.name}", eqn.params["axis"])


@rule(python_rules, "pallas_call")
def _pallas_call(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    kernel, p = kernel_call(eqn), eqn.params
    if kernel is None:
        return
    kept = [
        ("a mesh", p.get("mesh") is not None),
        ("an axis of its grid that `vmap` has added", any(axis.is_batch for axis in kernel.grid)),
        ("a Ref that it closes over", bool(kernel.captured)),
    ]
    for what, holds in kept:
        if holds:
            raise unsupported(eqn, f"`pl.pallas_call` has no argument for {what}")
    sizes = [operands[eqn.invars.index(a.operand)] if a.operand else a.size for a in kernel.grid]
    named = [(a.name, s) if a.is_named else s for a, s in zip(kernel.grid, sizes, strict=True)]
    spec = {
        "grid": tuple(named),
        "in_specs": [_block_spec(eqn, block) for block in kernel.inputs],
        "out_specs": tuple(_block_spec(eqn, block) for block in kernel.outputs),
        "scratch_shapes": [_scratch(eqn, scratch) for scratch in kernel.scratch],
    }
    options = {
        "compiler_params": kernel.compiler_params,
        "cost_estimate": kernel.cost_estimate,
        "debug": p["debug"],
        "input_output_aliases": dict(p["input_output_aliases"]),
        "interpret": p["interpret"],
        "metadata": None if p.get("metadata") is None else dict(p["metadata"]),
        "name": p["name"],
    }
    said = {name: _kernel_value(eqn, name, value) for name, value in options.items() if value}
    if kernel.prefetched:
        count = len(kernel.prefetched)
        whole = call("pltpu.PrefetchScalarGridSpec", num_scalar_prefetch=count, **spec)
        said = {"grid_spec": whole, **said}
    else:
        said = {name: value for name, value in spec.items() if value} | said
    shapes = [
        call("jax.ShapeDtypeStruct", v.aval.shape, dtype_name(v.aval.dtype)) for v in eqn.outvars
    ]
    mapping = p["grid_mapping"]
    body = PythonFunction(
        kernel.body,
        _own_name(kernel.body, "kernel"),
        tuple(range(len(kernel.edges))),
        None,
        setting=mapping.trace_env,
    )
    made = call("pl.pallas_call", body, tuple(shapes), **said)
    first = len(operands) - len(kernel.prefetched) - len(kernel.inputs)
    yield MultiResult(CallExpression(made, operands[first:]), tuple(range(len(eqn.outvars))))


def _block_spec(eqn: JaxprEqn, block: KernelBlock) -> Expression:
    more: dict[str, object] = {}
    if block.memory_space != "default":
        space = block.ref.aval.memory_space
        more["memory_space"] = _kernel_value(eqn, "memory space", space)
    for option in block.options:
        if not hasattr(option, "buffer_count"):
            raise unsupported(eqn, f"`pl.BlockSpec` has no argument for {option}")
        more["pipeline_mode"] = _kernel_value(eqn, "pipeline mode", option)
    index_map = PythonFunction(
        jaxcompat.close_jaxpr(block.index_map),
        f"index_of_{block.name}" if block.name.isidentifier() else "index_map",
        tuple(range(len(block.index_map.invars))),
        tuple(range(len(block.index_map.outvars))),
        setting=eqn.params["grid_mapping"].trace_env,
    )
    return call("pl.BlockSpec", tuple(_block_size(eqn, d) for d in block.dims), index_map, **more)


def _block_size(eqn: JaxprEqn, dim: BlockDimension) -> object:
    if dim.kind in ("Blocked", "Squeezed"):
        return dim.size if dim.kind == "Blocked" else None
    if dim.kind == "BoundedSlice":
        raise unsupported(eqn, "the index map of a `pl.BoundedSlice` returns a slice")
    return call(f"pl.{dim.kind}", dim.size, *([dim.padding] if any(dim.padding) else []))


def _scratch(eqn: JaxprEqn, scratch: KernelScratch) -> Expression:
    shape, dtype = scratch.array.shape, scratch.array.dtype
    space = _kernel_value(eqn, "memory space", scratch.ref.aval.memory_space)
    if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return CallExpression(space, (shape, dtype_name(dtype)))
    raise unsupported(eqn, f"its scratch {scratch.name} has the type {dtype}")


def _kernel_value(eqn: JaxprEqn, what: str, value: Any) -> Any:
    """Return an option of a kernel as an expression of public names. Raises UnsupportedError."""
    record = fields_of(value)
    if record is None and not isinstance(value, enum.Enum):
        if isinstance(value, tuple | list):
            return type(value)(_kernel_value(eqn, what, item) for item in value)
        return value
    module, _, name = (jaxcompat.public_kernel_name(value) or "").rpartition(".")
    if isinstance(value, enum.Enum):
        module, _, cls = module.rpartition(".")
        name = f"{cls}.{name}"
    if module not in _PALLAS:
        raise unsupported(eqn, f"its {what.replace('_', ' ')} {value} has no public name")
    path = f"{_PALLAS[module]}.{name}"
    if record is None:
        return Name(path)
    fields = fields_of(without_defaults(value)) or ("", {})
    return call(path, **{k: _kernel_value(eqn, what, v) for k, v in fields[1].items()})


# --- loops ----------------------------------------------------------------------------------------
# Rules for loops, branches and linear solves, with their bodies as local functions.


def group(indexes: Sequence[Any]) -> Any:
    """Return the structure of values: a single one without a tuple, none as None."""
    if len(indexes) == 1:
        return indexes[0]
    return tuple(indexes) or None


def _own_name(jaxpr: AnyJaxpr, otherwise: str) -> str:
    """Return the name of a body's Python function, or `otherwise` if it is generic."""
    name = jaxcompat.open_jaxpr(jaxpr).debug_info.func_name
    # A body read from a file is called "jaxpr".
    says_something = name.isidentifier() and not name.startswith("_") and name != "jaxpr"
    return name if says_something else otherwise


@rule(python_rules, "scan")
def _scan(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    loop = Scan.of(eqn)
    n, k, total = len(loop.consts), len(loop.carry), len(operands)
    outs = range(len(eqn.outvars))
    results = (group(outs[:k]), group(outs[k:]))
    step = PythonFunction(
        loop.body,
        _own_name(loop.body, "step"),
        (group(range(n, n + k)), group(range(n + k, total))),
        results,
        ("carry", "x"),
        captured=range(n),
        passed=range(n, total),
    )
    arguments = [step, group(operands[n : n + k]), group(operands[n + k :])]
    options: dict[str, object] = {}
    if not loop.xs:
        options["length"] = loop.length
    if loop.reverse:
        options["reverse"] = True
    if loop.unroll != 1:
        options["unroll"] = loop.unroll
    yield MultiResult(call("lax.scan", *arguments, **options), results)


@rule(python_rules, "while")
def _while(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    loop = While.of(eqn)
    if loop.cond.outvars[0].aval.shape:
        return  # a batched loop runs while any of its predicates is true
    c, b, k = len(loop.cond_consts), len(loop.body_consts), len(loop.carry)
    carry, results = range(c + b, c + b + k), group(range(k))
    condition = PythonFunction(
        loop.cond,
        _own_name(loop.cond, "condition"),
        (group(range(c, c + k)),),
        0,
        ("carry",),
        captured=range(c),
        passed=carry,
    )
    body = PythonFunction(
        loop.body,
        _own_name(loop.body, "body"),
        (group(range(b, b + k)),),
        results,
        ("carry",),
        captured=range(c, c + b),
        passed=carry,
    )
    start = group(operands[c + b :])
    yield MultiResult(call("lax.while_loop", condition, body, start), results)


@rule(python_rules, "cond")
def _cond(eqn: JaxprEqn, index: Slot, *operands: Slot) -> Iterator[Proposal]:
    functions, results, _ = _branches(eqn)
    more = {k: v for k, v in eqn.params.items() if k != "branches"}
    yield MultiResult(CallExpression(BRANCH_AT, (index, functions, *operands), more), results)


@rule(python_rules, "platform_index")
def _platform_index(eqn: JaxprEqn) -> Iterator[Proposal]:
    yield CallExpression(PLATFORM_INDEX, eqn.params["platforms"])


def on_number(eqn: JaxprEqn) -> MultiResult:
    """Return the branch as `lax.switch`, which clamps its first operand."""
    branches, results, (index, *operands) = _branches(eqn)
    return MultiResult(call("lax.switch", index, branches, *operands), results)


def on_predicate(eqn: JaxprEqn) -> MultiResult:
    """Return the branch as `lax.cond`, which converts its first operand to an index."""
    (otherwise, then), results, (predicate, *operands) = _branches(eqn)
    return MultiResult(call("lax.cond", predicate, then, otherwise, *operands), results)


def on_platform(eqn: JaxprEqn) -> MultiResult:
    """Return the branch as `lax.platform_dependent`, which queries its first operand."""
    functions, results, operands = _branches(eqn, 0)
    by_platform = {
        platform: function
        for function, platforms in zip(functions, eqn.params["branches_platforms"], strict=True)
        for platform in platforms or ("default",)
    }
    return MultiResult(call("lax.platform_dependent", *operands, **by_platform), results)


def _branches(eqn: JaxprEqn, leading: int = 1) -> tuple[list[PythonFunction], Grouping, list[Slot]]:
    """Return the branches as functions, the structure of their results, and all operands.

    In Python, `leading` operands precede those of the branches.
    """
    choice = Cond.of(eqn)
    results = group(range(len(choice.outs)))
    names = ["otherwise", "then"] if leading and len(choice.branches) == 2 else []
    count = len(choice.operands)
    functions = [
        PythonFunction(
            body,
            names[i] if names else f"branch_{i}",
            tuple(range(count)),
            results,
            passed=range(leading, leading + count),
        )
        for i, body in enumerate(choice.branches)
    ]
    return functions, results, [Slot(i) for i in range(leading + count)]


@rule(python_rules, "custom_linear_solve")
def _linear_solve(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    names = ("matvec", "vecmat", "solve", "transpose_solve")
    starts = dict(zip(names, accumulate(lengths, initial=0), strict=False))
    right = operands[sum(lengths) :]

    def function(name: str, takes_operator: bool) -> PythonFunction:
        body, first = getattr(jaxprs, name), starts[name]
        count = getattr(lengths, name)
        vector = group(range(count, len(body.invars)))
        return PythonFunction(
            body,
            name,
            (None, vector) if takes_operator else (vector,),
            group(range(len(body.outvars))),
            ("matvec", "b") if takes_operator else ("x",),
            captured=range(first, first + count),
        )

    solved = len(eqn.outvars) - len(right)
    results = group(range(len(right)))
    options: dict[str, object] = {}
    solve = function("solve", takes_operator=True)
    if solved:
        aux = tuple(range(len(right), len(eqn.outvars)))
        results = (results, aux)
        options["has_aux"] = True
        solve = replace(solve, results=results)
    if jaxprs.vecmat is not None and jaxprs.vecmat is jaxprs.matvec:
        options["symmetric"] = True
    elif jaxprs.transpose_solve is not None:
        options["transpose_solve"] = function("transpose_solve", takes_operator=True)
    matvec = function("matvec", takes_operator=False)
    solution = call("lax.custom_linear_solve", matvec, group(right), solve, **options)
    yield MultiResult(solution, results)
