"""Modules of other front ends: PyTorch by torchax, Keras, and TensorFlow, each if it is installed.

What a module computes is what its front end does: the artifact's own bits, or TensorFlow's numbers.
Each package may need an environment of its own: the tests of the others are then skipped.
"""

import os
import sys

import jax
import numpy as np
import pytest

from jaxprtool.formats.stablehlo import read_module_program
from jaxprtool.ir.program import type_check

pytestmark = pytest.mark.models
os.environ.setdefault("KERAS_BACKEND", "jax")


def numbers(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def prove(artifact, args):
    """Read the module of an artifact, and compare its results with those of the artifact."""
    with jax.enable_x64("i64" in artifact.mlir_module() or "f64" in artifact.mlir_module()):
        program = read_module_program(artifact.mlir_module_serialized)
        type_check(program)
        leaves = jax.tree.leaves(args)
        positional, keywords = jax.tree.unflatten(artifact.in_tree, leaves)
        wanted = jax.tree.leaves(jax.jit(artifact.call)(*positional, **keywords))
        kept = [leaves[i] for i in artifact.module_kept_var_idx]
        results = jax.jit(program.flat_function(donate=False))(*kept)
    assert len(wanted) == len(results) > 0
    for x, y in zip(wanted, results, strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
    return program


# --- PyTorch --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch():
    torch = pytest.importorskip("torch")
    packet = torch._ops.OpOverloadPacket
    lookup = packet.__getattr__

    def with_removed(self, name):
        try:
            return lookup(self, name)
        except AttributeError:
            if "name" in name:  # torchax lists overloads that newer releases of torch lack
                return self, name
            raise

    packet.__getattr__ = with_removed
    try:
        pytest.importorskip("torchax.export")
    finally:
        packet.__getattr__ = lookup
    torch.manual_seed(0)
    return torch


def torch_models(torch):
    nn, functional = torch.nn, torch.nn.functional

    class Function(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def forward(self, *args):
            return self.function(*args)

    image, rows = torch.from_numpy(numbers(2, 3, 8, 8)), torch.from_numpy(numbers(3, 4))
    picture = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    dense = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
    places = torch.tensor([[0, 1, 1, 3]] * 3)
    return {
        "convolution": (picture, image),
        "dense": (dense, rows),
        "transposed": (nn.ConvTranspose2d(3, 4, 3, stride=2), image),
        "lstm": (nn.LSTM(4, 5), rows),
        "transformer": (nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), rows[None]),
        "sort": (Function(lambda x: tuple(torch.sort(x, 1, descending=True))), rows),
        "top_k": (Function(lambda x: tuple(torch.topk(x, 2))), rows),
        "sums": (Function(lambda x: (x.cumsum(1), x.argmax(1), x.std(0))), rows),
        "scatter": (Function(lambda x: torch.zeros(3, 4).scatter_add(1, places, x)), rows),
        "resize": (Function(lambda x: functional.interpolate(x, scale_factor=2)), image),
        "loss": (Function(lambda x: functional.cross_entropy(x, torch.arange(3))), rows),
        "qr": (Function(lambda x: torch.linalg.qr(x)[1]), rows),
        "special": (Function(lambda x: torch.erf(x) + torch.lgamma(x.abs() + 1)), rows),
    }


def test_torchax(torch):
    from torchax.export import exported_program_to_stablehlo

    for name, (model, x) in torch_models(torch).items():
        print(name)  # shown if it fails
        exported = torch.export.export(model.eval(), (x,))
        weights, artifact = exported_program_to_stablehlo(exported)
        prove(artifact, [*weights, x.numpy()])


# --- Keras ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keras():
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "jax":
        pytest.skip("Keras has another back end than JAX in this process")
    keras.utils.set_random_seed(0)
    return keras


def keras_models(keras):
    layers = keras.layers

    def sequence(shape, *parts):
        return keras.Sequential([keras.Input(shape), *parts])

    tokens = keras.Input((7,), dtype="int32")
    embedded = layers.Embedding(11, 6)(tokens)
    attended = layers.MultiHeadAttention(2, 3)(embedded, embedded)
    image = (8, 8, 3)
    pictures = layers.Conv2D(4, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten()
    return {
        "convolution": sequence(image, layers.BatchNormalization(), *pictures, layers.Dense(5)),
        "recurrent": sequence((6, 4), layers.Bidirectional(layers.LSTM(3)), layers.Dense(2)),
        "separable": sequence(image, layers.SeparableConv2D(4, 3), layers.GlobalMaxPooling2D()),
        "resize": sequence(image, layers.Conv2DTranspose(4, 3, strides=2), layers.UpSampling2D()),
        "attention": keras.Model(tokens, layers.Dense(2)(attended + embedded)),
    }


@pytest.mark.parametrize("name", ["convolution", "recurrent", "separable", "resize", "attention"])
def test_keras_and_five_steps_of_training_from_the_module_alone(name, keras):
    model = keras_models(keras)[name]
    x = numbers(2, *model.input_shape[1:])
    x = np.abs(x * 5).astype(np.int32) % 11 if name == "attention" else x
    optimizer = keras.optimizers.Adam(1e-2)
    optimizer.build(model.trainable_variables)
    variables = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    state = tuple([variable.value for variable in group] for group in variables)
    y = np.zeros(jax.eval_shape(model.stateless_call, *state[:2], x)[0].shape, np.float32)

    def step(weights, others, moments, x, y):
        def loss(weights, others):
            out, others = model.stateless_call(weights, others, x, training=True)
            return ((out - y) ** 2).mean(), others

        (value, others), slopes = jax.value_and_grad(loss, has_aux=True)(weights, others)
        weights, moments = optimizer.stateless_apply(moments, slopes, weights)
        return value, weights, others, moments

    artifact = jax.export.export(jax.jit(step))(*state, x, y)
    program = prove(artifact, [*state, x, y])
    run, reference = jax.jit(program.flat_function(donate=False)), jax.jit(artifact.call)
    other, losses = state, []
    for _ in range(5):
        leaves = jax.tree.leaves((*state, x, y))
        value, *rest = run(*(leaves[i] for i in artifact.module_kept_var_idx))
        state = jax.tree.unflatten(jax.tree.structure(state), rest)
        _, *other = reference(*other, x, y)
        losses.append(float(value))
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert losses[-1] < losses[0]


# --- TensorFlow -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tensorflow():
    if "torch" in sys.modules:
        pytest.skip("PyTorch is in this process")
    return pytest.importorskip("tensorflow")


def tensorflow_functions(tf):
    weights, kernel, rows = tf.constant(numbers(4, 3)), tf.constant(numbers(3, 3, 2, 4)), (3, 4)
    image, places = (1, 6, 6, 2), tf.constant([[0], [2]])

    def loop(x):
        return tf.while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, tf.sin(x)), [0, x])[1]

    def special(x):
        return tf.math.erf(x) + tf.math.lgamma(tf.abs(x) + 1) + tf.math.expm1(x)

    def slopes(x):
        return tf.gradients(tf.reduce_sum(tf.tanh(x @ weights) ** 2), x)[0]

    return {
        "dense": (lambda x: tf.nn.softmax(x @ weights), rows),
        "convolution": (lambda x: tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME")), image),
        "pool": (lambda x: tf.nn.max_pool2d(x, 2, 2, "VALID"), image),
        "loop": (loop, rows),
        "branch": (lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x * 2, lambda: x - 1), rows),
        "scatter": (lambda x: tf.tensor_scatter_nd_add(x, places, x[:2]), rows),
        "top_k": (lambda x: tf.math.top_k(x, 2), rows),
        "sort": (lambda x: tf.sort(x, direction="DESCENDING"), rows),
        "sums": (lambda x: (tf.argmax(x, 1, output_type=tf.int32), tf.cumsum(x, 1)), rows),
        "gradient": (slopes, rows),
        "special": (special, rows),
        "cholesky": (lambda x: tf.linalg.cholesky(x @ tf.transpose(x) + tf.eye(3)), rows),
        "resize": (lambda x: tf.image.resize(x, (9, 9)), image),
    }


def test_tensorflow(tensorflow):
    tf = tensorflow
    for name, (fun, shape) in tensorflow_functions(tf).items():
        print(name)
        function, x = tf.function(fun, jit_compile=True), tf.constant(numbers(*shape))
        wanted = [value.numpy() for value in tf.nest.flatten(function(x))]
        text = function.experimental_get_compiler_ir(x)(stage="stablehlo")
        concrete = function.get_concrete_function(x)
        captured = [value.numpy() for value in concrete.captured_inputs]
        with jax.enable_x64(True):
            program = read_module_program(text.encode(), f"{name}.mlir")
            type_check(program)
            results = jax.jit(program.flat_function())(x.numpy(), *captured)
        for a, b in zip(wanted, results, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
