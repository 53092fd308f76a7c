"""Take the pictures of pages in the gallery: `python -m tests.documentation.gallery`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.documentation.blocks import ROOT
from tests.render import browser

FOLDER = ROOT / "docs" / "gallery"

#: The command that writes the page of each picture. The page is the last word, or the run's page.
PAGES = {
    "show": "show samples/layers.py:loss --depth 1 -o show.html",
    "report": "report samples/transformer.py:loss -p grad -o report.html",
    "record": "record -o record/ samples/train.py --steps 60",
}


def take(name: str, command: str) -> None:
    """Write the page of a command, and its picture."""
    subprocess.run([sys.executable, "-m", "jaxprtool", *command.split()], check=True)
    page = Path("record/index.html" if name == "record" else f"{name}.html").absolute()
    with browser.chromium(1200, 800) as driver:
        driver.get(page.as_uri())
        driver.save_screenshot(str(FOLDER / f"{name}.png"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("samples").symlink_to(ROOT / "samples")
        os.environ["PYTHONPATH"] = str(ROOT)
        for each, given in PAGES.items():
            take(each, given)
