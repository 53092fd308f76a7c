"""A program as JAX lowers it, to StableHLO, and as XLA takes and compiles it, to HLO.

What `jax.jit` of the function would be lowered to, under the program's name and with the names of
its arguments and results; arguments that nothing uses are left out, as there. A function that is
under `jax.jit` keeps its options. A program with free named axes (`axis_env`) runs on one replica
for each combination of their indices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
from jax import export

from jaxprtool import jaxcompat
from jaxprtool.errors import (
    BackendError,
    JaxprToolError,
    UnsupportedError,
    described,
    did_you_mean,
)
from jaxprtool.ir.core.equations import equations, named, size_of, type_of
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.programs.border import top_jaxpr
from jaxprtool.ir.programs.meshes import concrete_mesh
from jaxprtool.ir.programs.program import Program
from jaxprtool.jaxcompat import ClosedJaxpr, JaxprEqn

#: Platforms that JAX lowers for, whether or not the machine has them.
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def stablehlo(program: Program, platform: str | None = None, locations: bool = False) -> str:
    """StableHLO as text, for a platform or JAX's default one; with source locations if asked for.

    Raises UnsupportedError for a program that JAX cannot lower, BackendError for no platform.
    """
    return module(program, platform).operation.get_asm(enable_debug_info=locations)


def stablehlo_bytecode(program: Program, platform: str | None = None) -> bytes:
    """StableHLO as a portable artifact: bytecode that later releases of StableHLO read too.

    Raises what `stablehlo` does.
    """
    with reported(program, "written as bytecode"):
        return jaxcompat.portable_artifact(module(program, platform))


def hlo(program: Program, platform: str | None = None) -> str:
    """Return the HLO text that XLA is handed, with the names and source lines of operations.

    Raises what `stablehlo` does, and UnsupportedError for a program whose sizes are symbolic.
    """
    return jaxcompat.hlo_text(computation(program, platform))


def hlo_proto(program: Program, platform: str | None = None) -> bytes:
    """Return the same as a serialized HloModuleProto."""
    return computation(program, platform).as_serialized_hlo_module_proto()


def hlo_dot(program: Program, platform: str | None = None) -> str:
    """Return the same as XLA draws it, in Graphviz's language."""
    return computation(program, platform).as_hlo_dot_graph()


def hlo_optimized(program: Program, device: jax.Device | None = None) -> str:
    """Return the HLO text after XLA's passes, for a device that is there.

    Raises what `hlo` does.
    """
    require_sizes(program)
    if program.axis_env:
        axes = ", ".join(str(name) for name, _ in program.axis_env)
        raise UnsupportedError(
            f"{program.name} has free named axes ({axes}), and jax.jit compiles none",
            "bind them with vmap or shard_map; hlo and stablehlo are given for any",
        )
    place = nullcontext() if device is None else jax.default_device(device)
    mesh = concrete_mesh(program, (), device)
    on_mesh = nullcontext() if mesh is None else jax.set_mesh(mesh)
    with place, on_mesh, reported(program, "compiled"):
        return traced(program, flat=True).lower().compile().as_text()


def module(
    program: Program,
    platform: str | None = None,
    *,
    donated: Sequence[int] = (),
    keep_unused: bool = False,
) -> Any:
    """Return the StableHLO module of a program, as JAX's MLIR bindings hold it.

    `donated` are positions among the flat arguments. Raises what `stablehlo` does.
    """
    if not program.axis_env:
        return _lowered(program, platform, donated, keep_unused).compiler_ir("stablehlo")
    (name,) = platform_names([platform] if platform else [])
    with reported(program, f"lowered for {name}"):
        return jaxcompat.module_under_axes(
            _bordered(program),
            f"jit({program.name})",
            program.axis_env,
            name,
            (*donated, *program.jit_keywords.get("donate_argnums", ())),
        )


def computation(program: Program, platform: str | None = None) -> Any:
    """Return the `XlaComputation` that XLA is handed. Raises what `hlo` does."""
    require_sizes(program)
    if program.axis_env:
        return jaxcompat.xla_computation(module(program, platform), False, False)
    lowered = _lowered(program, platform)
    with reported(program, "written as HLO"):
        return lowered.compiler_ir("hlo")


def platform_names(wanted: Sequence[str]) -> tuple[str, ...]:
    """Return platforms as JAX calls them, of which a user wants these; JAX's default one for none.

    `gpu` is the one that is there, or else CUDA's. Raises BackendError for one that JAX does not
    lower for.
    """
    default = export.default_export_platform()
    return tuple(dict.fromkeys(_platform(name.lower(), default) for name in wanted)) or (default,)


def _platform(wanted: str, default: str) -> str:
    if wanted == "gpu":
        return default if default in ("cuda", "rocm") else "cuda"
    if wanted not in (*PLATFORMS, default):
        raise BackendError(
            f"JAX does not lower for '{wanted}'; it does for {', '.join(PLATFORMS)}",
            did_you_mean(wanted, PLATFORMS),
        )
    return wanted


# --- what JAX is given, and what it says ------------------------------------------------------


def traced(
    program: Program,
    donated: Sequence[int] = (),
    keep_unused: bool = False,
    *,
    flat: bool = False,
) -> jax.stages.Traced:
    """Return a program as `jax.jit(...).trace(...)` gives it, ready to be lowered.

    What `jax.jit` was told of the function holds, too. If `flat`, arguments and results have no
    structure: JAX builds nodes of descriptions, which classes that check their children refuse.
    """
    told = program.jit_keywords
    told["donate_argnums"] = sorted({*told.get("donate_argnums", ()), *donated})
    told["keep_unused"] = keep_unused or told.get("keep_unused", False)
    trees = program.in_tree, program.out_tree
    if flat:
        args, results = tuple(program.in_avals), tuple(program.out_avals)
        trees = jax.tree.structure((args, {})), jax.tree.structure(results)
    return jaxcompat.traced_jaxpr(_bordered(program), program.name, *trees, **told)


def require_sizes(program: Program) -> None:
    """Refuse symbolic dimensions, which HLO does not have. Raises UnsupportedError."""
    for name, aval in zip(program.arg_names, program.in_avals, strict=True):
        if size_of(aval) is None:
            raise UnsupportedError(
                f"{program.name} takes {name}:{type_of(aval)}, and HLO has no symbolic sizes",
                "give numbers in --args, or take --to stablehlo or exported",
            )


@contextmanager
def reported(program: Program, done: str) -> Iterator[None]:
    """Say what JAX or XLA raises as one line: what cannot be done, to which equation, and why."""
    try:
        yield
    except JaxprToolError:
        raise
    except Exception as error:  # lowering rules, those of plug-ins too, raise what they like
        text = described(error)
        found = (eqn for eqn in equations(top_jaxpr(program)) if _is_meant(eqn, text))
        where = next((f" because of {named(eqn)}" for eqn in found), "")
        raise UnsupportedError(f"{program.name} cannot be {done}{where}: {text}") from error


def _is_meant(eqn: JaxprEqn, text: str) -> bool:
    """Return whether the text of an error is about this equation."""
    name = eqn.primitive.name
    if "host_callbacks" in text or "specified backend" in text:
        return traits(eqn).callback
    return f"'{name}'" in text or f"checkify.{name}" in text


def _lowered(
    program: Program,
    platform: str | None,
    donated: Sequence[int] = (),
    keep_unused: bool = False,
) -> jax.stages.Lowered:
    platforms = platform_names([platform] if platform else [])
    with reported(program, f"lowered for {platforms[0]}"):
        staged = traced(program, donated, keep_unused, flat=True)
        return staged.lower(lowering_platforms=platforms)


def _bordered(program: Program) -> ClosedJaxpr:
    names = {"arg_names": program.arg_names, "result_paths": program.out_names}
    debug = program.jaxpr.debug_info._replace(**names)
    return jaxcompat.replace_jaxpr(program.jaxpr, debug_info=debug)
