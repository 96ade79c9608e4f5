"""Print a script that completes benchmarks, subcommands, options and choices in bash or zsh.

source <(./run_and_time.sh completion bash)          in ~/.bashrc, with the path of the project
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from common import benchmarks
from common.command_line import SWITCHES, Parser
from launch.cli import NEVER, VERBS, parser_of

SCRIPT = Path(__file__).with_suffix(".bash")
ZSH = "(( $+functions[compdef] )) || { autoload -U compinit && compinit }\nautoload -U +X bashcompinit && bashcompinit\n"


def parser(benchmark: str) -> Parser:
    parser = Parser("completion", __doc__, ["completion zsh > ~/.run_and_time_completion"])
    parser.add_argument("shell", choices=("bash", "zsh"))
    return parser


def words_of(parser: Parser) -> list[str]:
    """Return the parser's options and the choices of its positional arguments."""
    choices = [
        str(choice)
        for action in parser._actions
        if not action.option_strings
        for choice in action.choices or ()
    ]
    return [*choices, *dict.fromkeys(parser.options()), *SWITCHES]


def script(shell: str) -> str:
    known = benchmarks.names()
    found = {
        name: dict.fromkeys(
            word
            for each in known
            for parser in [parser_of(name, each)]
            if parser
            for word in words_of(parser)
        )
        for name in VERBS
    }
    own = {name: known if VERBS[name].benchmark != NEVER else [] for name in VERBS}
    cases = "\n".join(
        f"        {name}) words='{' '.join([*own[name], *words])}' ;;"
        for name, words in found.items()
    )
    first = " ".join([*known, *VERBS, "--help", "--version"])
    places = {
        "VERBS": "|".join(VERBS),
        "BENCHMARKS": "|".join(known),
        "CASES": cases,
        "FIRST": first,
    }
    return ZSH * (shell == "zsh") + re.sub(
        "@([A-Z]+)@", lambda place: places[place[1]], SCRIPT.read_text()
    )


if __name__ == "__main__":
    print(script(parser("").parse_args(sys.argv[1:]).shell), end="")
