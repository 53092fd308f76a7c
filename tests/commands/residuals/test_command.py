"""`jaxprtool residuals` shows what a gradient saves, why, and what policies would save."""

import json
import os
import re
import subprocess
import sys
import textwrap

import pytest

FUNCTIONS = """
    import jax
    import jax.numpy as jnp

    def loss(w, x):
        return jnp.sin(x @ w).sum()

    def deep(w, x):
        return jnp.sin(jnp.sin(jnp.sin(x @ w))).sum()

    def stack(layers, x):
        for layer in layers:
            x = jnp.sin(x @ layer["w"])
        return x.sum()

    def count(i):
        return i + 1

    def scanned(ws, x):
        def layer(x, w):
            hidden = x @ w
            return x + jnp.tanh(jnp.sin(hidden)) @ w.T, None

        return jnp.square(jax.lax.scan(layer, x, ws)[0]).mean()

    def gated(up, down, x):
        def layer(x, w):
            hidden = x @ w["up"]
            return x + jax.nn.silu(hidden) @ w["down"], None

        return jnp.square(jax.lax.scan(layer, x, {"up": up, "down": down})[0]).mean()

    def sampled(key, params, labels):
        return (jax.random.normal(key, (8,)) * params["w"] ** 3 * labels).sum()

    def step(w, m, x):
        g = jax.grad(lambda w: jnp.sin(x @ w).sum())(w)
        m = 0.9 * m + g
        return w - m, m
"""

LOSS = "residuals", "kept.py:loss", "--args", "f32[8,8], f32[4,8]"


@pytest.fixture(autouse=True)
def kept(folder):
    (folder / "kept.py").write_text(textwrap.dedent(FUNCTIONS))


def test_a_table_has_each_residual_and_the_policies(cli):
    found = cli(*LOSS)
    heading = "loss keeps 2 residuals, 256 bytes, with respect to w\n"
    assert found.code == 0 and found.out.startswith(heading)
    assert "kept.py:6 cos" in found.out and "for dot_general at kept.py:6" in found.out
    assert "nothing_saveable" in found.out
    assert "… 1 more" in cli(*LOSS, "--top", "1").out
    both = cli(*LOSS, "--argnums", "0,1")
    assert both.out.startswith("loss keeps 3 residuals, 512 bytes, with respect to w, x\n")


@pytest.mark.proof
def test_equal_residuals_of_layers_are_one_row(cli):
    layers = ", ".join(["{'w': f32[8,8]}"] * 12)
    args = "residuals", "kept.py:stack", "--args", f"[{layers}], f32[4,8]"
    found = cli(*args).out
    assert found.startswith("stack keeps 35 residuals, 5.8 KiB, with respect to layers\n")
    assert re.search(r"2.8 KiB   11 x f32\[8,8\] +layers\[1..11\]\['w'\]\n", found)
    assert re.search(r"1.5 KiB   12 x f32\[4,8\] +6.5 k   kept.py:13 cos\n +for mul", found)
    assert "… 2 more" in cli(*args, "--top", "2").out
    assert len(json.loads(cli(*args, "--json").out)["residuals"]) == 35


def test_json_has_the_contents_of_the_table(cli):
    found = json.loads(cli(*LOSS, "--json").out)
    assert found["total_bytes"] == 256 and len(found["residuals"]) == 2
    assert found["argnums"] == [0] and found["with_respect_to"] == ["w"]
    assert found["residuals"][0].keys() >= {"type", "bytes", "place", "name", "policies"}
    assert found["policies"]["nothing_saveable"] == 384


def test_a_budget_proposes_names_to_save_and_where_to_put_them(cli):
    found = cli(*LOSS, "--budget", "1KiB").out
    assert "within 1.0 KiB: all residuals of loss fit, without a policy" in found
    args = "residuals", "kept.py:scanned", "--args", "f32[6,64,256], f32[512,64]"
    found = cli(*args, "--budget", "4MiB").out
    assert "within 4.0 MiB, save nothing\njax.checkpoint(layer," in found
    assert re.search(r"peak \d.* MiB instead of \d.* MiB", found)
    document = json.loads(cli(*args, "--budget", "4MiB", "--json").out)["proposal"]
    assert document["policy"].startswith("save_only_these_names('")
    assert document["total_bytes"] <= document["budget"] == 4 << 20
    placement, before = document["placement"], document["before"]
    assert placement["only"] == ["layer"] and placement["peak_bytes"] < before["peak_bytes"]
    assert placement["passes"] == "checkpoint(only='layer', policy=nothing_saveable)"


def test_a_proposal_with_fewer_flops_is_shown_beside_the_one_with_the_lowest_peak(cli):
    args = "residuals", "kept.py:gated", "--args", "f32[6,64,512], f32[6,512,64], f32[512,64]"
    found = cli(*args, "--budget", "10MiB").out
    assert "within 10.0 MiB, save nothing\njax.checkpoint(layer," in found
    assert "\nwith fewer FLOPs, save as dots_saveable does\njax.checkpoint(layer," in found
    proposal = json.loads(cli(*args, "--budget", "10MiB", "--json").out)["proposal"]
    best, cheaper = proposal["placement"], proposal["cheaper"]
    assert best["peak_bytes"] < cheaper["peak_bytes"] < proposal["before"]["peak_bytes"]
    assert cheaper["flops"] < best["flops"] and cheaper["total_bytes"] <= 10 << 20


def test_nothing_is_proposed_that_does_not_lower_the_peak(cli):
    found = cli(*LOSS, "--argnums", "0,1", "--budget", "400")
    text = "within 400 bytes: no place of jax.checkpoint lowers the peak of its gradient, 904 bytes"
    assert found.code == 0 and text in " ".join(found.out.split())
    assert "jax.checkpoint(" not in found.out


@pytest.mark.proof
def test_the_peak_has_columns_for_the_whole_the_parts_and_xla(cli):
    args = "residuals", "kept.py:scanned", "--args", "f32[6,64,256], f32[512,64]"
    found = cli(*args, "--compiled").out
    assert re.search(r"policy +bytes +peak +XLA's peak\n", found)
    rows = dict(re.findall(r"^ *(none|nothing_saveable) .* ([\d.]+) MiB$", found, re.MULTILINE))
    assert "around layer\n" in found and float(rows["nothing_saveable"]) < float(rows["none"])


def test_a_training_step_has_the_values_passed_from_its_forward_to_its_backward_part(cli):
    args = "residuals", "kept.py:step", "--args", "f32[8,8], f32[8,8], f32[4,8]"
    found = cli(*args)
    heading = "the gradient inside step keeps 2 residuals, 256 bytes\n"
    assert found.code == 0 and found.out.startswith(heading)
    assert "kept.py:37 cos" in found.out and "nothing_saveable" not in found.out
    refused = cli(*args, "--budget", "100")
    assert refused.code == 2 and "step has its gradient inside" in refused.err


def test_mistakes_are_one_line_errors(cli):
    found = cli(*LOSS, "-p", "vjp")
    assert (found.code, found.out) == (2, "")
    assert found.err.startswith("error: residuals takes one program")
    assert cli(*LOSS, "--top", "0").code == 2
    found = cli(*LOSS, "--budget", "much")
    assert (found.code, found.out) == (2, "") and "'much' is not a number of bytes" in found.err
    found = cli(*LOSS, "--budget", "5")
    assert (found.code, found.out) == (2, "") and "the minimum is 256" in found.err


def test_an_argument_without_a_gradient_is_named_with_the_others(cli):
    args = "residuals", "kept.py:sampled", "--args"
    found = cli(*args, "key<fry>[], {'w': f32[8]}, i32[8]")
    assert (found.code, found.out) == (2, "")
    error = "sampled has no gradient with respect to argument 0: key is key<fry>[]"
    assert error in " ".join(found.err.split())
    assert "hint: --argnums takes the position of another: 1 (params)" in found.err
    given = cli(*args, "key<fry>[], {'w': f32[8]}, i32[8]", "--argnums", "1")
    assert given.code == 0 and given.out.startswith("sampled keeps 3 residuals, 96 bytes, with")
    missing = cli(*args, "key<fry>[], {'w': f32[8]}, i32[8]", "--argnums", "3")
    assert missing.code == 2 and "no positional argument 3 for argnums" in missing.err


def test_types_of_a_symbolic_program_are_shown_whole(cli):
    found = cli("residuals", "kept.py:loss", "--args", "f32[d,d], f32[n,d]")
    assert found.out.startswith("loss keeps 2 residuals, with respect to w\n")
    assert "f32[n,d]" in found.out


@pytest.mark.usefixtures("processes")
def test_functions_under_the_new_checkpoint_have_residuals(folder):
    code = "import jax\n\n@jax.checkpoint\ndef kept(x):\n    return jax.numpy.cos(x * 2).sum()\n"
    (folder / "remat.py").write_text(code)
    command = [sys.executable, "-m", "jaxprtool", "residuals", "remat.py:kept", "--args", "f32[3]"]
    env = {**os.environ, "JAX_REMAT3": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    assert "keeps 1 residual, 12 bytes" in done.stdout
    assert "nothing_saveable" in done.stdout
