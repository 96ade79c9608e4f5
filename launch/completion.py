"""Print the completion script for bash or zsh: commands, options and values of options.

Save the script in a file, and let ~/.bashrc or ~/.zshrc read the file with `source`.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path

from common import benchmarks
from common.command_line import Parser, program
from launch.cli import ALWAYS, COMMANDS, NEVER, commands_of, owners_of, parser_of

PROGRAM = "run_and_time.sh"
FILES = ("FILE", "DIR", "LOG_OR_FOLDER")  # metavars of arguments that are paths
FUNCTION = "_run_and_time"  # prefix of the functions that complete values
# In front of zsh's script: compdef is defined by compinit.
ZSH_HEAD = "(( $+functions[compdef] )) || { autoload -U compinit && compinit }\n"
# Behind bash's script: no space after `key=`.
BASH_TAIL = f"""
{FUNCTION}() {{
  _shtab_run_and_time_sh
  [[ ${{COMPREPLY[0]-}} != *= ]] || compopt -o nospace
}}
complete -o bashdefault -F {FUNCTION} {PROGRAM}
"""


def parser() -> Parser:
    """Return the argument parser of `completion`."""
    parser = Parser("completion", __doc__, ["completion bash > ~/.run_and_time_completion"])
    parser.add_argument("shell", choices=("bash", "zsh"), help="shell that reads the script")
    return parser


def script(shell: str) -> str:
    """Return the completion script. A shell evaluates it."""
    import shtab

    text = shtab.complete(command_tree(), shell)
    if shell == "bash":
        return text + BASH_TAIL
    text = re.sub(r":\(((\w+= ?)+)\)", r":compadd -S '' -- \1", text)  # no space after `key=`
    # In zsh, the script of shtab works only inside `eval`, not in a file that is read by `source`.
    return f"{ZSH_HEAD}eval {shlex.quote(text)}\n"


def command_tree() -> argparse.ArgumentParser:
    """Return a parser of every command line, with a benchmark before or after its command."""
    root = argparse.ArgumentParser(PROGRAM, description="MLPerf Training of Llama models")
    first = root.add_subparsers()
    for benchmark in benchmarks.names():
        default = _add(first, benchmark, parser_of("run", benchmark))
        commands = default.add_subparsers()
        for name in commands_of(benchmark):
            _add(commands, name, parser_of(name, benchmark))
    for name, command in COMMANDS.items():
        owners = owners_of(name)
        if command.benchmark != ALWAYS:
            without = _add(first, name, parser_of(name, ""))
        elif owners:
            without = first.add_parser(name, help=_about(parser_of(name, owners[0])))
        else:
            continue  # no benchmark of this checkout has it
        if command.benchmark == NEVER:
            continue
        second = without.add_subparsers()
        for benchmark in owners:
            _add(second, benchmark, parser_of(name, benchmark))
    return root


def _about(parser: argparse.ArgumentParser) -> str:
    """Return the first line of a parser's description."""
    return (parser.description or "").strip().partition("\n")[0]


def _add(
    words: argparse._SubParsersAction, word: str, parser: argparse.ArgumentParser
) -> argparse.ArgumentParser:
    """Add `word` with the arguments of `parser`, and return the new parser."""
    added = words.add_parser(word, parents=[parser], add_help=False, help=_about(parser))
    for action in list(added._actions):
        _set_values(action)
    return added


def _set_values(action: argparse.Action) -> None:
    """Tell shtab how to complete the values of `action`, and of the parsers below it."""
    import shtab

    words = action.choices or getattr(action, "words", None)
    if isinstance(action, argparse._SubParsersAction):
        for parser in action.choices.values():
            for each in parser._actions:
                _set_values(each)
    elif words:
        action.choices = [str(word) for word in words]
    elif action.type is Path or action.metavar in FILES:
        action.complete = shtab.FILE  # type: ignore[attr-defined]


main = program(parser, lambda options: print(script(options.shell), end=""))

if __name__ == "__main__":
    sys.exit(main())
