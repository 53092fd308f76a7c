"""HLO modules are found and read in files and in folders of --xla_dump_to."""

import jax.numpy as jnp
import pytest

from jaxprtool.errors import TargetError
from jaxprtool.extend import equations, open_jaxpr
from jaxprtool.formats.hlo import is_hlo, stored_module
from jaxprtool.ir.regions import regions
from jaxprtool.render.terminal.tree import ModuleJaxpr
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


#: An operation in the background, whose operation is not written, and one that is JAX's by name.
BACKGROUND = """\
HloModule jit_gather, is_scheduled=true

gathered {
  p = f32[8]{0} parameter(0)
  ROOT gathered = f32[16]{0} all-gather(p), dimensions={0}, replica_groups={{0,1}}
}

step {
  carry = f32[] parameter(0)
  row = f32[] parameter(1)
  sum = f32[] add(carry, row)
  ROOT both = (f32[], f32[]) tuple(sum, row)
}

ENTRY main {
  x = f32[8]{0} parameter(0)
  start = ((f32[8]{0}), f32[16]{0}) async-start(x), calls=gathered
  y = f32[16]{0} async-done(start)
  c = f32[3]{0} constant({1, 2, 3})
  ROOT loops = f32[16]{0} custom-call(y, c), custom_call_target="a, b={c}", api_version=API_VERSION_STATUS_RETURNING
}
"""  # noqa: E501


def test_a_jaxpr_has_the_attributes_of_instructions_in_xlas_notation(tmp_path):
    (tmp_path / "step.hlo").write_text(BACKGROUND)
    shown = ModuleJaxpr(stored_module(str(tmp_path / "step.hlo")).module)
    eqns = {shown.instruction(eqn).name: eqn for eqn in equations(open_jaxpr(shown.jaxpr))}
    assert [list(map(shown.names.get, eqn.outvars)) for eqn in eqns.values()] == [
        ["start[0][0]", "start[1]"], ["y"], ["c"], ["loops"], ["gathered"]
    ]  # fmt: skip
    assert shown.attributes(eqns["c"]) == {"value": "{1, 2, 3}", "shape": "f32[3]{0}"}
    assert shown.attributes(eqns["loops"])["custom_call_target"] == '"a, b={c}"'
    assert shown.attributes(eqns["start"])["dimensions"] == "{0}"
    assert shown.attributes(eqns["gathered"]) == {}
    assert shown.roles(eqns["start"]) == ["gathered"] and shown.computes(eqns["y"]) == "async-done"


def test_an_operation_with_the_name_of_a_jax_loop_is_not_taken_for_it(tmp_path):
    text = BACKGROUND.replace("custom-call(y, c)", "custom-call(y, c), called_computations={step}")
    (tmp_path / "step.hlo").write_text(text)
    module = stored_module(str(tmp_path / "step.hlo")).module
    loops = module.by_name["loops"]
    object.__setattr__(loops, "opcode", "scan")
    shown = ModuleJaxpr(module)
    (eqn,) = (eqn for eqn in shown.jaxpr.eqns if shown.instruction(eqn) is loops)
    assert shown.opcode(eqn) == "scan" and regions(eqn) is None
