"""The golden files: every JAX release reads those of all releases, with the same results."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from jaxprtool.formats.jaxpr.read import read
from jaxprtool.formats.jaxpr.write import write
from jaxprtool.ir.equivalence import structural_difference
from jaxprtool.ir.program import Program, type_check
from jaxprtool.ir.trees import same_tree
from tests.formats.jaxpr.golden import CASES, FOLDER, programs, random_case
from tests.programs import same
from tests.share import first_and_proofs

FILES = sorted(FOLDER.glob("*/*.jaxpr"))
IDS = [f"{path.parent.name}/{path.stem}" for path in FILES]


def test_every_release_has_written_every_program():
    written = {path.parent.name: set() for path in FILES}
    for path in FILES:
        written[path.parent.name].add(path.stem)
    assert len(written) >= 2
    assert all(names == set(programs()) for names in written.values())


@pytest.mark.parametrize("path", first_and_proofs(FILES), ids=IDS)
def test_a_golden_file_returns_the_results_of_the_function(path: Path):
    read_back = read(path)
    if path.stem == "over_an_axis":
        type_check(read_back)
        assert read_back.axis_env == (("i", 4),)
        return
    case = random_case() if path.stem == "random_numbers" else CASES[path.stem]
    with case.setting():
        type_check(read_back)
        traced = case.program()
        assert same_tree(read_back.in_tree, traced.in_tree)
        assert same_tree(read_back.out_tree, traced.out_tree)
        read_back = read_back.replace(in_tree=traced.in_tree, out_tree=traced.out_tree)
        same(traced, read_back, case.arguments())


@pytest.mark.parametrize("name", sorted(programs()))
def test_the_golden_files_of_this_release_are_up_to_date(name: str, tmp_path: Path):
    golden = FOLDER / jax.__version__ / f"{name}.jaxpr"
    if not golden.exists():
        pytest.skip(f"no golden files of JAX {jax.__version__}")
    program = programs()[name]()
    assert without_places(program, tmp_path / "now.jaxpr") == without_places(
        read(golden), tmp_path / "then.jaxpr"
    )
    assert structural_difference(read(golden), program) is None


def without_places(program: Program, path: Path) -> str:
    """Return the body of a program's file, without comments."""
    write(program, path)
    body = path.read_text().split("\n\n", 1)[1]
    return "\n".join(line.split("  #")[0].rstrip() for line in body.splitlines())
