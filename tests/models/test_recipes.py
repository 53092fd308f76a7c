"""The pages of frameworks in docs/howto run, and print the output they show."""

import jax
import pytest

from tests.documentation import stories
from tests.documentation.blocks import PAGES
from tests.documentation.test_tutorials import FRAMEWORKS

pytestmark = pytest.mark.models


@pytest.mark.parametrize("page", FRAMEWORKS)
def test_a_page_prints_the_output_it_shows(page, tmp_path, monkeypatch):
    if not jax.__version__.startswith("0.10."):
        pytest.skip("shown as on JAX 0.10")
    stories.play(PAGES[page], tmp_path, monkeypatch)
