"""`kvrecall chat`: a session in the terminal, with its memory after every turn."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from kvrecall.client import (
    KvrecallClient,
    KvrecallError,
    PendingCall,
    ReasoningDelta,
    ResearchOptions,
    SessionHandle,
    TextDelta,
    ToolCall,
    ToolCallEvent,
    Turn,
    TurnCompleted,
    TurnOptions,
)
from kvrecall_server.app.errors import CliError
from kvrecall_server.app.local.server import ServerNeeds, server_at
from kvrecall_server.app.models import is_reference
from kvrecall_server.app.run import TEST_INSTRUMENT
from kvrecall_server.cli.chat.sessions import NAME, find_session
from kvrecall_server.cli.chat.view import (
    HELP,
    memory_line,
    memory_text,
    repair_text,
    repairs_line,
    session_line,
)
from kvrecall_server.cli.options import ServedModel, Url, build_settings
from reference.conversation import SYSTEM_LINES
from reference.tools import TOOLS

Messages = list[dict[str, Any]]
REPAIRS_SHOWN = 3
# Begins a command; doubled, a message.
SLASH = "/"
QUIT = "/quit"


def _read_object(text: str) -> dict[str, Any]:
    """Read a JSON object. Raises BadParameter."""
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"no JSON: {error}") from error
    if not isinstance(settings, dict):
        raise typer.BadParameter(f"{text[:80]!r}; expected a JSON object")
    return settings


Recall = Annotated[
    bool | None,
    typer.Option(
        help="Every token stays reachable within the budget, the default, or the full cache."
    ),
]
SessionName = Annotated[
    str | None,
    typer.Option(
        help="Name or id of a session: the chat goes on in it, or begins one of this name. Without "
        "--url it is kept in the data directory of `kvrecall serve`. Default: a session of this chat "
        "alone."
    ),
]
Research = Annotated[
    dict[str, Any] | None,
    typer.Option(
        parser=_read_object,
        metavar="JSON",
        help='How the active rows are chosen, such as {"method": "snapkv", "repair_rows": 64}.',
    ),
]
TemplateArguments = Annotated[
    dict[str, Any] | None,
    typer.Option(
        "--chat-template-kwargs",
        parser=_read_object,
        metavar="JSON",
        help="Further arguments of the chat template of a new session, such as "
        '{"enable_thinking": false}.',
    ),
]
MemoryName = Annotated[
    str | None,
    typer.Option(
        help="Name of a memory: a new session knows what all sessions with this name have said."
    ),
]


def chat_command(
    url: Url = None,
    model: ServedModel = None,
    session: SessionName = None,
    budget: Annotated[
        int | None,
        typer.Option(min=1, help="Budget of the session, in active rows. Default: automatic."),
    ] = None,
    recall: Recall = None,
    research: Research = None,
    remember: MemoryName = None,
    template_arguments: TemplateArguments = None,
    system: Annotated[str | None, typer.Option(help="System message of a new session.")] = None,
    tools: Annotated[
        Path | None, typer.Option(help="JSON file with a list of OpenAI-style tools.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Token limit of a reply. Default: the context's end.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="0: greedy. Default: the model's.")
    ] = None,
) -> None:
    """Chat with a model in a session under a budget.

    When the model calls a tool, type its result; repair runs meanwhile. /help lists the commands:
    the session's memory, its last repairs with the text whose rows were promoted. Without --url and
    --model, what `kvrecall serve` would serve: SmolLM2, unless the environment names another.
    """
    console = Console()
    settings = build_settings()
    if url is None:
        model = model or settings.model
        console.print(f"starting {model}", style="dim", highlight=False, soft_wrap=True)
    needs = ServerNeeds(
        model=model,
        max_budget=max(budget or 0, settings.worker.max_budget),
        data=None if session is None else settings.data,
    )
    with server_at(url, needs) as address, KvrecallClient(address) as client:
        reference = is_reference(client.worker().model)
        if reference:
            console.print(TEST_INSTRUMENT, style="yellow", soft_wrap=True)
        found = None if session is None else find_session(client, session)
        if found is None:
            found = client.create_session(
                budget=budget,
                recall=recall,
                research=cast("ResearchOptions | None", research),
                remember=remember,
                chat_template_kwargs=template_arguments,
                tools=_tools(tools, reference),
                metadata={} if session is None else {NAME: session},
            )
        for line in (session_line(found), f"/help lists the commands, {QUIT} ends the chat"):
            console.print(line, style="dim", highlight=False, soft_wrap=True)
        opening = [] if found.turns else _begin(system, reference)
        Talk(client.attach(found.id), console, max_tokens, temperature).run(opening)


@dataclass(frozen=True)
class Talk:
    """One chat: typed messages are appended, replies are printed as they are generated."""

    session: SessionHandle
    console: Console
    max_tokens: int | None
    temperature: float | None = None

    def run(self, opening: Messages) -> None:
        """Complete pending tool calls, then read and send messages until the input ends."""
        try:
            self._follow(self._outstanding())
            while (line := self._read("[bold cyan]you[/]  ")) and line != QUIT:
                if line.startswith(SLASH) and not line.startswith(2 * SLASH):
                    self._obey(line)
                else:
                    message = line.removeprefix(SLASH) if line.startswith(SLASH) else line
                    opening = self._answer(opening, message)
        except EOFError:
            self.console.print()

    def _obey(self, line: str) -> None:
        """Run a command. The model never sees it, also where there is no such command."""
        commands = {
            "/help": self._show_help,
            "/memory": self._show_current_memory,
            "/repairs": self._show_repairs,
        }
        command = commands.get(line)
        if command is None:
            self.console.print(
                f"      there is no command {line.split()[0]}; /help lists them",
                style="yellow",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
            return
        try:
            command()
        except KvrecallError as error:
            self._show_error(error)

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
            self._show_error(error)
        return opening

    def _show_error(self, error: KvrecallError) -> None:
        """Print a refusal; raise the error if the service is gone."""
        if not error.status:
            raise error
        self.console.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)

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
        options: TurnOptions = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        with self.session.stream(messages, **options) as stream:
            for event in stream:
                match event:
                    case ReasoningDelta(text):
                        self.console.print(
                            text, end="", style="dim", markup=False, highlight=False, soft_wrap=True
                        )
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
        lines = [memory_line(turn, seconds)]
        if turn.memory.repairs:
            lines.append(repairs_line(turn.memory))
        for line in lines:
            self.console.print(f"      {line}", style="dim", highlight=False, soft_wrap=True)

    def _show_help(self) -> None:
        for line in HELP.splitlines():
            self.console.print(f"      {line}", style="dim", highlight=False, soft_wrap=True)

    def _show_current_memory(self) -> None:
        """Print rows and bytes as they are now: a repair may have changed them since the turn."""
        self.console.print(
            memory_text(self.session.memory()), style="dim", highlight=False, soft_wrap=True
        )

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


def _begin(system: str | None, reference: bool) -> Messages:
    """The messages before a session's first one."""
    text = system or (SYSTEM_LINES[0] if reference else "You are a helpful assistant.")
    return [{"role": "system", "content": text}]


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
