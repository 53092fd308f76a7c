"""Programs of megabytes, on which the estimate of memory is compared with XLA.

`PROGRAMS` has at least one for each primitive with memory of its own. `batched_harnesses` scales
JAX's own test programs: it maps them over as many elements as make their data megabytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import sparse

from tests.programs.harnesses import harnesses_by_group

#: The bytes that the data of a batched harness has at least.
DATA = 4 << 20


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def c64(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.complex64)


# --- programs of our own --------------------------------------------------------------------------


def _sparse_product(dense: bool) -> Callable[..., Any]:
    def product(data: Any, indices: Any, *other: Any) -> Any:
        a = sparse.BCOO((data, indices), shape=(256, 1024))
        if dense:
            return a @ other[0]
        return (a @ sparse.BCOO(other, shape=(256, 1024)).T).todense()

    return product


def _pool(kind: Any, initial: float, window: tuple[int, ...], padding: str) -> Callable[..., Any]:
    def pool(x: Any) -> Any:
        return lax.reduce_window(x, initial, kind, window, window, padding)

    return pool


def _conv(strides: tuple[int, int] = (1, 1), groups: int = 1) -> Callable[..., Any]:
    def conv(x: Any, kernel: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, kernel, strides, "SAME", dimension_numbers=numbers, feature_group_count=groups
        )

    return conv


@jax.custom_batching.custom_vmap
def _scores(x: Any, w: Any) -> Any:
    return jax.nn.logsumexp(x @ w, axis=-1)


@_scores.def_vmap
def _never(size: int, batched: Any, x: Any, w: Any) -> Any:
    raise NotImplementedError


def _circuit(x: Any, y: Any) -> Any:
    """Return a parameter of a circuit: quotients of which each is used several times."""
    a, b, c = x, y, x + y
    for _ in range(4):
        d = 1 - a * b
        a, b, c = (a + b * c * (1 - a)) / d, (b + a * c * (1 - b)) / d, (c + a * b) / d
    return a


def _root(x: Any) -> Any:
    def solve(f: Any, y: Any) -> Any:
        return lax.fori_loop(0, 9, lambda _, z: z - f(z) / (2 * z), y)

    return lax.custom_root(lambda y: y * y - x, x, solve, lambda g, y: y / g(jnp.ones_like(y)))


def _sort_and_multiply(x: Any) -> Any:
    return lax.while_loop(lambda c: c.sum() < 1e9, lambda c: jnp.sort(c) @ c, x)


def _table() -> Any:
    return np.arange(256 * 256, dtype="float32").reshape(256, 256) / 65536


def _equal_constants(x: Any) -> Any:
    for _ in range(20):
        x = jnp.tanh(x @ _table())
    return x


def _kalman(scan: Callable[..., Any]) -> Callable[..., Any]:
    def both(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    return lambda a, b: scan(both, (a, b))[1]


MATRIX = f32(1024, 1024)
IMAGES = f32(8, 64, 64, 16)

#: Each program and the types of its arguments.
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "sparse product": (_sparse_product(False), (f32(4000), i32(4000, 2)) * 2),
    "sparse times dense": (_sparse_product(True), (f32(4000), i32(4000, 2), f32(1024, 512))),
    "ragged_dot": (lax.ragged_dot, (f32(1024, 256), f32(16, 256, 256), i32(16))),
    "custom_vmap": (_scores, (f32(1024, 64), f32(64, 2048))),
    "equal constants": (_equal_constants, (f32(8, 256),)),
    "roll": (lambda x, i: jnp.roll(jnp.sin(x), i, axis=1), (MATRIX, i32())),
    "roll of two axes": (
        lambda x, i: jnp.roll(x * x, (i[0], i[1]), axis=(0, 1)),
        (MATRIX, i32(2)),
    ),
    "roll and FFT": (
        lambda x, i: jnp.fft.fft2(jnp.roll(x * x, (i[0], i[1]), axis=(0, 1))),
        (c64(512, 512), i32(2)),
    ),
    "roll by a known shift": (lambda x: jnp.roll(jnp.sin(x), 3, axis=1), (MATRIX,)),
    "max pooling": (_pool(lax.max, -jnp.inf, (1, 2, 2, 1), "VALID"), (IMAGES,)),
    "max pooling, padded": (_pool(lax.max, -jnp.inf, (1, 3, 3, 1), "SAME"), (IMAGES,)),
    "mean pooling": (_pool(lax.add, 0.0, (1, 2, 2, 1), "VALID"), (IMAGES,)),
    **{
        f"{name} over axis {axis}": (partial(function, axis=axis), (f32(512, 4096),))
        for name, function in {
            "cumsum": lax.cumsum,
            "cumprod": lax.cumprod,
            "cummax": lax.cummax,
            "cummin": lax.cummin,
            "cumlogsumexp": lax.cumlogsumexp,
        }.items()
        for axis in (0, 1)
    },
    "cumsum of a vector": (lax.cumsum, (f32(1 << 20),)),
    "cumsum reversed": (partial(lax.cumsum, reverse=True, axis=1), (f32(512, 4096),)),
    "associative scan": (_kalman(lax.associative_scan), (f32(1024, 256),) * 2),
    "sort": (jnp.sort, (MATRIX,)),
    "sort of a vector": (jnp.sort, (f32(1 << 20),)),
    "argsort": (jnp.argsort, (MATRIX,)),
    "median": (partial(jnp.median, axis=1), (MATRIX,)),
    "top_k": (lambda x: lax.top_k(x, 8)[0], (MATRIX,)),
    "approx_max_k": (lambda x: lax.approx_max_k(x, 8)[0], (MATRIX,)),
    "argmax": (partial(jnp.argmax, axis=1), (MATRIX,)),
    "searchsorted": (jnp.searchsorted, (f32(4096), f32(1 << 20))),
    "gather of rows": (lambda x, i: x[i], (f32(4096, 256), i32(8192))),
    "gather of elements": (lambda x, i: jnp.sin(x)[i], (f32(1 << 20), i32(1 << 20))),
    "gather of pairs": (lambda x, i, j: x[i, j], (MATRIX, i32(1 << 20), i32(1 << 20))),
    "take_along_axis": (
        lambda x, i: jnp.take_along_axis(x, i, axis=1),
        (MATRIX, i32(1024, 1024)),
    ),
    "embedding": (lambda x, i: jnp.sin(x[i]) @ x[:64].T, (f32(4096, 64), i32(8192))),
    "scatter": (lambda x, i, y: x.at[i].set(y), (f32(4096, 256), i32(4096), f32(4096, 256))),
    "scatter-add": (lambda x, i, y: x.at[i].add(y), (f32(4096, 256), i32(8192), f32(8192, 256))),
    "segment_sum": (lambda y, i: jax.ops.segment_sum(y, i, 4096), (f32(8192, 256), i32(8192))),
    "scatter-mul": (lambda x, i, y: x.at[i].mul(y), (f32(4096, 256), i32(4096), f32(4096, 256))),
    "scatter-max": (lambda x, i, y: x.at[i].max(y), (f32(4096, 256), i32(4096), f32(4096, 256))),
    "dynamic_slice": (
        lambda x, i: lax.dynamic_slice(jnp.sin(x), (i, i), (512, 512)),
        (MATRIX, i32()),
    ),
    "dynamic_update_slice": (
        lambda x, y, i: lax.dynamic_update_slice(jnp.sin(x), y, (i, i)),
        (MATRIX, f32(512, 512), i32()),
    ),
    "pad": (lambda x: jnp.sin(jnp.pad(x, 64)).sum(0), (MATRIX,)),
    "concatenate": (lambda x, y: jnp.concatenate([jnp.sin(x), y]), (MATRIX, MATRIX)),
    "stack": (lambda x, y: jnp.stack([jnp.sin(x), y, x * y]), (MATRIX, MATRIX)),
    "transpose": (lambda x: jnp.sin(x.T) + x, (MATRIX,)),
    "transpose of three axes": (lambda x: jnp.sin(x.transpose(2, 0, 1)), (f32(64, 128, 128),)),
    "rev": (lambda x: jnp.sin(x[::-1]) * x, (MATRIX,)),
    "dot_general": (lambda x, y: jnp.sin(x @ y), (MATRIX, MATRIX)),
    "dot_general, batched": (
        lambda x, y: jnp.einsum("bhid,bhjd->bhij", x, y),
        (f32(4, 8, 128, 64), f32(4, 8, 128, 64)),
    ),
    "dot_general, transposed": (
        lambda x, y: jnp.einsum("bihd,bjhd->bhij", x, y),
        (f32(4, 128, 8, 64), f32(4, 128, 8, 64)),
    ),
    "dot_general of bf16": (
        lambda x, y: x @ y,
        (jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16),) * 2,
    ),
    "dot_general of i8": (
        lambda x, y: lax.dot(x, y, preferred_element_type=jnp.int32),
        (jax.ShapeDtypeStruct((1024, 1024), jnp.int8),) * 2,
    ),
    "convolution": (_conv(), (IMAGES, f32(3, 3, 16, 32))),
    "convolution of 1 x 1": (_conv(), (IMAGES, f32(1, 1, 16, 32))),
    "convolution with strides": (_conv((2, 2)), (IMAGES, f32(3, 3, 16, 32))),
    "grouped convolution": (_conv(groups=16), (IMAGES, f32(3, 3, 1, 16))),
    "convolution of signals": (
        lambda x, k: lax.conv(x, k, (1,), "SAME"),
        (f32(16, 16, 4096), f32(32, 16, 5)),
    ),
    "fft": (jnp.fft.fft, (c64(512, 1024),)),
    "rfft": (jnp.fft.rfft, (MATRIX,)),
    "irfft": (jnp.fft.irfft, (c64(1024, 513),)),
    "fft2": (jnp.fft.fft2, (c64(512, 1024),)),
    "cholesky": (jnp.linalg.cholesky, (MATRIX,)),
    "solve": (jnp.linalg.solve, (MATRIX, f32(1024, 256))),
    "inv": (jnp.linalg.inv, (MATRIX,)),
    "det": (lambda x: jnp.linalg.slogdet(x)[1], (MATRIX,)),
    "lu": (lambda x: jax.scipy.linalg.lu(x)[1:], (MATRIX,)),
    "qr": (jnp.linalg.qr, (MATRIX,)),
    "qr of a tall matrix": (jnp.linalg.qr, (f32(4096, 256),)),
    "eigh": (jnp.linalg.eigh, (MATRIX,)),
    "eigvalsh": (jnp.linalg.eigvalsh, (MATRIX,)),
    "svd": (partial(jnp.linalg.svd, full_matrices=False), (f32(1024, 512),)),
    "singular values": (partial(jnp.linalg.svd, compute_uv=False), (f32(1024, 512),)),
    "pinv": (jnp.linalg.pinv, (f32(1024, 512),)),
    "eig": (lambda x: jnp.linalg.eig(x)[0], (f32(512, 512),)),
    "schur": (lambda x: jax.scipy.linalg.schur(x)[1], (f32(512, 512),)),
    "expm": (jax.scipy.linalg.expm, (f32(512, 512),)),
    "triangular_solve": (
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
        (MATRIX, f32(1024, 512)),
    ),
    "solve, batched": (jnp.linalg.solve, (f32(1024, 16, 16), f32(1024, 16, 16))),
    "cholesky, batched": (jnp.linalg.cholesky, (f32(4096, 16, 16),)),
    "tridiagonal_solve": (
        lax.linalg.tridiagonal_solve,
        (f32(64, 4096), f32(64, 4096), f32(64, 4096), f32(64, 4096, 4)),
    ),
    "normal": (lambda k: jax.random.normal(jax.random.key(k), (1024, 1024)), (i32(),)),
    "uniform": (lambda k, x: x * jax.random.uniform(jax.random.key(k), x.shape), (i32(), MATRIX)),
    "permutation": (
        lambda k, x: jax.random.permutation(jax.random.key(k), x),
        (i32(), f32(1 << 20)),
    ),
    "gamma": (lambda k, x: jax.random.gamma(jax.random.key(k), x), (i32(), f32(1 << 20))),
    "categorical": (lambda k, x: jax.random.categorical(jax.random.key(k), x), (i32(), MATRIX)),
    "split": (
        lambda k: jax.random.key_data(jax.random.split(jax.random.key(k), 1 << 18)),
        (i32(),),
    ),
    "igamma": (jax.scipy.special.gammainc, (f32(1 << 18), f32(1 << 18))),
    "betainc": (jax.scipy.special.betainc, (f32(1 << 18),) * 3),
    "lgamma": (jax.scipy.special.gammaln, (MATRIX,)),
    "erf_inv": (jax.scipy.special.erfinv, (MATRIX,)),
    "zeta": (jax.scipy.special.zeta, (MATRIX, MATRIX)),
    "bessel": (jax.scipy.special.i0e, (MATRIX,)),
    "complex arithmetic": (lambda x: jnp.exp(x) * jnp.sqrt(x), (c64(512, 1024),)),
    "complex inverse": (jnp.arccos, (c64(512, 1024),)),
    "reductions": (lambda x: (x.sum(0), x.max(1), x.prod(0)), (MATRIX,)),
    "softmax": (jax.nn.softmax, (MATRIX,)),
    "layer norm": (jax.nn.standardize, (MATRIX,)),
    "logsumexp": (partial(jax.nn.logsumexp, axis=1), (MATRIX,)),
    "variance": (partial(jnp.var, axis=0), (MATRIX,)),
    "reduce of pairs": (
        lambda x, y: lax.reduce(
            (x, y), (0.0, 0.0), lambda a, b: (a[0] + b[0] * a[1], a[1] * b[1]), (1,)
        )[0],
        (MATRIX, MATRIX),
    ),
    "histogram": (lambda x: jnp.histogram(x, 64)[0], (f32(1 << 20),)),
    "interp": (jnp.interp, (f32(1 << 20), f32(512), f32(512))),
    "convolve": (partial(jnp.convolve, mode="same"), (f32(1 << 20), f32(65))),
    "polyval": (lambda x: jnp.polyval(jnp.arange(9.0), x), (MATRIX,)),
    "while": (_sort_and_multiply, (MATRIX,)),
    "map": (lambda x: lax.map(jnp.sort, x), (f32(64, 16384),)),
    "cond": (lambda i, x: lax.cond(i > 0, jnp.sort, lambda x: x @ x, x), (i32(), MATRIX)),
    "linear solve": (
        lambda a, b: jax.scipy.sparse.linalg.cg(lambda x: a @ x, b)[0],
        (MATRIX, f32(1024)),
    ),
    "root": (_root, (MATRIX,)),
    "circuit": (_circuit, (c64(512, 1024),) * 2),
    "attention": (
        jax.nn.dot_product_attention,
        (f32(2, 512, 4, 64), f32(2, 512, 4, 64), f32(2, 512, 4, 64)),
    ),
    "ctc": (
        lambda x, i: jnp.take_along_axis(jax.nn.log_softmax(x), i[:, None], axis=1).mean(),
        (MATRIX, i32(1024)),
    ),
    "one_hot": (lambda i, w: jax.nn.one_hot(i, 1024) @ w, (i32(2048), f32(1024, 256))),
    "resize": (lambda x: jax.image.resize(x, (8, 128, 128, 16), "bilinear"), (IMAGES,)),
    "map_coordinates": (
        lambda x, y: jax.scipy.ndimage.map_coordinates(x, [y, y], order=1),
        (MATRIX, f32(1 << 19)),
    ),
    "where": (lambda x: jnp.where(x > 0, jnp.sin(x), jnp.cos(x)), (MATRIX,)),
    "select and sort": (lambda x: jnp.sort(jnp.where(x > 0, x, 0.0), axis=0), (MATRIX,)),
    "tril": (lambda x: jnp.tril(jnp.sin(x)) @ x, (MATRIX,)),
    "kron": (jnp.kron, (f32(32, 32), f32(32, 32))),
    "outer": (lambda x: jnp.sin(jnp.outer(x, x)).sum(), (f32(2048),)),
    "unique": (partial(jnp.unique, size=1024), (f32(1 << 18),)),
    "nonzero": (lambda x: jnp.nonzero(x, size=1024)[0], (f32(1 << 20),)),
    "bitcast": (lambda x: lax.bitcast_convert_type(jnp.sin(x), jnp.int32) + 1, (MATRIX,)),
    "reduce_precision": (lambda x: lax.reduce_precision(jnp.sin(x), 5, 10) @ x, (MATRIX,)),
    "callback": (
        lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), jnp.cos(x)) * x,
        (MATRIX,),
    ),
}


def gradient(
    function: Callable[..., Any], types: Sequence[Any]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the gradient of the sum of squares of a function's results, and its types."""
    inexact = tuple(i for i, a in enumerate(types) if jnp.issubdtype(a.dtype, jnp.inexact))

    def loss(*args: Any) -> Any:
        outs = [o for o in jax.tree.leaves(function(*args)) if jnp.issubdtype(o.dtype, jnp.inexact)]
        return sum(jnp.real(out * jnp.conj(out)).sum().astype(jnp.float32) for out in outs)

    return jax.grad(loss, inexact), tuple(types)


# --- JAX's programs -------------------------------------------------------------------------------


def batched_harnesses() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield the largest of JAX's test programs of each group, mapped until it has megabytes.

    Floating-point arguments are mapped, or all if there are none.
    """
    for harnesses in harnesses_by_group().values():
        sized = [(_size(harness), harness.fullname, harness) for harness in harnesses]
        size, name, harness = max(sized, key=lambda each: each[:2])
        if size:
            yield name, *_batched(harness)


def _arguments(harness: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(tuple(harness.dyn_args_maker(np.random.RandomState(0))))


def _size(harness: Any) -> int:
    leaves, _ = _arguments(harness)
    sizes = [np.size(leaf) * getattr(leaf, "itemsize", 4) for leaf in leaves]
    return sum(sizes) if all(sizes) else 0


def _batched(harness: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    leaves, tree = _arguments(harness)
    types = [
        jax.ShapeDtypeStruct(jax.typeof(leaf).shape, jax.typeof(leaf).dtype) for leaf in leaves
    ]
    inexact = [jnp.issubdtype(a.dtype, np.inexact) for a in types]
    mapped = inexact if any(inexact) else [True] * len(types)
    data = sum(a.size * a.dtype.itemsize for a, flag in zip(types, mapped, strict=True) if flag)
    count = -(-DATA // data)

    def flat(*args: Any) -> Any:
        return harness.dyn_fun(*jax.tree.unflatten(tree, args))

    larger = (
        jax.ShapeDtypeStruct((count, *a.shape), a.dtype) if flag else a
        for a, flag in zip(types, mapped, strict=True)
    )
    return jax.vmap(flat, [0 if flag else None for flag in mapped]), tuple(larger)
