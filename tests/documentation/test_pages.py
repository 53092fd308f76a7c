"""The pages agree with the project: dependencies, links, models, JSON documents, sizes."""

import re
import tomllib
from xml.etree import ElementTree

import pytest

import jaxprtool
from jaxprtool import extend, testing
from jaxprtool.commands.explain import command as explain
from tests.documentation import jax_internals, json_page, lint_page, picture
from tests.documentation.blocks import PAGES, ROOT
from tests.documentation.documents import (
    DESCRIPTIONS,
    DOCUMENTS,
    FOLDER,
    descriptions_file,
    schema_file,
)

README = PAGES["README.md"]


def test_the_readme_is_short():
    assert len(README.encode()) <= 6_000


def test_the_dependency_table_matches_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {"": project["dependencies"], **project["optional-dependencies"]}
    del declared["models"], declared["zoo"]  # the models themselves
    del declared["docs"]  # on the contributing page
    table = README.partition("| dependency | why |")[2].partition("\n\n")[0]
    shown = {
        name: extra
        for names, extra in re.findall(r"^\| (`.*?`)(?: \((\w+)\))? \|", table, re.MULTILINE)
        for name in re.findall(r"`([\w-]+)`", names)
    }
    assert shown == {
        re.match(r"[\w-]+", requirement)[0]: extra
        for extra, requirements in declared.items()
        for requirement in requirements
        if not requirement.startswith("jaxprtool[")  # another one of these
    }


def test_links_to_files_resolve():
    for page, text in PAGES.items():
        text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
        folder = (ROOT / page).parent
        assert [link for link in links if not (folder / link).exists()] == [], page


def test_the_index_links_to_every_page():
    linked = set(re.findall(r"\]\(([\w/]+\.md)\)", PAGES["docs/index.md"]))
    assert {f"docs/{name}" for name in linked} | {"docs/index.md"} == {
        page for page in PAGES if page.startswith("docs/")
    }


@pytest.mark.parametrize("module", [jaxprtool, testing, extend], ids=lambda m: m.__name__)
def test_every_public_name_is_in_the_api_reference(module):
    text = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.rst"))
    listed = re.findall(
        rf"^\.\. \w*(?::\w+)?:: {re.escape(module.__name__)}\.(\w+)$", text, re.MULTILINE
    )
    assert set(module.__all__) <= set(listed)


def test_every_model_has_a_row_without_failures_in_each_table():
    rows = re.findall(r"^\| (\w+) \|(.*)\|$", PAGES["docs/models.md"], re.MULTILINE)
    models = {path.stem for path in (ROOT / "tests" / "models" / "zoo").glob("[!_]*.py")}
    told = [(name, cells) for name, cells in rows if name in models]
    assert sorted(name for name, _ in told) == sorted([*models] * 3)
    assert not any("**" in cells for _, cells in told)


def test_the_lint_page_has_exactly_the_existing_rules():
    before = PAGES["docs/lint.md"]
    assert before == lint_page.page(before)


def test_the_page_of_json_documents_is_up_to_date_with_the_types():
    before = PAGES["docs/json.md"]
    assert before == json_page.page(before)


@pytest.mark.parametrize("command", DOCUMENTS)
def test_the_schema_of_a_command_is_up_to_date_with_the_types(command):
    assert (FOLDER / f"{command}.json").read_text() == schema_file(command)


def test_the_descriptions_of_passes_are_up_to_date():
    assert DESCRIPTIONS.read_text() == descriptions_file()
    assert list(explain.descriptions().values()) == explain.described_afresh()


@pytest.mark.parametrize("name", picture.PICTURES)
def test_a_picture_shows_the_output_of_its_commands(monkeypatch, name):
    monkeypatch.chdir(ROOT)
    drawn = ElementTree.parse(picture.DOCS / f"{name}.svg").iter("{http://www.w3.org/2000/svg}text")
    shown = "".join("".join(text.itertext()) for text in drawn)
    printed = picture.screen(name).plain
    assert "".join(shown.split()).removeprefix("jaxprtool") == "".join(printed.split())


def test_the_page_of_jax_internals_lists_exactly_those_used():
    listed = re.findall(r"^\| `([\w.]+)` \| .+ \|$", PAGES["docs/jax_internals.md"], re.MULTILINE)
    assert sorted(listed) == list(jax_internals.used_names())
    assert len(listed) <= 160
