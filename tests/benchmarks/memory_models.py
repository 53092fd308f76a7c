"""Gradients of models with `jax.checkpoint` in various places, to compare with XLA's memory.

    for case in cases():
        jax.jit(case.function).lower(*case.args)

A model is a function of `wrap`, which it applies to each of its blocks; `around` is applied to the
whole loss. Sizes are such that XLA compiles each in a second or two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Fun = Callable[..., Any]
Wrap = Callable[[Fun], Fun]
POLICIES = jax.checkpoint_policies


@dataclass(frozen=True)
class Case:
    """The gradient of a model.

    Attributes:
        model: The name of the model.
        place: Where `jax.checkpoint` is applied: `no` for nowhere, to `each` block, to the `whole`
            loss, or `dots` for each block with the policy that saves dots.
        function: The gradient.
        args: The types of its arguments.
    """

    model: str
    place: str
    function: Fun
    args: tuple[Any, ...]

    @property
    def name(self) -> str:
        """The name of the case."""
        return f"{self.model}, {self.place}"


def _plain(function: Fun) -> Fun:
    return function


#: The wrapper of the blocks and that of the whole loss, by place.
PLACES: dict[str, tuple[Wrap, Wrap]] = {
    "no": (_plain, _plain),
    "each": (jax.checkpoint, _plain),
    "dots": (partial(jax.checkpoint, policy=POLICIES.dots_saveable), _plain),
    "whole": (_plain, jax.checkpoint),
}


def cases() -> Iterator[Case]:
    """Yield all cases."""
    for name, (model, args, places) in MODELS.items():
        for place in places:
            wrap, around = PLACES[place]
            yield Case(name, place, jax.value_and_grad(around(model(wrap))), args)


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    """Return the type of a float array."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    """Return the type of an integer array."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


# --- layers -----------------------------------------------------------------------------------


def norm(x: Any) -> Any:
    """Apply layer normalization."""
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5)


def attention(x: Any, w: Any, heads: int = 4) -> Any:
    """Apply causal multi-head attention."""
    b, n, d = x.shape
    q, k, v = jnp.split((x @ w["qkv"]).reshape(b, n, heads, 3 * d // heads), 3, -1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(d / heads)
    scores = jnp.where(jnp.tril(jnp.ones((n, n), bool)), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return mixed.reshape(b, n, d) @ w["out"]


def transformer_block(x: Any, w: Any) -> Any:
    """Apply a block of a pre-norm transformer."""
    x = x + attention(norm(x), w)
    return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]


def block_types(d: int) -> dict[str, Any]:
    """Return the types of the parameters of a transformer block."""
    return {"qkv": f32(d, 3 * d), "out": f32(d, d), "up": f32(d, 4 * d), "down": f32(4 * d, d)}


def stacked(types: Any, n: int) -> Any:
    """Return the types of the stacked parameters of n layers."""
    return jax.tree.map(lambda t: jax.ShapeDtypeStruct((n, *t.shape), t.dtype), types)


def conv(x: Any, w: Any, stride: int = 1) -> Any:
    """Apply a convolution to images."""
    return lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


# --- sequential layers ----------------------------------------------------------------------------


def mlp(wrap: Wrap) -> Fun:
    """Residual layers with two tanh each, unrolled."""

    @wrap
    def layer(w: Any, x: Any) -> Any:
        return x + jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"])

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = layer(w, x)
        return jnp.square(x).mean()

    return loss


def wide_mlp(wrap: Wrap) -> Fun:
    """Dense layers with relu, and a softmax at the end."""

    @wrap
    def layer(x: Any, w: Any) -> Any:
        return jax.nn.relu(x @ w["w"] + w["b"])

    def loss(params: Any, x: Any, labels: Any) -> Any:
        for w in params:
            x = layer(x, w)
        logp = jax.nn.log_softmax(x)
        return -jnp.take_along_axis(logp, labels[:, None], 1).mean()

    return loss


def transformer(wrap: Wrap) -> Fun:
    """A transformer, unrolled."""
    block = wrap(transformer_block)

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = block(x, w)
        return jnp.square(norm(x)).mean()

    return loss


def scanned_transformer(wrap: Wrap) -> Fun:
    """A transformer with a scan over its layers."""
    block = wrap(transformer_block)

    def loss(params: Any, x: Any) -> Any:
        x, _ = lax.scan(lambda x, w: (block(x, w), None), x, params)
        return jnp.square(norm(x)).mean()

    return loss


def language_model(wrap: Wrap) -> Fun:
    """A scanned transformer with embeddings and the cross entropy of the next token."""
    block = wrap(transformer_block)

    def loss(params: Any, tokens: Any) -> Any:
        x = params["embed"][tokens[:, :-1]]
        x, _ = lax.scan(lambda x, w: (block(x, w), None), x, params["blocks"])
        logp = jax.nn.log_softmax(norm(x) @ params["embed"].T)
        return -jnp.take_along_axis(logp, tokens[:, 1:, None], -1).mean()

    return loss


def mixer(wrap: Wrap) -> Fun:
    """Alternating products over tokens and over channels."""

    @wrap
    def block(x: Any, w: Any) -> Any:
        y = norm(x).swapaxes(1, 2)
        x = x + (jax.nn.gelu(y @ w["t1"]) @ w["t2"]).swapaxes(1, 2)
        return x + jax.nn.gelu(norm(x) @ w["c1"]) @ w["c2"]

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = block(x, w)
        return jnp.square(x.mean(1)).sum()

    return loss


def experts(wrap: Wrap) -> Fun:
    """Layers of dense experts, mixed by a gate."""

    @wrap
    def layer(x: Any, w: Any) -> Any:
        gate = jax.nn.softmax(x @ w["gate"])
        hidden = jax.nn.silu(jnp.einsum("nd,edh->neh", x, w["up"]))
        return x + jnp.einsum("neh,ehd,ne->nd", hidden, w["down"], gate)

    def loss(params: Any, x: Any) -> Any:
        x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, params)
        return jnp.square(x).mean()

    return loss


# --- images -----------------------------------------------------------------------------------


def resnet(wrap: Wrap) -> Fun:
    """Residual convolutions, normalized over the batch."""

    def unit(x: Any, w: Any) -> Any:
        y = conv(x, w)
        mean, variance = y.mean((0, 1, 2)), y.var((0, 1, 2))
        return (y - mean) * lax.rsqrt(variance + 1e-5)

    @wrap
    def block(x: Any, w: Any) -> Any:
        return jax.nn.relu(x + unit(jax.nn.relu(unit(x, w["a"])), w["b"]))

    def loss(params: Any, x: Any) -> Any:
        x = jax.nn.relu(conv(x, params["stem"]))
        for w in params["blocks"]:
            x = block(x, w)
        return jnp.square(x.mean((1, 2)) @ params["head"]).mean()

    return loss


def scanned_resnet(wrap: Wrap) -> Fun:
    """The same blocks as a scan."""

    @wrap
    def block(x: Any, w: Any) -> Any:
        return x + conv(jax.nn.relu(conv(x, w["a"])), w["b"])

    def loss(params: Any, x: Any) -> Any:
        x, _ = lax.scan(lambda x, w: (block(x, w), None), x, params)
        return jnp.square(x).mean()

    return loss


def unet(wrap: Wrap) -> Fun:
    """Downsampling and upsampling with skip connections."""

    @wrap
    def block(x: Any, w: Any) -> Any:
        return jax.nn.silu(conv(jax.nn.silu(conv(x, w["a"])), w["b"]))

    def loss(params: Any, x: Any) -> Any:
        start, skips = x, []
        x = conv(x, params["in"])
        for w in params["down"]:
            x = block(x, w)
            skips.append(x)
            x = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "SAME") / 4
        for w in params["up"]:
            n, h, width, c = x.shape
            x = jax.image.resize(x, (n, 2 * h, 2 * width, c), "nearest")
            x = block(jnp.concatenate([x, skips.pop()], -1), w)
        return jnp.square(conv(x, params["out"]) - start).mean()

    return loss


def vision_transformer(wrap: Wrap) -> Fun:
    """A transformer over patches of images."""
    block = wrap(transformer_block)

    def loss(params: Any, x: Any) -> Any:
        n, h, _, c = x.shape
        x = x.reshape(n, h // 8, 8, h // 8, 8, c).transpose(0, 1, 3, 2, 4, 5)
        x = x.reshape(n, h * h // 64, 64 * c) @ params["patch"]
        for w in params["blocks"]:
            x = block(x, w)
        return jax.nn.logsumexp(x.mean(1) @ params["head"], -1).mean()

    return loss


# --- sequences --------------------------------------------------------------------------------


def lstm_step(w: Any, state: Any, x: Any) -> Any:
    """A step of an LSTM."""
    h, c = state
    i, f, g, o = jnp.split(x @ w["x"] + h @ w["h"] + w["b"], 4, -1)
    c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def lstm(wrap: Wrap) -> Fun:
    """An LSTM as a scan."""
    step = wrap(lstm_step)

    def loss(w: Any, xs: Any) -> Any:
        h = jnp.zeros((xs.shape[1], w["h"].shape[0]))
        _, hs = lax.scan(partial(step, w), (h, h), xs)
        return jnp.square(hs).mean()

    return loss


def unrolled_lstm(wrap: Wrap) -> Fun:
    """An LSTM in a Python loop."""
    step = wrap(lstm_step)

    def loss(w: Any, xs: Any) -> Any:
        h = jnp.zeros((xs.shape[1], w["h"].shape[0]))
        state, total = (h, h), 0.0
        for x in xs:
            state, h = step(w, state, x)
            total += jnp.square(h).mean()
        return total

    return loss


def gru(wrap: Wrap) -> Fun:
    """A GRU as a scan, of which only the last state is used."""

    @wrap
    def step(w: Any, h: Any, x: Any) -> Any:
        z, r = jnp.split(jax.nn.sigmoid(x @ w["x"] + h @ w["h"]), 2, -1)
        new = jnp.tanh(x @ w["n"] + (r * h) @ w["m"])
        return (1 - z) * h + z * new, None

    def loss(w: Any, xs: Any) -> Any:
        h = jnp.zeros((xs.shape[1], w["h"].shape[0]))
        return jnp.square(lax.scan(partial(step, w), h, xs)[0]).mean()

    return loss


def scan_of_scans(wrap: Wrap) -> Fun:
    """A scan of scans: `wrap` is applied to each chunk of steps."""

    def step(w: Any, h: Any, x: Any) -> Any:
        return jnp.tanh(h @ w + x), None

    @wrap
    def chunk(w: Any, h: Any, xs: Any) -> Any:
        return lax.scan(partial(step, w), h, xs)

    def loss(w: Any, xs: Any) -> Any:
        h, _ = lax.scan(partial(chunk, w), jnp.zeros(xs.shape[2:]), xs)
        return jnp.square(h).mean()

    return loss


def inner_checkpoint(wrap: Wrap) -> Fun:
    """A scan of scans: `wrap` is applied to each step."""

    @wrap
    def step(w: Any, h: Any, x: Any) -> Any:
        return jnp.sin(jnp.tanh(h @ w + x) @ w), None

    def chunk(w: Any, h: Any, xs: Any) -> Any:
        return lax.scan(partial(step, w), h, xs)

    def loss(w: Any, xs: Any) -> Any:
        h, _ = lax.scan(partial(chunk, w), jnp.zeros(xs.shape[2:]), xs)
        return jnp.square(h).mean()

    return loss


def layers_over_time(wrap: Wrap) -> Fun:
    """Recurrent layers: a scan over time in a scan over layers."""

    @wrap
    def layer(xs: Any, w: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            h = jnp.tanh(x @ w["x"] + h @ w["h"])
            return h, h

        return xs + lax.scan(step, jnp.zeros(xs.shape[1:]), xs)[1]

    def loss(params: Any, xs: Any) -> Any:
        xs, _ = lax.scan(lambda xs, w: (layer(xs, w), None), xs, params)
        return jnp.square(xs).mean()

    return loss


def ode(wrap: Wrap) -> Fun:
    """Runge-Kutta steps through a field of two layers."""

    def field(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w["a"]) @ w["b"]

    @wrap
    def step(w: Any, x: Any) -> Any:
        k1 = field(w, x)
        k2 = field(w, x + 0.05 * k1)
        k3 = field(w, x + 0.05 * k2)
        k4 = field(w, x + 0.1 * k3)
        return x + 0.1 / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    def loss(w: Any, x: Any) -> Any:
        x, _ = lax.scan(lambda x, _: (step(w, x), None), x, None, length=16)
        return jnp.square(x).mean()

    return loss


def wave(wrap: Wrap) -> Fun:
    """A wave equation on a grid, by finite differences."""

    @wrap
    def step(c: Any, state: Any, _: Any) -> Any:
        u, v = state
        around = jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0) + jnp.roll(u, 1, 1) + jnp.roll(u, -1, 1)
        v = v + 0.1 * jnp.square(c) * (around - 4 * u)
        return (u + 0.1 * v, v), jnp.sin(u[0])

    def loss(c: Any, u: Any) -> Any:
        (_, _), trace = lax.scan(partial(step, c), (u, jnp.zeros_like(u)), length=30)
        return jnp.square(trace).sum()

    return loss


# --- pairs ------------------------------------------------------------------------------------


def plain_attention(wrap: Wrap) -> Fun:
    """Layers of single-head attention and nothing else."""

    @wrap
    def layer(x: Any, w: Any) -> Any:
        return x + jax.nn.softmax((x @ w["q"]) @ (x @ w["k"]).T / 8) @ (x @ w["v"])

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = layer(x, w)
        return jnp.square(x).mean()

    return loss


def chunked_attention(wrap: Wrap) -> Fun:
    """Attention as a scan over chunks of queries."""

    @wrap
    def chunk(k: Any, v: Any, q: Any) -> Any:
        return jax.nn.softmax(q @ k.T / 8) @ v

    def loss(w: Any, x: Any) -> Any:
        q, k, v = x @ w["q"], x @ w["k"], x @ w["v"]
        q = q.reshape(16, -1, q.shape[-1])
        _, out = lax.scan(lambda c, q: (c, chunk(k, v, q)), None, q)
        return jnp.square(out).mean()

    return loss


def distances(wrap: Wrap) -> Fun:
    """The energy of points by their pairwise distances."""

    @wrap
    def energy(x: Any, y: Any) -> Any:
        squares = jnp.square(x[:, None] - y[None]).sum(-1)
        return jnp.exp(-squares).sum()

    return lambda x: energy(x, x)


def gaussian_kernel(wrap: Wrap) -> Fun:
    """A Gaussian kernel matrix times weights."""

    @wrap
    def kernel(x: Any, y: Any) -> Any:
        squares = (x * x).sum(1)[:, None] + (y * y).sum(1)[None] - 2 * x @ y.T
        return jnp.exp(-0.1 * squares)

    return lambda x, a: jnp.square(kernel(x, x) @ a).mean()


def contrastive(wrap: Wrap) -> Fun:
    """Similarities of two encodings, and their cross entropy in both directions."""

    @wrap
    def encode(w: Any, x: Any) -> Any:
        z = jnp.tanh(x @ w["a"]) @ w["b"]
        return z / jnp.linalg.norm(z, axis=-1, keepdims=True)

    def loss(w: Any, x: Any, y: Any) -> Any:
        scores = encode(w, x) @ encode(w, y).T / 0.1
        logp = jax.nn.log_softmax(scores, 0) + jax.nn.log_softmax(scores, 1)
        return -jnp.trace(logp)

    return loss


def graph(wrap: Wrap) -> Fun:
    """Messages along the edges of a graph."""

    @wrap
    def layer(w: Any, x: Any, senders: Any, receivers: Any) -> Any:
        messages = jax.nn.relu(jnp.concatenate([x[senders], x[receivers]], -1) @ w["m"])
        gathered = jax.ops.segment_sum(messages, receivers, x.shape[0])
        return x + jnp.tanh(gathered @ w["u"])

    def loss(params: Any, x: Any, senders: Any, receivers: Any) -> Any:
        for w in params:
            x = layer(w, x, senders, receivers)
        return jnp.square(x).mean()

    return loss


def per_example(wrap: Wrap) -> Fun:
    """A network mapped over examples."""

    @wrap
    def network(params: Any, x: Any) -> Any:
        for w in params:
            x = jax.nn.silu(w @ x)
        return x

    return lambda params, xs: jnp.square(jax.vmap(partial(network, params))(xs)).mean()


def state_space(wrap: Wrap) -> Fun:
    """A diagonal recurrence by an associative scan."""

    @wrap
    def layer(x: Any, w: Any) -> Any:
        decay = jax.nn.sigmoid(x @ w["a"])

        def both(left: Any, right: Any) -> Any:
            return left[0] * right[0], right[0] * left[1] + right[1]

        return x + lax.associative_scan(both, (decay, x @ w["b"]))[1]

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = layer(x, w)
        return jnp.square(x).mean()

    return loss


_AB = {"a": f32(128, 512), "b": f32(512, 128)}
_LSTM = {"x": f32(64, 512), "h": f32(128, 512), "b": f32(512)}
_CONVS = {"a": f32(3, 3, 16, 16), "b": f32(3, 3, 16, 16)}
_ALL = ("no", "each", "dots", "whole")
_THREE = ("no", "each", "whole")
_TWO = ("no", "each")

#: Each model, the types of its arguments, and the places of `jax.checkpoint`.
MODELS: dict[str, tuple[Callable[[Wrap], Fun], tuple[Any, ...], tuple[str, ...]]] = {
    "MLP": (mlp, ([_AB] * 6, f32(2048, 128)), _ALL),
    "dense layers": (
        wide_mlp,
        ([{"w": f32(256, 256), "b": f32(256)}] * 8, f32(2048, 256), i32(2048)),
        _THREE,
    ),
    "transformer": (transformer, ([block_types(64)] * 3, f32(8, 128, 64)), _ALL),
    "scanned transformer": (
        scanned_transformer,
        (stacked(block_types(64), 6), f32(8, 128, 64)),
        _ALL,
    ),
    "language model": (
        language_model,
        ({"embed": f32(1000, 64), "blocks": stacked(block_types(64), 4)}, i32(4, 129)),
        _ALL,
    ),
    "mixer": (
        mixer,
        (
            [{"t1": f32(64, 128), "t2": f32(128, 64), "c1": f32(96, 384), "c2": f32(384, 96)}] * 3,
            f32(32, 64, 96),
        ),
        _THREE,
    ),
    "experts": (
        experts,
        (
            stacked({"gate": f32(64, 4), "up": f32(4, 64, 128), "down": f32(4, 128, 64)}, 6),
            f32(1024, 64),
        ),
        _TWO,
    ),
    "ResNet": (
        resnet,
        (
            {"stem": f32(3, 3, 3, 16), "blocks": [_CONVS] * 4, "head": f32(16, 10)},
            f32(16, 32, 32, 3),
        ),
        _THREE,
    ),
    "scanned ResNet": (
        scanned_resnet,
        (stacked(_CONVS, 6), f32(16, 32, 32, 16)),
        _THREE,
    ),
    "U-Net": (
        unet,
        (
            {
                "in": f32(3, 3, 3, 16),
                "down": [_CONVS] * 3,
                "up": [{"a": f32(3, 3, 32, 16), "b": f32(3, 3, 16, 16)}] * 3,
                "out": f32(3, 3, 16, 3),
            },
            f32(8, 32, 32, 3),
        ),
        _THREE,
    ),
    "vision transformer": (
        vision_transformer,
        (
            {"patch": f32(192, 64), "blocks": [block_types(64)] * 3, "head": f32(64, 10)},
            f32(16, 64, 64, 3),
        ),
        _TWO,
    ),
    "LSTM": (lstm, (_LSTM, f32(64, 64, 64)), _ALL),
    "unrolled LSTM": (unrolled_lstm, (_LSTM, f32(8, 128, 64)), _THREE),
    "GRU": (
        gru,
        (
            {"x": f32(64, 256), "h": f32(128, 256), "n": f32(64, 128), "m": f32(128, 128)},
            f32(64, 64, 64),
        ),
        _THREE,
    ),
    "scan of scans": (scan_of_scans, (f32(128, 128), f32(16, 16, 64, 128)), _THREE),
    "steps in chunks": (inner_checkpoint, (f32(128, 128), f32(16, 16, 64, 128)), _TWO),
    "recurrent layers": (
        layers_over_time,
        (stacked({"x": f32(64, 64), "h": f32(64, 64)}, 8), f32(64, 32, 64)),
        _TWO,
    ),
    "ODE": (ode, (_AB, f32(512, 128)), _THREE),
    "wave": (wave, (f32(128, 128), f32(128, 128)), _TWO),
    "attention": (
        plain_attention,
        ([{"q": f32(64, 64), "k": f32(64, 64), "v": f32(64, 64)}] * 4, f32(512, 64)),
        _ALL,
    ),
    "chunked attention": (
        chunked_attention,
        ({"q": f32(64, 64), "k": f32(64, 64), "v": f32(64, 64)}, f32(1024, 64)),
        _TWO,
    ),
    "distances": (distances, (f32(1000, 16),), _TWO),
    "kernel": (gaussian_kernel, (f32(1000, 16), f32(1000, 4)), _TWO),
    "contrastive": (contrastive, (_AB, f32(1024, 128), f32(1024, 128)), _THREE),
    "graph": (
        graph,
        ([{"m": f32(128, 64), "u": f32(64, 64)}] * 3, f32(500, 64), i32(4000), i32(4000)),
        _TWO,
    ),
    "mapped network": (per_example, ([f32(128, 128)] * 6, f32(1024, 128)), _TWO),
    "state space": (state_space, ([{"a": f32(64, 64), "b": f32(64, 64)}] * 3, f32(512, 64)), _TWO),
}
