"""Compiled modules are read with the contents of XLA's own text."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxprtool.execute.running.backends import compiled_afresh
from jaxprtool.ir.hlo.module import (
    HloShape,
    Instruction,
    compiled_module,
    integer,
    integers,
    message,
    text_field,
)


def scanned(weights, x):
    def layer(x, w):
        return jnp.tanh(x @ w), x.sum()

    x, sums = jax.lax.scan(layer, x, weights)
    return jnp.sort(x, axis=0), sums


@pytest.fixture(scope="module")
def compiled():
    weights, x = jnp.ones((4, 8, 8)), jnp.ones((3, 8), jnp.bfloat16)
    with compiled_afresh():  # a cached executable may have the lines of another checkout
        return jax.jit(scanned).lower(weights, x.astype("float32")).compile()


@pytest.fixture(scope="module")
def module(compiled):
    return compiled_module(compiled)


@pytest.mark.proof
def test_the_devices_are_those_of_compilation(module):
    assert module.devices == 1
    on_all = jax.jit(jnp.sin, in_shardings=NamedSharding(jax.make_mesh((4,), "x"), P("x")))
    assert compiled_module(on_all.lower(jnp.ones(8)).compile()).devices == 4


def test_each_instruction_of_the_text_is_read(compiled, module):
    lines = re.findall(r"^\s*(?:ROOT )?%(\S+) = (.*)$", compiled.as_text(), re.MULTILINE)
    assert module.by_name.keys() == {name for name, _ in lines}
    for name, rest in lines:
        found = module.by_name[name]
        assert f" {found.opcode}(" in f" {rest}"
        array = re.match(r"(\w+)\[([\d,]*)\]", rest)
        if array:
            assert str(found.shape) == array[0]
        operands = [module.instructions[each].name for each in found.operands]
        inside = rest.split(f" {found.opcode}(", 1)[1].split(")", 1)[0]
        assert found.opcode in ("constant", "parameter") or operands == re.findall(
            r"%([\w.-]+)", inside
        )
        path = re.search(r'op_name="([^"]*)"', rest)
        assert found.op_name == (path[1] if path else "")


def test_the_root_of_the_entry_is_the_result(module):
    assert [str(part) for part in module.entry.root.shape.parts] == ["f32[3,8]", "f32[4]"]


def test_an_operation_has_the_lines_of_its_calls(module):
    line = scanned.__code__.co_firstlineno
    sort = next(each for each in module.instructions.values() if each.opcode == "sort")
    frame = next(f for f in module.frames(sort) if f.file == __file__)
    assert (frame.line, frame.function) == (line + 5, "scanned")
    dots = [i for i in module.instructions.values() if i.op_name.endswith("/dot_general")]
    assert {f.line for dot in dots for f in module.frames(dot)[:1]} == {line + 2}


def test_a_loop_has_its_bodies(module):
    (loop,) = [each for each in module.instructions.values() if each.opcode == "while"]
    bodies = [module.computations[each] for each in loop.calls]
    inside = {op.op_name.rpartition("/")[2] for body in bodies for i in body.instructions
              for op in module.inside(i)}  # fmt: skip
    assert {"dot_general", "tanh"} <= inside


def test_the_schedule_orders_all_instructions(module):
    order = module.schedule[module.entry.id]
    assert sorted(order) == sorted(each.id for each in module.entry.instructions)
    position = {number: i for i, number in enumerate(order)}
    for each in module.entry.instructions:
        assert all(position[operand] < position[each.id] for operand in each.operands)


@pytest.mark.parametrize(
    "dtype", ["bool", "int4", "uint8", "int32", "float16", "bfloat16", "float8_e4m3fn", "complex64"]
)
def test_shapes_have_the_size_of_their_arrays(dtype):
    x = jax.ShapeDtypeStruct((5, 3), jnp.dtype(dtype))
    module = compiled_module(jax.jit(lambda x: x).lower(x).compile())
    (argument,) = [i for i in module.entry.instructions if i.opcode == "parameter"]
    bits = 4 if dtype == "int4" else 8 * np.dtype(x.dtype).itemsize
    assert argument.shape.bytes == (15 * bits + 7) // 8


@pytest.mark.parametrize(
    ("op_name", "path"),
    [
        ("jit(f)/jvp()/mul", "jit(f)/jvp()/mul"),
        ("jit(f)/transpose(jvp())/mul;jit(f)/neg", "jit(f)/transpose(jvp())/mul"),
        ("jit(f)/(jvp()/reduce_sum:transpose(jvp())/dot_general)", "jit(f)/jvp()/reduce_sum"),
        ("jit(f)/(add:mul)", "jit(f)/add"),
        ("", ""),
    ],
)
def test_merged_operations_have_the_first_path(op_name, path):
    found = Instruction(1, "x", "add", HloShape("f32"), op_name, 0, (), (), {})
    assert found.path == path


def test_messages_are_read_by_their_wire_types():
    packed = bytes([0x2A, 4, 3, 0x8E, 0x02, 5])  # field 5: 3, 270, 5
    data = bytes([0x08, 0x96, 0x01, 0x12, 2]) + b"hi" + bytes([0x1D, 1, 0, 0, 0]) + packed
    fields = message(data)
    assert (integer(fields, 1), text_field(fields, 2), fields[3]) == (150, "hi", [b"\1\0\0\0"])
    assert integers(fields, 5) == [3, 270, 5] and integer(fields, 9, 7) == 7
    minus_one = message(bytes([0x08]) + b"\xff" * 9 + b"\x01")
    assert integer(minus_one, 1) == -1 and integers(minus_one, 1) == [-1]
    for broken in (data[:-1], data[:1], data[:2], data[:4], bytes([0x0B])):
        with pytest.raises(ValueError):
            message(broken)
