"""Losses in pure JAX, with arguments, whose gradients the rewriting benchmarks use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.benchmarks.models import transformer_loss, transformer_shapes

Loss = Callable[..., Any]


def losses() -> dict[str, tuple[Loss, tuple[Any, ...]]]:
    """Return each loss by name. Losses take parameters and data."""
    shapes = transformer_shapes(48)
    return {
        "transformer, 48 layers": (transformer_loss, tuple(map(_drawn, shapes))),
        "ResNet-50": (resnet_loss, (resnet_parameters(), drawn_array(2, 64, 64, 3))),
        "RNN, 200 steps": (rnn_loss, (rnn_parameters(), drawn_array(200, 8, 32))),
        "U-Net": (unet_loss, (unet_parameters(), drawn_array(2, 32, 32, 3), jnp.full((2,), 0.3))),
    }


_random = np.random.default_rng(0)


def drawn_array(*shape: int) -> Any:
    """Return normal numbers, scaled for a weight by the number of elements it is summed over."""
    scale = np.sqrt(np.prod(shape[:-1], dtype=float)) if len(shape) > 1 else 1.0
    return jnp.asarray(_random.standard_normal(shape) / max(1.0, scale), jnp.float32)


def _drawn(shapes: Any) -> Any:
    return jax.tree.map(lambda s: drawn_array(*s.shape), shapes)


def conv(x: Any, w: Any, stride: int = 1) -> Any:
    return lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


# --- a residual network -------------------------------------------------------------------------


def resnet_parameters(counts: Sequence[int] = (3, 4, 6, 3)) -> dict[str, Any]:
    """Return the parameters of a ResNet, by the number of blocks per stage."""

    def unit(height: int, inputs: int, outputs: int) -> dict[str, Any]:
        w = drawn_array(height, height, inputs, outputs)
        return {"w": w, "scale": jnp.ones(outputs), "bias": jnp.zeros(outputs)}

    stages, inputs = [], 64
    for stage, count in enumerate(counts):
        blocks, width = [], 64 * 2**stage
        for position in range(count):
            block = {
                "reduce": unit(1, inputs, width),
                "conv": unit(3, width, width),
                "expand": unit(1, width, 4 * width),
            }
            if position == 0:
                block["project"] = unit(1, inputs, 4 * width)
            blocks.append(block)
            inputs = 4 * width
        stages.append(blocks)
    return {"stem": unit(7, 3, 64), "stages": stages, "head": drawn_array(inputs, 1000)}


def resnet_loss(params: Any, images: Any) -> Any:
    """Return the cross entropy of the first class, with batch statistics."""

    def unit(x: Any, p: Any, stride: int = 1) -> Any:
        x = conv(x, p["w"], stride)
        mean = x.mean((0, 1, 2))
        variance = x.var((0, 1, 2))
        return (x - mean) * lax.rsqrt(variance + 1e-5) * p["scale"] + p["bias"]

    def block(x: Any, p: Any, stride: int) -> Any:
        y = jax.nn.relu(unit(x, p["reduce"]))
        y = jax.nn.relu(unit(y, p["conv"], stride))
        y = unit(y, p["expand"])
        return jax.nn.relu(y + (unit(x, p["project"], stride) if "project" in p else x))

    x = jax.nn.relu(unit(images, params["stem"], 2))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for stage, blocks in enumerate(params["stages"]):
        for position, p in enumerate(blocks):
            x = block(x, p, 2 if stage and not position else 1)
    logits = x.mean((1, 2)) @ params["head"]
    return -jax.nn.log_softmax(logits)[:, 0].mean()


# --- a recurrent network, unrolled ---------------------------------------------------------------


def rnn_parameters() -> dict[str, Any]:
    return {"x": drawn_array(32, 256), "h": drawn_array(64, 256), "b": jnp.zeros(256)}


def rnn_loss(params: Any, xs: Any) -> Any:
    """Return the squared error of an LSTM over all steps, in a Python loop."""
    h = c = jnp.zeros((xs.shape[1], 64))
    loss = 0.0
    for x in xs:
        gates = x @ params["x"] + h @ params["h"] + params["b"]
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        loss += jnp.mean(jnp.square(h.mean(-1) - x.mean(-1)))
    return loss / len(xs)


# --- a diffusion model ---------------------------------------------------------------------------

_WIDTHS = (32, 64, 128)


def unet_parameters() -> dict[str, Any]:
    return dict(_unet_layers())


def _unet_layers() -> Iterator[tuple[str, Any]]:
    def residual(inputs: int, outputs: int) -> dict[str, Any]:
        return {
            "norm1": jnp.ones(inputs),
            "conv1": drawn_array(3, 3, inputs, outputs),
            "time": drawn_array(128, outputs),
            "norm2": jnp.ones(outputs),
            "conv2": drawn_array(3, 3, outputs, outputs),
            "skip": drawn_array(1, 1, inputs, outputs),
        }

    def attention(width: int) -> dict[str, Any]:
        return {
            "norm": jnp.ones(width),
            "qkv": drawn_array(width, 3 * width),
            "out": drawn_array(width, width),
        }

    yield "time1", drawn_array(32, 128)
    yield "time2", drawn_array(128, 128)
    yield "in", drawn_array(3, 3, 3, _WIDTHS[0])
    inputs = _WIDTHS[0]
    for i, width in enumerate(_WIDTHS):
        yield f"down{i}", [residual(inputs, width), residual(width, width), attention(width)]
        inputs = width
    yield "middle", [residual(inputs, inputs), attention(inputs), residual(inputs, inputs)]
    for i, width in reversed(list(enumerate(_WIDTHS))):
        first = residual(inputs + width, width)
        yield f"up{i}", [first, residual(width, width), attention(width)]
        inputs = width
    yield "norm", jnp.ones(inputs)
    yield "out", drawn_array(3, 3, inputs, 3)


def unet_loss(params: Any, images: Any, times: Any) -> Any:
    """Return the error of the predicted noise, for images at times between 0 and 1."""
    noise = jnp.sin(1e3 * images)
    angle = times[:, None, None, None] * jnp.pi / 2
    noisy = jnp.cos(angle) * images + jnp.sin(angle) * noise
    return jnp.mean(jnp.square(_unet(params, noisy, times) - noise))


def _unet(params: Any, x: Any, times: Any) -> Any:
    frequencies = jnp.exp(jnp.arange(16) * (-jnp.log(1e4) / 16))
    angles = times[:, None] * frequencies
    time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
    time = jax.nn.silu(time @ params["time1"]) @ params["time2"]
    x = conv(x, params["in"])
    skips = []
    for i in range(len(_WIDTHS)):
        first, second, attention = params[f"down{i}"]
        x = _attention(attention, _residual(second, _residual(first, x, time), time))
        skips.append(x)
        x = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "SAME") / 4
    first, attention, second = params["middle"]
    x = _residual(second, _attention(attention, _residual(first, x, time)), time)
    for i in reversed(range(len(_WIDTHS))):
        n, h, w, c = x.shape
        x = jax.image.resize(x, (n, 2 * h, 2 * w, c), "nearest")
        x = jnp.concatenate([x, skips.pop()], -1)
        first, second, attention = params[f"up{i}"]
        x = _attention(attention, _residual(second, _residual(first, x, time), time))
    return conv(jax.nn.silu(_group_norm(x, params["norm"])), params["out"])


def _group_norm(x: Any, scale: Any, groups: int = 8) -> Any:
    n, h, w, c = x.shape
    y = x.reshape(n, h, w, groups, c // groups)
    mean = y.mean((1, 2, 4), keepdims=True)
    variance = jnp.square(y - mean).mean((1, 2, 4), keepdims=True)
    return ((y - mean) * lax.rsqrt(variance + 1e-5)).reshape(x.shape) * scale


def _residual(p: Any, x: Any, time: Any) -> Any:
    y = conv(jax.nn.silu(_group_norm(x, p["norm1"])), p["conv1"])
    y = y + (jax.nn.silu(time) @ p["time"])[:, None, None]
    y = conv(jax.nn.silu(_group_norm(y, p["norm2"])), p["conv2"])
    return y + conv(x, p["skip"])


def _attention(p: Any, x: Any) -> Any:
    n, h, w, c = x.shape
    q, k, v = jnp.split(_group_norm(x, p["norm"]).reshape(n, h * w, c) @ p["qkv"], 3, -1)
    weights = jax.nn.softmax(jnp.einsum("nqc,nkc->nqk", q, k) / jnp.sqrt(c))
    return x + (jnp.einsum("nqk,nkc->nqc", weights, v) @ p["out"]).reshape(n, h, w, c)
