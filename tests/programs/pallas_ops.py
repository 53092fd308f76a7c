"""The kernels that ship with JAX, `jax.experimental.pallas.ops`, on small arguments.

Each case is a function and its arguments. Kernels of TPUs and those of Triton run in interpret
mode. Those of Mosaic GPU do not run here: JAX has no interpreter of most of their operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

_OPS = "jax.experimental.pallas.ops."

#: The cases, by name: `tpu.matmul`.
CASES: dict[str, Callable[[], KernelCase]] = {}


@dataclass(frozen=True)
class KernelCase:
    """A function that calls kernels.

    Attributes:
        function: The function.
        args: Its arguments.
        interpret: The mode that its kernels run in, if the function does not take it: True for a
            JAX function, parameters of an interpreter of TPUs, or None.
        runs: Whether it runs on a CPU.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    interpret: Any = None
    runs: bool = True

    @contextmanager
    def context(self) -> Iterator[None]:
        """Enter the context in which the function is traced."""
        modes = pltpu.force_tpu_interpret_mode(self.interpret) if self.interpret else nullcontext()
        with ExitStack() as stack:
            stack.enter_context(modes)
            for target, value in _DEVICE.items() if not self.runs else ():
                stack.enter_context(mock.patch(target, value))
            yield


def op(module: str, name: str) -> Any:
    return getattr(import_module(_OPS + module), name)


def case(name: str) -> Any:
    def add(build: Callable[[], KernelCase]) -> Callable[[], KernelCase]:
        CASES[name] = build
        return build

    return add


def normal(*shape: int, dtype: Any = "float32", seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed + len(shape) * 7 + shape[-1]).standard_normal(shape)
    return np.asarray(values.astype("float32"), jnp.dtype(dtype))


#: What kernels for GPUs ask of the device that they are traced for.
_DEVICE = {
    "jax.extend.backend.get_default_device": lambda: _GPU,
    "jax.devices": lambda: [_GPU],
    "jax.local_devices": lambda: [_GPU],
    f"{_OPS}gpu.attention_mgpu.cuda_versions": SimpleNamespace(
        cuda_runtime_get_version=lambda: 13000
    ),
}
_GPU = SimpleNamespace(core_count=132)


# --- TPU ------------------------------------------------------------------------------------------


@case("tpu.example")
def _example() -> KernelCase:
    return KernelCase(op("tpu.example_kernel", "double"), (normal(8, 128),), True)


@case("tpu.matmul")
def _matmul() -> KernelCase:
    function = functools.partial(op("tpu.matmul", "matmul"), block_shape=(8, 128), block_k=128)
    return KernelCase(function, (normal(16, 256), normal(256, 128)), True)


def _flash(gradient: bool, **options: Any) -> KernelCase:
    backward = ("q_major_dkv", "k_major_dkv", "k_dkv", "q_dkv", "k_major_dq", "k_dq", "q_dq")
    names = ("q", "k_major", "k", *backward)
    sizes = op("tpu.flash_attention", "BlockSizes")(
        block_b=1, **{f"block_{name}": 128 for name in names}
    )
    attention = functools.partial(
        op("tpu.flash_attention", "flash_attention"), block_sizes=sizes, **options
    )
    if gradient:
        function: Any = jax.grad(lambda q, k, v: attention(q, k, v).sum(), (0, 1, 2))
    else:
        function = attention
    return KernelCase(function, tuple(normal(1, 2, 256, 64, seed=i) for i in range(3)), True)


case("tpu.flash_attention")(lambda: _flash(False, causal=True))
case("tpu.flash_attention.grad")(lambda: _flash(True, causal=True))


def _splash(gradient: bool, is_mqa: bool = False) -> KernelCase:
    kernels = import_module(_OPS + "tpu.splash_attention")
    kernel = import_module(_OPS + "tpu.splash_attention.splash_attention_kernel")
    masks = kernels.MultiHeadMask([kernels.CausalMask((256, 256)) for _ in range(2)])
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    sizes = kernel.BlockSizes(**{f"block_{name}": 128 for name in names})
    make = kernel.make_splash_mqa if is_mqa else kernel.make_splash_mha
    attend = make(masks, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=True)
    heads = () if is_mqa else (2,)
    args = (normal(2, 256, 128), normal(*heads, 256, 128, seed=1), normal(*heads, 256, 128, seed=2))
    if gradient:
        return KernelCase(jax.grad(lambda q, k, v: attend(q, k, v).sum(), (0, 1, 2)), args)
    return KernelCase(lambda q, k, v: attend(q, k, v), args)


case("tpu.splash_attention")(lambda: _splash(False))
case("tpu.splash_attention.mqa")(lambda: _splash(False, True))
case("tpu.splash_attention.grad")(lambda: _splash(True))

_GROUPS = np.array([100, 0, 156], "int32")


@case("tpu.megablox.gmm")
def _gmm() -> KernelCase:
    function = functools.partial(op("tpu.megablox.gmm", "gmm"), interpret=True)
    return KernelCase(function, (normal(256, 128), normal(3, 128, 128), _GROUPS))


@case("tpu.megablox.tgmm")
def _tgmm() -> KernelCase:
    function = functools.partial(op("tpu.megablox.gmm", "tgmm"), interpret=True)
    return KernelCase(function, (normal(128, 256), normal(256, 128), _GROUPS))


@case("tpu.megablox.grad")
def _gmm_grad() -> KernelCase:
    function = op("tpu.megablox.ops", "gmm")
    options = {"preferred_element_type": jnp.float32, "interpret": True}

    def loss(x: Any, y: Any, groups: Any) -> Any:
        return function(x, y, groups, **options).sum()

    return KernelCase(jax.grad(loss, (0, 1)), (normal(256, 128), normal(3, 128, 128), _GROUPS))


@case("tpu.paged_attention")
def _paged() -> KernelCase:
    function = functools.partial(
        op("tpu.paged_attention", "paged_attention"), pages_per_compute_block=2
    )
    pages = normal(2, 8, 16, 128), normal(2, 8, 16, 128, seed=1)
    lengths, indices = np.array([30, 17], "int32"), np.arange(8, dtype="int32").reshape(2, 4)
    return KernelCase(
        function, (normal(2, 4, 128), *pages, lengths, indices), pltpu.InterpretParams()
    )


@case("tpu.ragged_paged_attention")
def _ragged() -> KernelCase:
    function = functools.partial(
        op("tpu.ragged_paged_attention", "ragged_paged_attention"),
        num_kv_pages_per_block=2,
        num_queries_per_block=8,
    )
    indices = np.arange(8, dtype="int32").reshape(2, 4)
    args = (
        normal(16, 4, 128),
        normal(8, 16, 4, 128),
        np.array([20, 30], "int32"),
        indices,
        np.array([0, 8, 16], "int32"),
        np.array([2], "int32"),
    )
    # JAX's interpreter has no index into a ref that is reshaped.
    return KernelCase(function, args, pltpu.InterpretParams(), runs=False)


@case("tpu.all_gather")
def _all_gather() -> KernelCase:
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))  # JAX interprets it wrongly on eight
    function = functools.partial(op("tpu.all_gather", "all_gather"), mesh=mesh, axis_name="x")
    return KernelCase(function, (normal(16, 128),), pltpu.InterpretParams())


@case("tpu.random.philox")
def _philox() -> KernelCase:
    bits = op("tpu.random.philox", "philox_random_bits")
    key = np.array([1, 2], "uint32")
    return KernelCase(lambda key: bits(key, 32, (300, 300)), (key,), True)


@case("tpu.random.threefry")
def _threefry() -> KernelCase:
    bits = op("tpu.random.threefry", "plthreefry_random_bits")
    key = np.array([1, 2], "uint32")
    return KernelCase(lambda key: bits(key, 32, (300, 300)), (key,), True)


# --- Triton ---------------------------------------------------------------------------------------


def _triton_attention(gradient: bool) -> KernelCase:
    mha = op("gpu.attention", "mha")
    sizes = op("gpu.attention", "BlockSizes")(32, 32, 32, 32, 32, 32)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return mha(q, k, v, None, block_sizes=sizes, causal=True, interpret=True)

    args = tuple(normal(1, 64, 2, 32, seed=i) for i in range(3))
    if gradient:
        return KernelCase(jax.grad(lambda *args: attend(*args).sum(), (0, 1, 2)), args)
    return KernelCase(attend, args)


case("gpu.attention")(lambda: _triton_attention(False))
case("gpu.attention.grad")(lambda: _triton_attention(True))


@case("gpu.decode_attention.mqa")
def _mqa() -> KernelCase:
    function = functools.partial(
        op("gpu.decode_attention", "mqa"), k_splits=2, block_k=16, interpret=True
    )
    return KernelCase(function, (normal(2, 4, 32), normal(2, 32, 32), normal(2, 32, 32, seed=1)))


@case("gpu.decode_attention.gqa")
def _gqa() -> KernelCase:
    function = functools.partial(
        op("gpu.decode_attention", "gqa"), k_splits=2, block_k=16, interpret=True
    )
    keys = normal(2, 32, 2, 32), normal(2, 32, 2, 32, seed=1)
    return KernelCase(function, (normal(2, 4, 32), *keys))


@case("gpu.paged_attention")
def _paged_gpu() -> KernelCase:
    function = functools.partial(
        op("gpu.paged_attention", "paged_attention"),
        pages_per_compute_block=2,
        k_splits=2,
        interpret=True,
    )
    pages = normal(2, 8, 16, 32), normal(2, 8, 16, 32, seed=1)
    lengths, indices = np.array([30, 17], "int32"), np.arange(8, dtype="int32").reshape(2, 4)
    return KernelCase(function, (normal(2, 4, 32), *pages, indices, lengths))


def _norm(module: str, gradient: bool) -> KernelCase:
    norm = op(f"gpu.{module}", module)
    args = normal(2, 4, 128), normal(128), normal(128, seed=1)

    def function(x: Any, weight: Any, bias: Any) -> Any:
        return norm(x, weight, bias, interpret=True)

    if gradient:
        return KernelCase(jax.grad(lambda *args: function(*args).sum(), (0, 1, 2)), args)
    return KernelCase(function, args)


for _module in ("layer_norm", "rms_norm"):
    case(f"gpu.{_module}")(functools.partial(_norm, _module, False))
    case(f"gpu.{_module}.grad")(functools.partial(_norm, _module, True))


@case("gpu.softmax")
def _softmax() -> KernelCase:
    function = functools.partial(op("gpu.softmax", "softmax"), interpret=True)
    return KernelCase(function, (normal(2, 3, 60),))


# --- Mosaic GPU -----------------------------------------------------------------------------------

_TILES = {"tile_m": 128, "tile_n": 128, "tile_k": 64, "grid_tile_width": 4}


def _half(*shape: int) -> Any:
    return normal(*shape, dtype="float16")


@case("gpu.hopper_matmul")
def _hopper() -> KernelCase:
    config = op("gpu.hopper_matmul_mgpu", "TuningConfig")(
        max_concurrent_steps=4, epi_tile_n=64, epi_tile_m=64, **_TILES
    )
    function = functools.partial(op("gpu.hopper_matmul_mgpu", "matmul"), config=config)
    return KernelCase(
        lambda a, b: function(a, b, None), (_half(256, 256), _half(256, 256)), runs=False
    )


@case("gpu.hopper_mixed_type_matmul")
def _hopper_mixed() -> KernelCase:
    config = op("gpu.hopper_mixed_type_matmul_mgpu", "TuningConfig")(
        max_concurrent_steps=4, epi_tile_n=64, epi_tile_m=64, **_TILES
    )
    function = functools.partial(
        op("gpu.hopper_mixed_type_matmul_mgpu", "mixed_matmul_kernel"),
        out_dtype=jnp.bfloat16,
        config=config,
    )
    args = np.ones((256, 256), "int8"), normal(256, 256, dtype="bfloat16")
    return KernelCase(function, args, runs=False)


@case("gpu.blackwell_matmul")
def _blackwell() -> KernelCase:
    config = op("gpu.blackwell_matmul_mgpu", "TuningConfig")(
        max_concurrent_steps=2, collective=True, epilogue_tile_n=32, **_TILES
    )
    function = functools.partial(op("gpu.blackwell_matmul_mgpu", "matmul_kernel"), config=config)
    return KernelCase(function, (_half(512, 256), _half(256, 512)), runs=False)


@case("gpu.blackwell_ragged_dot")
def _blackwell_ragged() -> KernelCase:
    minor = op("gpu.blackwell_matmul_mgpu", "MatmulDimension").N
    config = op("gpu.blackwell_ragged_dot_mgpu", "TuningConfig")(
        max_concurrent_steps=4, collective=True, grid_minor_dim=minor, **_TILES
    )
    function = functools.partial(
        op("gpu.blackwell_ragged_dot_mgpu", "ragged_dot_kernel"), config=config
    )
    args = _half(512, 256), _half(2, 256, 512), np.array([200, 312], "int32")
    return KernelCase(function, args, runs=False)


@case("gpu.ragged_dot")
def _ragged_dot() -> KernelCase:
    options = {"block_m": 64, "block_n": 64, "block_k": 64, "max_concurrent_steps": 2}
    ragged_dot = op("gpu.ragged_dot_mgpu", "ragged_dot")

    def function(x: Any, y: Any, sizes: Any) -> Any:
        return ragged_dot(x, y, group_sizes=sizes, grid_block_n=2, **options)

    args = _half(256, 128), _half(2, 128, 256), np.array([100, 156], "int32")
    return KernelCase(function, args, runs=False)


@case("gpu.transposed_ragged_dot")
def _transposed() -> KernelCase:
    options = {"block_m": 64, "block_n": 64, "block_k": 64, "max_concurrent_steps": 2}
    ragged_dot = op("gpu.transposed_ragged_dot_mgpu", "transposed_ragged_dot")

    def function(x: Any, y: Any, sizes: Any) -> Any:
        return ragged_dot(x, y, group_sizes=sizes, grid_block_n=2, **options)

    args = _half(256, 128), _half(256, 256), np.array([100, 156], "int32")
    return KernelCase(function, args, runs=False)


def _mosaic_attention(name: str, gradient: bool = False) -> KernelCase:
    blocks = ("q_dkv", "kv_dkv", "q_dq", "kv_dq") if gradient else ()
    config = op("gpu.attention_mgpu", "TuningConfig")(
        block_q=64, block_kv=64, max_concurrent_steps=2, **{f"block_{b}": 64 for b in blocks}
    )
    attend = functools.partial(op("gpu.attention_mgpu", name), config=config)
    args = tuple(_half(1, 256, 2, 64) for _ in range(3))
    if gradient:
        return KernelCase(jax.grad(lambda *args: attend(*args).sum(), (0, 1, 2)), args, runs=False)
    return KernelCase(attend, args, runs=False)


case("gpu.attention_mgpu")(lambda: _mosaic_attention("attention"))
case("gpu.attention_mgpu.grad")(lambda: _mosaic_attention("attention", True))
case("gpu.attention_mgpu.pipeline")(lambda: _mosaic_attention("attention_with_pipeline_emitter"))


def _collective(module: str, name: str, args: tuple[Any, ...], **options: Any) -> KernelCase:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    function = functools.partial(op(f"gpu.{module}", name), axis_name="x", **options)
    rows, columns = PartitionSpec("x"), PartitionSpec(None, "x")
    specs: tuple[Any, Any] = ((rows,), rows) if len(args) == 1 else ((rows, columns), columns)
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False
    )
    return KernelCase(mapped, args, runs=False)


case("gpu.all_gather")(
    lambda: _collective("all_gather_mgpu", "all_gather", (_half(256, 256),), num_blocks=4)
)
case("gpu.reduce_scatter")(
    lambda: _collective("reduce_scatter_mgpu", "reduce_scatter", (_half(256, 256),), num_blocks=4)
)


@case("gpu.collective_matmul")
def _collective_matmul() -> KernelCase:
    config = op("gpu.hopper_matmul_mgpu", "TuningConfig")(max_concurrent_steps=4, **_TILES)
    size = 256 * jax.device_count()
    args = _half(size, 256), _half(256, size)
    return _collective("collective_matmul_mgpu", "all_gather_lhs_matmul", args, config=config)
