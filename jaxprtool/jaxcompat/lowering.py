"""Lower, run and measure closed jaxprs, after the expansion of high primitives."""

from __future__ import annotations

import copy
import gzip
import inspect
import json
import logging
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import jax
import numpy as np
from jax._src import ad_checkpoint, config, effects, hijax
from jax._src.interpreters import ad, partial_eval
from jax._src.interpreters import mlir as jax_lowering
from jax._src.lax.control_flow import solves
from jax._src.lib import _jax, hlo
from jax._src.lib.mlir import ir, passmanager
from jax._src.lib.mlir.dialects import hlo as stablehlo
from jax.custom_derivatives import SymbolicZero
from jax.experimental.layout import Format
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive
from jax.extend.core.primitives import name_p, remat_p
from jax.interpreters import mlir
from jax.interpreters.ad import Zero, primitive_jvps
from jax.tree_util import PyTreeDef

from jaxprtool.errors import described
from jaxprtool.jaxcompat.custom_rules import JVPRule, VJPRule, live_key
from jaxprtool.jaxcompat.jaxprs import (
    ONE_JAXPR_CLASS,
    UNSPECIFIED,
    AnyJaxpr,
    Aval,
    axes_bound,
    close_jaxpr,
    open_jaxpr,
)
from jaxprtool.jaxcompat.marks import for_jax, jaxpr_as_fun
from jaxprtool.jaxcompat.tracing import setting_of, trace_flat, traced_like

# --- high primitives ------------------------------------------------------------------------------
# High primitives: operations that are objects with rules of their own (`jax.experimental.hijax`).
#
# An equation of `call_hi_primitive` holds such an object. Before JAX compiles, it replaces the
# equation by the object's `expand`; until then the object defines the derivatives and batching.
# Since 0.12 `jnp.frexp`, `jnp.searchsorted` or `lax.custom_root` are of this kind.

#: The class of the objects.
HighPrimitive: type = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive

#: The name of the primitive whose equations hold them.
CALL_HIGH = hijax.call_hi_primitive_p.name

#: The objects that are differentiated by differentiating their expansion.
_TRANSPARENT: tuple[type, ...] = tuple(
    cls for cls in (getattr(solves, "_RootLinearMap", None),) if cls is not None
)

#: The attribute for an object's body, which lives as long as the object.
_BODY = "_jaxprtool_body"


def high_body(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return the expansion of a `call_hi_primitive` as a closed jaxpr, or None.

    It has none if JAX cannot expand it, or must lower types of operands or results too.
    """
    prim = eqn.params["_prim"]
    cached = prim.__dict__.get(_BODY)
    if cached is None:
        cached = prim.__dict__[_BODY] = (_expanded(prim, eqn),)
    return cached[0]


def _expanded(prim: Any, eqn: JaxprEqn) -> ClosedJaxpr | None:
    if any(aval.is_high for aval in (*prim.in_avals_flat, *prim.out_avals_flat)):
        return None
    if isinstance(prim, ad_checkpoint.RematTraced):
        return close_jaxpr(prim.jaxpr)

    def expand(*operands: Any) -> list[Any]:
        return hijax.call_hi_primitive_p.to_lojax(*operands, _prim=prim)

    try:
        with setting_of(eqn):
            return trace_flat(expand, high_name(eqn), prim.in_avals_flat)
    except Exception:  # user code may raise anything; then JAX cannot compile the equation either
        return None


def with_high_body(eqn: JaxprEqn, body: ClosedJaxpr) -> Any:
    """Return an equation's object, with its own rules, and another closed jaxpr to expand to."""
    prim = eqn.params["_prim"]
    if isinstance(prim, ad_checkpoint.RematTraced):
        changed = {**prim.params, "jaxpr": body}
        return type(prim)(**changed)
    new = copy.copy(prim)

    def expand(*args: Any) -> Any:
        outs = jaxpr_as_fun(body)(*jax.tree.leaves(args))
        return jax.tree.unflatten(prim.out_tree, outs)

    # JAX's listing shows some objects with a jaxpr, which would be the old one.
    shown = {k: v for k, v in prim.params.items() if isinstance(v, bool | int | str | tuple)}
    printed = {**shown, "expand": body}
    new.__dict__.update({"expand": expand, "pp_params": lambda: printed, _BODY: (body,)})
    return new


def high_name(eqn: JaxprEqn) -> str:
    """Return the name of the function that an object was created from, or that of its class."""
    prim = eqn.params["_prim"]
    return str(getattr(prim.params.get("traced"), "fun_name", type(prim).__name__))


def high_key(eqn: JaxprEqn) -> Hashable:
    """Return a key that two objects share if they follow the same rules at the same types."""
    prim = eqn.params["_prim"]
    params = {k: v for k, v in prim.params.items() if k != "traced"}
    types = tuple(prim.in_avals_flat), prim.in_tree, tuple(prim.out_avals_flat)
    return type(prim), types, live_key(tuple(params.values()))


# --- derivatives --------------------------------------------------------------------------------


def high_derivative(eqn: JaxprEqn) -> str:
    """Return the kind of derivative that an object has: "body", "jvp" or "vjp"."""
    prim = eqn.params["_prim"]
    if isinstance(prim, _TRANSPARENT):
        return "body"
    rules = [name for name in ("jvp", "vjp_fwd") if _overridden(prim, name)]
    only_reverse = rules == ["vjp_fwd"] or isinstance(prim, hijax.CustomVJPTraced)
    return "vjp" if only_reverse else "jvp"


def _overridden(prim: object, method: str) -> bool:
    return getattr(type(prim), method) is not getattr(HighPrimitive, method)


def _is_zero(value: object) -> bool:
    """Return True if a tangent or cotangent is None, or of a type whose only value is zero."""
    if isinstance(value, Zero | SymbolicZero):
        return True
    return bool(getattr(value, "dtype", None) == jax.dtypes.float0)


def _zero(aval: Aval) -> bool:
    return bool(getattr(aval.to_tangent_aval(), "dtype", None) == jax.dtypes.float0)


def high_jvp_rule(eqn: JaxprEqn) -> JVPRule:
    """Return an object's forward derivative. Raises the exception of the object's rule."""
    prim = eqn.params["_prim"]
    primals = prim.in_avals_flat
    tangents = [aval.to_tangent_aval() for aval in primals]
    zeros: list[bool] = []

    def rule(*args: Any) -> list[Any]:
        if all(map(_zero, prim.out_avals_flat)):  # the object's rule may need sizes to be numbers
            zeros[:] = [True] * len(prim.out_avals_flat)
            return list(hijax.call_hi_primitive_p.bind(*args[: len(primals)], _prim=prim))
        in_dots = [
            Zero(aval) if _is_zero(t) else t
            for t, aval in zip(args[len(primals) :], tangents, strict=True)
        ]
        outs, dots = primitive_jvps[hijax.call_hi_primitive_p](
            args[: len(primals)], in_dots, _prim=prim
        )
        zeros[:] = map(_is_zero, dots)
        return [*outs, *(dot for dot, zero in zip(dots, zeros, strict=True) if not zero)]

    with setting_of(eqn):
        name = f"{high_name(eqn)}_jvp"
        jaxpr = trace_flat(rule, name, [*primals, *tangents])
    return JVPRule(name, jaxpr, tuple(zeros), (True,) * len(primals))


def high_vjp_rule(eqn: JaxprEqn) -> VJPRule:
    """Return an object's reverse derivative, whose `fwd` returns all residuals.

    Raises the exceptions of the object's rules, and TypeError for rules that are more than
    functions of residuals and cotangents.
    """
    prim = eqn.params["_prim"]
    wanted = _differentiable(prim)
    trees: list[Any] = []

    def forward(*args: Any) -> list[Any]:
        asked, primals = (jax.tree.unflatten(prim.in_tree, part) for part in (wanted, args))
        out, *rest = prim.vjp_fwd(asked, *primals)
        if len(rest) > 2:
            raise TypeError("its residuals have a structure of their own")
        leaves, tree = jax.tree.flatten(rest[0])
        trees[:] = [tree]
        return [*leaves, *jax.tree.leaves(out)]

    zeros: list[bool] = []

    def backward(*args: Any) -> list[Any]:
        count = trees[0].num_leaves
        sums = [ad.ValAccum(aval.to_ct_aval()) for aval in prim.in_avals_flat]
        log = prim.vjp_bwd(
            jax.tree.unflatten(trees[0], args[:count]),
            jax.tree.unflatten(prim.out_tree, args[count:]),
            *jax.tree.unflatten(prim.in_tree, sums),
        )
        if log is not None:
            raise TypeError("its backward rule returns a log")
        cts = [accum.freeze() for accum in sums]
        zeros[:] = map(_is_zero, cts)
        return [ct for ct, zero in zip(cts, zeros, strict=True) if not zero]

    cotangents = [aval.to_ct_aval() for aval in prim.out_avals_flat]
    names = f"{high_name(eqn)}_fwd", f"{high_name(eqn)}_bwd"
    with setting_of(eqn):
        fwd = trace_flat(forward, names[0], prim.in_avals_flat)
        residuals = [atom.aval for atom in fwd.outvars[: trees[0].num_leaves]]
        bwd = trace_flat(backward, names[1], [*residuals, *cotangents])
    forwarded = (None,) * len(residuals)
    return VJPRule(*names, fwd, bwd, forwarded, tuple(zeros), (True,) * len(eqn.invars))


def _differentiable(prim: Any) -> list[bool]:
    """Return, for each operand, True if an object's reverse rule returns a cotangent for it."""
    flags = [not _zero(aval) for aval in prim.in_avals_flat]
    if isinstance(prim, hijax.CustomVJPTraced):
        closed_over = jax.tree.structure(prim.in_avals[:2]).num_leaves
        if closed_over:
            raise TypeError("it closes over traced values")
    return flags


# --- objects with an older equivalent ---------------------------------------------------------


def older_form(eqn: JaxprEqn) -> JaxprEqn | None:
    """Return an equivalent `remat2` or `name` equation for the objects that replaced these."""
    prim = eqn.params["_prim"]
    if isinstance(prim, ad_checkpoint.CheckpointName):
        return eqn.replace(primitive=name_p, params={"name": prim.name})
    if not isinstance(prim, ad_checkpoint.RematTraced):
        return None
    jaxpr = close_jaxpr(prim.jaxpr)
    if jaxpr.consts:  # a remat takes them as operands
        return None
    body = jaxpr if ONE_JAXPR_CLASS else open_jaxpr(jaxpr)
    params = {
        "jaxpr": body,
        "prevent_cse": prim.params.get("prevent_cse", True),
        "differentiated": False,
        "policy": prim.policy,
    }
    return eqn.replace(primitive=remat_p, params=params)


def lowered(jaxpr: AnyJaxpr) -> ClosedJaxpr:
    """Return a closed jaxpr in which JAX has expanded all objects, at every depth."""
    return partial_eval.lower_jaxpr2(jaxpr) if open_jaxpr(jaxpr).is_high else jaxpr


# --- lowering -------------------------------------------------------------------------------------
# Lower closed jaxprs, under their own names and under axis environments.


def traced_jaxpr(
    jaxpr: AnyJaxpr, name: str, in_tree: PyTreeDef, out_tree: PyTreeDef, **options: Any
) -> jax.stages.Traced:
    """Return a closed jaxpr as `jax.jit(fun, ...).trace(...)` returns it, ready for `.lower()`.

    `name` is the function's, `in_tree` the structure of its `(args, kwargs)`; `options` are
    `jax.jit`'s, for a function from flat arguments to a list.
    """
    count = len(jaxpr.outvars)
    placements = options.pop("out_shardings", None) or [None] * count
    empty = jax.jit(lambda *flat: (), **options)
    traced = empty.trace(*map(_as_argument, (v.aval for v in jaxpr.invars)))
    formats = [p if isinstance(p, Format) else Format(None, p) for p in placements]
    traced._params = {
        **traced._params,
        "jaxpr": for_jax(jaxpr),
        "name": name,
        "out_shardings": tuple(UNSPECIFIED if f.sharding is None else f.sharding for f in formats),
        "out_layouts": tuple(f.layout for f in formats),
    }
    traced._in_tree, traced.out_tree = in_tree, out_tree
    return traced


def _as_argument(aval: Aval) -> jax.ShapeDtypeStruct:
    """Return the placeholder for an argument of this type when a function is traced."""
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


def lowering_function(primitive: Primitive) -> Callable[..., Any] | None:
    """Return the function that JAX traces to lower a primitive on the CPU, if its rule is one.

    It takes the operands, and the parameters by name, and returns a list of the results.
    """
    entry = _LOWERINGS["cpu"].get(primitive) or jax_lowering._lowerings.get(primitive)
    rule: Any = getattr(entry, "rule", None)
    if getattr(rule, "__code__", None) is not _LOWER_FUN.__code__:
        return None
    closure = inspect.getclosurevars(rule).nonlocals
    fun = closure["fun"]
    return fun if closure["multiple_results"] else lambda *args, **params: [fun(*args, **params)]


_LOWERINGS = jax_lowering._platform_specific_lowerings

#: A rule that JAX makes from a function: all such rules have its code.
_LOWER_FUN: Any = mlir.lower_fun(list)


def traced_lowering(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return the jaxpr that JAX lowers an equation to on the CPU.

    Returns:
        None if the lowering rule of its primitive is not a function of JAX, or cannot be traced.
    """
    fun = lowering_function(eqn.primitive)
    if fun is None:
        return None
    try:
        return traced_like(eqn, partial(fun, **eqn.params), eqn.invars)
    except Exception:  # the rule may be another package's, and may raise anything
        return None


def module_under_axes(
    jaxpr: AnyJaxpr,
    name: str,
    axis_env: Sequence[tuple[Hashable, int]],
    platform: str,
    donated: Sequence[int],
) -> ir.Module:
    """Return the StableHLO module of a closed jaxpr whose free named axes become replicas.

    JAX itself lowers collectives to the partitions of one program; here they are for replicas,
    as those of `pmap` were: without channels, and with `replica_id` instead of `partition_id`.
    """
    names, sizes = zip(*axis_env, strict=True)
    manual = (jax.sharding.AxisType.Manual,) * len(names)
    mesh = jax.sharding.AbstractMesh(sizes, names, axis_types=manual)
    avals = {"in_avals": jaxpr.in_avals, "out_avals": jaxpr.out_avals}
    parameters = mlir.lower_jaxpr_to_module.__annotations__
    with axes_bound(axis_env), _DENSE_REPLICA_GROUPS():
        jaxpr = lowered(for_jax(jaxpr))
        module = mlir.lower_jaxpr_to_module(
            name,
            jaxpr,
            num_const_args=0,
            ordered_effects=list(effects.ordered_effects.filter_in(jaxpr.effects)),
            platforms=(platform,),
            backend=None,
            axis_context=mlir.SPMDAxisContext(mesh, frozenset(names)),
            donated_args=[i in donated for i in range(len(jaxpr.in_avals))],
            arg_names=open_jaxpr(jaxpr).debug_info.arg_names,
            result_names=open_jaxpr(jaxpr).debug_info.result_paths,
            lowering_parameters=mlir.LoweringParameters(hoist_constants_as_args=False),
            **{key: avals[key] for key in avals if key in parameters},
        ).module
    _use_replicas(module, mesh.size)
    return module


#: Since 0.12 replica groups are written as axes of a mesh, unless that is turned off.
_DENSE_REPLICA_GROUPS = (
    partial(config.use_rgv3, False) if hasattr(config, "use_rgv3") else nullcontext
)


def _use_replicas(module: ir.Module, count: int) -> None:
    """Convert the collectives of a module from partitions to replicas."""

    def visit(op: ir.Operation) -> ir.WalkResult:
        for name in ("channel_handle", "use_global_device_ids"):
            if name in op.attributes:
                del op.attributes[name]
        # A collective that StableHLO lacks is a custom call, in which channel 0 means none.
        backend_config = op.attributes.get("backend_config")
        if isinstance(backend_config, ir.DictAttr) and "channel_id" in backend_config:
            none = ir.IntegerAttr.get(backend_config["channel_id"].type, 0)
            kept = {item.name: item.attr for item in backend_config} | {"channel_id": none}
            op.attributes["backend_config"] = ir.DictAttr.get(kept, op.context)
        if op.name == "stablehlo.partition_id":
            with ir.InsertionPoint(op), op.location:
                new = ir.Operation.create("stablehlo.replica_id", [op.result.type])
            op.result.replace_all_uses_with(new.result)
            op.erase()
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    with module.context:
        i32 = ir.IntegerType.get_signless(32)
        module.operation.attributes["mhlo.num_replicas"] = ir.IntegerAttr.get(i32, count)


def portable_artifact(module: ir.Module) -> bytes:
    """Return a StableHLO module as bytecode that StableHLO reads for years."""
    requirement = stablehlo.StablehloCompatibilityRequirement.WEEK_4
    version = stablehlo.get_version_from_compatibility_requirement(requirement)
    return _jax.mlir.serialize_portable_artifact(module, version, True)


def set_argument_shapes(
    module: ir.Module, arguments: Sequence[Any], shapes: Sequence[Sequence[int]]
) -> None:
    """Give the arguments of the function `main` these shapes; the sizes in it stay open."""
    kinds = [
        "tensor<" + "".join(f"{size}x" for size in shape) + f"{argument.type.element_type}>"
        if isinstance(argument.type, ir.RankedTensorType)
        else str(argument.type)
        for argument, shape in zip(arguments, shapes, strict=True)
    ]
    _run_passes(module, f"stablehlo-refine-arguments{{types={','.join(kinds)}}}")


def load_quantized_types(context: ir.Context) -> None:
    """Let a context parse quantized types.

    jaxlib has no bindings of their dialect. A pass that depends on it loads it.
    """
    with context, ir.Location.unknown():
        _run_passes(ir.Module.create(), "vhlo-legalize-to-stablehlo")


def lower_quantized(module: ir.Module) -> None:
    """Replace quantized values by the integers that store them, and their operations by floats'.

    StableHLO's reference interpreter does the same.
    """
    _run_passes(module, "func.func(stablehlo-legalize-quant-to-math)")


def _run_passes(module: ir.Module, passes: str) -> None:
    stablehlo.register_stablehlo_passes()
    with module.context:
        passmanager.PassManager.parse(f"builtin.module({passes})").run(module.operation)


def rename_module(module: ir.Module, name: str) -> None:
    """Set the name of a module."""
    with module.context:
        module.operation.attributes["sym_name"] = ir.StringAttr.get(name)


def partition_module(
    module: ir.Module, ins: Sequence[str | None], outs: Sequence[str | None]
) -> None:
    """Annotate the arguments and results of a module with their shardings, in HLO's notation."""
    main = next(op for op in module.body.operations if op.attributes["sym_name"].value == "main")
    with module.context:
        main.attributes["arg_attrs"] = _with_shardings(main.arg_attrs, ins)
        main.attributes["res_attrs"] = _with_shardings(main.result_attrs, outs)


def _with_shardings(attributes: Any, shardings: Sequence[str | None]) -> Any:
    noted = []
    for attrs, sharding in zip(attributes, shardings, strict=True):
        new = {item.name: item.attr for item in attrs}
        if sharding is not None:
            new["mhlo.sharding"] = ir.StringAttr.get(sharding)
        noted.append(ir.DictAttr.get(new))
    return ir.ArrayAttr.get(noted)


def exported_names(artifact: jax.export.Exported) -> tuple[dict[int, str], dict[int, str]]:
    """Return the names of an exported function's flat arguments and results, as in its module."""
    kept, count = artifact.module_kept_var_idx, len(artifact.out_avals)
    with mlir.make_ir_context():
        module = _jax.mlir.deserialize_portable_artifact(artifact.mlir_module_serialized)
        functions = {
            op.attributes["sym_name"].value: op
            for op in module.body.operations
            if op.operation.name == "func.func"
        }
        # If sizes are symbolic, `main` computes them and calls the function proper.
        main = functions.get("_wrapped_jax_export_main", functions["main"])
        places = [a.location for a in main.arguments][-len(kept) :] if kept else []
        results = list(main.result_attrs)[-count:] if count else []
        named = zip(kept, places, strict=True)
        return (
            {i: place.name_str for i, place in named if isinstance(place, ir.NameLoc)},
            {
                i: attributes["jax.result_info"].value
                for i, attributes in enumerate(results)
                if "jax.result_info" in attributes
            },
        )


class HloSyntaxError(ValueError):
    """Text that the HLO parser of this jaxlib does not accept.

    Attributes:
        line: The line, from 1; 0 if it is not known.
        reason: What the parser says.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        place = re.search(r"was parsing (\d+):\d+: error: (.*)", message)
        self.line = int(place[1]) if place else 0
        self.reason = (place[2] if place else message).rpartition("error: ")[2].strip()


def parsed_hlo(text: str) -> bytes:
    """Return the `HloModuleProto` of a text; raises HloSyntaxError if jaxlib does not accept it."""
    try:
        return hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    except (RuntimeError, IndexError) as error:
        raise HloSyntaxError(str(error)) from None


def printed_hlo(source: bytes | str) -> str:
    """Print a module without metadata and large constants; raises RuntimeError if jaxlib cannot."""
    options = hlo.HloPrintOptions.short_parsable()
    options.print_large_constants, options.print_backend_config = False, True
    is_text, of_proto = isinstance(source, str), hlo.HloModule.from_serialized_hlo_module_proto
    return (hlo.hlo_module_from_text if is_text else of_proto)(source).to_string(options)


def hlo_text(computation: Any) -> str:
    """Return the text of an `XlaComputation`, with the names and source lines of its operations."""
    options = hlo.HloPrintOptions.short_parsable()
    options.print_metadata = True
    return computation.as_hlo_module().to_string(options)


def as_xla_computation(module: ir.Module, tuple_args: bool, return_tuple: bool) -> Any:
    """Return a StableHLO module as the `XlaComputation` of jaxlib."""
    code = mlir.module_to_bytecode(module)
    return _jax.mlir.mlir_module_to_xla_computation(code, tuple_args, return_tuple)


def source_paths_without(pattern: str) -> AbstractContextManager[object]:
    """Lower with source paths that leave out the part that a pattern matches."""
    return config.hlo_source_file_canonicalization_regex(pattern)


# --- running --------------------------------------------------------------------------------------
# Running programs, JAX's own test programs, and the JAX release.

#: JAX releases that the test suite runs on, newest last; others cause a warning.
TESTED_VERSIONS = ((0, 10), (0, 11), (0, 12))


def compiles_draws_slowly() -> bool:
    """Return True if XLA for the CPU compiles a draw of random bits in 0.2 s instead of 0.02."""
    return jax.__version_info__ >= (0, 12)


def fuses_sines_and_pads() -> bool:
    """Return True if XLA's kernels for the CPU fuse `sin` and `pad` with a reduction."""
    return jax.__version_info__ >= (0, 12)


def keeps_bfloat16() -> bool:
    """Return True if XLA for the CPU multiplies matrices of bf16 to a result in bf16."""
    return jax.__version_info__ >= (0, 12)


def lgamma_reads_tables() -> bool:
    """Return True if JAX lowers `lgamma` to polynomials whose coefficients it looks up."""
    return jax.__version_info__ >= (0, 12)


def untested_version() -> str | None:
    """Return the running JAX's version if the test suite does not cover its release, else None."""
    return None if jax.__version_info__[:2] in TESTED_VERSIONS else jax.__version__


def primitive_test_programs() -> Iterator[Any]:
    """Yield JAX's own primitive test harnesses, thousands of them; needs absl-py."""
    from jax._src.internal_test_util import test_harnesses

    yield from test_harnesses.all_harnesses


def keep_backend_probing_quiet() -> None:
    """Keep JAX from logging the accelerators that it searches and does not find."""
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.CRITICAL)


@contextmanager
def failures_to_start() -> Iterator[dict[str, str]]:
    """Yield the reason, by name, of each backend and plug-in that JAX fails to start in the block.

    JAX logs most failures and goes on. It starts backends once per process.
    """
    logger = logging.getLogger("jax._src.xla_bridge")
    handler = _FailuresToStart()
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield handler.reasons
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates


class _FailuresToStart(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.reasons: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if failed := failure_to_start(str(record.msg)):
            self.reasons[failed[0]] = failed[1]
        elif error is not None and record.args and "initialize()" in str(record.msg):
            (module,) = record.args
            self.reasons[str(module)] = described(error)


def failure_to_start(message: str) -> tuple[str, str] | None:
    """Return the backend that a message of JAX says it cannot start, and the reason, if any."""
    match = re.match(r"Unable to initialize backend '([^']*)': (.*)", message)
    if match is None:
        return None
    reason = re.sub(r" \((set|you may need to) .*$", "", match[2])
    return match[1], reason


def has_backends() -> bool:
    """Return True if this process has started a backend, with threads of its own."""
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


class _Failures(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.errors.append(record.exc_info[1])


@contextmanager
def callback_failures() -> Iterator[list[BaseException]]:
    """Collect the exceptions that a program's Python callbacks raise while it runs.

    XLA forwards only their text; JAX logs each with its traceback before that, and this reads the
    log instead of printing it.
    """
    handler = _Failures()
    loggers = [logging.getLogger(f"jax._src.{name}") for name in ("callback", "debugging")]
    propagation = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield handler.errors
    finally:
        for logger, propagate in zip(loggers, propagation, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagate


def default_tolerance(dtype: Any) -> float:
    """Return the error, absolute and relative, that JAX's tests tolerate by default for a dtype."""
    from jax._src.public_test_util import default_tolerance as tolerances

    return float(tolerances().get(np.dtype(dtype), 0))


def has_checks(jaxpr: AnyJaxpr) -> bool:
    """Return True if a jaxpr holds `checkify.check`s that have not been functionalized."""
    return any(type(effect).__name__ == "ErrorEffect" for effect in jaxpr.effects)


# --- roofline -------------------------------------------------------------------------------------
# The costs of primitives by the rules of `jax.experimental.roofline`.


def roofline_flops(eqn: JaxprEqn) -> int | None:
    """Return the FLOPs of an equation by a rule from `register_roofline`.

    Returns:
        None if there is no rule, if the rule counts no FLOPs, as for many JAX primitives, or if the
        equation has operands other than arrays of known sizes, which rules do not support.
    """
    from jax.experimental.roofline import RooflineRuleContext, RooflineShape
    from jax.experimental.roofline.roofline import _rooflines

    rule, avals = _rooflines.get(eqn.primitive), [v.aval for v in eqn.invars]
    if rule is None or not all(isinstance(aval, jax.core.ShapedArray) for aval in avals):
        return None
    if not all(type(size) is int for aval in avals for size in aval.shape):
        return None
    context = RooflineRuleContext(
        name_stack=eqn.source_info.name_stack,
        primitive=eqn.primitive,
        avals_in=avals,
        avals_out=[v.aval for v in eqn.outvars],
        jaxpr_eqn_ctx=eqn.ctx,
        mesh=None,
        pin_lhs_in_vmem=False,
        pin_rhs_in_vmem=False,
    )
    result = rule(context, *map(RooflineShape.from_aval, avals), **eqn.params)
    return result.flops or result.unfused_flops or None


# --- profiles -------------------------------------------------------------------------------------
# Profiles in the format of pprof, which jaxlib writes.


def pprof(profile: Mapping[str, Any]) -> bytes:
    """Return a profile, compressed, from the JSON form of its protocol buffer.

    The format is https://github.com/google/pprof/blob/main/proto/profile.proto.
    """
    return gzip.compress(_jax.json_to_pprof_profile(json.dumps(profile)), mtime=0)


def read_pprof(data: bytes) -> str:
    """Return the JSON form of a profile from `pprof`."""
    return str(_jax.pprof_profile_to_json(gzip.decompress(data)))
