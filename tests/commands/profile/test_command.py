"""`jaxprtool profile` shows measured time by line, and writes it for other tools."""

import json
import os
import textwrap

import jax
import jax.numpy as jnp
import pytest

from jaxprtool.execute.running.backends import compiled_afresh
from jaxprtool.jaxcompat.lowering import read_pprof

FUNCTIONS = """
    import jax
    import jax.numpy as jnp
    import jaxprtool

    @jaxprtool.example("f32[300,200]", "f32[200,200]")
    def loss(x, w):
        with jax.named_scope("product"):
            y = jnp.tanh(x @ w)
        return jnp.sort(y, axis=0).sum()
"""


@pytest.fixture(autouse=True)
def timed(folder):
    (folder / "timed.py").write_text(textwrap.dedent(FUNCTIONS))


LOSS = "profile", "timed.py:loss", "--calls", "4", "--no-cache"


@pytest.mark.proof
def test_a_table_has_the_lines_with_source_and_the_explained_share(cli):
    found = cli(*LOSS)
    assert found.code == 0 and found.out.startswith("loss: ") and "% explained\n" in found.out
    assert "return jnp.sort(y, axis=0).sum()" in found.out
    assert "FLOP/s of" in found.out and "a call without the profiler" in found.out
    assert all(len(line) <= 80 for line in found.out.splitlines())


@pytest.mark.parametrize(
    "by, name", [("scope", "product"), ("function", "timed.py:loss"), ("primitive", "sort")]
)
def test_time_can_be_grouped_in_other_ways(cli, by, name):
    found = cli(*LOSS, "--by", by)
    assert found.code == 0 and name in found.out


@pytest.mark.proof
def test_a_compiled_operation_is_shown_whole_with_its_lines(cli):
    found = cli(*LOSS, "--by", "op")
    assert "sort" in found.out and "timed.py:10" in found.out


def test_all_formats_can_be_written_at_once(cli, folder):
    files = "--pprof", "p.pb.gz", "--perfetto", "p.json", "-o", "p.html"
    found = cli(*LOSS, "-p", "grad", "--json", *files)
    document = json.loads(found.out)
    assert {"wall_seconds", "explained", "lines", "operations", "own"} <= document.keys()
    assert 0 < document["explained"] <= 1
    line = document["lines"][0]
    assert {"place", "seconds", "share", "flops_per_second", "backward_seconds"} <= line.keys()
    assert {"name", "places", "seconds"} <= document["operations"][0].keys()
    samples = json.loads(read_pprof((folder / "p.pb.gz").read_bytes()))
    total = sum(int(each["value"][0]) for each in samples["sample"]) * 1e-9
    assert total == pytest.approx(sum(each["seconds"] for each in document["lines"]), rel=1e-3)
    slices = [e for e in json.loads((folder / "p.json").read_text())["traceEvents"] if "dur" in e]
    assert {"call 1", "timed.py:10"} <= {each["name"] for each in slices}
    page = (folder / "p.html").read_text()
    assert "jnp" in page and 'href="#f0-10"' in page and "--heat:" in page


def test_a_folder_of_jaxs_profiler_is_a_target(cli, folder):
    @jax.jit
    def sorts(x):
        return jnp.sort(x, axis=0)

    # A trace has no modules for programs from JAX's compilation cache.
    with compiled_afresh(), jax.profiler.trace(folder / "trace"):
        sorts(jnp.ones((300, 300))).block_until_ready()
    found = cli("profile", "trace")
    assert found.code == 0 and "test_command.py:" in found.out
    (file,) = (path.relative_to(folder) for path in (folder / "trace").rglob("*.xplane.pb"))
    assert "test_command.py:" in cli("profile", str(file)).out
    os.utime(file, (0, 0))
    older = cli("profile", str(file))  # than the source
    assert "test_command.py:" in older.out and "return jnp.sort" not in older.out
    assert "test_command.py has changed since it was recorded" in older.err
    for broken in (file.read_bytes()[:-9], b"\x0a\x02\x0a\x05"):
        (folder / "broken.xplane.pb").write_bytes(broken)
        found = cli("profile", "broken.xplane.pb")
        assert found.code == 2 and "is not a trace of JAX's profiler" in found.err


def test_other_folders_are_refused_with_a_one_line_error(cli, folder):
    (folder / "nothing").mkdir()
    found = cli("profile", "nothing")
    assert found.code == 2 and "no file in it ends with .xplane.pb" in found.err
    (folder / "bad.xplane.pb").write_text("not a trace")
    found = cli("profile", "bad.xplane.pb")
    assert found.code == 2 and "is not a trace of JAX's profiler" in found.err
    found = cli("profile", "none.xplane.pb")
    assert found.code == 2 and "cannot read 'none.xplane.pb'" in found.err


@pytest.mark.parametrize("option", [("-p", "grad"), ("--args", "f32[3]"), ("--calls", "3")])
def test_options_of_a_run_do_not_apply_to_a_profile(cli, folder, option):
    (folder / "nothing").mkdir()
    found = cli("profile", "nothing", *option)
    assert found.code == 2
    assert f"{option[0]} does not apply to 'nothing', which is a profile" in found.err


def test_an_empty_profile_is_reported_and_estimated_only_on_request(cli, monkeypatch):
    # As on a device whose operations the profiler does not record.
    monkeypatch.setattr("jaxprtool.execute.profile._operation", lambda *event: None)
    found = cli(*LOSS)
    assert found.code == 2 and "recorded no operations" in found.err and "--estimate" in found.err
    found = cli(*LOSS, "--estimate")
    assert found.code == 0 and "this is an estimate" in found.err
    assert found.out.startswith("loss: 24.6 MFLOP")


def test_a_profile_that_is_too_long_is_truncated_with_a_warning(cli, monkeypatch):
    monkeypatch.setattr("jaxprtool.execute.profile.MOST_EVENTS", 12)
    found = cli(*LOSS)
    assert found.code == 0
    assert "the profile is too long: only 12 of its operations are read" in found.out


def test_a_page_needs_the_suffix_html(cli):
    found = cli(*LOSS, "-o", "page.txt")
    assert found.code == 2 and "name it FILE.html" in found.err
