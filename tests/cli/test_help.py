"""The help: commands in groups, and examples that the commands take."""

import re
import shlex

import click
import pytest
from click.testing import CliRunner

from capflow.cli import COMMANDS, GROUPS, cli


def leaves(command, *names):
    """Yield the commands that are no groups, each with the words that name it."""
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            yield from leaves(command.get_command(click.Context(command), name), *names, name)
    else:
        yield names, command


LEAVES = dict(leaves(cli))


def examples_of(text):
    return re.findall(r"^ +(capflow .*)$", text.partition("Examples:\n")[2].partition("\n\n")[0], re.MULTILINE)


def test_each_command_is_in_one_group_and_its_line_is_not_wrapped_at_80_columns():
    shown = CliRunner().invoke(cli, ["--help"], terminal_width=80).output
    assert sum(map(len, GROUPS.values())) == len(COMMANDS)
    for title, group in GROUPS.items():
        (section,) = re.findall(rf"^{title}:\n((?:  .*\n)+)", shown, re.MULTILINE)
        assert [line.split()[0] for line in section.splitlines()] == list(group)
        assert all(line.endswith(text) for line, (_, text) in zip(section.splitlines(), group.values(), strict=True))


@pytest.mark.parametrize("names", [(), *LEAVES], ids=" ".join)
def test_the_help_ends_with_examples_that_the_command_takes(names):
    shown = CliRunner().invoke(cli, [*names, "--help"], terminal_width=40).output
    examples = examples_of(shown)
    assert examples
    for example in examples:
        words = shlex.split(re.split(" [<>|] ", example)[0])[1:]
        command = max((leaf for leaf in LEAVES if tuple(words[: len(leaf)]) == leaf), key=len)
        assert names in ((), command)
        LEAVES[command].make_context(example, words[len(command) :])
