"""Completion for shells, written from the parser itself."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from onnxtrain.cli.console import Console
from onnxtrain.cli.parser import make_parser


def completion_command(options: argparse.Namespace, console: Console) -> int:
    """Write the script of a shell to standard output."""
    write = {"bash": bash, "zsh": zsh, "fish": fish}[options.shell]
    print(write(), end="", flush=True)
    return 0


def _commands(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Yield every command with the words that lead to it."""
    yield path, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from _commands(inner, (*path, name))


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """What may follow a command: its subcommands, choices and options."""
    words: list[str] = []
    for action in parser._actions:
        words += action.option_strings
        if not action.option_strings and action.choices is not None:
            words += list(action.choices)
    return words


def _choices(parser: argparse.ArgumentParser) -> Iterator[tuple[Sequence[str], list[str]]]:
    """Yield options that take one of a few words, with these words."""
    for action in parser._actions:
        if action.option_strings and action.choices is not None:
            yield action.option_strings, list(action.choices)


def bash() -> str:
    """Return the script for bash: words by command, then file names."""
    words, values = [], []
    for path, parser in _commands(make_parser()):
        key = " ".join(path)
        words.append(f'    "{key}") words="{" ".join(_words(parser))}" ;;')
        for options, choices in _choices(parser):
            values += [f'    "{key} {o}") words="{" ".join(choices)}"; only=1 ;;' for o in options]
    return "\n".join(
        [
            "_onnxtrain() {",
            '  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"',
            '  local path="${COMP_WORDS[1]}" words="" only=""',
            '  [ "$COMP_CWORD" -le 1 ] && path=""',
            '  [ "$path" = checkpoint ] && [ "$COMP_CWORD" -gt 2 ] && path="checkpoint show"',
            '  case "$path" in',
            *words,
            "  esac",
            '  case "$path $before" in',
            *values,
            "  esac",
            '  COMPREPLY=($(compgen -W "$words" -- "$word"))',
            '  [ -n "$only" ] || COMPREPLY+=($(compgen -f -- "$word"))',
            "}",
            "complete -o filenames -F _onnxtrain onnxtrain",
            "",
        ]
    )


def zsh() -> str:
    """Return the script for zsh, which runs that of bash."""
    return f"autoload -U +X bashcompinit && bashcompinit\n{bash()}"


def fish() -> str:
    """Return the script for fish."""
    lines = []
    for path, parser in _commands(make_parser()):
        after = " and ".join(f"__fish_seen_subcommand_from {word}" for word in path)
        condition = after.replace(" and ", "; and ") if path else "__fish_use_subcommand"
        for word in _words(parser):
            if not word.startswith("-"):
                lines.append(f"complete -c onnxtrain -n '{condition}' -a {word}")
            elif word.startswith("--"):
                lines.append(f"complete -c onnxtrain -n '{condition}' -l {word[2:]}")
        for options, choices in _choices(parser):
            long = next(o for o in options if o.startswith("--"))
            lines.append(
                f"complete -c onnxtrain -n '{condition}' -l {long[2:]} -xa '{' '.join(choices)}'"
            )
    return "\n".join([*lines, ""])
