"""The live view: devices over time, who has which, jobs and the queue; and keys to change them.

Once a second it asks for everything anew; a server that is away is waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, ClassVar, NamedTuple

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Label, Static

from stretto.cli import drawing, show, words
from stretto.cli.options import Connection
from stretto.client import AsyncClient, Cluster, Job, Node
from stretto.errors import StrettoError
from stretto.visible import in_all, in_line

_EVERY_S = 1.0
_SPAN_S = 600.0
_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red", "bright_cyan", "bright_green", "bright_magenta")
_COLUMNS = ("JOB", "NAME", "PHASE", "WORKERS", "STEPS", "ETA", "AGE")
_MOST_NODES = 6
_SAID_S = 20.0
_CHART_ROWS = 3


class Said(NamedTuple):
    """The answer to a key: about which job, and how long it stands."""

    ref: str
    text: str
    until_s: float


class Sure(ModalScreen[bool]):
    """Asks before something that cannot be taken back."""

    CSS = """
    Sure { align: center middle; }
    Sure Label { padding: 1 2; background: $panel; border: round $error; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("y", "answer(True)", "yes"),
        ("n", "answer(False)", "no"),
        ("escape", "answer(False)", "no"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Label(f"{self._question} [b]y[/b]/[b]n[/b]")

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)


class Live(App[None]):
    CSS = """
    #use, #nodes, #told { height: auto; padding: 0 1; }
    #told { max-height: 4; color: $text-muted; }
    DataTable { height: 1fr; }
    """
    TITLE = "stretto"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        ("c", "cancel", "cancel"),
        ("s", "suspend", "suspend/resume"),
        ("plus,equals_sign", "scale(1)", "+1"),
        ("minus", "scale(-1)", "-1"),
        ("w", "why", "why"),
        ("q", "quit", "quit"),
    ]

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._client = AsyncClient(connection.server, data=connection.data, timeout_s=5.0)
        self._jobs: dict[str, dict[str, Any]] = {}
        self._asking = asyncio.Lock()
        self._said = Said("", "", 0.0)

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(id="use", markup=False)
            yield Static(id="nodes", markup=False)
            yield DataTable[str](cursor_type="row", zebra_stripes=True)
            yield Static(id="told", markup=False)
        yield Footer(compact=True, show_command_palette=False)

    async def on_mount(self) -> None:
        table = self.query_one(DataTable)
        for column in _COLUMNS:
            table.add_column(column, key=column)
        table.focus()
        await self.look()
        self.set_interval(_EVERY_S, self.look)

    async def on_unmount(self) -> None:
        await self._client.close()

    async def look(self) -> None:
        """Everything anew. When one look takes longer than a second the next one is left out."""
        if self._asking.locked():
            return
        async with self._asking:
            try:
                cluster, nodes = await asyncio.gather(self._client.cluster(), self._client.nodes())
                jobs = [Job(in_all(dict(job))) async for job in self._client.jobs(phase="active", limit=1000)]
            except StrettoError as error:
                self.query_one("#use", Static).update(Text(f"{in_line(error.message)}; trying again", style="bold red"))
                return
        self._draw_use(Cluster(in_all(dict(cluster))))
        self._draw_nodes([Node(in_all(dict(node))) for node in nodes])
        self._draw_jobs(jobs)
        self._draw_told()

    def on_data_table_row_highlighted(self) -> None:
        self._draw_told()

    def action_cancel(self) -> None:
        job = self._chosen()
        if job is None:
            return

        def answered(sure: bool | None) -> None:
            if sure:
                self._change(job["id"], self._client.cancel(job["id"]), f"job {job['id']} is being cancelled")

        self.push_screen(Sure(f"cancel job {job['id']} ({job['name']})?"), answered)

    def action_suspend(self) -> None:
        if (job := self._chosen()) is None:
            return
        if job["wish"] == "suspend" or job["phase"] == "suspended":
            self._change(job["id"], self._client.resume(job["id"]), f"job {job['id']} goes on")
        else:
            self._change(job["id"], self._client.suspend(job["id"]), f"job {job['id']} is being suspended")

    def action_scale(self, by: int) -> None:
        if (job := self._chosen()) is None:
            return
        high = max(1, job["max_workers"] + by)
        low = min(job["min_workers"], high)
        text = f"job {job['id']} may have {words.limits(low, high)} workers"
        self._change(job["id"], self._client.scale(job["id"], low, high), text)

    def action_why(self) -> None:
        if (job := self._chosen()) is not None:
            self.run_worker(self._ask_why(job["id"]), exclusive=True)

    def _change(self, ref: str, doing: Awaitable[Any], text: str) -> None:
        async def change() -> None:
            try:
                await doing
                self._say(ref, text)
            except StrettoError as error:
                self._say(ref, f"error: {error}")
            await self.look()

        self.run_worker(change())

    async def _ask_why(self, ref: str) -> None:
        try:
            why = await self._client.why(ref)
        except StrettoError as error:
            self._say(ref, f"error: {error}")
        else:
            facts = ", ".join(f"{name} {value}" for name, value in why.facts.items() if value not in ("", None))
            self._say(ref, f"job {why.job}: {why.text or why.reason} ({why.policy}; {facts})")

    def _say(self, ref: str, text: str) -> None:
        self._said = Said(ref, in_line(text), time.monotonic() + _SAID_S)
        self._draw_told()

    def _chosen(self) -> dict[str, Any] | None:
        table = self.query_one(DataTable)
        if not table.row_count:
            return None
        key = table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value
        return self._jobs.get(key or "")

    def _draw_use(self, cluster: Any) -> None:
        width = max(10, self.size.width - 4)
        values = drawing.resample(cluster.series, "used", width, cluster["at_s"], _SPAN_S)
        text = Text(drawing.headline(cluster), style="bold")
        for line in drawing.chart(values, cluster.devices, _CHART_ROWS):
            text.append(f"\n{line}", style="green")
        text.append(f"\n{words.span(_SPAN_S)} ago{'now':>{max(4, width - 7)}}", style="dim")
        self.query_one("#use", Static).update(text)

    def _draw_nodes(self, nodes: list[Any]) -> None:
        text = Text()
        wide = max((len(node.name) for node in nodes), default=0)
        for i, node in enumerate(nodes[:_MOST_NODES]):
            text.append(f"{'' if i == 0 else chr(10)}{node.name:<{wide}} {node.used:g}/{node.devices} ")
            text.append("drained " if node.drained else "", style="yellow")
            for cell in drawing.cells(node):
                style = "dim" if cell.job is None else f"reverse {_COLOURS[cell.job % len(_COLOURS)]}"
                text.append(f" {cell.text} ", style=style)
        if len(nodes) > _MOST_NODES:
            text.append(f"\nand {len(nodes) - _MOST_NODES} nodes more", style="dim")
        self.query_one("#nodes", Static).update(text)

    def _draw_jobs(self, jobs: list[Any]) -> None:
        """Rows that stay keep their place under the cursor."""
        table, chosen, now_s = self.query_one(DataTable), self._chosen(), show.now_s()
        ordered = drawing.in_order(jobs)
        self._jobs = {job["id"]: dict(job) for job in ordered}
        table.clear()
        for job in ordered:
            style = "" if job["phase"] == "running" else "dim"
            table.add_row(*(Text(cell, style=style) for cell in _row(job, now_s)), key=job["id"])
        if chosen is not None and chosen["id"] in self._jobs:
            table.move_cursor(row=table.get_row_index(chosen["id"]))

    def _draw_told(self) -> None:
        """The answer to the last key for a while, if it is about the chosen job or one that has gone; else its why."""
        job, said = self._chosen(), self._said
        about = job is None or said.ref == job["id"] or said.ref not in self._jobs
        if said.text and about and time.monotonic() < said.until_s:
            text = said.text
        elif job is not None:
            text = f"job {job['id']}: {job['text'] or job['message'] or job['phase']}"
        else:
            text = "no jobs; `stretto run train.py` submits one"
        self.query_one("#told", Static).update(text)


def _row(job: Any, now_s: float) -> list[str]:
    return [
        job["id"], job["name"][:20], words.phase(job), words.size(job), words.progress(job),
        words.span(job.get("eta_s")), words.span(now_s - job["submitted_s"]),
    ]  # fmt: skip
