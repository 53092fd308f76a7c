"""Training steps of real libraries on eight devices, sharded as their users do.

    MODELS["linen"]() -> Sharded(function, arguments, mesh)

Flax and Equinox are imported by the functions that use them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.programs.sharded import Sharded, integers, mesh_of


def _shardings(mesh: Any, specs: Any) -> Any:
    is_spec = lambda each: isinstance(each, P)  # noqa: E731
    return jax.tree.map(partial(NamedSharding, mesh), specs, is_leaf=is_spec)


def linen() -> Sharded:
    """A transformer in Flax Linen, with its state sharded by `nn.get_partition_spec`, and Adam."""
    import flax.linen as nn
    import optax
    from flax.training.train_state import TrainState

    mesh = mesh_of(data=2, model=4)
    normal = nn.initializers.normal(0.02)

    def dense(features: int, *names: str | None) -> nn.Dense:
        initial = nn.with_partitioning(normal, names)
        return nn.Dense(features, use_bias=False, kernel_init=initial)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            heads = (*x.shape[:2], 4, -1)
            y = nn.LayerNorm()(x)
            q, k, v = (dense(x.shape[-1], None, "model")(y).reshape(heads) for _ in range(3))
            mixed = nn.dot_product_attention(q, k, v, mask=nn.make_causal_mask(x[..., 0]))
            x = x + dense(x.shape[-1], "model", None)(mixed.reshape(x.shape))
            hidden = nn.gelu(dense(4 * x.shape[-1], None, "model")(nn.LayerNorm()(x)))
            x = x + dense(x.shape[-1], "model", None)(hidden)
            return with_sharding_constraint(x, P("data"))

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            table = nn.with_partitioning(normal, ("model", None))
            embed = nn.Embed(64, 32, embedding_init=table)
            x = embed(tokens)
            for _ in range(2):
                x = Block()(x)
            return embed.attend(nn.LayerNorm()(x))

    model = Transformer()

    def create(key: Any, tokens: Any) -> Any:
        params = model.init(key, tokens)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    def step(state: Any, tokens: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = state.apply_fn({"params": params}, tokens[:, :-1])
            labels = tokens[:, 1:]
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    tokens = integers(8, 17)
    with jax.set_mesh(mesh):
        state = jax.eval_shape(create, jax.random.key(0), integers(8, 16))
    placed = _shardings(mesh, nn.get_partition_spec(state))
    both = (placed, NamedSharding(mesh, P("data")))
    function = jax.jit(step, in_shardings=both, out_shardings=(placed, None), donate_argnums=0)
    return Sharded(function, (state, tokens), mesh)


def equinox() -> Sharded:
    """An MLP in Equinox, sharded by `eqx.filter_shard` inside `filter_jit`, with Adam."""
    import equinox as eqx
    import optax

    mesh = mesh_of(data=8)
    optimizer = optax.adam(1e-3)
    model = eqx.nn.MLP(16, 8, 64, 2, key=jax.random.key(0))
    state = optimizer.init(eqx.filter(model, eqx.is_array))
    replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    def loss(model: Any, x: Any, y: Any) -> Any:
        return jnp.square(jax.vmap(model)(x) - y).mean()

    @eqx.filter_jit(donate="all")
    def step(model: Any, state: Any, x: Any, y: Any) -> Any:
        model, state = eqx.filter_shard((model, state), replicated)
        x, y = eqx.filter_shard((x, y), split)
        value, grads = eqx.filter_value_and_grad(loss)(model, x, y)
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
        model = eqx.apply_updates(model, updates)
        return *eqx.filter_shard((model, state), replicated), value

    return Sharded(step, (model, state, jnp.ones((32, 16)), jnp.ones((32, 8))), mesh)


def nnx() -> Sharded:
    """A transformer in Flax NNX as MaxText shards it: layers under `scan` and `remat`, two axes."""
    import optax
    from flax import nnx

    mesh = mesh_of(fsdp=4, tensor=2)
    width, heads = 32, 4

    def named(*names: str | None) -> Any:
        return nnx.with_partitioning(nnx.initializers.normal(0.02), names)

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            def linear(features: tuple[int, int], *names: str) -> nnx.Linear:
                return nnx.Linear(*features, use_bias=False, kernel_init=named(*names), rngs=rngs)

            self.norms = nnx.Param(jnp.ones((2, width)))
            self.qkv = linear((width, 3 * width), "fsdp", "tensor")
            self.out = linear((width, width), "tensor", "fsdp")
            self.up = linear((width, 4 * width), "fsdp", "tensor")
            self.down = linear((4 * width, width), "tensor", "fsdp")

        def __call__(self, x: Any) -> Any:
            def norm(y: Any, i: int) -> Any:
                scale = jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-6)
                return y * scale * self.norms[i]

            qkv = self.qkv(norm(x, 0)).reshape(*x.shape[:2], 3, heads, -1)
            qkv = with_sharding_constraint(qkv, P("fsdp", None, None, "tensor"))
            q, k, v = (qkv[:, :, i] for i in range(3))
            mixed = nnx.dot_product_attention(q, k, v).reshape(x.shape)
            x = with_sharding_constraint(x + self.out(mixed), P("fsdp"))
            hidden = with_sharding_constraint(
                nnx.silu(self.up(norm(x, 1))), P("fsdp", None, "tensor")
            )
            return with_sharding_constraint(x + self.down(hidden), P("fsdp"))

    class Transformer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
            def blocks(rngs: nnx.Rngs) -> Block:
                return Block(rngs)

            self.embed = nnx.Embed(64, width, embedding_init=named("tensor", "fsdp"), rngs=rngs)
            self.blocks = blocks(rngs)

        def __call__(self, tokens: Any) -> Any:
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            @nnx.remat
            def run(block: Block, x: Any) -> Any:
                return block(x)

            x = with_sharding_constraint(self.embed(tokens), P("fsdp"))
            return self.embed.attend(run(self.blocks, x))

    def create() -> Any:
        model = Transformer(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    with jax.set_mesh(mesh):
        both = nnx.eval_shape(create)
    graphdef, state = nnx.split(both)
    specs = nnx.get_partition_spec(state)

    def step(state: Any, tokens: Any) -> Any:
        model, optimizer = nnx.merge(graphdef, state)

        def loss(model: Any) -> Any:
            logits = model(tokens[:, :-1])
            labels = tokens[:, 1:]
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), value

    placed = _shardings(mesh, specs)
    function = jax.jit(
        step,
        in_shardings=(placed, NamedSharding(mesh, P("fsdp"))),
        out_shardings=(placed, None),
        donate_argnums=0,
    )
    return Sharded(function, (state, integers(8, 17)), mesh)


#: One model of each library.
MODELS: dict[str, Callable[[], Sharded]] = {make.__name__: make for make in (linen, equinox, nnx)}
