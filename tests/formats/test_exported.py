"""Artifacts of `jax.export`: JAX calls ours, and we read JAX's."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool import trace
from jaxprtool.errors import BackendError, OutputError, ProgramFileError, UnsupportedError
from jaxprtool.formats.lowering import exported, is_exported, read_exported
from jaxprtool.ir.program import type_check
from tests.programs import same, sample_programs
from tests.programs.outlined import layers
from tests.sweep.corpora import Harnesses
from tests.sweep.parts import Part


def loss(params, x, *, unused):
    return {"y": params["w"] @ x, "total": x.sum()}


ARGS = ({"w": jnp.arange(12.0).reshape(3, 4)}, jnp.ones(4))


@pytest.fixture
def program():
    return trace(loss, *ARGS, unused=2.0)


def test_jax_calls_an_artifact_with_the_arguments_of_the_function(program):
    data = exported(program)
    artifact = jax.export.deserialize(bytearray(data))
    assert artifact.fun_name == "loss" and artifact.platforms == ("cpu",)
    out = artifact.call(*ARGS, unused=2.0)
    np.testing.assert_array_equal(out["y"], program(*ARGS, unused=2.0)["y"])


def test_units_are_calls_that_are_not_inlined():
    program = layers(2)
    artifact = jax.export.deserialize(bytearray(exported(program)))
    module = artifact.mlir_module()
    assert module.count('inlineable = "false"') == 4 and "compilation_unit" not in module
    args = jnp.ones((3, 4)), [(jnp.eye(4), jnp.ones((4, 4)))] * 2
    jax.tree.map(np.testing.assert_array_equal, artifact.call(*args), program(*args))


@pytest.mark.parametrize("platforms", [(), ("cpu",), ("cpu", "cuda"), ("gpu", "cpu")])
def test_names_and_trees_are_restored(program, platforms):
    data = exported(program, platforms)
    assert is_exported(data)
    read = read_exported(data)
    type_check(read)
    assert (read.name, read.arg_names, read.out_names) == (
        program.name,
        program.arg_names,
        program.out_names,
    )
    assert (read.in_tree, read.out_tree) == (program.in_tree, program.out_tree)
    assert [eqn.primitive.name for eqn in read.jaxpr.eqns] == ["call_exported"]


def test_a_derivative_in_the_artifact_is_kept():
    artifact = jax.export.export(jax.jit(jnp.sin))(1.0)
    read = read_exported(artifact.serialize(vjp_order=1))
    assert float(jax.grad(read)(0.0)) == 1.0
    with pytest.raises(NotImplementedError, match="call_exported"):
        jax.grad(read_exported(artifact.serialize()))(0.0)


def test_symbolic_sizes_are_restored():
    (n,) = jax.export.symbolic_shape("n")
    program = trace(loss, {"w": jax.ShapeDtypeStruct((n, 4), "float32")}, jnp.ones(4), unused=1.0)
    read = read_exported(exported(program, ("cpu", "cuda")))
    assert read.arg_names == ("params['w']", "x", "unused")
    assert str(read.in_avals[0].shape) == "(n, 4)"
    assert read(*ARGS, unused=1.0)["y"].shape == (3,)


def test_keys_are_restored():
    program = trace(lambda key: jax.random.normal(key, (3,)), jax.random.key(0))
    key = jax.random.key(7)
    np.testing.assert_array_equal(read_exported(exported(program))(key), program(key))


def test_an_artifact_of_jax_is_read_with_its_names():
    artifact = jax.export.export(jax.jit(loss))(*ARGS, unused=2.0)
    read = read_exported(artifact.serialize())
    # jax.jit omits unused arguments, so only its place in the tree can name it.
    assert read.arg_names == ("params['w']", "x", "unused")
    assert read.out_names == ("result['total']", "result['y']")
    plain = jax.export.export(jax.jit(lambda *args: ()))([1.0], 2.0)
    assert read_exported(plain.serialize()).arg_names == ("args[0][0]", "args[1]")


class Pair:
    def __init__(self, left, right):
        self.left, self.right = left, right


jax.tree_util.register_pytree_node(
    Pair, lambda pair: ((pair.left, pair.right), None), lambda _, parts: Pair(*parts)
)


def prints(x):
    jax.debug.print("{}", x)
    return x


def test_unsupported_programs_are_refused():
    with pytest.raises(UnsupportedError, match=r"debug_print at .*test_exported.py:\d+ calls"):
        exported(trace(prints, 1.0))
    with pytest.raises(UnsupportedError, match="nothing binds its axes i"):
        exported(trace(lambda x: jax.lax.psum(x, "i"), 1.0, axis_env=[("i", 2)]))
    with pytest.raises(UnsupportedError, match=r"unregistered type .*Pair"):
        exported(trace(lambda pair: pair.left, Pair(1.0, 2.0)))
    with pytest.raises(BackendError, match="'abacus'"):
        exported(trace(jnp.sin, 1.0), ["abacus"])


@pytest.mark.parametrize("cut", [0, 1, 4, 100, 500, -300])
def test_a_damaged_artifact_is_an_error(program, cut):
    with pytest.raises(ProgramFileError, match=r"^x\.exported is not an artifact of jax\.export: "):
        read_exported(exported(program)[:cut], "x.exported")


def test_other_files_are_not_artifacts(program):
    from jaxprtool.formats.lowering import stablehlo, stablehlo_bytecode

    others = (b"", b"jaxprtool 1\n", stablehlo(program).encode(), stablehlo_bytecode(program))
    assert not any(map(is_exported, others))


def test_without_flatbuffers_the_error_explains_what_to_install(program, monkeypatch):
    data = exported(program)
    for name in [name for name in sys.modules if name.startswith("jax._src.export.serial")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(jax._src.export, "serialization", raising=False)
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    for attempt in (lambda: exported(program), lambda: read_exported(data)):
        with pytest.raises(OutputError, match="flatbuffers") as caught:
            attempt()
        assert "pip install flatbuffers" in caught.value.hint


@pytest.mark.proof
@pytest.mark.parametrize("file", ["branches.py", "rnn.py"])
def test_samples_compute_the_same_as_artifacts(file):
    for sample in sample_programs(file):
        check_artifact(sample)


def check_artifact(case):
    with case.setting():
        program = case.program()
        read = read_exported(exported(program))
        assert (read.arg_names, read.out_names) == (program.arg_names, program.out_names)
        same(program, read, case.arguments(), gradients=False)


SWEEP = [
    Part("artifacts: harnesses", Harnesses(every=20), lambda number, case: check_artifact(case)),
]
