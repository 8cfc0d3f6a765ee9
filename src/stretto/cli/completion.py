"""`stretto completion`: words after Tab."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="Which shell.")], /) -> None:
    """Print a script that completes words in your shell.

    bash: stretto completion bash > ~/.local/share/bash-completion/completions/stretto
    zsh:  stretto completion zsh > a file called _stretto in a folder of $fpath
    fish: stretto completion fish > ~/.config/fish/completions/stretto.fish
    """
    from stretto.cli import app

    print(app.generate_completion(shell=shell))
