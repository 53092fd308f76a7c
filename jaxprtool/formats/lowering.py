"""Lowering of programs to StableHLO by JAX, and to HLO by XLA.

The result is the lowering of `jax.jit` of the function, with the names of the program, its
arguments and its results; unused arguments are dropped, as by `jax.jit`. A function under `jax.jit`
keeps its options. A program with free named axes (`axis_env`) runs on one replica per combination
of their indices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
from jax import export
from jax.extend import backend as jax_backend

from jaxprtool import jaxcompat
from jaxprtool.errors import (
    BackendError,
    JaxprToolError,
    UnsupportedError,
    described,
    did_you_mean,
)
from jaxprtool.ir.basics.backends import failure_to_start, start_backends
from jaxprtool.ir.core.equations import equations, named, size_of, type_of
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.programs.auto_sharding import is_over_devices
from jaxprtool.ir.programs.meshes import concrete_mesh, mesh_in_types
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.program_signature import top_jaxpr
from jaxprtool.jaxcompat import ClosedJaxpr, JaxprEqn

#: Platforms that JAX can lower for, whether or not this machine has them.
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def stablehlo(program: Program, platform: str | None = None, locations: bool = False) -> str:
    """Return StableHLO text for a platform or JAX's default one, with locations on request.

    Raises UnsupportedError for a program that JAX cannot lower, BackendError for an unknown
    platform.
    """
    return module(program, platform).operation.get_asm(enable_debug_info=locations)


def stablehlo_bytecode(program: Program, platform: str | None = None) -> bytes:
    """Return StableHLO as a portable artifact: bytecode that later StableHLO releases can read.

    Raises the errors of `stablehlo`.
    """
    with reported(program, "written as bytecode"):
        return jaxcompat.portable_artifact(module(program, platform))


def hlo(program: Program, platform: str | None = None) -> str:
    """Return the HLO text passed to XLA, with the names and source lines of operations.

    Raises the errors of `stablehlo`, and UnsupportedError for symbolic sizes.
    """
    return jaxcompat.hlo_text(computation(program, platform))


def hlo_proto(program: Program, platform: str | None = None) -> bytes:
    """Return the HLO passed to XLA as a serialized HloModuleProto."""
    return computation(program, platform).as_serialized_hlo_module_proto()


def hlo_dot(program: Program, platform: str | None = None) -> str:
    """Return XLA's drawing of the HLO in Graphviz's language."""
    return computation(program, platform).as_hlo_dot_graph()


def hlo_optimized(program: Program, devices: Sequence[jax.Device] = ()) -> str:
    """Return the HLO text after XLA's passes, for some devices, or for JAX's default one.

    The devices may be descriptions of devices that this machine lacks, at least as many as the mesh
    of the program has. Raises the errors of `hlo`.
    """
    first = devices[0] if devices else None
    return compiled(program, (), first, devices).as_text()


def compiled(
    program: Program,
    arguments: Sequence[object] = (),
    device: jax.Device | None = None,
    devices: Sequence[jax.Device] = (),
    compiler_options: Mapping[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Return a program compiled for a device, or for those of its mesh.

    Args:
        program: The program.
        arguments: Its flat arguments, if known. Arguments on several devices keep their shardings.
        device: The device; by default JAX's, or the one that the program names.
        devices: The devices for a mesh; by default those of the platform of `device`.
        compiler_options: Options of XLA in addition to those of the program.

    Raises:
        UnsupportedError: For free named axes or symbolic sizes, or if XLA cannot compile it.
        BackendError: If there are too few devices for its mesh.
    """
    require_sizes(program)
    if program.axis_env:
        axes = ", ".join(str(name) for name, _ in program.axis_env)
        raise UnsupportedError(
            f"{program.name} has free named axes ({axes}), which jax.jit cannot compile",
            "bind them with vmap or shard_map, or emit hlo or stablehlo",
        )
    mesh = concrete_mesh(program, arguments, device, devices)
    if mesh is not None:
        place: AbstractContextManager[object] = jax.set_mesh(mesh)
    else:
        place = nullcontext() if device is None else jax.default_device(device)
    placed = [_placement(each) for each in arguments]
    results: list[jax.sharding.Sharding] = []
    if mesh is None and devices:  # JAX's default device must be one of this machine
        place, single = nullcontext(), jax.sharding.SingleDeviceSharding(devices[0])
        placed, results = [single] * len(program.in_avals), [single] * len(program.out_avals)
    with place, reported(program, "compiled"):
        lowered = traced(program, flat=True, placed=placed, results=results).lower()
        return lowered.compile(None if compiler_options is None else dict(compiler_options))


def _placement(argument: object) -> jax.sharding.Sharding | None:
    """Return the sharding of an argument that lies on several devices; otherwise None."""
    sharding = getattr(argument, "sharding", None)
    is_abstract = isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh)
    return sharding if is_over_devices(sharding) and not is_abstract else None


def module(
    program: Program,
    platform: str | None = None,
    *,
    donated: Sequence[int] = (),
    keep_unused: bool = False,
) -> Any:
    """Return the StableHLO module of a program in JAX's MLIR bindings.

    `donated` are positions among the flat arguments. Raises the errors of `stablehlo`.
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
    """Return the `XlaComputation` passed to XLA. Raises the errors of `hlo`."""
    require_sizes(program)
    if program.axis_env:
        return jaxcompat.xla_computation(module(program, platform), False, False)
    lowered = _lowered(program, platform)
    with reported(program, "written as HLO"):
        return lowered.compiler_ir("hlo")


def platform_names(wanted: Sequence[str]) -> tuple[str, ...]:
    """Return JAX's names of the wanted platforms; its default one if none are given.

    `gpu` is the GPU platform of this machine, or else CUDA. Raises BackendError for a platform that
    JAX does not lower for, and if JAX cannot start.
    """
    start_backends()
    default = export.default_export_platform()
    return tuple(dict.fromkeys(_platform(name.lower(), default) for name in wanted)) or (default,)


def _platform(wanted: str, default: str) -> str:
    if wanted == "gpu":
        return default if default in ("cuda", "rocm") else "cuda"
    if wanted not in (*PLATFORMS, default) and wanted not in jax_backend.backends():
        raise BackendError(
            f"JAX does not lower for '{wanted}', only for {', '.join(PLATFORMS)}",
            did_you_mean(wanted, PLATFORMS),
        )
    return wanted


# --- JAX's input and errors -------------------------------------------------------------------


def traced(
    program: Program,
    donated: Sequence[int] = (),
    keep_unused: bool = False,
    *,
    flat: bool = False,
    placed: Sequence[jax.sharding.Sharding | None] = (),
    results: Sequence[jax.sharding.Sharding] = (),
) -> jax.stages.Traced:
    """Return a program in the form of `jax.jit(...).trace(...)`, ready to be lowered.

    The options of `jax.jit` apply. If `flat`, arguments and results have no structure: JAX
    unflattens descriptions of values, which fails for classes that validate their children.
    `placed` and `results` are the shardings of the arguments and results, for a function that does
    not state its own.
    """
    keywords = program.jit_keywords
    if any(placed):
        keywords.setdefault("in_shardings", tuple(placed))
    if results:
        keywords.setdefault("out_shardings", tuple(results))
    keywords["donate_argnums"] = sorted({*keywords.get("donate_argnums", ()), *donated})
    keywords["keep_unused"] = keep_unused or keywords.get("keep_unused", False)
    trees = program.in_tree, program.out_tree
    if flat:
        args, results = tuple(program.in_avals), tuple(program.out_avals)
        trees = jax.tree.structure((args, {})), jax.tree.structure(results)
    return jaxcompat.traced_jaxpr(_bordered(program), program.name, *trees, **keywords)


def under_mesh(program: Program) -> AbstractContextManager[object]:
    """Lower for the mesh in the types of a program, whether or not its devices are present.

    JAX takes the number of devices from the arguments, or else from the mesh that is set. Without
    this, a program whose arguments lie on no mesh would be lowered for one device.
    """
    mesh = mesh_in_types(program)
    return nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh)


def require_sizes(program: Program) -> None:
    """Raise UnsupportedError for symbolic dimensions, which HLO does not support."""
    for name, aval in zip(program.arg_names, program.in_avals, strict=True):
        if size_of(aval) is None:
            raise UnsupportedError(
                f"{program.name} takes {name}:{type_of(aval)}, but HLO has no symbolic sizes",
                "give sizes in --args, or use --to stablehlo or --to exported",
            )


@contextmanager
def reported(program: Program, done: str) -> Iterator[None]:
    """Reraise an exception of JAX or XLA as a one-line error with the equation and the cause."""
    try:
        yield
    except JaxprToolError:
        raise
    except Exception as error:  # lowering rules and plug-ins may raise anything
        if failure := failure_to_start(error):
            raise failure from error
        text = described(error)
        meant = _is_named_in(str(error)) or _is_meant
        found = (eqn for eqn in equations(top_jaxpr(program)) if meant(eqn, text))
        where = next((f" because of {named(eqn)}" for eqn in found), "")
        raise UnsupportedError(f"{program.name} cannot be {done}{where}: {text}") from error


def _is_named_in(error: str) -> Callable[[JaxprEqn, str], bool] | None:
    """Return a test for the equations of an instruction in an error of XLA; None without one."""
    found = re.search(r'op_name="[^"]*?([\w-]+)"', error)
    return found and (lambda eqn, text: eqn.primitive.name == found[1])


def _is_meant(eqn: JaxprEqn, text: str) -> bool:
    """Return True if the text of an error is about this equation."""
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
    with under_mesh(program), reported(program, f"lowered for {platforms[0]}"):
        staged = traced(program, donated, keep_unused, flat=True)
        return staged.lower(lowering_platforms=platforms)


def _bordered(program: Program) -> ClosedJaxpr:
    names = {"arg_names": program.arg_names, "result_paths": program.out_names}
    debug = program.jaxpr.debug_info._replace(**names)
    return jaxcompat.replace_jaxpr(program.jaxpr, debug_info=debug)
