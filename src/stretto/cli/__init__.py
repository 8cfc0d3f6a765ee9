"""The command line: one module per group of verbs, imported when the group is used.

Bad input never ends in a traceback: errors of ours are printed with their hint and give the exit code that
`stretto.errors` says. Results go to standard output, everything else to standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

import stretto
from stretto.cli import streams
from stretto.errors import StrettoError

app = App(
    name="stretto",
    help="Elastic scheduler and elastic training runtime for deep learning.",
    version=stretto.__version__,
    help_format="plaintext",
    result_action="return_value",
)
app.command("stretto.cli.sim:app", name="sim", help="Simulate a trace under a policy; compare, draw, explain.")
app.command("stretto.cli.trace:app", name="trace", help="Traces: make one, look into one, convert one.")
app.command("stretto.cli.job:app", name="job", help="Job files: check one, print the schema.")
app.command("stretto.cli.lab:app", name="lab", help="The experiments of the documentation, re-run.")

policy = App(name="policy", help="The scheduling policies: list, show; the one in force.", help_format="plaintext")
policy.command("stretto.cli.policy:list_", name="list", help="List every policy: built in, or installed as a plug-in.")
policy.command("stretto.cli.policy:show_", name="show", help="Show one policy: what it does, promises and takes.")
policy.command("stretto.cli.cluster:policy_get", name="get", help="Print the policy that is in force.")
policy.command("stretto.cli.cluster:policy_set", name="set", help="Change the policy while jobs run.")
app.command(policy)

classes = App(name="class", help="What was learned of jobs: list, show, forget.", help_format="plaintext")
classes.command("stretto.cli.classes:list_", name="list", help="List the classes of which something was learned.")
classes.command("stretto.cli.classes:show_", name="show", help="Show what was learned of one: lengths and speeds.")
classes.command("stretto.cli.classes:forget", name="forget", help="Forget one: its next job is as new as the first.")
app.command(classes)

for _verb, _where, _help in (
    ("up", "server:up", "Start the server on this machine."),
    ("login", "login:login", "Pin the key of a server that speaks TLS."),
    ("down", "server:down", "Stop it; jobs go on for a grace."),
    ("controller", "controller:controller", "Run jobs on Kubernetes."),
    ("run", "run:run", "Run a script or command as a job, and follow it. Options of the script come after --."),
    ("check", "check:check", "Check that a script trains the same at any number of workers."),
    ("submit", "submit:submit", "Submit a job file."),
    ("ps", "jobs:ps", "List jobs."),
    ("show", "jobs:show_", "Show one job."),
    ("why", "jobs:why", "Say why a job has the workers it has, or waits."),
    ("logs", "watching:logs", "Print or follow the log of a job."),
    ("events", "watching:events", "Print or follow what happens."),
    ("top", "top:top", "Watch devices, jobs and the queue, live."),
    ("cancel", "jobs:cancel", "Cancel jobs."),
    ("suspend", "jobs:suspend", "Suspend jobs."),
    ("resume", "jobs:resume", "Let suspended jobs go on."),
    ("scale", "jobs:scale", "Change between how many workers a job may run."),
    ("migrate", "jobs:migrate", "Move a job to another node."),
    ("nodes", "cluster:nodes", "List nodes; drain one, or take it into use again."),
    ("forecast", "cluster:forecast", "Say when jobs will start and end."),
    ("token", "cluster:token", "Tokens: create, list, revoke."),
    ("completion", "completion:completion", "Print a script that completes words in your shell."),
):
    app.command(f"stretto.cli.{_where}", name=_verb, help=_help)


@app.command
def version() -> None:
    """Print the version."""
    print(stretto.__version__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit code."""
    with streams.prepared():
        return _run(arguments)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        code = app(arguments, exit_on_error=False, print_error=False)
        with streams.unread(sys.stdout):
            sys.stdout.flush()
    except CycloptsError as error:
        return _complain(str(error), "stretto --help, or --help after any command, says what there is", 2)
    except StrettoError as error:
        return _complain(error.message, error.hint, error.exit_code)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): not an error, and there is nobody to tell.
        streams.silence(sys.stdout)
        return 0
    except OSError as error:
        return _complain(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "), "", 1)
    except UnicodeError as error:
        return _complain(f"this is not text that can be read or sent: {error}", "use UTF-8", 2)
    except KeyboardInterrupt:
        return _complain("interrupted", "", 130)
    return code if isinstance(code, int) else 0


def _complain(message: str, hint: str, code: int) -> int:
    with streams.unread(sys.stderr):
        print(f"error: {message}", file=sys.stderr)
        if hint:
            print(f"  hint: {hint}", file=sys.stderr)
    return code
