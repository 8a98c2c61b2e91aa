"""Shell completion, generated from the parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from onnxtrain.cli.console import Console
from onnxtrain.cli.parser import make_parser

Command = tuple[tuple[str, ...], argparse.ArgumentParser]


def completion_command(options: argparse.Namespace, console: Console) -> int:
    """Print the completion script of a shell."""
    script = {"bash": bash, "zsh": zsh, "fish": fish}[options.shell]()
    if console.as_json:
        console.result({"shell": options.shell, "script": script})
    else:
        print(script, end="", flush=True)
    return 0


def _commands(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[Command]:
    """Yield every command and its path of words."""
    yield path, parser
    for name, (inner, _) in _subcommands(parser).items():
        yield from _commands(inner, (*path, name))


def _subcommands(
    parser: argparse.ArgumentParser,
) -> dict[str, tuple[argparse.ArgumentParser, str]]:
    """Return the subcommands of a command and their help."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            does = {choice.dest: choice.help or "" for choice in action._choices_actions}
            return {name: (inner, does.get(name, "")) for name, inner in action.choices.items()}
    return {}


def _options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings]


def _arguments(parser: argparse.ArgumentParser) -> list[str]:
    """Return the choices of the positional arguments."""
    found = [a.choices for a in parser._actions if not a.option_strings and a.choices is not None]
    return [str(word) for choices in found for word in choices]


_BASH = r"""_onnxtrain() {
  local IFS=$' \t\n'
  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"
  local command="${COMP_WORDS[1]}" offer="" files=1
  [ "$COMP_CWORD" -le 1 ] && command=""
  case "$command" in checkpoint|adapter)
    [ "$COMP_CWORD" -gt 2 ] && command="$command ${COMP_WORDS[2]}" ;;
  esac
CASES
  COMPREPLY=($(compgen -W "$offer" -- "$word"))
  IFS=$'\n'  # file names may have spaces
  [ -z "$files" ] || COMPREPLY+=($(compgen -f -- "$word"))
}
complete -o filenames -F _onnxtrain onnxtrain
"""

_ZSH = """(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -u; }
_onnxtrain() {
  local command="${words[2]}" before="${words[CURRENT-1]}" offer="" files=1
  (( CURRENT <= 2 )) && command=""
  [[ "$command" = (checkpoint|adapter) ]] && (( CURRENT > 3 )) && command="$command ${words[3]}"
CASES
  [[ -z "$offer" ]] || compadd -- ${=offer}
  [[ -z "$files" ]] || _files
}
compdef _onnxtrain onnxtrain
"""


def _cases() -> str:
    """Return what bash and zsh offer: by command, and by command and last option."""
    words, values = [], []
    for path, parser in _commands(make_parser()):
        key = " ".join(path)
        arguments = _arguments(parser)
        names = [name for action in _options(parser) for name in action.option_strings]
        files = "; files=" if arguments else ""
        words.append(f'    "{key}") offer="{" ".join([*arguments, *names])}"{files} ;;')
        for action in _options(parser):
            if action.nargs == 0:
                continue
            offered = " ".join(map(str, action.choices or ()))
            here = "|".join(f'"{key} {name}"' for name in action.option_strings)
            values.append(f'    {here}) offer="{offered}"{"; files=" if offered else ""} ;;')
    by_command = ['  case "$command" in', *words, "  esac"]
    return "\n".join([*by_command, '  case "$command $before" in', *values, "  esac"])


def bash() -> str:
    """Return the script for bash."""
    return _BASH.replace("CASES", _cases())


def zsh() -> str:
    """Return the script for zsh."""
    return _ZSH.replace("CASES", _cases())


def fish() -> str:
    """Return the script for fish, with descriptions."""
    lines = []
    for path, parser in _commands(make_parser()):
        begin = f"complete -c onnxtrain -n {_quoted(_condition(path, parser))}"
        below = _subcommands(parser)
        lines += [
            f"{begin} -f -a {word}{_said(below[word][1] if below else '')}"
            for word in _arguments(parser)
        ]
        for action in _options(parser):
            names = [
                f" -l {name[2:]}" if name.startswith("--") else f" -s {name[1:]}"
                for name in action.option_strings
            ]
            value = "" if action.nargs == 0 else " -r"
            if action.choices is not None:
                value = f" -x -a {_quoted(' '.join(map(str, action.choices)))}"
            lines.append(f"{begin}{''.join(names)}{value}{_said(action.help or '')}")
    return "\n".join([*lines, ""])


def _condition(path: tuple[str, ...], parser: argparse.ArgumentParser) -> str:
    """Return the condition under which fish offers the words of a command."""
    if not path:
        return "__fish_use_subcommand"
    parts = [f"__fish_seen_subcommand_from {word}" for word in path]
    below = _subcommands(parser)
    if below:
        parts.append(f"not __fish_seen_subcommand_from {' '.join(below)}")
    return "; and ".join(parts)


def _said(text: str) -> str:
    return f" -d {_quoted(text)}" if text and text != argparse.SUPPRESS else ""


def _quoted(text: str) -> str:
    """Quote a text for fish."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
