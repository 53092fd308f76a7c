"""Tutorials and recipes run from the first block to the last, and print the output they show."""

import re

import jax
import pytest

from tests.documentation import stories
from tests.documentation.blocks import PAGES

#: Pages of frameworks, which tests/models runs.
FRAMEWORKS = [f"docs/howto/{name}.md" for name in ("equinox", "haiku", "linen", "nnx", "numpyro")]

STORIES = [
    page
    for page in PAGES
    if page.startswith(("docs/tutorials/", "docs/howto/")) and page not in FRAMEWORKS
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return the path of one shared folder, which `forget` can distinguish from others."""
    return tmp_path_factory.mktemp("tutorial")


@pytest.mark.proof
@pytest.mark.parametrize("page", STORIES)
def test_a_page_prints_what_it_shows(page, place, monkeypatch):
    release = re.search(r"figures are those\sof\sJAX (\d+\.\d+)\.\s", PAGES[page])
    if not jax.__version__.startswith(f"{release[1] if release else '0.10'}."):
        pytest.skip("shown as on another JAX release")
    stories.play(PAGES[page], place, monkeypatch)


def test_a_difference_is_detected(place, monkeypatch):
    page = "```python\n# f.py\nimport jax.numpy as jnp\nf = jnp.sin\n```\n{}"
    console = "```console\n$ jaxprtool show f.py:f --args 'f32[2]'\n{}```\n"
    shown = "{{ lambda ; a:f32[2]. let b:f32[2] = {} a in (b,) }}\n"
    stories.play(page.format(console.format(shown.format("sin"))), place, monkeypatch)
    stories.play(page.format(console.format("...\n")), place, monkeypatch)
    with pytest.raises(AssertionError):
        stories.play(page.format(console.format(shown.format("cos"))), place, monkeypatch)
    change = "```diff\n--- f.py\n-f = jnp.sin\n+f = jnp.cos\n```\n"
    changed = change + console.format(shown.format("cos"))
    stories.play(page.format(changed), place, monkeypatch)
    with pytest.raises(AssertionError, match="does not have these lines"):
        stories.play(page.format(change + change), place, monkeypatch)
