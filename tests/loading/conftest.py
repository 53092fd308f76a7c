"""The folder of a project that a test writes."""

import pytest


@pytest.fixture
def project(empty_folder):
    """An empty current folder. `project(path, text)` writes a file in it and returns its path."""

    def write(path, text=""):
        file = empty_folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return str(file)

    return write
