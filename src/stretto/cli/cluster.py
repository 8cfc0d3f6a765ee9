"""Verbs about the cluster as a whole: nodes, the policy in force, the forecast, tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from stretto.cli import show, words
from stretto.cli.options import HERE, Connection, Json, policy_for_server
from stretto.errors import UsageError

token = App(name="token", help="Tokens: create, list, revoke.", help_format="plaintext")


def nodes(
    *,
    drain: Annotated[str | None, Parameter(help="Leave this node: its workers move, and none comes.")] = None,
    within: Annotated[
        str | None, Parameter(help="With --drain: so long those may stay that would lose their work, such as 10m.")
    ] = None,
    now: Annotated[
        bool, Parameter(negative=(), help="With --drain: nobody may stay to end, whatever is lost.")
    ] = False,
    undrain: Annotated[str | None, Parameter(help="Take this node into use again.")] = None,
    json: Json = False,
    connection: Connection = HERE,
) -> None:
    """List the nodes with their devices and who uses them; drain one, or take it into use again.

    Jobs that would lose their work stay on a drained node until they end, unless --within or --now is given.
    """
    if drain and undrain:
        raise UsageError("one node at a time is drained or taken into use again", hint="use two commands")
    if (within or now) and not drain:
        raise UsageError("--within and --now say how a node is drained", hint="add --drain NODE")
    if within and now:
        raise UsageError("--within and --now are both given", hint="keep one of them")
    within_s = 0.0 if now else None if within is None else words.seconds(within)
    with connection.client() as client:
        if drain:
            client.drain(drain, within_s=within_s)
        if undrain:
            client.undrain(undrain)
        found = client.nodes()
    if json:
        show.as_json(found)
        return
    rows = [_node(node) for node in found]
    show.columns(["NODE", "TYPE", "USED", "CORES", "MEMORY", "STATE", "JOBS"], rows, right=["USED", "CORES", "MEMORY"])


def policy_get(*, json: Json = False, connection: Connection = HERE) -> None:
    """Print the policy and placement that are in force."""
    with connection.client() as client:
        _print_policy(client.policy(), json)


def policy_set(
    name: Annotated[str, Parameter(help="A policy's name (`stretto policy list` lists them), or file.py[:name].")],
    /,
    *,
    set_: Annotated[
        list[str],
        Parameter(name="--set", negative=(), help="key=value of an option, or of the cycle around the policy; repeat."),
    ] = [],  # noqa: B006
    placement: Annotated[str | None, Parameter(help="Where workers are put; as it is if not given.")] = None,
    json: Json = False,
    connection: Connection = HERE,
) -> None:
    """Change the policy while jobs run."""
    with connection.client() as client:
        _print_policy(client.set_policy(policy_for_server(name), words.pairs(set_), placement=placement), json)


def forecast(*, json: Json = False, connection: Connection = HERE) -> None:
    """Say when queued jobs will start and running ones end, if things go on as they do."""
    with connection.client() as client:
        found = client.forecast()
    if json:
        show.as_json(found)
        return
    now_s = show.now_s()
    if not found.jobs:
        show.note("no jobs that have not ended")
        return
    rows = [_expected(entry, now_s) for entry in found.jobs]
    show.columns(["JOB", "NAME", "PHASE", "WORKERS", "STARTS", "ENDS"], rows, right=["JOB", "WORKERS"])
    if any(entry.get("start_guessed") or entry.get("end_guessed") for entry in found.jobs):
        show.note("~ hangs on a job of unknown length: say what to `expect` of it in its job file")
    if found.get("text"):
        show.note(found.text)


@token.command(name="create")
def token_create(
    user: Annotated[str, Parameter(help="Whose it is.")],
    /,
    *,
    role: Annotated[
        Literal["viewer", "user", "admin"],
        Parameter(help="viewer reads, user submits and changes their own jobs, admin does everything."),
    ] = "user",
    expires: Annotated[str | None, Parameter(help="So long it is good for: 12h, 30d; for ever if not given.")] = None,
    account: Annotated[
        str | None, Parameter(help="The account of the server's machine that its jobs run as; default: of that name.")
    ] = None,
    shared: Annotated[
        bool, Parameter(negative=(), help="They may do all that the account can that the server runs as.")
    ] = False,
    json: Json = False,
    connection: Connection = HERE,
) -> None:
    """Make a token. Its secret is shown once."""
    expires_s = None if expires is None else show.now_s() + words.seconds(expires)
    with connection.client() as client:
        made = client.create_token(user, role, expires_s=expires_s, account=account, shared=shared)
    if json:
        show.as_json(made)
        return
    print(made["secret"])
    show.note(f"token {made.id} of {made.user} ({made.role}); keep it now, it is not shown again")
    if made.get("account"):
        show.note(f"its jobs run as the account {made.account}")
    elif shared:
        show.note(
            f"its jobs run as the account of the server: {made.user} can do what that one can, and read its files"
        )


@token.command(name="list")
def token_list(*, json: Json = False, connection: Connection = HERE) -> None:
    """List the tokens, without their secrets."""
    with connection.client() as client:
        found = client.tokens()
    if json:
        show.as_json(found)
        return
    now_s = show.now_s()
    rows = [
        [
            each.id, each.user, each.role, words.ago(each.created_s, now_s), words.ahead(each.get("expires_s"), now_s),
            words.ago(each.get("last_used_s"), now_s),
        ]
        for each in found
    ]  # fmt: skip
    show.columns(["TOKEN", "USER", "ROLE", "CREATED", "EXPIRES", "USED"], rows)


@token.command(name="revoke")
def token_revoke(
    id: Annotated[str, Parameter(help="As `stretto token list` shows it.")],
    /,
    *,
    json: Json = False,
    connection: Connection = HERE,
) -> None:
    """Make a token worthless."""
    with connection.client() as client:
        client.revoke_token(id)
    if json:
        show.as_json({"revoked": id})
    else:
        print(f"token {id} is revoked")


def _node(node: Any) -> list[str]:
    sizes: dict[str, int] = {}
    for worker in node.workers:
        who = f"{worker['job']} ({worker['name']})"
        sizes[who] = sizes.get(who, 0) + 1
    jobs = ", ".join(who if count == 1 else f"{who} ×{count}" for who, count in sizes.items())
    used = f"{words.number(node.used)}/{node.devices}"
    state = ("draining" if node.get("waits_for") else "drained") if node.drained else "ready"
    return [node.name, node.pool, used, f"{node['cpu_milli'] / 1000:g}", words.mib(node["memory_mib"]), state, jobs]


def _print_policy(policy: Any, json: bool) -> None:
    if json:
        show.as_json(policy)
        return
    options = " ".join(f"{name}={value}" for name, value in policy.options.items())
    settings = " ".join(f"{name}={value}" for name, value in policy.get("settings", {}).items())
    told = [("policy", policy.name), ("options", options), ("placement", policy.placement), ("settings", settings)]
    show.listing([(name, value) for name, value in [*told, ("trouble", policy.get("trouble", ""))] if value])


def _expected(entry: dict[str, Any], now_s: float) -> list[str]:
    running = entry["phase"] == "running"
    starts = "running" if running else words.foreseen(entry, "start", now_s)
    return [
        str(entry["job"]), entry["name"], entry["phase"], str(entry.get("workers", "-")), starts,
        words.foreseen(entry, "end", now_s),
    ]  # fmt: skip
