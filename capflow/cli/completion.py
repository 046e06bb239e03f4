"""`capflow completion`: prints the script with which a shell completes commands, options and consumers.

The script asks capflow itself: it runs `capflow` with the variable `_CAPFLOW_COMPLETE`, which click handles. Each
shell's script is click's, changed where click has no way for `--consumer NAME:KEY=VALUE,KEY=VALUE`.

Invariant: a completion imports neither torch nor vLLM.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
    split_arg_string,
)

from capflow.text.examples import examples

if TYPE_CHECKING:
    from capflow.plugins.configure import Plugin

VARIABLE = "_CAPFLOW_COMPLETE"
"""The variable that makes capflow answer a shell: click's, for a program with this name."""

_JOINED = (":", "=")


class _Bash(BashComplete):
    """Bash splits words at `:` and `=`, too, and replaces only the last part. So the script sends the whole line."""

    source_template: ClassVar[str] = r"""%(complete_func)s() {
    local line="${COMP_LINE:0:COMP_POINT}" part="${COMP_WORDS[COMP_CWORD]}" type value
    local before="${line##*[[:space:]]}"
    [[ $part == [:=]* ]] && part=""
    before="${before%%"$part"}"
    before="${before#--*=}"
    while IFS=, read -r type value; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain)
                [[ $value == *[:=] ]] && compopt -o nospace
                COMPREPLY+=("${value#"$before"}")
                ;;
        esac
    done < <(COMP_LINE="$line" %(complete_var)s=bash_complete "$1" 2> /dev/null)
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words of the line before the one that is completed, and that word."""
        line = os.environ["COMP_LINE"]
        words = split_arg_string(line)[1:]
        return (words, "") if not words or line[-1:].isspace() else (words[:-1], words[-1])


class _Zsh(ZshComplete):
    """No space follows a completion without a help text."""

    source_template: ClassVar[str] = ZshComplete.source_template.replace("compadd -U", "compadd -S '' -U")

    def format_completion(self, item: CompletionItem[str]) -> str:
        """Return a completion for the script; one after which a value follows has no help text."""
        if item.value.endswith(_JOINED):
            item = CompletionItem(item.value, item.type)
        return super().format_completion(item)


class _Fish(FishComplete):
    """A completion may have commas."""

    source_template: ClassVar[str] = FishComplete.source_template.replace("string split ", "string split --max 1 ")


_SHELLS: dict[str, type[ShellComplete]] = {"bash": _Bash, "zsh": _Zsh, "fish": _Fish}


def register() -> None:
    """Have click complete with the classes of this module."""
    for shell in _SHELLS.values():
        add_completion_class(shell)


@click.command(epilog=examples("source <(capflow completion bash)", "capflow completion fish | source"))
@click.argument("shell", type=click.Choice(list(_SHELLS)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script with which SHELL completes the commands, options and consumers of capflow.

    To complete in every session, add the line `source <(capflow completion bash)` to ~/.bashrc, or with `zsh` to
    ~/.zshrc below `compinit`; with fish, write the script to ~/.config/fish/completions/capflow.fish.
    """
    click.echo(_SHELLS[shell](context.find_root().command, {}, "capflow", VARIABLE).source(), nl=False)


def complete_plugin(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Return the names of plugins that begin with a text."""
    return [
        CompletionItem(name, help=(plugin.__doc__ or "").strip().partition("\n")[0])
        for name, plugin in sorted(_plugins().items())
        if name.startswith(incomplete)
    ]


def complete_consumer(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Return the completions of a value of `--consumer`: names of plugins, and names of their options."""
    from capflow.plugins.configure import options_of

    plugins = _plugins()
    name, colon, text = incomplete.partition(":")
    if not colon:
        items = complete_plugin(context, parameter, incomplete)
        needing = {each for each, plugin in plugins.items() if any(option.required for option in options_of(plugin))}
        return [CompletionItem(f"{item.value}:") if item.value in needing else item for item in items]
    plugin = plugins.get(name.partition("@")[0])
    done, comma, key = text.rpartition(",")
    given = {each.partition("=")[0] for each in done.split(",")}
    return [
        CompletionItem(f"{name}:{done}{comma}{option.name}=", help=option.meaning)
        for option in (options_of(plugin) if plugin is not None else ())
        if option.name.startswith(key) and option.name not in given
    ]


def _plugins() -> dict[str, Plugin]:
    """Return the plugins by name; none if one cannot be loaded, which other commands report."""
    from capflow.errors import CapflowError
    from capflow.plugins.configure import load_plugins

    try:
        return load_plugins()
    except CapflowError:
        return {}
