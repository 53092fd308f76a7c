"""`jaxprtool kernels` shows what kernels cost, and whether they fit."""

import json
import textwrap

import pytest

FUNCTIONS = """
    import jax
    from jax.experimental import pallas as pl

    def double(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 2

    def rows(x, size):
        spec = pl.BlockSpec((size, 512), lambda i: (i, 0))
        grid = x.shape[0] // size
        return pl.pallas_call(double, grid=grid, in_specs=[spec], out_specs=spec, out_shape=x)(x)

    def small(x):
        return rows(x, 128)

    def large(x):
        return rows(x, 4096)

    def plain(x):
        return x * 2
"""

X = "--args", "f32[8192,512]"


@pytest.fixture(autouse=True)
def doubles(folder):
    (folder / "doubles.py").write_text(textwrap.dedent(FUNCTIONS))


def test_a_kernel_has_a_row_and_a_table_of_its_blocks(cli):
    found = cli("kernels", "doubles.py:small", *X, "--device", "tpu-v5e", "--steps", "2")
    assert found.code == 0
    lines = [" ".join(line.split()) for line in found.out.splitlines()]
    assert lines[0] == "small: 1 Pallas kernel"
    assert lines[1] == "min time limit calls FLOPs HBM VMEM kernel"
    assert lines[3:5] == ["41 µs memory 1 4.2 M 32.0 MiB 1.0 MiB doubles.py:11", "double"]
    assert "double, grid (64)" in lines
    assert "y_ref f32[8192,512] in [128,512] at 2 512.0 KiB 64 16.0 MiB" in lines
    assert "VMEM: at least 1.0 MiB of the limit of 16.0 MiB" in lines
    assert lines[-3:-1] == ["0 (0, 0) (0, 0)", "1 (1, 0) (1, 0)"]


def test_a_kernel_that_does_not_fit_is_named(cli):
    found = cli("kernels", "doubles.py:large", *X, "--device", "tpu-v5e")
    assert (
        "does not fit: it needs at least 32.0 MiB of VMEM, and the limit is 16.0 MiB" in found.out
    )
    assert "does not fit" not in cli("kernels", "doubles.py:large", *X, "--device", "h100").out


def test_a_program_without_kernels_says_so(cli):
    assert cli("kernels", "doubles.py:plain", *X).out == "plain: no Pallas kernel\n"


def test_the_document_has_each_program(cli):
    found = cli("kernels", "doubles.py:small", *X, "--device", "tpu-v5e", "--json", "--steps", "1")
    (report,) = json.loads(found.out)["programs"]
    (row,) = report["kernels"]
    assert (row["flops"], row["vmem_bytes"], row["fits"]) == (2**22, 2**20, True)
    assert report["steps"][0]["steps"] == [{"position": [0], "indices": [[0, 0], [0, 0]]}]


def test_an_unknown_device_is_an_error(cli):
    found = cli("kernels", "doubles.py:small", *X, "--device", "tpu-v5")
    assert found.code == 2 and found.lines[0] == "error: unknown device 'tpu-v5'"


def test_other_block_sizes_are_listed_with_what_their_axes_are(cli):
    found = cli("kernels", "doubles.py:large", *X, "--device", "tpu-v5e", "--fit")
    lines = found.out.splitlines()
    start = next(i for i, line in enumerate(lines) if "other block sizes" in line)
    assert lines[start + 3].split()[:2] == ["now", "4096"]
    assert lines[start + 4].split()[:4] == ["1", "1024", "512", "8"]
    assert "i: sizes along axis i, of x_ref axis 0, y_ref axis 0" in lines
    hint = cli("kernels", "doubles.py:large", *X, "--device", "tpu-v5e").out
    assert "--fit lists block sizes that would fit" in hint


def test_other_block_sizes_need_a_tpu(cli):
    for device in ((), ("--device", "h100")):
        found = cli("kernels", "doubles.py:large", *X, "--fit", *device)
        assert found.code == 2 and "hint: name one: --device tpu-v5e" in found.err
    found = cli("kernels", "doubles.py:large", *X, "--backend", "cpu")
    assert found.code == 2 and "'cpu' is no TPU" in found.err


def test_a_document_has_other_block_sizes(cli):
    found = cli("kernels", "doubles.py:large", *X, "--device", "tpu-v5e", "--fit", "--json")
    (row,) = json.loads(found.out)["programs"][0]["kernels"]
    assert row["fit"]["axes"][0]["dimensions"] == ["x_ref axis 0", "y_ref axis 0"]
    assert row["fit"]["choices"][0]["sizes"] == [1024, 512]


def test_a_picture_has_each_block_and_its_copies(cli, folder):
    pytest.importorskip("matplotlib")
    found = cli("kernels", "doubles.py:small", *X, "-o", "blocks.svg")
    assert found.code == 0 and "wrote blocks.svg" in found.err
    text = (folder / "blocks.svg").read_text()
    assert "x_ref: f32[8192,512] in [128,512] at (i, 0)" in text and "block written" in text
    again = cli("kernels", "doubles.py:small", *X, "-o", "again.svg")
    assert again.code == 0 and (folder / "again.svg").read_text() == text
    assert cli("kernels", "doubles.py:small", *X, "-o", "blocks.png").code == 0
    assert (folder / "blocks.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_needs_a_kernel_and_a_format(cli):
    found = cli("kernels", "doubles.py:plain", *X, "-o", "blocks.svg")
    assert found.code == 2 and "plain has no Pallas kernel with steps that are known" in found.err
    found = cli("kernels", "doubles.py:small", *X, "-o", "blocks.txt")
    assert found.code == 2 and "its name must end in .svg or .png" in found.err
