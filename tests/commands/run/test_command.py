import json
import os
import textwrap

import jax
import numpy as np
import pytest


def test_results_and_times_are_reported(cli):
    result = cli("run", "functions.py:double", "--args", "arange(3)")
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0] == "result: i32[3] [0, 2, 4]"
    steps = [line.split("  ")[0] for line in lines[2:]]
    assert steps == ["device", "trace", "lower", "compile", "first call", "later calls"]
    assert "random" not in result.err


def test_passes_are_timed_separately_from_tracing(cli):
    lines = cli("run", "functions.py:double", "-p", "dce").out.splitlines()
    steps = [line.split("  ")[0] for line in lines if "  " in line]
    assert steps[1:5] == ["device", "trace", "passes", "lower"]
    document = json.loads(cli("run", "functions.py:double", "-p", "dce", "--json").out)
    assert 0 < document["times"]["passes"] < 60


def test_random_arguments_are_reported_and_depend_on_the_seed(cli):
    first = cli("run", "functions.py:double", "--json")
    assert "note: x filled with random values (--seed 0)" in result_lines(first)
    again = cli("run", "functions.py:double", "--json")
    other = cli("run", "functions.py:double", "--json", "--seed", "1")
    values = [json.loads(r.out)["outputs"][0]["value"] for r in (first, again, other)]
    assert values[0] == values[1] != values[2]


def result_lines(result):
    assert result.code == 0, result.err
    return result.lines


def test_the_json_document(cli):
    document = json.loads(cli("run", "functions.py:kinds", "--json", "--repeat", "2").out)
    assert list(document) == ["schema", "name", "devices", "random", "times", "outputs"]
    assert document["random"] == ["i", "b", "k"]
    assert document["times"]["repeats"] == 2
    outputs = {o["name"]: o for o in document["outputs"]}
    assert outputs["result['bad']"]["value"] == ["NaN", "Infinity", 1.0]
    assert outputs["result['none']"] == {"name": "result['none']", "type": "f32[0,2]", "value": []}
    assert sum(outputs["result['b']"]["statistics"].values()) == 20
    assert outputs["result['key']"]["type"] == "key<fry>[]"
    assert all(0 <= i < 8 for i in outputs["result['i']"]["value"])


def test_every_kind_of_result_can_be_printed(cli):
    out = cli("run", "functions.py:kinds").out
    assert "result['bad']: f32[3] [nan, inf,  1.]" in out
    assert "result['b']: bool[20] true " in out


def test_output_of_the_program_goes_to_stdout_but_never_into_json(cli):
    text = cli("run", "functions.py:prints", "--args", "ones(f32[2])")
    assert "the sum is 2.0\n" in text.out and "later calls" not in text.out
    document = cli("run", "functions.py:prints", "--args", "ones(f32[2])", "--json")
    assert json.loads(document.out)["times"]["repeats"] == 0
    assert "the sum is 2.0" in document.err


def test_results_are_saved_in_full_by_name(cli, folder):
    assert cli("run", "functions.py:kinds", "--save", "out.npz").code == 0
    saved = np.load(folder / "out.npz")
    assert saved["result['normal']"].dtype == np.float32
    assert saved["result['none']"].shape == (0, 2)
    assert saved["result['key']"].dtype == np.uint32
    refused = cli("run", "functions.py:kinds", "--save", "-")
    assert refused.code == 2 and "--save takes a file" in refused.err
    assert set(os.listdir(folder)) - {"__pycache__"} == {"functions.py", "out.npz"}


LAYERS = """
import jax.numpy as jnp, jaxprtool

@jaxprtool.example(*([jnp.ones((4, 8))] * 12))
def layers(*ws):
    return [{"w": w * i, "b": w[0] * (jnp.nan if i == 3 else i)} for i, w in enumerate(ws)]
"""


def test_results_of_equal_layers_have_one_row_and_those_with_nan_come_first(folder, terminal):
    (folder / "layers.py").write_text(LAYERS)
    shown = terminal("run", "layers.py:layers").splitlines()
    nan, biases, weights = (" ".join(line.split()) for line in shown[-3:])
    assert nan.startswith("result[3]['b'] f32[8] [nan, nan, ")
    assert biases == "result[*]['b'] 11 x f32[8] 0 to 11, mean 5.73"
    assert weights == "result[0..11]['w'] 12 x f32[4,8] 0 to 11, mean 5.5"


TRAINING = """
import jax.numpy as jnp, jaxprtool

@jaxprtool.example(*("f32[%d,8]" % n for n in range(1, 41)))
def step(*ws):
    return {f"w{i}": w * 0 + i for i, w in enumerate(ws)}, jnp.float32(0.5) + ws[0].sum() * 0
"""


@pytest.mark.proof
def test_scalars_are_first_among_many_results_and_ranges_fit_the_terminal(folder, terminal):
    (folder / "training.py").write_text(TRAINING)
    rows = [" ".join(line.split()) for line in terminal("run", "training.py:step").splitlines()]
    loss = rows.index("result[1] f32[] 0.5")
    assert rows[loss + 1] == "result[0]['w0'] f32[1,8] 0"
    assert rows[-1] == "… 21 more: --all"


MASKS = """
import jax.numpy as jnp, jaxprtool

@jaxprtool.example("f32[3]")
def masks(x):
    many = {f"w{'x' * i}": jnp.ones(8) for i in range(25)}
    return {"a": x > 9.0, "b": jnp.zeros((0, 2)), **many}
"""


def test_booleans_and_empty_arrays_have_values_in_a_table_of_many_results(folder, terminal):
    (folder / "masks.py").write_text(MASKS)
    rows = [" ".join(line.split()) for line in terminal("run", "masks.py:masks").splitlines()]
    assert "result['a'] bool[3] [False, False, False]" in rows
    assert "result['b'] f32[0,2] []" in rows


HALVES = """
import jax, jax.numpy as jnp, jaxprtool

@jaxprtool.example("f32[3]", "i32[3]", "key<fry>[]", "bf16[3]")
def f(x, i, k, b):
    y = jnp.sin(x) * i + jnp.sin(b).astype("float32") * jax.random.normal(k, (3,))
    return {"y": y, "i": i}
"""


@pytest.mark.proof
def test_backward_runs_on_the_saved_results_of_forward(cli, folder):
    (folder / "halves.py").write_text(HALVES)
    assert cli("opt", "halves.py:f", "-p", "vjp", "-o", "halves/").code == 0
    given = "arange(3, dtype=f32), arange(3), key(1), ones(bf16[3])"
    forward = cli("run", "halves/forward.jaxpr", "--args", given, "--save", "forward.npz")
    assert forward.code == 0, forward.err
    given = "load('forward.npz')['result'][1], {'i': float0[3], 'y': ones(f32[3])}"
    backward = cli("run", "halves/backward.jaxpr", "--args", given, "--save", "backward.npz")
    assert (
        "result[1]: float0[3]\nresult[2]: float0[]\n" in backward.out
        and backward.err.startswith("wrote ")
    )
    saved = np.load(folder / "backward.npz")
    assert saved["result[1]"].dtype == jax.dtypes.float0 and saved["result[1]"].shape == (3,)
    assert np.allclose(saved["result[0]"], np.cos(np.arange(3.0)) * np.arange(3))
    given = (
        "load('forward.npz')['result'][1], {'i': load('backward.npz')['result'][1], 'y': f32[3]}"
    )
    again = cli("run", "halves/backward.jaxpr", "--args", given, "--json")
    document = json.loads(again.out)
    assert document["random"] == ["cotangents['y']"]
    assert document["outputs"][1] == {"name": "result[1]", "type": "float0[3]", "statistics": {}}


def test_tangents_added_by_a_pass_are_random_and_those_of_integers_are_zero(cli, folder):
    (folder / "halves.py").write_text(HALVES)
    result = cli("run", "halves.py:f", "-p", "jvp", "--json")
    names = ["x", "i", "k", "b", "d_x", "d_b"]
    assert json.loads(result.out)["random"] == names
    assert cli("opt", "halves.py:f", "-p", "jvp", "-o", "jvp.jaxpr").code == 0
    primals = "arange(3, dtype=f32), arange(3), key(1), ones(bf16[3])"
    for nothing in "float0[3]", "zeros(float0[3])":
        tangents = f"ones(f32[3]), {nothing}, zeros(float0[]), ones(bf16[3])"
        result = cli("run", "jvp.jaxpr", "--args", f"({primals}), ({tangents})")
        assert result.code == 0 and not result.err
        assert "d_result['i']: float0[3]\n" in result.out
    result = cli("run", "jvp.jaxpr", "--args", f"({primals}), ({primals})")
    assert result.code == 2
    assert "argument 'd_i' is i32[3], but the program takes float0[3]" in result.err
    assert "the only value has type float0[3]" in result.err


def test_nothing_is_written_if_the_run_fails(cli, folder):
    (folder / "out.npz").write_text("old")
    assert cli("run", "functions.py:callback", "--save", "out.npz").code == 3
    assert (folder / "out.npz").read_text() == "old"
    assert set(os.listdir(folder)) - {"__pycache__"} == {"functions.py", "out.npz"}


def test_passes_run_first_and_may_drop_inputs(cli, folder):
    (folder / "unused.py").write_text("def f(x, y): return x + 1\n")
    command = ["run", "unused.py:f", "--args", "ones(f32[2]), f32[9]"]
    result = cli(*command, "-p", "dce(drop_inputs=True)")
    assert "result: f32[2] [2., 2.]" in result.out and "random" not in result.err


def test_a_program_runs_on_another_device(cli):
    result = cli("run", "functions.py:double", "--backend", "cpu", "--device", "3", "--json")
    (device,) = json.loads(result.out)["devices"]
    assert device.endswith("3")


def test_x64_keeps_wide_types(cli):
    import jax

    try:
        result = cli("run", "functions.py:double", "--args", "ones(f64[2])", "--x64")
    finally:
        jax.config.update("jax_enable_x64", False)
    assert "result: f64[2] [2., 2.]" in result.out, result.err


@pytest.mark.parametrize("save", [None, "out.npz"])
def test_a_callback_that_raises_shows_the_users_frames(cli, save):
    result = cli("run", "functions.py:callback", *(["--save", save] if save else []))
    assert result.code == 3 and result.out == ""
    assert result.lines[-1] == "error: callback raised ValueError: not today"
    assert result.lines[-2].strip() == 'raise ValueError("not today")'
    assert not any("jax/" in line or "Traceback" in line for line in result.lines)


def test_unavailable_statistics_are_omitted(cli):
    out = cli("run", "jax.numpy:divide", "--args", "zeros(f32[24]), zeros(f32[24])").out
    assert out.splitlines()[0] == "result: f32[24] nan 24, inf 0"


# --- symbolic sizes -------------------------------------------------------------------------------

LENGTHS = """
    import jax.numpy as jnp

    def cat(x):
        return jnp.concatenate([x, x * 2]) / x.shape[0]

    def outer(x, y):
        return jnp.outer(x, y).sum(0)
"""


@pytest.fixture
def lengths(folder):
    (folder / "lengths.py").write_text(textwrap.dedent(LENGTHS))
    return folder


def test_an_artifact_with_symbols_runs_at_the_sizes_of_its_arguments(lengths, cli):
    made = "emit", "lengths.py:cat", "--args", "f32[n]", "--to", "exported", "-o", "cat.exported"
    assert cli(*made).code == 0
    found = cli("run", "cat.exported", "--args", "arange(2.)", "--repeat", "0")
    assert found.out.startswith("result: f32[4] [0. , 0.5, 0. , 1. ]")
    found = cli("run", "cat.exported", "--args", "arange(2)")
    assert (found.code, found.err) == (
        2,
        "error: argument 'x' is i32[2], but the program takes f32[2]\n",
    )


def test_a_program_with_symbols_runs_shows_and_verifies_at_the_sizes_of_its_arguments(lengths, cli):
    cli("opt", "lengths.py:outer", "--args", "f32[n], f32[2*m]", "-o", "p.jaxpr")
    found = cli("run", "p.jaxpr", "--args", "ones(f32[3]), ones(f32[4])", "--repeat", "0")
    assert found.out.startswith("result: f32[4] [3., 3., 3., 3.]")
    found = cli("show", "p.jaxpr", "--args", "f32[3], f32[6*k]")
    assert found.out.startswith("{ lambda ; a:f32[3] b:f32[6*k].")
    found = cli("opt", "p.jaxpr", "-O1", "--verify")
    assert found.code == 0 and "verified: " in found.err
    found = cli("run", "p.jaxpr", "-p", "specialize(n=2, m=1)", "--repeat", "0")
    assert found.out.startswith("result: f32[2]")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("ones(f32[3]), ones(f32[3])", "division had remainder 1 when computing the value of 'm'"),
        ("ones(f32[3]), ones(f32[2,2])", "argument 'y' has shape [2,2], but outer takes f32[2*m]"),
        ("ones(f32[0]), ones(f32[2])", "expected value >= 1 for dimension variable 'n'"),
        ("f32[k], ones(f32[2])", "k needs a number before the program can run"),
        (None, "n needs a number before the program can run"),
    ],
)
def test_impossible_sizes_are_a_one_line_error(lengths, cli, args, message):
    cli("opt", "lengths.py:outer", "--args", "f32[n], f32[2*m]", "-o", "p.jaxpr")
    found = cli("run", "p.jaxpr", *([] if args is None else ["--args", args]))
    assert found.code == 2 and message in found.err
    assert found.err.startswith("error: ") and "Please see" not in found.err


def test_a_module_over_a_mesh_without_devices_runs_on_the_first_devices(cli, tmp_path):
    rows = jax.sharding.NamedSharding(jax.make_mesh((4,), ("a",)), jax.P("a"))
    module = jax.jit(lambda x: x * 2, in_shardings=rows).lower(np.ones(8)).compiler_ir()
    (tmp_path / "m.mlir").write_text(module.operation.get_asm())
    done = cli("run", str(tmp_path / "m.mlir"), "--args", "ones(f32[8])")
    assert "cpu:0, cpu:1, cpu:2, cpu:3" in done.out, done.err
    missing = cli("run", str(tmp_path / "n.mlir"))
    assert missing.code == 2 and missing.err.startswith("error: cannot read ")
