"""Print what completes the words of ``asyncsgd`` in a shell: ``asyncsgd completion bash``, or zsh.

    asyncsgd completion bash > ~/.local/share/bash-completion/completions/asyncsgd
    asyncsgd completion zsh > ~/.asyncsgd.zsh && echo source ~/.asyncsgd.zsh >> ~/.zshrc

The words are those of this version: they are read from the help of every command, so print them again after an
update."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from collections.abc import Mapping, Sequence

from asyncsgd.settings.shipped import config_names
from asyncsgd.tasks import NAMED

BASH = """\
_asyncsgd() {{
    local typed="${{COMP_WORDS[*]:1:COMP_CWORD-1}} " found=""
    case "$typed" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$found" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _asyncsgd asyncsgd"""
ZSH = """\
(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit; }}
_asyncsgd() {{
    local typed="${{(j: :)words[2,CURRENT-1]}} " found=""
    case "$typed" in
{cases}
    esac
    local -a matches=(${{=found}})
    compadd -a matches || _files
}}
compdef _asyncsgd asyncsgd"""
SHELLS = {"bash": BASH, "zsh": ZSH}
FLAG_LINE = re.compile(r"^ {2,}(-.*?)(?:   ?|$)", re.MULTILINE)
"""What stands on a line of a help text in front of a flag's meaning."""


def run(argv: list[str], prog: str) -> int:
    summary, _, more = str(__doc__).partition("\n")
    parser = argparse.ArgumentParser(
        prog=prog,
        description=summary,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell that is to read it")
    shell = parser.parse_args(argv).shell
    cases = "\n".join(f'        {typed}) found="{" ".join(words)}" ;;' for typed, words in completed().items())
    print(SHELLS[shell].format(cases=cases))
    return 0


def completed() -> Mapping[str, Sequence[str]]:
    """What was typed, as a pattern of the shell -> the words that may come next. The first pattern that fits counts."""
    from asyncsgd.__main__ import commands

    names = commands()
    words: dict[str, Sequence[str]] = {'" "': names, '"completion "': list(SHELLS)}
    of_tasks = {}
    for command in ("train", "check"):
        words[f'"{command} "'] = list(NAMED)
        for task in NAMED:
            flags = flags_in_help(command, task)
            if flags:  # the package of another one may be broken
                of_tasks[task] = flags
                words[f'"{command} {task} "*'] = flags
        shared = set.intersection(*map(set, of_tasks.values()))
        words[f'"{command} "*'] = [flag for flag in of_tasks["masked_lm"] if flag in shared]
    for name in names:
        if name not in ("train", "check", "completion"):
            words[f'"{name} "*'] = flags_in_help(name)
    return {'"study "': [*config_names(), *words['"study "*']], **words}


def flags_in_help(*words: str) -> list[str]:
    """The flags that the help of a command lists."""
    from asyncsgd.__main__ import main

    printed = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(printed):
        main([*words, "--help"])
    lines = FLAG_LINE.findall(printed.getvalue())
    return list(dict.fromkeys(re.findall(r"--[a-z][\w-]*", " ".join(lines))))
