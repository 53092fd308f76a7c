"""The listing of an HLO module."""

import json

import jax.numpy as jnp
import pytest
from jax import lax

from jaxprtool.commands.show.page import module_rows
from tests.programs.modules import OLD, stored


def test_a_row_names_what_a_kernel_computes_and_reads(tmp_path, cli):
    (tmp_path / "old.hlo").write_text(OLD)
    lines = cli("show", str(tmp_path / "old.hlo")).out.splitlines()
    assert lines[0] == "jit_step: 2 kernels, arguments 192 bytes, results 128 bytes"
    assert [line.split("  # ")[0] for line in lines[2:]] == [
        "dot.1:f32[8,4] = dot x w",
        "tanh.1:f32[8,4] = tanh dot.1",
    ]
    assert lines[2].endswith("step.py:7")
    only = cli("show", str(tmp_path / "old.hlo"), "--only", "tan*").out
    assert "tanh.1" in only and "dot.1:" not in only


def test_the_kernels_of_a_loop_are_below_it():
    def scanned(x):
        return lax.scan(lambda c, row: (jnp.sin(c) + row, ()), x[0], x)[0]

    module = stored(scanned, jnp.ones((10, 4))).module
    rows = list(module_rows(module))
    (loop,) = (row for row in rows if row.op.opcode == "while")
    assert loop.what == "while[10 times]"
    inside = [row for row in rows[rows.index(loop) + 1 :] if row.depth > loop.depth]
    assert any("sine" in row.what for row in inside)
    assert not any(row.depth for row in module_rows(module, depth=0))


@pytest.mark.parametrize("options", ["--stats", "--format tree", "--uses x"])
def test_views_of_jaxprs_are_refused(tmp_path, cli, options):
    (tmp_path / "old.hlo").write_text(OLD)
    found = cli("show", str(tmp_path / "old.hlo"), *options.split())
    assert found.code == 2 and "the kernels of an HLO module are listed" in found.err


def test_the_document_has_the_rows(tmp_path, cli):
    (tmp_path / "old.hlo").write_text(OLD)
    document = json.loads(cli("show", str(tmp_path / "old.hlo"), "--json").out)
    assert document["name"] == "jit_step" and document["summary"].startswith("2 kernels")
    first, second = document["kernels"]
    assert (first["name"], first["reads"], first["place"]["line"]) == ("dot.1", ["x", "w"], 7)
    assert (second["type"], second["what"], second["depth"]) == ("f32[8,4]", "tanh", 0)


@pytest.mark.parametrize("command", ["show", "report"])
def test_a_page_has_the_tables_and_the_source(folder, cli, command):
    (folder / "step.py").write_text("\n" * 6 + "y = x @ w\nz = jnp.tanh(y)\n")
    (folder / "old.hlo").write_text(OLD.replace("/home/me", str(folder)))
    found = cli(command, "old.hlo", "-o", "page.html")
    page = (folder / "page.html").read_text()
    assert found.code == 0 and "<title>jit_step: 2 kernels" in page
    for caption in ("kernels in the order in which they run", "by line", "memory at the peak"):
        assert caption in page
    assert '<section aria-label="step.py">' in page and page.count('style="--heat:') == 2


def test_a_module_is_neither_measured_nor_compiled_for_a_report(tmp_path, cli):
    (tmp_path / "old.hlo").write_text(OLD)
    page = str(tmp_path / "page.html")
    found = cli("report", str(tmp_path / "old.hlo"), "-o", page, "--compiled")
    assert found.code == 2 and "need a program, not an HLO module" in found.err
