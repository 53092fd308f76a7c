"""The README tells the truth: its commands and its session give what it shows."""

import doctest
import re
import shlex
from pathlib import Path

from jaxprtool.cli.main import main

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_session_gives_what_it_shows():
    (text,) = (text for language, text in BLOCKS if language == "pycon")
    test = doctest.DocTestParser().get_doctest(text, {}, "README", "README.md", 0)
    assert doctest.DocTestRunner().run(test) == (0, 7)


def test_the_commands_give_what_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (model,) = (text for language, text in BLOCKS if language == "python")
    (tmp_path / "model.py").write_text(model)
    commands = 0
    for text in (text for language, text in BLOCKS if language == "console"):
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            assert main(shlex.split(command)[1:]) == 0
            out = " ".join(capsys.readouterr().out.split())  # the width of a line is no matter
            assert out.startswith(" ".join(shown.partition("...\n")[0].split()))
            commands += 1
    assert commands == 3
