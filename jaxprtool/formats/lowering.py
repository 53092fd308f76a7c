"""Programs lowered: StableHLO, HLO, artifacts of `jax.export`, and XLA's partitioned modules.

The result is the lowering of `jax.jit` of the function, with the names of the program, its
arguments and its results; unused arguments are dropped, as by `jax.jit`. A function under `jax.jit`
keeps its options. A program with free named axes (`axis_env`) runs on one replica per combination
of their indices.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
from jax import export
from jax.extend import backend as jax_backend
from jax.sharding import Mesh, PartitionSpec

from jaxprtool import jaxcompat
from jaxprtool.errors import (
    ArgumentsError,
    BackendError,
    JaxprToolError,
    OutputError,
    ProgramFileError,
    UnsupportedError,
    described,
    did_you_mean,
)
from jaxprtool.formats.hlo import StoredModule
from jaxprtool.ir.arguments import has_objects
from jaxprtool.ir.backends import backend_start_error, start_backends
from jaxprtool.ir.dtypes import is_foreign
from jaxprtool.ir.equations import equations, named, size_of, type_of
from jaxprtool.ir.hlo.buffers import buffer_assignment, read_assignment
from jaxprtool.ir.hlo.module import HloModule, compiled_module, message, read_module
from jaxprtool.ir.meshes import SpecReader, concrete_mesh, is_over_devices, mesh_in_types
from jaxprtool.ir.process import without_collector
from jaxprtool.ir.program import Program, top_jaxpr
from jaxprtool.ir.regions import view
from jaxprtool.ir.traits import traits
from jaxprtool.ir.trees import filled, paths
from jaxprtool.jaxcompat import Aval, ClosedJaxpr, JaxprEqn

# --- lowering -------------------------------------------------------------------------------------
# Lowering of programs to StableHLO by JAX, and to HLO by XLA.

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
    with compile_errors_reported(program, "written as bytecode"):
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


def hlo_optimized(
    program: Program, devices: Sequence[jax.Device] = (), binary: bool = False
) -> str | bytes:
    """Return the HLO after XLA's passes, for some devices, or for JAX's default one.

    It is text, or with `binary` a serialized HloModuleProto, which other releases can read too.

    The devices may be descriptions of devices that this machine lacks, at least as many as the mesh
    of the program has. Raises the errors of `hlo`.
    """
    first = devices[0] if devices else None
    executable = compiled(program, (), first, devices)
    if not binary:
        return executable.as_text()
    (compiled_module,) = executable.runtime_executable().hlo_modules()
    return compiled_module.as_serialized_hlo_module_proto()


def compiled(
    program: Program,
    arguments: Sequence[object] = (),
    device: jax.Device | None = None,
    devices: Sequence[jax.Device] = (),
) -> jax.stages.Compiled:
    """Return a program compiled for a device, or for those of its mesh.

    Takes the arguments and raises the errors of `lowered_on`. XLA's errors are UnsupportedErrors.
    """
    with compile_errors_reported(program, "compiled"):
        return lowered_on(program, arguments, device, devices).compile()


def compiled_with_memory(
    program: Program,
    arguments: Sequence[object] = (),
    devices: Sequence[jax.Device] = (),
    hint_of: Callable[[StoredModule], str] | None = None,
) -> StoredModule:
    """Return the module that XLA compiles a program to, with its assignment of buffers.

    The compiler for TPUs tells JAX nothing of it, but writes it to a file. Where it cannot, as on
    another machine, the module has none. JAX's persistent compilation cache must be off. Takes the
    arguments and raises the errors of `compiled`; `hint_of` returns the hint of the error for a
    program that does not fit, from its module.
    """
    lowered = lowered_on(program, arguments, None, devices)
    platform = devices[0].platform if devices else jax.default_backend()
    with TemporaryDirectory(prefix="jaxprtool-") as folder:
        options = {**_DUMP, "xla_dump_hlo_pass_re": "", "xla_dump_to": folder}
        try:
            with compile_errors_reported(program, "compiled"):
                executable = lowered.compile(options if platform == "tpu" else None)
        except UnsupportedError as error:
            if "RESOURCE_EXHAUSTED" in error.message and hint_of is not None:
                error.hint = next(map(hint_of, _written(folder)), None)
            raise
        module = compiled_module(executable)
        own = (stored for stored in _written(folder) if stored.module.name == module.name)
        return next(own, None) or StoredModule(module, buffer_assignment(executable, module))


def _written(folder: str) -> Iterator[StoredModule]:
    """Yield the modules that XLA wrote to a folder with an assignment of buffers."""
    for path in Path(folder).glob("*.after_optimizations.hlo.pb"):
        fields = message(path.read_bytes())
        if 3 in fields:
            module = read_module(fields[1][-1])
            yield StoredModule(module, read_assignment(fields[3][-1], module))


def on_devices(
    program: Program, devices: Sequence[jax.Device], backend: str
) -> tuple[Program, Sequence[jax.Device]]:
    """Return a program on the first of some devices, and these: one, or those of its mesh.

    Raises:
        BackendError: If its mesh needs more devices than there are of this backend.
    """
    if not program.meshes:
        return program, devices[:1]
    mesh = max(program.meshes, key=lambda candidate: len(candidate.shape))
    count = math.prod(mesh.axis_sizes)
    if len(devices) < count:
        raise BackendError(
            f"{program.name} runs on a mesh of {count} devices, but '{backend}' has {len(devices)}"
        )
    chosen = np.array(devices[:count]).reshape(mesh.axis_sizes)
    there = program.on_mesh(Mesh(chosen, mesh.axis_names, axis_types=mesh.axis_types))
    return there, devices[:count]


def lowered_on(
    program: Program,
    arguments: Sequence[object] = (),
    device: jax.Device | None = None,
    devices: Sequence[jax.Device] = (),
) -> jax.stages.Lowered:
    """Return a program lowered for a device, or for those of its mesh, ready to be compiled.

    Args:
        program: The program.
        arguments: Its flat arguments, if known. Arguments on several devices keep their shardings.
        device: The device; by default JAX's, or the one that the program names.
        devices: The devices for a mesh; by default those of the platform of `device`.

    Raises:
        UnsupportedError: For free named axes or symbolic sizes, or if JAX cannot lower it.
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
    placed = [_placement(argument) for argument in arguments]
    results: list[jax.sharding.Sharding] = []
    if not program.meshes and devices:  # JAX's default device must be one of this machine
        place, single = nullcontext(), jax.sharding.SingleDeviceSharding(devices[0])
        placed, results = [single] * len(program.in_avals), [single] * len(program.out_avals)
    with place, compile_errors_reported(program, "compiled"):
        return as_traced(program, flat=True, placed=placed, results=results).lower()


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
    with compile_errors_reported(program, f"lowered for {name}"):
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
        return jaxcompat.as_xla_computation(module(program, platform), False, False)
    lowered = _lowered(program, platform)
    with compile_errors_reported(program, "written as HLO"):
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


def as_traced(
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
def compile_errors_reported(program: Program, done: str) -> Iterator[None]:
    """Reraise an exception of JAX or XLA as a one-line error with the equation and the cause."""
    try:
        yield
    except JaxprToolError:
        raise
    except Exception as error:  # lowering rules and plug-ins may raise anything
        if failure := backend_start_error(error):
            raise failure from error
        text = described(error)
        meant = _is_named_in(str(error)) or _is_meant
        matching = (eqn for eqn in equations(top_jaxpr(program)) if meant(eqn, text))
        where = next((f" because of {named(eqn)}" for eqn in matching), "")
        raise UnsupportedError(f"{program.name} cannot be {done}{where}: {text}") from error


def _is_named_in(error: str) -> Callable[[JaxprEqn, str], bool] | None:
    """Return a test for the equations of an instruction in an error of XLA; None without one."""
    match = re.search(r'op_name="[^"]*?([\w-]+)"', error)
    return match and (lambda eqn, text: eqn.primitive.name == match[1])


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
    with under_mesh(program), compile_errors_reported(program, f"lowered for {platforms[0]}"):
        staged = as_traced(program, donated, keep_unused, flat=True)
        return staged.lower(lowering_platforms=platforms)


def _bordered(program: Program) -> ClosedJaxpr:
    names = {"arg_names": program.arg_names, "result_paths": program.out_names}
    debug = program.jaxpr.debug_info._replace(**names)
    return jaxcompat.replace_jaxpr(program.jaxpr, debug_info=debug)


# --- partitioning ---------------------------------------------------------------------------------
# The modules of a program over several devices: before and after XLA's partitioner, and compiled.
#
#     found = partitioned(program)
#     found.before.entry.instructions, found.final.entry.instructions
#
# XLA writes them while it compiles (`xla_dump_to`). In the first, each instruction has the sharding
# that Shardy assigned to it, and arrays have their whole size. The partitioner splits the arrays
# and adds collectives, which later passes merge and move. The *final* module is the one that runs.

#: The options that make XLA write the module. They take precedence over the user's `XLA_FLAGS`.
_DUMP = {
    "xla_dump_hlo_pass_re": "spmd-partitioning",
    "xla_dump_hlo_module_re": ".*",
    "xla_dump_hlo_pipeline_re": ".*",
    "xla_dump_max_hlo_modules": -1,
    "xla_dump_hlo_as_proto": True,
    "xla_dump_compress_protos": False,
}


@dataclass(frozen=True, eq=False)
class Partitioned:
    """A program compiled for several devices.

    Attributes:
        compiled: The compiled program.
        devices: Its devices.
        before: Its module before the partitioner, with the sharding of each instruction.
        after: Its module after the partitioner, in which operations keep their names and lines.
        final: The module of one device that runs.
    """

    compiled: jax.stages.Compiled
    devices: Sequence[jax.Device]
    before: HloModule
    after: HloModule
    final: HloModule


def partitioned(
    program: Program, arguments: Sequence[object] = (), devices: Sequence[jax.Device] = ()
) -> Partitioned:
    """Compile a program for the devices of its mesh, and return its modules.

    JAX's persistent compilation cache must be off, since a cached program is not partitioned again.

    Args:
        program: The program.
        arguments: Its flat arguments, if known. Arguments on several devices keep their shardings.
        devices: The devices for its mesh, or descriptions of devices that this machine lacks; by
            default JAX's.

    Raises:
        UnsupportedError: If it runs on one device; for free named axes or symbolic sizes; or if XLA
            cannot compile it, or writes no modules.
        BackendError: If there are too few devices for its mesh.
    """
    if program.symbols:
        names = "=…, ".join(program.symbols)
        raise UnsupportedError(
            f"the partitioner needs sizes of {program.name} that are numbers",
            f'write them in --args, or -p "specialize({names}=…)"',
        )
    lowered = lowered_on(program, arguments, devices[0] if devices else None, devices)
    attributes = lowered.compiler_ir().operation.attributes
    if all(attributes[f"mhlo.num_{kind}"].value == 1 for kind in ("partitions", "replicas")):
        raise UnsupportedError(
            f"{program.name} is not partitioned: it is compiled for one device",
            "give its arguments shardings over a mesh, by jax.jit(in_shardings=…), shard_map, "
            "or types such as f32[8@x,4]",
        )
    with TemporaryDirectory(prefix="jaxprtool-") as folder:
        options = {**_DUMP, "xla_dump_to": folder}
        with compile_errors_reported(program, "compiled"):
            executable = lowered.compile(options)
        before = sorted(Path(folder).glob("*.before_*spmd-partitioning*.pb"))
        after = sorted(Path(folder).glob("*.after_*spmd-partitioning*.pb"))
        if not (before and after):
            raise UnsupportedError(f"XLA did not write the modules of {program.name}")
        with without_collector():
            modules = _dumped(before[0]), _dumped(after[-1]), compiled_module(executable)
            return Partitioned(executable, _devices(executable), *modules)


def _devices(program: jax.stages.Compiled) -> Sequence[jax.Device]:
    """Return the devices of a compiled program, in the order of their numbers in its module."""
    executable = program.runtime_executable()
    if hasattr(executable, "local_devices"):
        return list(executable.local_devices())
    # Compiled for descriptions of devices, on which nothing can be loaded.
    placed = jax.tree.leaves((program.input_shardings, program.output_shardings))
    meshes = (mesh for sharding in placed if (mesh := getattr(sharding, "mesh", None)) is not None)
    return next((list(mesh.devices.flat) for mesh in meshes), list(placed[0].device_set))


def _dumped(path: Path) -> HloModule:
    """Return the module in a file that XLA wrote: an `HloProto`, whose field 1 is the module."""
    return read_module(message(path.read_bytes())[1][-1])


# --- exported -------------------------------------------------------------------------------------
# Programs as artifacts of `jax.export`: StableHLO with pytree structures.
#
# Plain `jax.export.deserialize(data).call(*args)` takes the arguments of the function.
# `read_exported` returns a program of one `call_exported` equation with the same names, which can
# be shown and run.

_FLATBUFFERS = "pip install flatbuffers"


def exported(program: Program, platforms: Sequence[str] = ()) -> bytes:
    """Return the artifact for these platforms, or for JAX's default one.

    Unused arguments are kept, so that it takes the function's arguments. Raises UnsupportedError if
    the program cannot be exported, BackendError for a platform unknown to JAX, and OutputError if
    the package flatbuffers is not installed.
    """
    names = platform_names(platforms)
    _require_portable(program)
    with under_mesh(program), compile_errors_reported(program, "exported"):
        artifact = export.export(_Wrapped(program), platforms=names)()
    try:
        return bytes(artifact.serialize())
    except ImportError as error:
        raise OutputError(f"cannot export {program.name}: {error}", _FLATBUFFERS) from error
    except Exception as error:  # a tree with nodes that JAX cannot serialize
        raise UnsupportedError(f"{program.name} cannot be exported: {described(error)}") from error


def _require_portable(program: Program) -> None:
    """Raise UnsupportedError for Python callbacks and free named axes."""
    refused = f"{program.name} cannot be exported"
    for eqn in equations(top_jaxpr(program)):
        if traits(eqn).callback:
            hint = "stablehlo and hlo show such a call as a custom_call"
            raise UnsupportedError(f"{refused}: {named(eqn)} calls a Python function", hint)
    for name, aval in (*program.arguments, *program.results):
        if is_foreign(getattr(aval, "dtype", None)):
            what = f"elements of {aval.dtype}, a type defined by a package"
            raise UnsupportedError(f"{refused}: {name} has {what}")
    if has_objects(filled(program.in_tree, program.in_avals)):
        raise UnsupportedError(
            f"{refused}: it takes objects of Flax NNX, which an artifact cannot hold",
            "take nnx.to_pure_dict(nnx.state(model)) instead, update a model with it in the "
            "function with nnx.update, and return the new state",
        )
    if program.axis_env:
        axes = ", ".join(str(name) for name, _ in program.axis_env)
        raise UnsupportedError(f"{refused}: nothing binds its axes {axes}")


class _Wrapped:
    """A program with the interface of a jitted function (`jax.stages.Wrapped`), for `export`."""

    def __init__(self, program: Program):
        self._program = program

    def trace(self, *args: object, **kwargs: object) -> jax.stages.Traced:
        return as_traced(self._program, keep_unused=True)

    def lower(self, *args: object, **kwargs: object) -> jax.stages.Lowered:
        return self.trace().lower()

    def eval_shape(self, *args: object, **kwargs: object) -> object:
        return self.trace().out_info

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._program(*args, **kwargs)


# --- reading ----------------------------------------------------------------------------------


def is_exported(data: bytes) -> bool:
    """Return True if these bytes look like an artifact: a flatbuffer with a StableHLO module."""
    return b"ML\xefR" in data[4:] and b"StableHLO" in data and not data.startswith(b"ML\xefR")


def read_exported(data: bytes, path: str = "the artifact") -> Program:
    """Return the program in an artifact; `path` is its name in errors.

    Raises ProgramFileError for any other bytes, OutputError if flatbuffers is not installed.
    """
    try:
        artifact = export.deserialize(bytearray(data))
        arg_names, out_names = _names(artifact)
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in artifact.in_avals]
        args, kwargs = filled(artifact.in_tree, shapes)
        jaxpr = jax.make_jaxpr(artifact.call)(*args, **kwargs)
        if not artifact.has_vjp():  # JAX's derivative rule around the call would only raise
            (eqn,) = jaxpr.eqns
            jaxpr = view(eqn).body
    except ImportError as error:
        raise OutputError(f"cannot read {path}: {error}", _FLATBUFFERS) from error
    except Exception as error:  # a decoder may raise anything on foreign bytes
        raise ProgramFileError(
            f"{path} is not an artifact of jax.export: {described(error)}"
        ) from error
    return Program(
        name=artifact.fun_name,
        jaxpr=jaxpr,
        in_tree=artifact.in_tree,
        out_tree=artifact.out_tree,
        arg_names=arg_names,
        out_names=out_names,
    )


def _names(artifact: export.Exported) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return a name per flat argument and result: from the module, or else the tree path."""
    arg_names, out_names = jaxcompat.exported_names(artifact)
    args, kwargs = filled(artifact.in_tree, artifact.in_avals)
    results = filled(artifact.out_tree, artifact.out_avals)
    arg_paths = [*paths("args", args)]
    for name, value in kwargs.items():
        arg_paths += paths(name, value)
    return _one_each(arg_names, arg_paths), _one_each(out_names, paths("result", results))


def _one_each(names: dict[int, str], paths: Sequence[str]) -> tuple[str, ...]:
    chosen = tuple(names.get(i, path) for i, path in enumerate(paths))
    return chosen if len(set(chosen)) == len(chosen) else tuple(paths)


# --- xla computation ------------------------------------------------------------------------------
# The computation of a program as `xla_computation` of JAX 2022 made it.
#
# Unlike the lowering of `jax.jit`, it keeps unused arguments, and its result is always a tuple.
# Arguments and results may be split into parts, arguments donated, or passed as one tuple.

#: With `tuple_args=None`, more arguments than this are passed as one tuple.
MOST_SEPARATE_ARGUMENTS = 100


@dataclass(frozen=True)
class OptionNames:
    """How errors name options: by default as parameters of `xla_computation`."""

    in_parts: str = "in_parts"
    out_parts: str = "out_parts"
    donated: str = "donate_argnums"


@dataclass(frozen=True)
class XlaComputation:
    """The options of `xla_computation`.

    Attributes:
        in_parts: A prefix of the tree of positional arguments, with a `PartitionSpec` of numbers of
            parts, or None for replicated values.
        out_parts: The same for the results.
        tuple_args: Whether all arguments are passed as one tuple; None for more than a hundred.
        donated: The positions of arguments whose memory results may reuse, among the positional
            ones of the program.
        names: How errors name these options.
    """

    in_parts: object = None
    out_parts: object = None
    tuple_args: bool | None = False
    donated: tuple[int, ...] = ()
    names: OptionNames = OptionNames()

    def module(self, program: Program, platform: str | None = None) -> Any:
        """Return the StableHLO module of a program in JAX's MLIR bindings.

        Raises ArgumentsError for parts and positions that do not fit it, and the errors of
        `lowering.module`.
        """
        args, _ = filled(program.in_tree, range(len(program.arg_names)))
        for position in self.donated:
            if position >= len(args):
                raise ArgumentsError(
                    f"{self.names.donated} has {position}, but {program.name} has {len(args)} "
                    "positional arguments"
                )
        donated = jax.tree.leaves([args[position] for position in sorted(set(self.donated))])
        ins = _partitions(self.names.in_parts, self.in_parts, args, program.arguments)
        results = filled(program.out_tree, range(len(program.out_names)))
        outs = _partitions(self.names.out_parts, self.out_parts, results, program.results)
        lowered = module(program, platform, donated=donated, keep_unused=True)
        if self.in_parts is not None or self.out_parts is not None:
            jaxcompat.partition_module(lowered, ins, outs)
        return lowered

    def computation(self, program: Program, module: Any) -> Any:
        """Return the `XlaComputation` of jaxlib for a module of `module`."""
        require_sizes(program)
        count = len(program.in_avals)
        in_tuple = count > MOST_SEPARATE_ARGUMENTS if self.tuple_args is None else self.tuple_args
        with compile_errors_reported(program, "written as HLO"):
            return jaxcompat.as_xla_computation(module, in_tuple, return_tuple=True)


def result_types(program: Program) -> str:
    """Return the types of the results, in their tree: `{'y': f32[3], 'total': f32[]}`."""
    return repr(filled(program.out_tree, [_Unquoted(type_of(aval)) for aval in program.out_avals]))


class _Unquoted(str):
    """A text without quotes in the representation of a tree."""

    def __repr__(self) -> str:
        return str(self)


# --- parts --------------------------------------------------------------------------------------


def read_parts(text: str, option: str) -> object:
    """Return the tree of parts in a text: `(P(2, 1), None)`. It is never evaluated.

    Raises ArgumentsError for text that cannot be read, with its place.
    """
    positional, named = _PartReader(text, option).trees()
    if named or not positional:
        raise ArgumentsError(
            f"{option} takes parts by position, not '{text}'",
            "write (P(2, 1), None), with an entry for each argument or result",
        )
    return positional[0] if len(positional) == 1 else positional


class _PartReader(SpecReader):
    entries, examples = "numbers of parts", "P(2, 1)"

    def entry(self, node: ast.expr) -> Any:
        return self.source.literal(node)


def _partitions(
    option: str, parts: object, tree: object, values: Sequence[tuple[str, Aval]]
) -> list[str | None]:
    """Return the HLO sharding of each flat value; None for all if there are no parts."""
    if parts is None:
        return [None] * len(values)
    try:
        flat = jax.tree.leaves(
            jax.tree.broadcast(parts, tree, is_leaf=_is_partition), is_leaf=_is_partition
        )
    except (ValueError, TypeError) as error:
        detail = " ".join(str(error).split())[:200]
        raise ArgumentsError(f"{option} is not a prefix of the tree of values: {detail}") from error
    flat += [None] * (len(values) - len(flat))  # keyword arguments
    return [_sharding(option, part, *value) for part, value in zip(flat, values, strict=True)]


def _is_partition(node: object) -> bool:
    return node is None or isinstance(node, PartitionSpec)


def _sharding(option: str, parts: Any, name: str, aval: Aval) -> str:
    """Return `{devices=[2,1]0,1}`: device numbers in row-major order over a grid of parts."""
    if parts is None:
        return "{replicated}"
    counts = [1 if part is None else part for part in parts] if _is_partition(parts) else [parts]
    if not _is_partition(parts) or not all(type(n) is int and n > 0 for n in counts):
        raise ArgumentsError(
            f"{option} has {parts} for {name}; it must be a PartitionSpec of numbers, or None",
            "PartitionSpec(2, 1) splits the first dimension in two; for mesh axes use jax.jit",
        )
    if len(counts) != len(aval.shape):
        raise ArgumentsError(
            f"{option} has {parts} for {name}, which has {len(aval.shape)} dimensions"
        )
    devices = ",".join(map(str, range(math.prod(counts))))
    return f"{{devices=[{','.join(map(str, counts))}]{devices}}}"
