"""A scripted worker for tests of timing, failures and cancellation, without a model."""

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import WorkerLost, WorkerRefused
from kvrecall.domain.page_ids import ID_BYTES, join_ids, split_ids
from kvrecall.domain.settings.session import WorkerOptions
from kvrecall.protocol.convert import worker_options_from_wire
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.testing._stub_values import (
    PAGE_TOKENS,
    answer_message,
    built_episode,
    cut_at_stop,
    drop_answer,
    embed_words,
    find_pages,
    finish,
    map_words,
    memory_report,
    name_pages,
    pause_repair_report,
    settle_words,
    split_arguments,
    switch_report,
    take_pending,
    token_of_word,
    turn_reports,
    utterance_tokens,
    words_of_message,
    words_of_signal,
    worker_info,
    worker_record,
    worker_stats,
)

_UNBOUNDED = 1 << 30
# Few, so that a list has several parts.
_PAGES_LISTED = 7
Policy = Callable[[Sequence[pb.Message], Sequence[str]], str | list[pb.ToolCall]]


class StubWorker:
    """Generates the next of `script` (texts, or tool calls) in each turn, one word per token.

    The arguments of calls come in pieces of some characters.

    With a `policy` the answer is its value for all messages of the session and its tools instead.

    Its rows are words. A session's selection is a hash over everything that ever changed it: equal
    selections mean the same turns and repairs in the same order, and a missed rollback shows. Texts
    with the same words get similar vectors; it builds episodes of any rows.

    - `gates` hold calls back: a turn waits for `gates["token"]` before each word and for
      `gates["call"]` before each piece of arguments, a repair for `gates["repair"]`, likewise settle, prefill
      ahead, embed and build. A repair that is stopped early waits no longer and has scored half of
      its rows. `reached` is set when a call arrives at its gate.
    - `faults` are raised by the call of that name, once each.
    - `recalls`: the words of an answer are left pending, as of sessions that attend to stored rows.
    - `pages` that are stored, also those of an earlier process, with the time of their writing.
    - `context`: the most words of a session; a turn over it is refused.
    - `template_variables` of its description.
    - `names`: with several, it acts as that many workers over the same rows; some are `draining`.
      `homes` are those of prompt families.
    - All others record what it was asked for.
    """

    def __init__(
        self, pages: Mapping[bytes, float] | None = None, policy: Policy | None = None
    ) -> None:
        self._policy = policy
        self.script: list[str | list[pb.ToolCall]] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.reached: dict[str, asyncio.Event] = {
            name: asyncio.Event()
            for name in ("token", "call", "repair", "settle", "ahead", "embed", "build")
        }
        self.faults: dict[str, Exception] = {}
        self.usage: dict[str, pb.Usage] = {}
        self.sessions: dict[str, pb.SessionState] = {}
        self.specs: dict[str, pb.SessionSpec] = {}
        self.call_log: list[str] = []
        self.words: dict[int, str] = {}
        self.stops: dict[str, asyncio.Event] = {}
        self.options: list[WorkerOptions] = []
        self.embedded: list[list[str]] = []
        self.builds: list[pb.BuildEpisodesRequest] = []
        self.switches: list[pb.Episode] = []
        self.remembered: list[list[pb.Passage]] = []
        self.dimensions = 24
        self.open_turns = 0
        self.closed = False
        self.pages = dict(pages or {})
        self.catalogs: set[str] = set()
        self.forgotten: list[str] = []
        self.deleted: list[str] = []
        self.context = _UNBOUNDED
        self.template_variables: list[str] = []
        self.durable = True
        self.recalls = False
        self.names = ["one"]
        self.draining: set[str] = set()
        self.homes: dict[str, str] = {}
        self.turning: list[str] = []
        self.released: list[tuple[str, int]] = []
        self.rebuilds: list[pb.RebuildRequest] = []
        self.epochs: list[int] = []

    async def describe(self) -> pb.WorkerInfo:
        """Describe a tiny model with pages of four tokens, and the context if it has a bound."""
        info = worker_info()
        info.template_variables.extend(self.template_variables)
        if self.context < _UNBOUNDED:
            info.max_context = info.max_session_tokens = self.context
        return info

    def choose_worker(
        self, session: str, owner: str, avoid: Sequence[str] = (), family: str = ""
    ) -> str:
        """Choose the owner, or the family's home, while it is healthy, else the first healthy name.

        Raises WorkerLost.
        """
        healthy = [name for name in self.names if name not in avoid and name not in self.draining]
        if not healthy:
            raise WorkerLost("there is no worker")
        owner = owner or self.homes.get(family, "")
        return owner if owner in healthy else healthy[0]

    @contextmanager
    def count_turn(self, session: str) -> Iterator[None]:
        """Record the turn while it lasts."""
        self.turning.append(session)
        try:
            yield
        finally:
            self.turning.remove(session)

    async def workers(self) -> list[pb.WorkerRecord]:
        """List a record per name."""
        return [worker_record(name, draining=name in self.draining) for name in self.names]

    async def list_pages(
        self, worker: str, request: pb.ListPagesRequest
    ) -> AsyncGenerator[pb.PageList, None]:
        """List stored pages by age, in parts of a few."""
        self._fault("list_pages")
        self.catalogs.add(request.catalog)
        newest = time.monotonic() - request.older_than_seconds
        found = [id for id, at in self.pages.items() if at <= newest]
        for first in range(0, len(found), _PAGES_LISTED):
            yield pb.PageList(page_ids=join_ids(found[first : first + _PAGES_LISTED]))

    async def delete_pages(
        self, request: pb.DeletePagesRequest, worker: str = ""
    ) -> pb.DeletePagesResult:
        """Delete stored pages, but for those of open sessions."""
        self._fault("delete_pages")
        self.catalogs.add(request.catalog)
        used = {id for state in self.sessions.values() for id in split_ids(state.page_ids)}
        ids = set(split_ids(request.page_ids)) & self.pages.keys() - used
        for id in ids:
            del self.pages[id]
        return pb.DeletePagesResult(deleted=len(ids))

    def forget(self, session: str) -> None:
        """Record the session."""
        self.forgotten.append(session)

    async def open(self, request: pb.OpenRequest) -> pb.MemoryReport:
        """Take over the state of the request."""
        self._fault("open")
        session = request.spec.session
        self.call_log.append(f"open {request.state.length}")
        self.epochs.append(request.spec.epoch)
        self.specs[session] = request.spec
        self.sessions[session] = pb.SessionState.FromString(request.state.SerializeToString())
        return self._memory(session)

    async def fork(self, request: pb.ForkRequest) -> pb.ForkResult:
        """Make a session from the request's replayed turns."""
        self._fault("fork")
        session = request.spec.session
        self.call_log.append(f"fork {len(request.turns)}")
        state = pb.SessionState()
        for turn in request.turns:
            words = [self.words[token] for token in turn.token_ids]
            self._change(state, "turn", words[: turn.prompt_tokens])
            if self._policy is not None:
                state.recent.extend(turn.messages)
            for word in words[turn.prompt_tokens :]:
                self._change(state, "token", [word])
        state.page_ids = request.page_ids[: state.length // PAGE_TOKENS * ID_BYTES]
        self._store(state)
        self.specs[session] = request.spec
        self.sessions[session] = state
        return pb.ForkResult(memory=self._memory(session), state=state)

    async def rebuild(self, request: pb.RebuildRequest) -> pb.RebuildResult:
        """Record the request and open the session."""
        self._fault("rebuild")
        self.rebuilds.append(request)
        await self.open(pb.OpenRequest(spec=request.spec, state=request.state))
        return pb.RebuildResult(pages=2, seconds=0.5, memory=self._memory(request.spec.session))

    async def release(self, request: pb.ReleaseRequest) -> None:
        """Record the request."""
        self._fault("release")
        self.released.append((request.session, request.epoch))

    async def turn(self, request: pb.TurnRequest) -> AsyncGenerator[pb.TurnEvent, None]:
        """Generate the next of `script`, word by word."""
        self._fault("turn")
        state = self._state(request.session)
        if request.HasField("length") and request.length != state.length:
            raise WorkerRefused(
                ErrorCode.SESSION_NOT_OPEN, f"{state.length} rows are not committed"
            )
        if request.HasField("episode"):
            self._fault("switch")
        self.remembered.append(list(request.remembered))
        settled = settle_words(state)
        start, before = state.length, take_pending(state)
        self.open_turns += 1
        try:
            switched = self._switch(state, request)
            prompt = self._read_prompt(request)
            planned = pb.TurnPlanned(
                held_tokens=state.length, prompt_tokens=len(prompt), max_tokens=self.context
            )
            yield pb.TurnEvent(planned=planned)
            if state.length + len(prompt) + request.generate > self.context:
                raise WorkerRefused(ErrorCode.TURN_TOO_LONG, "the model's context ends before")
            self._change(state, "turn" if not request.repair else "repaired turn", prompt)
            self._usage(request.session).prefilled_tokens += len(prompt)
            message, stop = self._choose_answer(request, state)
            spoken = message.content.split()[: request.sampling.max_tokens] if message else []
            async for event in self._speak(request.session, state, spoken, message):
                yield event
            self._fault("done")
            if self.recalls and spoken:
                drop_answer(state, start, before, prompt, spoken)
            done = self._done(request, state, prompt, message, spoken)
            self._store(state)
            done.settled_tokens = settled
            done.pending_pages = int(bool(state.unsettled))
            done.stop_sequence = stop
            if request.opening:
                done.message.content = request.opening + done.message.content
            if switched is not None:
                done.switched.CopyFrom(switched)
            yield pb.TurnEvent(done=done)
        except WorkerRefused:
            self.sessions.pop(request.session, None)  # as the worker closes what it has changed
            raise
        finally:
            self.open_turns -= 1

    async def _speak(
        self, session: str, state: pb.SessionState, spoken: list[str], message: pb.Message | None
    ) -> AsyncGenerator[pb.TurnEvent, None]:
        for word in spoken:
            await self._gate("token")
            self._fault("token")
            self._change(state, "token", [word])
            self._usage(session).decoded_tokens += 1
            yield pb.TurnEvent(token=pb.TokenChunk(ids=[token_of_word(word)], text=word + " "))
        for index, call in enumerate(message.tool_calls if message else []):
            for piece in split_arguments(index, call):
                await self._gate("call")
                self._fault("call")
                yield pb.TurnEvent(arguments=piece)
            yield pb.TurnEvent(tool_call=call)

    async def repair(self, request: pb.RepairRequest) -> pb.RepairResult:
        """Promote two rows; all eight candidates are scored unless it is stopped early."""
        self._fault("repair")
        state = self._state(request.session)
        signal = words_of_signal(request, self.words)
        self.call_log.append(f"{request.trigger}: {' '.join(signal)}")
        self.options.append(worker_options_from_wire(self.specs[request.session]))
        self._change(state, request.trigger, [])
        cut = not await self._gate_or_stop(request.session)
        state.promoted_rows += 2
        state.selection = hashlib.sha256(state.selection + " ".join(signal).encode()).digest()
        report = pause_repair_report(request.trigger, len(signal), cut)
        return pb.RepairResult(report=report, memory=self._memory(request.session), state=state)

    async def settle(self, request: pb.SettleRequest) -> pb.SettleResult:
        """Compute the unsettled words."""
        self._fault("settle")
        state = self._state(request.session)
        self.call_log.append(f"settle {len(state.pending)}")
        await self._gate("settle")
        settled = settle_words(state)
        name_pages(state, b"", [])
        self._store(state)
        memory = self._memory(request.session)
        return pb.SettleResult(
            settled_tokens=settled, durable=self.durable, memory=memory, state=state
        )

    async def prefill_ahead(self, request: pb.PrefillAheadRequest) -> pb.PrefillAheadResult:
        """Take note of what is known of the next prompt."""
        self._fault("prefill_ahead")
        self._state(request.session)
        words = len(" ".join(message.content for message in request.messages).split())
        self.call_log.append(f"ahead {words}")
        await self._gate_or_stop(request.session, "ahead")
        return pb.PrefillAheadResult(prompt_tokens=words)

    async def take_usage(self, request: pb.TakeUsageRequest) -> pb.Usage:
        """The words of prompts and answers since this was last asked."""
        self._fault("take_usage")
        return self.usage.pop(request.session, pb.Usage())

    async def stop_early(self, request: pb.StopEarlyRequest) -> None:
        """Stop the session's running repair."""
        self._fault("stop_early")
        if request.session in self.stops:
            self.stops[request.session].set()

    async def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResult:
        """Join the words of each chunk."""
        return pb.DetokenizeResult(
            texts=[" ".join(self.words.get(id, "") for id in chunk.ids) for chunk in request.chunks]
        )

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResult:
        """Return the words of the messages, or of the text, as tokens."""
        self._fault("tokenize")
        words = [word for message in request.messages for word in words_of_message(message)]
        words += [*(["<s>"] if request.special_tokens else []), *request.text.split()]
        self.words |= {token_of_word(word): word for word in words}
        pieces = words if request.pieces else []
        return pb.TokenizeResult(ids=map(token_of_word, words), pieces=pieces)

    async def map_rows(self, request: pb.MapRowsRequest) -> pb.MapRowsResult:
        """Map every word as active in both layers."""
        return map_words(request)

    async def embed(self, texts: list[str]) -> pb.EmbedResult:
        """Embed texts as bags of words: unit vectors float32 `[dimensions]`."""
        self._fault("embed")
        await self._gate("embed")
        self.embedded.append(texts)
        vectors = np.stack([embed_words(text, self.dimensions) for text in texts])
        return pb.EmbedResult(dimensions=self.dimensions, vectors=vectors.astype("<f4").tobytes())

    async def build_episodes(self, request: pb.BuildEpisodesRequest) -> pb.BuildEpisodesResult:
        """Build an episode for each plan, of any rows."""
        self._fault("build")
        state = self._state(request.session)
        for plan in request.plans:
            if not plan.patched_prompt or any(span.stop > state.length for span in plan.segments):
                raise WorkerRefused(
                    ErrorCode.BAD_EPISODE,
                    f"{plan.id} has no prompt, or names rows that are not there",
                )
        await self._gate("build")
        self.builds.append(request)
        return pb.BuildEpisodesResult(
            episodes=[built_episode(plan, state.length) for plan in request.plans],
            scored_rows=state.length,
            seconds=0.5,
        )

    async def memory(self, session: str) -> pb.MemoryReport:
        """Report the session's rows. Raises WorkerRefused when it is not open."""
        return self._memory(session)

    async def delete(self, request: pb.DeleteRequest) -> None:
        """Record the request and remove the session."""
        self._fault("delete")
        self.deleted.append(request.session)
        self.sessions.pop(request.session, None)

    async def stats(self) -> dict[str, pb.WorkerStats]:
        """Return the same counters for every name."""
        self._fault("stats")
        return dict.fromkeys(self.names, worker_stats(len(self.sessions)))

    async def close(self) -> None:
        """Record that the worker was closed."""
        self.closed = True

    def _store(self, state: pb.SessionState) -> None:
        for id in split_ids(state.page_ids):
            self.pages.setdefault(id, time.monotonic())

    def _state(self, session: str) -> pb.SessionState:
        if session not in self.sessions:
            raise WorkerRefused(ErrorCode.SESSION_NOT_OPEN, f"{session} is not open")
        return self.sessions[session]

    def _change(self, state: pb.SessionState, why: str, words: list[str]) -> None:
        state.length += len(words)
        self.words |= {token_of_word(word): word for word in words}
        said = f"{why} {' '.join(words)}".encode()
        state.selection = hashlib.sha256(state.selection + said).digest()

    def _switch(self, state: pb.SessionState, request: pb.TurnRequest) -> pb.SwitchReport | None:
        if not request.HasField("episode"):
            return None
        episode = request.episode
        self.switches.append(episode)
        self._change(state, f"switch to {episode.id}", [])
        state.episode = episode.id
        state.patched_prompt[:] = episode.patched_prompt
        return switch_report(episode)

    def _read_prompt(self, request: pb.TurnRequest) -> list[str]:
        words = [word for message in request.messages for word in words_of_message(message)]
        return words + [self.words.get(token, str(token)) for token in request.prompt]

    def _usage(self, session: str) -> pb.Usage:
        return self.usage.setdefault(session, pb.Usage())

    def _choose_answer(
        self, request: pb.TurnRequest, state: pb.SessionState
    ) -> tuple[pb.Message | None, str]:
        """Choose the answer's message, and the stop sequence that ends it."""
        answer = self._answer(request, state) if request.generate else ""
        stop = ""
        if isinstance(answer, str):
            answer, stop = cut_at_stop(answer, request.sampling.stop)
        message = answer_message(request.generate, answer)
        if self._policy is not None:
            state.recent.extend([*request.messages, *([message] if message else [])])
        return message, stop

    def _answer(self, request: pb.TurnRequest, state: pb.SessionState) -> str | list[pb.ToolCall]:
        if self._policy is not None:
            said = [*state.recent, *request.messages]
            return self._policy(said, self.specs[request.session].tools)
        return self.script.pop(0) if self.script else "ok"

    async def _gate(self, name: str) -> None:
        self.reached[name].set()
        if name in self.gates:
            await self.gates[name].wait()

    async def _gate_or_stop(self, session: str, gate: str = "repair") -> bool:
        """Wait for a gate, or for a stop request; true if it was the gate."""
        stopped = self.stops[session] = asyncio.Event()
        waiting = [asyncio.create_task(self._gate(gate)), asyncio.create_task(stopped.wait())]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return not stopped.is_set()
        finally:
            del self.stops[session]
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)

    def _fault(self, name: str) -> None:
        if name in self.faults:
            raise self.faults.pop(name)

    def _done(
        self,
        request: pb.TurnRequest,
        state: pb.SessionState,
        prompt: list[str],
        message: pb.Message | None,
        spoken: list[str],
    ) -> pb.TurnDone:
        ids = [token_of_word(word) for word in prompt + spoken]
        options = worker_options_from_wire(self.specs[request.session])
        key = self.specs[request.session].row_key
        taken = 0 if state.page_ids else find_pages(self.pages, key, prompt)
        name_pages(state, key, prompt)
        done = pb.TurnDone(
            finish_reason=finish(message, request.sampling.max_tokens),
            message=message,
            token_ids=ids,
            prompt_tokens=len(prompt),
            output_tokens=len(spoken),
            memory=self._memory(request.session),
            seconds={"prefill": 0.25, "decode": 0.75},
            phase_starts={"prefill": 0.0, "decode": 0.25},
            state=state,
            durable=self.durable,
            utterance_tokens=utterance_tokens(request) + [len(spoken)] * (message is not None),
            shared_pages=taken,
            # An answer's last word has a row at once; elsewhere it is the next turn's.
            prefilled_tokens=len(prompt) + (message is not None) - taken * PAGE_TOKENS,
            **turn_reports(request, options, len(prompt)),
        )
        if request.repair:
            self.options.append(options)
        return done

    def _memory(self, session: str) -> pb.MemoryReport:
        state, spec = self._state(session), self.specs[session]
        return memory_report(state, spec.budget or worker_info().max_budget)
