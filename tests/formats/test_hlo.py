"""HLO modules are found and read in files and in folders of --xla_dump_to."""

import jax.numpy as jnp
import pytest

from jaxprtool.errors import TargetError
from jaxprtool.formats.hlo import is_hlo, stored_module
from tests.programs.modules import OLD, dumped

X = jnp.ones((4, 4))


def step(x):
    return jnp.sin(x) @ x


def loss(x):
    return jnp.cos(x).sum()


@pytest.fixture
def dump(tmp_path):
    dumped(tmp_path, step, X, number=0)
    dumped(tmp_path, loss, X, number=2)
    dumped(tmp_path, step, X[:2, :2], number=4)
    (tmp_path / "module_0000.jit_step.cpu_after_optimizations-buffer-assignment.txt").write_text("")
    return tmp_path


def test_a_module_of_a_folder_is_chosen_by_name_number_and_stage(dump):
    assert is_hlo(str(dump)) and is_hlo(f"{dump}/jit_step")
    first, second = (stored_module(f"{dump}/jit_step{at}").module for at in ("", "@2"))
    assert [m.entry.root.shape.sizes for m in (first, second)] == [(4, 4), (2, 2)]
    before = stored_module(f"{dump}/jit_loss:before").module
    assert first.schedule and not before.schedule
    lines = {frame.line for op in first.instructions.values() for frame in first.frames(op)}
    assert step.__code__.co_firstlineno + 1 in lines


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "has 2 modules: choose one"),
        ("/jit_stop", "has no module 'jit_stop'"),
        ("/jit_step@3", "has 2 modules 'jit_step', no '@3'"),
        ("/jit_step@x", "has 2 modules 'jit_step', no '@x'"),
    ],
)
def test_another_name_is_one_line(dump, name, message):
    with pytest.raises(TargetError, match=message):
        stored_module(f"{dump}{name}")


def test_a_proto_is_read_with_and_without_a_module_around_it(tmp_path):
    from jaxprtool.jaxcompat.lowering import parsed_hlo

    proto = parsed_hlo(OLD)
    length = len(proto)
    around = b"\x0a" + bytes([length & 127 | 128, length >> 7]) + proto
    for name, data in (("a.pb", proto), ("b.hlo.pb", around)):
        (tmp_path / name).write_bytes(data)
        assert stored_module(str(tmp_path / name)).module.name == "jit_step"
    (tmp_path / "c.pb").write_bytes(b"no proto")
    with pytest.raises(TargetError, match="has no HLO module"):
        stored_module(str(tmp_path / "c.pb"))


def test_lines_of_old_releases_are_call_stacks_of_one_frame(tmp_path):
    (tmp_path / "old.hlo").write_text(OLD)
    module = stored_module(str(tmp_path / "old.hlo")).module
    frames = [module.frames(op) for op in module.entry.instructions]
    assert [[f[:2] for f in stack] for stack in frames] == [
        [], [], [("/home/me/step.py", 7)], [("/home/me/step.py", 8)]
    ]  # fmt: skip


def test_what_the_parser_does_not_know_is_one_line(tmp_path):
    (tmp_path / "new.txt").write_text(OLD.replace(" tanh(", " wavelet("))
    with pytest.raises(TargetError, match=r"new.txt:\d+: .* Unknown opcode: wavelet"):
        stored_module(str(tmp_path / "new.txt"))


def test_other_files_are_no_modules(tmp_path):
    (tmp_path / "notes.txt").write_text("HloModules are fine")
    assert not is_hlo(str(tmp_path)) and not is_hlo(str(tmp_path / "notes.txt"))
    assert not is_hlo("package.module:function") and not is_hlo(str(tmp_path / "x/y"))


def test_a_script_beside_dumps_is_no_module(dump):
    assert not is_hlo(f"{dump}/train.py:step")
