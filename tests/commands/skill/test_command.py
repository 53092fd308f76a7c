import re

from jaxprtool.cli.app import load_command
from jaxprtool.registry import commands


def test_the_page_names_commands_and_options_that_exist(cli):
    result = cli("skill")
    page, infos = result.out, commands()
    assert result.code == 0 and re.match(r"---\nname: \w+\ndescription: .+\n---\n", page)
    named = re.findall(r"`(?:jaxprtool )?([a-z]+)((?: [^`]*)?)`", page)
    lines = [(name, words.split()) for name, words in named if name in infos]
    assert len({name for name, _ in lines}) > 12
    for name, words in lines:
        options = {o for p in load_command(name, infos[name]).params for o in p.opts}
        assert {word for word in words if word.startswith("-")} <= options, name


def test_the_page_is_one_page(cli):
    assert len(cli("skill").out) < 6_000
