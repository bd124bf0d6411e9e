"""`kvrecall chat`: talk to a session in the terminal, and see after every turn what it holds."""

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
    url: Annotated[
        str | None, typer.Option(help="A running server. Without it one is started for this chat.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model of a server that is started.")
    ] = None,
    session: Annotated[
        str | None, typer.Option(help="Go on with this session of the server.")
    ] = None,
    budget: Annotated[
        int, typer.Option(min=1, help="Active rows of the session.")
    ] = DEFAULTS.default_budget,
    repair_rows: Annotated[
        int, typer.Option(min=0, help="Rows of the budget kept for repair.")
    ] = DEFAULTS.default_repair_rows,
    method: Annotated[str, typer.Option(help="Eviction method.")] = DEFAULTS.default_method,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    tools: Annotated[Path | None, typer.Option(help="JSON list of OpenAI-style tools.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
) -> None:
    """Chat with a model in a session. Asked for a tool, you type its result: the session repairs itself meanwhile.

    /repairs shows what the last repairs looked for, and the text that they brought back.
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
        told = f"session {session}; {SHOW_REPAIRS} shows what came back; an empty line or Ctrl-D ends the chat"
        console.print(told, style="dim", highlight=False)
        Talk(client.attach(session), console, max_tokens).run(opening)


@dataclass(frozen=True)
class Talk:
    """One chat: what is typed goes in, what is said is shown."""

    session: SessionHandle
    console: Console
    max_tokens: int

    def run(self, opening: Messages) -> None:
        """Go on where the session stands; then read and answer until the input ends."""
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
        """One message and all that follows from it; returns what has still to be said before the next."""
        try:
            calls = self._turn([*opening, {"role": "user", "content": line}])
            opening = []
            self._follow(calls)
        except KeyboardInterrupt:
            self.console.print(
                "\n(the turn was cancelled; nothing of it is remembered)", style="yellow"
            )
        except KvrecallError as error:
            if not error.status:  # the service is gone
                raise
            self.console.print(str(error), style="red", highlight=False, soft_wrap=True)
        return opening

    def _follow(self, calls: Sequence[ToolCall | PendingCall]) -> None:
        """Let the user answer tool calls until the model stops asking."""
        while calls:
            self._answer_calls(calls)
            calls = self._turn([])

    def _outstanding(self) -> list[PendingCall]:
        return [call for call in self.session.get().pending_calls if call.status == "pending"]

    def _turn(self, messages: Messages) -> Sequence[ToolCall]:
        """One turn, shown as it comes; returns the tool calls that it ends on."""
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
        """Ask the user for each tool's result. The early repair, on the call's arguments, runs while they type."""
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
        """The last repairs, the oldest of them first: what each looked for, and the passages that came back."""
        repairs = self.session.repairs(limit=REPAIRS_SHOWN)
        if not repairs:
            self.console.print("      nothing was repaired yet", style="dim")
        for repair in reversed(repairs):
            self.console.print(repair_text(repair), soft_wrap=True)

    def _read(self, prompt: str) -> str:
        """A line without the space around it. Raises EOFError at the end of the input and at Ctrl-C."""
        try:
            return self.console.input(prompt).strip()
        except KeyboardInterrupt:
            raise EOFError from None


def memory_line(memory: TurnMemory, episode: TurnEpisode | None, seconds: float) -> str:
    """What a session holds after a turn, and how long that took, in one line."""
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
    """The repairs since the turn before, in one line: on which signal, what moved, how long, how far they came."""
    shown = [_repair_words(repair) for repair in memory.repairs]
    if skipped := memory.repair.skipped:
        shown.append(f"{skipped} left out")
    return "repaired on " + " · ".join(shown)


def _repair_words(repair: Repair) -> str:
    moved = f"{repair.promoted} promoted, {repair.demoted} demoted"
    scanned = f"{repair.share_scanned:.0%} scanned" + (", truncated" if repair.truncated else "")
    return f"{repair.trigger}: {moved}, {repair.seconds * 1000:.0f} ms, {scanned}"


def repair_text(repair: PastRepair) -> Text:
    """One repair of the past: its signal, and each passage with what came back set off from the text around it."""
    text = Text(f"      for turn {repair.turn}, {_repair_words(repair)}\n", style="dim")
    text.append(f"      looked for: {_one_line(repair.signal)}", style="magenta")
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
        raise CliError(f"{path} is no JSON list of tools: {error}") from error
    if not isinstance(found, list):
        raise CliError(f"{path} is no JSON list of tools")
    return found
