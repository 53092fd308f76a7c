"""Ten sharded programs on eight devices, as users write them, and four with a planted mistake.

    SHARDED["fsdp"]() -> Sharded(function, arguments, mesh)

The functions are under `jax.jit`, with the shardings of their arguments. The arguments are
abstract. Sizes are tiny, so that each compiles in less than a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


class Sharded(NamedTuple):
    """A function under `jax.jit`, its abstract arguments, and its mesh."""

    function: Any
    arguments: tuple[Any, ...]
    mesh: Mesh

    def compiled(self) -> jax.stages.Compiled:
        """Compile the function for the mesh with JAX only."""
        with jax.set_mesh(self.mesh):
            return self.function.lower(*self.arguments).compile()


def mesh_of(kind: AxisType = AxisType.Auto, **axes: int) -> Mesh:
    """Return a mesh of CPU devices whose axes all have one axis type."""
    devices = jax.devices("cpu")[: math.prod(axes.values())]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), (kind,) * len(axes), devices=devices)


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    """Return the type of an array of 32-bit floats."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    """Return the type of an array of 32-bit integers."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def under_jit(function: Callable[..., Any], mesh: Mesh, *specs: Any) -> Any:
    """Put a function under `jax.jit` with a spec, or a tree of them, for each argument."""
    is_spec = lambda each: isinstance(each, P)  # noqa: E731
    return jax.jit(
        function, in_shardings=jax.tree.map(partial(NamedSharding, mesh), specs, is_leaf=is_spec)
    )


def trained(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step of gradient descent by the first argument of a loss."""

    def step(params: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return step


def data() -> Sharded:
    """Data parallel: the batch is split, and the gradients are summed over all devices."""
    mesh = mesh_of(data=8)

    def loss(params, x, y):
        hidden = jnp.tanh(x @ params["in"])
        return jnp.mean(jnp.square(hidden @ params["out"] - y))

    params = {"in": floats(16, 32), "out": floats(32, 8)}
    step = under_jit(trained(loss), mesh, P(), P("data"), P("data"))
    return Sharded(step, (params, floats(32, 16), floats(32, 8)), mesh)


def _mlp(params, x):
    hidden = jax.nn.gelu(x @ params["in"])
    return hidden @ params["out"]


def tensor() -> Sharded:
    """Tensor parallel: the hidden units are split, and the second product sums over devices."""
    mesh = mesh_of(data=2, model=4)
    params = {"in": floats(16, 64), "out": floats(64, 16)}
    specs = {"in": P(None, "model"), "out": P("model", None)}
    function = under_jit(lambda p, x: x + _mlp(p, x), mesh, specs, P("data"))
    return Sharded(function, (params, floats(32, 16)), mesh)


def fsdp() -> Sharded:
    """Fully sharded: weights and batch on one axis. Weights are gathered at their uses."""
    mesh = mesh_of(fsdp=8)

    def loss(params, x):
        for layer in params:
            gathered = jax.tree.map(lambda w: with_sharding_constraint(w, P()), layer)
            x = with_sharding_constraint(x + _mlp(gathered, x), P("fsdp"))
        return jnp.mean(jnp.square(x))

    layer = {"in": floats(16, 64), "out": floats(64, 16)}
    step = under_jit(trained(loss), mesh, P("fsdp"), P("fsdp"))
    return Sharded(step, ([layer, layer], floats(32, 16)), mesh)


def scanned() -> Sharded:
    """Fully sharded layers under `scan`: each iteration gathers the weights of its layer."""
    mesh = mesh_of(fsdp=8)

    def layer(x, weights):
        x = jnp.tanh(x @ with_sharding_constraint(weights, P()))
        return with_sharding_constraint(x, P("fsdp")), None

    def loss(params, x):
        return jnp.mean(jnp.square(jax.lax.scan(layer, x, params)[0]))

    step = under_jit(trained(loss), mesh, P(None, "fsdp"), P("fsdp"))
    return Sharded(step, (floats(6, 32, 32), floats(16, 32)), mesh)


def _attention(queries, keys, values):
    scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys) / 4
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), values)


def sequence() -> Sharded:
    """Sequence parallel: heads are split in the attention, and the sequence outside of it."""
    mesh = mesh_of(data=2, seq=4)

    def block(weights, x):
        q, k, v = (
            with_sharding_constraint(
                jnp.einsum("bsm,mhd->bshd", x, w), P("data", None, "seq", None)
            )
            for w in weights
        )
        mixed = _attention(q, k, v).reshape(x.shape)
        return with_sharding_constraint(x + mixed, P("data", "seq", None))

    function = under_jit(block, mesh, P(), P("data", "seq"))
    return Sharded(function, (floats(3, 32, 4, 8), floats(4, 16, 32)), mesh)


def expert() -> Sharded:
    """Expert parallel: each device sends its tokens to the experts of the others, and back."""
    mesh = mesh_of(expert=8)

    def mixture(weights, tokens):  # one expert and one shard of the tokens per device
        sent = jax.lax.all_to_all(tokens.reshape(8, -1, 16), "expert", 0, 0)
        done = jax.nn.relu(sent @ weights[0])
        return jax.lax.all_to_all(done, "expert", 0, 0).reshape(tokens.shape)

    routed = jax.shard_map(
        mixture, mesh=mesh, in_specs=(P("expert"), P("expert")), out_specs=P("expert")
    )

    def loss(weights, tokens):
        return jnp.mean(jnp.square(routed(weights, tokens)))

    step = under_jit(trained(loss), mesh, P("expert"), P("expert"))
    return Sharded(step, (floats(8, 16, 16), floats(128, 16)), mesh)


def pipeline() -> Sharded:
    """A pipeline by `shard_map`: one stage per device, microbatches pass along a ring in a loop."""
    mesh = mesh_of(stage=8)

    def stages(weights, batches):
        stage, last = jax.lax.axis_index("stage"), jax.lax.axis_size("stage") - 1
        ring = [(i, (i + 1) % 8) for i in range(8)]

        def tick(state, i):
            given = jnp.where(stage == 0, batches[jnp.minimum(i, 3)], state)
            made = jnp.tanh(given @ weights[0])
            return jax.lax.ppermute(made, "stage", ring), jnp.where(stage == last, made, 0.0)

        start = jax.lax.pcast(jnp.zeros(batches.shape[1:]), "stage", to="varying")
        _, made = jax.lax.scan(tick, start, jnp.arange(11))
        return jax.lax.psum(made[7:], "stage")

    over = jax.shard_map(stages, mesh=mesh, in_specs=(P("stage"), P()), out_specs=P())
    return Sharded(
        under_jit(over, mesh, P("stage"), P()), (floats(8, 16, 16), floats(4, 8, 16)), mesh
    )


def uneven() -> Sharded:
    """Sizes that are not divisible by eight: XLA pads the shards."""
    mesh = mesh_of(data=8)

    def normalised(x, weights):
        x = with_sharding_constraint(x[:30], P("data"))
        x = (x - x.mean(0)) / (x.std(0) + 1.0)
        return with_sharding_constraint(x @ weights, P(None, "data")).sum(0)

    function = under_jit(normalised, mesh, P("data"), P())
    return Sharded(function, (floats(32, 10), floats(10, 12)), mesh)


def explicit() -> Sharded:
    """Explicit axes: the types carry the shardings, and a reshard is explicit."""
    mesh = mesh_of(AxisType.Explicit, data=2, model=4)

    def forward(weights, x):
        hidden = jnp.tanh(jnp.einsum("bi,ij->bj", x, weights["in"]))
        out = jnp.einsum("bj,jk->bk", hidden, weights["out"], out_sharding=P("data", None))
        return jax.sharding.reshard(out, P(None, "model"))

    def typed(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    weights = {"in": typed(P(None, "model"), 16, 64), "out": typed(P("model", None), 64, 16)}
    return Sharded(jax.jit(forward), (weights, typed(P("data", None), 32, 16)), mesh)


def partly_manual() -> Sharded:
    """A `shard_map` over one axis of two; the partitioner splits its body over the other."""
    mesh = mesh_of(data=2, model=4)

    def body(params, x):
        out = with_sharding_constraint(_mlp(params, x), P(None, None))
        return jax.lax.pmean(out.sum(0), "data")

    over = jax.shard_map(
        body, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"}
    )
    params = {"in": floats(16, 64), "out": floats(64, 16)}
    specs = {"in": P(None, "model"), "out": P("model", None)}
    return Sharded(under_jit(over, mesh, specs, P("data")), (params, floats(32, 16)), mesh)


#: One program of each kind of parallelism.
SHARDED: dict[str, Callable[[], Sharded]] = {
    make.__name__: make
    for make in (
        data,
        tensor,
        fsdp,
        scanned,
        sequence,
        expert,
        pipeline,
        uneven,
        explicit,
        partly_manual,
    )
}


#: The width of the layers of programs with a mistake.
_WIDTH = 32


def missing_constraint() -> Sharded:
    """Three layers, the second of which gathers the batch because it lacks a constraint."""
    mesh = mesh_of(data=8)

    def forward(layers, x):
        for i, weights in enumerate(layers):
            spec = P() if i == 1 else P("data")
            x = with_sharding_constraint(jnp.tanh(x @ weights), spec)  # mistake
        return x

    function = under_jit(forward, mesh, P(), P("data"))
    return Sharded(function, ([floats(_WIDTH, _WIDTH)] * 3, floats(64, _WIDTH)), mesh)


def replicated_embedding() -> Sharded:
    """A large embedding that is replicated on each device, and so is its gradient."""
    mesh = mesh_of(data=8)

    def loss(params, tokens):
        x = params["embedding"][tokens]  # mistake
        return jnp.mean(jnp.square(jnp.tanh(x @ params["weights"])))

    params = {"embedding": floats(4096, _WIDTH), "weights": floats(_WIDTH, _WIDTH)}
    step = under_jit(trained(loss), mesh, P(), P("data"))
    return Sharded(step, (params, integers(64)), mesh)


def gathered_in_loop() -> Sharded:
    """A loop that gathers its whole state in each iteration and splits it again."""
    mesh = mesh_of(data=8)

    def forward(weights, x):
        def body(_, state):
            mixed = with_sharding_constraint(state @ weights, P("data"))
            whole = with_sharding_constraint(jnp.tanh(mixed), P())  # mistake
            return with_sharding_constraint(whole - state, P("data"))

        return jax.lax.fori_loop(0, 12, body, x).sum()

    function = under_jit(forward, mesh, P(), P("data"))
    return Sharded(function, (floats(_WIDTH, _WIDTH), floats(64, _WIDTH)), mesh)


def reshaped_batch() -> Sharded:
    """A batch axis that a reshape merges as a minor axis, where no spec can split it."""
    mesh = mesh_of(data=8)

    def forward(weights, x):
        swapped = x.transpose(1, 0, 2)
        merged = swapped.reshape(-1, _WIDTH)  # mistake
        return with_sharding_constraint(jnp.tanh(merged @ weights), P("data")).sum(1)

    function = under_jit(forward, mesh, P(), P("data"))
    return Sharded(function, (floats(_WIDTH, _WIDTH), floats(8, 24, _WIDTH)), mesh)


#: Programs with one mistake each, in the line that ends in `# mistake`.
MISTAKES: dict[str, Callable[[], Sharded]] = {
    make.__name__: make
    for make in (missing_constraint, replicated_embedding, gathered_in_loop, reshaped_batch)
}
