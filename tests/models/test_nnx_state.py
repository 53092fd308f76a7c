"""A Program, and the result of jaxprtool.jit, update Flax NNX objects as nnx.jit does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.errors import ArgumentsError, UnsupportedError

pytestmark = pytest.mark.models
nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")

X = jax.random.normal(jax.random.key(1), (4, 3))
ADAM = optax.adam(1e-2)


def linear(seed=0):
    return nnx.Linear(3, 3, rngs=nnx.Rngs(seed))


def loss_of(model, x):
    return jnp.square(model(x)).mean()


def sgd(model, x):
    loss, grads = nnx.value_and_grad(loss_of)(model, x)
    new = jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads)
    nnx.update(model, new)
    return loss


# --- steps, and their arguments -------------------------------------------------------------------


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(3, 4, use_bias=False, rngs=rngs)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.layers[0](x)))))


def training():
    model = Net()
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    return (model, nnx.Optimizer(model, ADAM, wrt=nnx.Param), metrics, X), {}


def train(model, optimizer, metrics, x):
    loss, grads = nnx.value_and_grad(loss_of)(model, x)
    optimizer.update(model, grads)
    metrics.update(loss=loss)
    return loss


class Tied(nnx.Module):
    """Two layers that share a kernel, and one layer in two places."""

    def __init__(self):
        self.a, self.b = linear(), linear(1)
        self.b.kernel = self.a.kernel
        self.c = self.b

    def __call__(self, x):
        return self.c(jnp.tanh(self.b(jnp.tanh(self.a(x)))))


class Sowing(nnx.Module):
    def __init__(self):
        self.layer, self.calls, self.old = linear(), 0, nnx.Cache(X)

    def __call__(self, x):
        return self.layer(x)


def attributes(model, x):
    """Add an attribute, delete one, and increment a static counter."""
    model.new = nnx.Intermediate(model(x))
    model.calls += 1
    del model.old
    return x.sum()


class Plain(nnx.Module):
    def __init__(self):
        self.a, self.pair = nnx.data(jnp.zeros(3)), nnx.data((jnp.zeros(2), nnx.Cache(jnp.ones(2))))


def plain(model, x):
    model.a = model.a + 1
    model.pair = (model.pair[0] + 1, model.pair[1])
    model.pair[1][...] *= 2
    return x.sum()


class Stack(nnx.Module):
    def __init__(self):
        make = nnx.vmap(lambda key: nnx.Linear(3, 3, rngs=nnx.Rngs(key)))
        self.layers = make(jax.random.split(jax.random.key(0), 3))
        self.count = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.count[...] += 1
        over = nnx.scan(
            lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )
        return over(x, self.layers)


def shared():
    model = linear()
    return (model, model, X), {}


def average(model, teacher, x):
    loss = sgd(model, x)
    teacher.kernel[...] = 0.9 * teacher.kernel[...] + 0.1 * model.kernel[...]
    return loss + loss_of(teacher, x)


def metrics_reset(metrics, x):
    metrics.update(loss=x.sum())
    value = metrics.compute()
    metrics.reset()
    return value


def drawn(rngs, x):
    return jax.random.normal(rngs(), x.shape) + x


def of_a_variable(variable, x):
    variable[...] = variable[...] * 0.9 + x.mean()
    return variable[...].sum()


def metadata(model, x):
    """Change the value and the metadata of a Variable."""
    count = model.bias.get_metadata().get("count", 0)
    model.bias[...] += x.sum()
    model.bias.set_metadata(count=count + 1)
    return x.sum() * count


def several_arrays():
    return (nnx.Cache({"a": jnp.zeros(3), "b": jnp.ones(2)}), X), {}


def tree_in_a_variable(cache, x):
    value = cache.get_value()
    cache.set_value({"a": value["a"] + x.sum(), "b": value["b"] * 2})
    return value["a"].sum()


def exchanged(model, other, x):
    """Exchange the values of two Variables, and change a third."""
    a, b = model.kernel[...], other.kernel[...]
    model.kernel[...], other.kernel[...] = b, a
    model.bias[...] += 1
    return (a * 2 + b).sum()


def by_name(*, model, x):
    return sgd(model, x)


def in_containers(models, x):
    return sgd(models["a"], x) + sgd(models["b"][0], x)


def evaluation(model, x):
    return model(x).sum()


#: By name: the function, a function that makes its arguments, and the number of calls.
STEPS: dict[str, Any] = {
    "training": (train, training, 5),
    "tied": (sgd, lambda: ((Tied(), X), {}), 3),
    "one object twice": (average, shared, 3),
    "two models": (average, lambda: ((linear(), linear(1), X), {}), 3),
    "containers": (in_containers, lambda: (({"a": linear(), "b": [linear(1)]}, X), {}), 3),
    "by name": (by_name, lambda: ((), {"x": X, "model": linear()}), 3),
    "attributes": (attributes, lambda: ((Sowing(), X), {}), 1),
    "plain arrays": (plain, lambda: ((Plain(), X), {}), 3),
    "scanned": (sgd, lambda: ((Stack(), X), {}), 3),
    "metrics": (metrics_reset, lambda: ((training()[0][2], X), {}), 2),
    "rngs": (drawn, lambda: ((nnx.Rngs(0), X), {}), 3),
    "a variable": (of_a_variable, lambda: ((nnx.Param(jnp.ones(3)), X), {}), 3),
    "metadata": (metadata, lambda: ((linear(), X), {}), 1),
    "several arrays in a variable": (tree_in_a_variable, several_arrays, 3),
    "exchanged values": (exchanged, lambda: ((linear(), linear(1), X), {}), 3),
    "evaluation": (evaluation, lambda: ((linear(), X), {}), 2),
}

WAYS: dict[str, Any] = {
    "a program": lambda fun, args: jaxprtool.trace(fun, *args[0], **args[1]),
    "a program, nnx.jit": lambda fun, args: jaxprtool.trace(nnx.jit(fun), *args[0], **args[1]),
    "-O3": lambda fun, args: jaxprtool.trace(nnx.jit(fun), *args[0], **args[1]).apply("-O3"),
    "nnx.jit of a program": lambda fun, args: nnx.jit(jaxprtool.trace(fun, *args[0], **args[1])),
    "jit": lambda fun, args: jaxprtool.jit(fun),
    "jit, nnx.jit": lambda fun, args: jaxprtool.jit(nnx.jit(fun), passes="-O3"),
}


def numbers(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path): np.asarray(
            jax.random.key_data(leaf)
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        )
        for path, leaf in leaves
    }


def close(mine, expected):
    mine, expected = numbers(mine), numbers(expected)
    assert mine.keys() == expected.keys()
    for path in mine:
        np.testing.assert_allclose(mine[path], expected[path], 1e-3, 1e-5, err_msg=path)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", STEPS)
def test_several_calls_return_and_leave_the_same_as_with_nnx_jit(name, way):
    fun, make, calls = STEPS[name]
    (args, kwargs), (mine, my_kwargs) = make(), make()
    expected, called = nnx.jit(fun), WAYS[way](fun, (mine, my_kwargs))
    for _ in range(calls):
        close(called(*mine, **my_kwargs), expected(*args, **kwargs))
        close((mine, my_kwargs), (args, kwargs))


def test_an_argument_that_is_not_a_pytree_is_named():
    with pytest.raises(ArgumentsError, match="argument x is not a pytree"):
        jaxprtool.trace(lambda x: x, {1: 1.0, "a": 2.0})


def test_objects_keep_their_identity():
    model = Tied()
    jaxprtool.jit(sgd)(model, X)
    jaxprtool.trace(sgd, model, X)(model, X)
    assert model.a.kernel is model.b.kernel and model.c is model.b
    sowing = Sowing()
    jaxprtool.trace(attributes, sowing, X)(sowing, X)
    assert sowing.calls == 1 and not hasattr(sowing, "old")
    assert isinstance(sowing.new, nnx.Intermediate)


def test_one_function_updates_objects_that_share_variables_in_different_ways():
    mine, expected = jaxprtool.jit(nnx.jit(average)), nnx.jit(average)
    one, other = [(m, m, linear(1), linear(2)) for m in (linear(), linear())]
    for _ in range(3):
        for first, second in ((0, 1), (2, 3), (3, 2), (0, 3)):
            close(mine(one[first], one[second], X), expected(other[first], other[second], X))
            close(one, other)


def test_a_static_attribute_may_become_an_equal_one_of_another_type():

    class Flagged(nnx.Module):
        def __init__(self, flag):
            self.flag, self.scale = flag, nnx.Param(jnp.ones(2))

    def flagged(model, x):
        model.scale[...] *= 2
        model.flag = True
        return x.sum()

    jitted = jaxprtool.jit(nnx.jit(flagged))
    for flag in (1, 1):
        model = Flagged(flag)
        jitted(model, X)
        assert model.flag is True and model.scale[0] == 2


def biased(model, x):
    model.bias[...] += x.sum()
    return (x @ model.kernel[...]).sum()


@pytest.mark.parametrize("passes", ["", "dce", "-O1", "-O3"])
def test_a_donated_object_keeps_unchanged_state(passes):
    fun = nnx.jit(biased, donate_argnums=0)
    mine, other = linear(), linear()
    program = jaxprtool.trace(fun, mine, X).apply(passes)
    for _ in range(2):
        close(program(mine, X), fun(other, X))
    close(mine, other)


def test_the_new_state_is_a_result_by_path_and_dce_keeps_it():
    model = linear()
    program = jaxprtool.trace(nnx.jit(sgd), model, X)
    names = ("result", "updated.model.bias.value", "updated.model.kernel.value")
    assert program.out_names == names == program.apply("-O1").out_names
    assert jaxprtool.trace(nnx.jit(evaluation), model, X).out_names == ("result",)


def test_in_files_and_as_python_the_new_state_is_the_second_of_a_pair(tmp_path):
    model = linear()
    program = jaxprtool.trace(sgd, model, X)
    jaxprtool.write(program, tmp_path / "sgd.jaxpr")
    read = jaxprtool.read(tmp_path / "sgd.jaxpr")
    assert jaxprtool.equivalent(program, read) and read.out_names == program.out_names
    loss, state = read(model, X)
    space: dict[str, Any] = {}
    exec(jaxprtool.to_python(program), space)
    close(space["sgd"](model, X), (loss, state))
    assert program(model, X) == loss
    close(state, {"model.bias.value": model.bias[...], "model.kernel.value": model.kernel[...]})


def test_derivatives_return_the_new_state():
    def scaled(x, model):
        model.kernel[...] *= 2
        return (x @ model.kernel[...]).sum()

    program = jaxprtool.trace(scaled, X, linear())
    with pytest.raises(UnsupportedError, match="needs a result that is one number"):
        program.apply("grad")
    grad, state = program.apply("grad(has_aux=True)")(X, linear())
    np.testing.assert_allclose(state["model.kernel.value"], 2 * linear().kernel[...])
    np.testing.assert_allclose(grad[0], 2 * linear().kernel[...].sum(1))


def test_objects_of_a_batched_program_have_the_state_of_each_example():
    program = jaxprtool.trace(of_a_variable, nnx.Param(jnp.ones(3)), X)
    each = nnx.Param(jnp.ones((2, 3)))
    program.apply("batch(axis_size=2)")(each, jnp.stack([X, 2 * X]))
    assert not np.allclose(each[0], each[1])
    with pytest.raises(ArgumentsError, match=r"variable.* has shape .3., but its new value .*2, 3"):
        program.apply("batch(in_axes=(None, 0), axis_size=2)")(
            nnx.Param(jnp.ones(3)), jnp.stack([X, X])
        )


def test_static_arguments_are_those_of_nnx_jit():
    @nnx.jit(static_argnames="double")
    def scaled(variable, double):
        if double:
            variable[...] *= 2
        return variable[...].sum()

    variable = nnx.Param(jnp.ones(3))
    fast = jaxprtool.jit(scaled)
    assert fast(variable, double=True) == 6 and fast(variable, True) == 12
    assert fast(variable, False) == 12
    jaxprtool.trace(scaled, variable, True, static_argnums=1)(variable)
    np.testing.assert_array_equal(variable[...], [8, 8, 8])


def test_jaxs_own_functions_treat_objects_as_without_jaxprtool():
    variable = nnx.Param(jnp.ones(3))
    ours, theirs = (
        make(of_a_variable)(variable, X) for make in (jaxprtool.make_jaxpr, jax.make_jaxpr)
    )
    assert ours.out_avals == theirs.out_avals
    program = jaxprtool.trace(jax.jit(of_a_variable), variable, X)
    assert program.out_names == ("result",)


def test_jit_for_buckets_refuses_to_lose_the_new_state():
    def step(model, x):
        model.calls[...] += 1
        return x.sum()

    class Counted(nnx.Module):
        def __init__(self):
            self.calls = nnx.Variable(jnp.zeros(()))

    jitted = jaxprtool.jit(step, shapes={"n": 8}, types={"x": "f32[n]"})
    with pytest.raises(ArgumentsError, match="with shapes its new state would be lost"):
        jitted(Counted(), jnp.ones(5))


def test_an_artifact_takes_the_state_of_nnx_objects():
    from jaxprtool.formats.lowering import exported

    def call(model, x):
        return model(x)

    def pure(state, x):
        model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        nnx.update(model, state)
        return model(x)

    model, x = nnx.Linear(3, 3, rngs=nnx.Rngs(0)), jnp.ones((2, 3))
    with pytest.raises(UnsupportedError, match="takes objects of Flax NNX") as refused:
        exported(jaxprtool.trace(call, model, x))
    assert "nnx.to_pure_dict" in refused.value.hint
    assert exported(jaxprtool.trace(pure, nnx.to_pure_dict(nnx.state(model)), x))
