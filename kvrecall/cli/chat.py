"""`kvrecall chat`: a session in the terminal, with its memory after every turn."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from kvrecall.app.errors import CliError
from kvrecall.app.local_server import ServerNeeds, server_at
from kvrecall.app.run import TEST_INSTRUMENT
from kvrecall.app.settings import DEFAULTS, Settings
from kvrecall.cli.options import Budget, Method, RepairRows, ServedModel, Url
from kvrecall.client import (
    KvrecallClient,
    KvrecallError,
    PastRepair,
    PendingCall,
    Repair,
    SessionHandle,
    TextDelta,
    ToolCall,
    ToolCallEvent,
    Turn,
    TurnCompleted,
    TurnEpisode,
    TurnMemory,
)
from kvrecall.reporting.units import readable_bytes
from reference import MODEL_PATH
from reference.conversation import SYSTEM_LINES
from reference.tools import TOOLS

Messages = list[dict[str, Any]]
SHOW_REPAIRS = "/repairs"
REPAIRS_SHOWN = 3


def chat_command(
    url: Url = None,
    model: ServedModel = None,
    session: Annotated[
        str | None, typer.Option(help="Continue this session of the server. Default: a new one.")
    ] = None,
    budget: Budget = DEFAULTS.default_budget,
    repair_rows: RepairRows = DEFAULTS.default_repair_rows,
    method: Method = DEFAULTS.default_method,
    system: Annotated[str | None, typer.Option(help="System message of a new session.")] = None,
    tools: Annotated[
        Path | None, typer.Option(help="JSON file with a list of OpenAI-style tools.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Token limit of a reply.")] = 256,
) -> None:
    """Chat with a model in a session under a budget.

    When the model calls a tool, type its result; repair runs meanwhile. /repairs shows the last
    repairs: their signals and the text whose rows were promoted.
    """
    console = Console()
    needs = ServerNeeds(model=model, max_budget=max(budget, Settings().worker.max_budget))
    with server_at(url, needs) as address, KvrecallClient(address) as client:
        reference = client.worker().model == str(MODEL_PATH)
        if reference:
            console.print(TEST_INSTRUMENT, style="yellow", soft_wrap=True)
        opening: Messages = []
        if session is None:
            session = client.create_session(
                budget=budget,
                repair_rows=repair_rows if method != "full" else 0,
                repair_on=["tool_call", "tool_result", "last_output", "turn"],
                method=method,
                tools=_tools(tools, reference),
            ).id
            lines = system or (SYSTEM_LINES[0] if reference else "You are a helpful assistant.")
            opening = [{"role": "system", "content": lines}]
        console.print(
            f"session {session}; {SHOW_REPAIRS} shows the last repairs; "
            "an empty line or Ctrl-D ends the chat",
            style="dim",
            highlight=False,
        )
        Talk(client.attach(session), console, max_tokens).run(opening)


@dataclass(frozen=True)
class Talk:
    """One chat: typed messages are appended, replies are printed as they are generated."""

    session: SessionHandle
    console: Console
    max_tokens: int

    def run(self, opening: Messages) -> None:
        """Complete pending tool calls, then read and send messages until the input ends."""
        try:
            self._follow(self._outstanding())
            while line := self._read("[bold cyan]you[/]  "):
                if line == SHOW_REPAIRS:
                    self._show_repairs()
                else:
                    opening = self._answer(opening, line)
        except EOFError:
            self.console.print()

    def _answer(self, opening: Messages, line: str) -> Messages:
        """Send one message and complete the tool calls that follow.

        Returns the messages to put before the next one: `opening` if this turn failed, else none.
        """
        try:
            calls = self._turn([*opening, {"role": "user", "content": line}])
            opening = []
            self._follow(calls)
        except KeyboardInterrupt:
            self.console.print(
                "\n(the turn was cancelled; the session is unchanged)", style="yellow"
            )
        except KvrecallError as error:
            if not error.status:  # the service is gone
                raise
            self.console.print(str(error), style="red", highlight=False, soft_wrap=True)
        return opening

    def _follow(self, calls: Sequence[ToolCall | PendingCall]) -> None:
        """Ask for the results of tool calls until a turn ends without any."""
        while calls:
            self._answer_calls(calls)
            calls = self._turn([])

    def _outstanding(self) -> list[PendingCall]:
        return [call for call in self.session.get().pending_calls if call.status == "pending"]

    def _turn(self, messages: Messages) -> Sequence[ToolCall]:
        """Run one turn and print it as it streams; returns the tool calls that it ends on."""
        started = time.perf_counter()
        calls: list[ToolCall] = []
        self.console.print("[bold green]model[/] ", end="")
        # Closed at Ctrl-C, a stream cancels its turn.
        with self.session.stream(messages, max_tokens=self.max_tokens) as stream:
            for event in stream:
                match event:
                    case TextDelta(text):
                        self.console.print(
                            text, end="", markup=False, highlight=False, soft_wrap=True
                        )
                    case ToolCallEvent(call):
                        calls.append(call)
                    case TurnCompleted(turn):
                        self.console.print()
                        self._show_memory(turn, time.perf_counter() - started)
        return calls

    def _answer_calls(self, calls: Sequence[ToolCall | PendingCall]) -> None:
        """Ask the user for each result; the repair on the call's arguments runs while they type."""
        for call in calls:
            function = call.function if isinstance(call, ToolCall) else call
            self.console.print(
                f"[bold magenta]tool[/]  {function.name}({function.arguments})",
                highlight=False,
                soft_wrap=True,
            )
            self.session.tool_started(call.id)
            if result := self._read("      its result: "):
                self.session.tool_result(call.id, result)
            else:
                self.session.tool_failed(call.id, "there is no result")

    def _show_memory(self, turn: Turn, seconds: float) -> None:
        lines = [memory_line(turn.memory, turn.episode, seconds)]
        if turn.memory.repairs:
            lines.append(repairs_line(turn.memory))
        for line in lines:
            self.console.print(f"      {line}", style="dim", highlight=False, soft_wrap=True)

    def _show_repairs(self) -> None:
        """Print the last repairs, oldest first: signals and promoted passages."""
        repairs = self.session.repairs(limit=REPAIRS_SHOWN)
        if not repairs:
            self.console.print("      no repair yet", style="dim")
        for repair in reversed(repairs):
            self.console.print(repair_text(repair), soft_wrap=True)

    def _read(self, prompt: str) -> str:
        """Read a line and strip it. Raises EOFError at the end of the input and at Ctrl-C."""
        try:
            return self.console.input(prompt).strip()
        except KeyboardInterrupt:
            raise EOFError from None


def memory_line(memory: TurnMemory, episode: TurnEpisode | None, seconds: float) -> str:
    """One line about a session's memory after a turn, and the turn's seconds."""
    shown = [
        f"{memory.length} rows: {memory.active_rows} active of {memory.budget}",
        f"{memory.evicted_rows} evicted",
        f"{readable_bytes(memory.active_bytes)} active",
        f"{readable_bytes(max(memory.tier_bytes.values(), default=0))} stored",
        f"{seconds:.2f} s",
    ]
    if episode is not None:
        shown.append(_episode_text(episode))
    return " · ".join(shown)


def repairs_line(memory: TurnMemory) -> str:
    """One line about the repairs since the previous turn.

    Of each: trigger, rows promoted and demoted, milliseconds, share of the evicted rows scanned.
    """
    shown = [_repair_line(repair) for repair in memory.repairs]
    if skipped := memory.repair.skipped:
        shown.append(f"{skipped} skipped")
    return "repaired on " + " · ".join(shown)


def _repair_line(repair: Repair) -> str:
    moved = f"{repair.promoted} promoted, {repair.demoted} demoted"
    scanned = f"{repair.share_scanned:.0%} scanned" + (", truncated" if repair.truncated else "")
    return f"{repair.trigger}: {moved}, {repair.seconds * 1000:.0f} ms, {scanned}"


def repair_text(repair: PastRepair) -> Text:
    """One past repair: its signal, and its passages with the promoted text highlighted."""
    text = Text(f"      for turn {repair.turn}, {_repair_line(repair)}\n", style="dim")
    text.append(f"      signal: {_one_line(repair.signal)}", style="magenta")
    for passage in repair.passages:
        text.append(f"\n      {passage.start:>7}  …{_one_line(passage.before)}")
        text.append(_one_line(passage.promoted), style="bold green not dim")
        text.append(f"{_one_line(passage.after)}…")
    return text


def _one_line(text: str) -> str:
    return text.replace("\n", "↵")


def _episode_text(episode: TurnEpisode) -> str:
    moved = f"{episode.rows_moved} rows moved, {readable_bytes(episode.bytes_moved)}"
    return f"episode {episode.episode}" + (f" ({moved})" if episode.switched else "")


def _tools(path: Path | None, reference: bool) -> list[Any]:
    if path is None:
        return [tool.schema() for tool in TOOLS] if reference else []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CliError(f"{path} is not a JSON list of tools: {error}") from error
    if not isinstance(found, list):
        raise CliError(f"{path} is not a JSON list of tools")
    return found
