"""Lower closed jaxprs, under their own names and under axis environments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
from jax._src import config, effects
from jax._src.interpreters import mlir as jax_lowering
from jax._src.lib import _jax, hlo
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import hlo as stablehlo
from jax.experimental.layout import Format
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive
from jax.interpreters import mlir
from jax.tree_util import PyTreeDef

from jaxprtool.jaxcompat.aliases import AnyJaxpr, Aval
from jaxprtool.jaxcompat.high import lowered
from jaxprtool.jaxcompat.jaxprs import axes_bound, open_jaxpr
from jaxprtool.jaxcompat.marked_calls import for_jax
from jaxprtool.jaxcompat.tracing import traced_like
from jaxprtool.jaxcompat.values import UNSPECIFIED


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
    held = inspect.getclosurevars(rule).nonlocals
    fun = held["fun"]
    return fun if held["multiple_results"] else lambda *args, **params: [fun(*args, **params)]


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
    known = mlir.lower_jaxpr_to_module.__annotations__
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
            **{key: avals[key] for key in avals if key in known},
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
        held = op.attributes.get("backend_config")
        if isinstance(held, ir.DictAttr) and "channel_id" in held:
            none = ir.IntegerAttr.get(held["channel_id"].type, 0)
            kept = {item.name: item.attr for item in held} | {"channel_id": none}
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
    for known, sharding in zip(attributes, shardings, strict=True):
        new = {item.name: item.attr for item in known}
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


def hlo_text(computation: Any) -> str:
    """Return the text of an `XlaComputation`, with the names and source lines of its operations."""
    options = hlo.HloPrintOptions.short_parsable()
    options.print_metadata = True
    return computation.as_hlo_module().to_string(options)


def xla_computation(module: ir.Module, tuple_args: bool, return_tuple: bool) -> Any:
    """Return a StableHLO module as the `XlaComputation` of jaxlib."""
    code = mlir.module_to_bytecode(module)
    return _jax.mlir.mlir_module_to_xla_computation(code, tuple_args, return_tuple)


def source_paths_without(pattern: str) -> AbstractContextManager[object]:
    """Lower with source paths that leave out the part that a pattern matches."""
    return config.hlo_source_file_canonicalization_regex(pattern)
