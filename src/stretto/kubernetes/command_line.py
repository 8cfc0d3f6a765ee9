"""A job file's command as a container has it.

The first process of a container is special: it is the only one that is told to end, and it ignores what it has no
handler for. So a line that needs no shell is run without one, and around others the shell passes the word on: every
process of the container gets SIGTERM, the program under way may finish what it does, and no other is started.

Kubernetes replaces `$(NAME)` in commands and variables; a job file knows nothing of that, so its dollars are doubled.
"""

from __future__ import annotations

import re
import shlex

_SHELL_ONLY = re.compile(r"[|&;<>()$`\\*?\[\]#~{}!\n]|^\s*\w+=")
_BUILTINS = frozenset(
    {
        ".", ":", "alias", "case", "cd", "command", "eval", "exec", "exit", "export", "for", "hash", "if", "read",
        "readonly", "set", "shift", "source", "times", "trap", "type", "ulimit", "umask", "unset", "until", "wait",
        "while",
    }
)  # fmt: skip
"""Words that are no programs."""
_PASS_ON = """\
trap 'trap : TERM; kill -TERM 0' TERM
(trap 'exit 143' TERM
{line}
) &
wait $!; status=$?
while kill -0 $! 2>/dev/null; do wait $!; status=$?; done
wait $! 2>/dev/null; last=$?
[ $last = 127 ] || status=$last
exit $status"""
"""The last `wait` is for a program that ended while the shell was passing the word on; 127: it was told already."""


def container_command(run: str | tuple[str, ...], setup: str | None = None) -> list[str]:
    """What a container executes for this command, after `setup` if there is one."""
    words = _words(run)
    if setup is None and words:
        return [literally(word) for word in words]
    line = run if isinstance(run, str) else shlex.join(run)
    return ["/bin/sh", "-c", literally(_PASS_ON.format(line=_after(setup, line)))]


def set_up_first(setup: str, command: list[str]) -> list[str]:
    """The same for a command that is Kubernetes' already: it is handed on as it is."""
    return ["/bin/sh", "-c", literally(_PASS_ON.format(line=_after(setup, '"$@"'))), "sh", *command]


def literally(text: str) -> str:
    """So that Kubernetes replaces nothing in it."""
    return text.replace("$", "$$")


def _words(run: str | tuple[str, ...]) -> tuple[str, ...]:
    """A program and its arguments; none if the line needs a shell."""
    if not isinstance(run, str):
        return run
    if _SHELL_ONLY.search(run):
        return ()
    try:
        words = tuple(shlex.split(run))
    except ValueError:
        return ()
    return () if words and words[0] in _BUILTINS else words


def _after(setup: str | None, line: str) -> str:
    return line if setup is None else f"(\n{setup}\n) || exit\n{line}"
