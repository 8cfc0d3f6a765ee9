"""The command line: one module per group of verbs, imported when the group is used.

Bad input never ends in a traceback: errors of ours are printed with their hint and give the exit code that
`stretto.errors` says. Results go to standard output, everything else to standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

import stretto
from stretto.errors import StrettoError

app = App(
    name="stretto",
    help="Elastic scheduler and elastic training runtime for deep learning.",
    version=stretto.__version__,
    help_format="plaintext",
    result_action="return_value",
)
app.command("stretto.cli.sim:app", name="sim", help="Simulate a trace under a policy; compare, draw, explain.")
app.command("stretto.cli.policy:app", name="policy", help="The scheduling policies: list them, show one.")
app.command("stretto.cli.trace:app", name="trace", help="Traces: make one, look into one, convert one.")
app.command("stretto.cli.job:app", name="job", help="Job files: check one, print the schema.")
app.command("stretto.cli.lab:app", name="lab", help="The experiments of the documentation, re-run.")


@app.command
def version() -> None:
    """Print the version."""
    print(stretto.__version__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit code."""
    try:
        code = app(arguments, exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except CycloptsError as error:
        return _complain(str(error), "stretto --help, or --help after any command, says what there is", 2)
    except StrettoError as error:
        return _complain(error.message, error.hint, error.exit_code)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): not an error, and there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _complain(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "), "", 1)
    except KeyboardInterrupt:
        return _complain("interrupted", "", 130)
    return code if isinstance(code, int) else 0


def _complain(message: str, hint: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"  hint: {hint}", file=sys.stderr)
    return code
