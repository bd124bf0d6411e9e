"""The worker as the services call it, over any transport."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import Protocol

from kvrecall.domain.errors import WorkerLost
from kvrecall.protocol import calls
from kvrecall.protocol.calls import Call, RequestT, ResponseT
from kvrecall.protocol.v1 import worker_pb2 as pb


class Worker(Protocol):
    """One process that computes, with its slots and its row store.

    Refused with `catalog_mismatch` when its pages belong to another catalog than the gateway's.
    Every method raises `kvrecall.domain.errors.WorkerRefused` if the request cannot be served as it
    stands (its `code` is the reason) and `kvrecall.domain.errors.WorkerLost` if the worker itself
    is gone or cannot be reached. A refused request has changed nothing, but with `worker_error`: the
    worker met an error that it did not expect, and goes on without the request.
    """

    async def describe(self) -> pb.WorkerInfo:
        """Model, shape and limits: constant while the worker lives."""
        ...

    def choose_worker(
        self, session: str, owner: str, avoid: Sequence[str] = (), family: str = ""
    ) -> str:
        """Choose the worker of the session's next `open`: a healthy `owner`, else another.

        Raises WorkerLost if there is none but those to `avoid`. An empty `owner`: any worker, by the
        session's prompt family if it is known.
        """
        ...

    def count_turn(self, session: str) -> AbstractContextManager[None]:
        """Count a turn as load of the worker that its session is in, or is to be opened in.

        From its admission on, before that worker is chosen, to its end.
        """
        ...

    async def workers(self) -> list[pb.WorkerRecord]:
        """The workers that can be reached, with their load."""
        ...

    def list_pages(
        self, worker: str, request: pb.ListPagesRequest
    ) -> AsyncGenerator[pb.PageList, None]:
        """List the pages that the named worker alone stores, in parts."""
        ...

    async def delete_pages(
        self, request: pb.DeletePagesRequest, worker: str = ""
    ) -> pb.DeletePagesResult:
        """Delete pages in the named worker, or in all of them; those of open sessions stay.

        WorkerLost unless all workers that are here answered.
        """
        ...

    async def open(self, request: pb.OpenRequest) -> pb.MemoryReport:
        """Open the session exactly as `request.state`: new, resumed, forked, or rolled back.

        Refused with `rows_missing` if some of its pages are not in the row store. Waits for the end
        even if the caller is cancelled.
        """
        ...

    async def fork(self, request: pb.ForkRequest) -> pb.ForkResult:
        """Open a session as another one was at the end of the request's turns, which are replayed.

        Pages that are stored are not computed again. Waits for the end even if the caller is
        cancelled.
        """
        ...

    async def rebuild(self, request: pb.RebuildRequest) -> pb.RebuildResult:
        """Compute lost pages again from the session's turns and open it: after `rows_missing`."""
        ...

    async def release(self, request: pb.ReleaseRequest) -> None:
        """Free the session's slots and memory in workers that it has moved away from."""
        ...

    def turn(self, request: pb.TurnRequest) -> AsyncGenerator[pb.TurnEvent, None]:
        """Run one turn; the last event is `done`. Closing the iterator early cancels the turn.

        With `request.episode`, that episode's rows are made active first, and only rows that are
        not active yet are moved; `bad_episode` if it does not fit the session as it is now. The
        effects of a cancelled or failed turn are undone by the next `open` with the committed
        state. `done` comes after every row of the turn is durable.
        """
        ...

    async def repair(self, request: pb.RepairRequest) -> pb.RepairResult:
        """Score the session's rows against a signal and promote the best evicted ones.

        Cancelling the call cancels the repair.
        """
        ...

    async def settle(self, request: pb.SettleRequest) -> pb.SettleResult:
        """Compute rows again that an answer's steps computed over active rows alone.

        The next turn does it before all else otherwise, to the same bits.
        """
        ...

    async def prefill_ahead(self, request: pb.PrefillAheadRequest) -> pb.PrefillAheadResult:
        """Compute the next prompt as far as it is known, uncommitted; `stop_early` ends it behind a block."""
        ...

    async def take_usage(self, request: pb.TakeUsageRequest) -> pb.Usage:
        """The tokens computed for a session since they were last taken.

        Of a job that was cancelled this waits for the end of its step.
        """
        ...

    async def stop_early(self, request: pb.StopEarlyRequest) -> None:
        """Stop the session's repair early: it returns the best rows so far, marked `truncated`.

        Does not wait for its end. Nothing happens if no repair is queued or running.
        """
        ...

    async def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResult:
        """The text of each chunk of token ids, special tokens included."""
        ...

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResult:
        """The tokens of a prompt, as a new session would append it, or of a plain text.

        Refused with `bad_messages` if the model's template refuses the messages.
        """
        ...

    async def map_rows(self, request: pb.MapRowsRequest) -> pb.MapRowsResult:
        """Which rows of some tokens are active in a committed state. Opens and moves nothing."""
        ...

    async def embed(self, texts: list[str]) -> pb.EmbedResult:
        """A unit vector per text, from the worker's sentence encoder; `dimensions` is always set.

        The first call loads the encoder, which takes seconds. Runs beside turns without delaying
        them. Refused with `embedder_refused` if the encoder cannot be loaded.
        """
        ...

    async def build_episodes(self, request: pb.BuildEpisodesRequest) -> pb.BuildEpisodesResult:
        """Select the rows of each planned episode from all rows of the session.

        Runs as one of the session's jobs, and lets other sessions decode between its steps.
        Cancelling the call cancels it. Without `token_ids` all plans are scored in one pass over
        the stored rows; with them, the session's tokens from the first on, they are prefilled once
        per plan (EpiCache's own build). Refused with `bad_settings` if the session's method keeps
        every row, with `bad_episode` if a plan has no prompt or names rows that the session does
        not have.
        """
        ...

    async def memory(self, session: str) -> pb.MemoryReport:
        """Rows and bytes of an open session, active and stored."""
        ...

    async def delete(self, request: pb.DeleteRequest) -> None:
        """Free the slots and memory of a deleted session. No error if it is unknown."""
        ...

    def forget(self, session: str) -> None:
        """Drop what this client keeps of a session: it is not open until the next `open`."""
        ...

    async def stats(self) -> dict[str, pb.WorkerStats]:
        """Counters for the metrics page, by the worker's name."""
        ...

    async def close(self) -> None:
        """Finish acknowledged requests and stop."""
        ...


class WorkerCalls(ABC):
    """The calls of `Worker` over one transport: `call` and `stream` carry all of them.

    `catalog`: id of the gateway's catalog; empty for a client without one.
    """

    catalog: str = ""

    @abstractmethod
    async def call(self, call: Call[RequestT, ResponseT], request: RequestT) -> ResponseT:
        """Send a request and return its answer. Raises WorkerRefused and WorkerLost."""

    @abstractmethod
    def stream(
        self, call: Call[RequestT, ResponseT], request: RequestT
    ) -> AsyncGenerator[ResponseT, None]:
        """Send a request and iterate over its answers; closing the iterator cancels the call.

        Raises WorkerRefused and WorkerLost.
        """

    @abstractmethod
    def forget(self, session: str) -> None:
        """See `Worker.forget`."""

    def count_turn(self, session: str) -> AbstractContextManager[None]:
        """Count nothing: one worker has all turns."""
        return nullcontext()

    async def describe(self) -> pb.WorkerInfo:
        """See `Worker.describe`."""
        return await self.call(calls.DESCRIBE, pb.DescribeRequest(catalog=self.catalog))

    def list_pages(
        self, worker: str, request: pb.ListPagesRequest
    ) -> AsyncGenerator[pb.PageList, None]:
        """See `Worker.list_pages`."""
        return self.stream(calls.LIST_PAGES, request)

    async def delete_pages(
        self, request: pb.DeletePagesRequest, worker: str = ""
    ) -> pb.DeletePagesResult:
        """See `Worker.delete_pages`."""
        return await self.call(calls.DELETE_PAGES, request)

    async def open(self, request: pb.OpenRequest) -> pb.MemoryReport:
        """See `Worker.open`."""
        return await self.call(calls.OPEN, request)

    async def fork(self, request: pb.ForkRequest) -> pb.ForkResult:
        """See `Worker.fork`."""
        return await self.call(calls.FORK, request)

    async def rebuild(self, request: pb.RebuildRequest) -> pb.RebuildResult:
        """See `Worker.rebuild`."""
        return await self.call(calls.REBUILD, request)

    async def release(self, request: pb.ReleaseRequest) -> None:
        """See `Worker.release`."""
        await self.call(calls.RELEASE, request)

    def turn(self, request: pb.TurnRequest) -> AsyncGenerator[pb.TurnEvent, None]:
        """See `Worker.turn`."""
        return self.stream(calls.TURN, request)

    async def repair(self, request: pb.RepairRequest) -> pb.RepairResult:
        """See `Worker.repair`."""
        async with aclosing(self.stream(calls.REPAIR, request)) as events:
            async for event in events:
                if event.WhichOneof("event") == "result":
                    return event.result
        raise WorkerLost(f"the repair of session {request.session!r} ended without a result")

    async def settle(self, request: pb.SettleRequest) -> pb.SettleResult:
        """See `Worker.settle`."""
        return await self.call(calls.SETTLE, request)

    async def prefill_ahead(self, request: pb.PrefillAheadRequest) -> pb.PrefillAheadResult:
        """See `Worker.prefill_ahead`."""
        return await self.call(calls.PREFILL_AHEAD, request)

    async def take_usage(self, request: pb.TakeUsageRequest) -> pb.Usage:
        """See `Worker.take_usage`."""
        return await self.call(calls.TAKE_USAGE, request)

    async def stop_early(self, request: pb.StopEarlyRequest) -> None:
        """See `Worker.stop_early`."""
        await self.call(calls.STOP_EARLY, request)

    async def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResult:
        """See `Worker.detokenize`."""
        return await self.call(calls.DETOKENIZE, request)

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResult:
        """See `Worker.tokenize`."""
        return await self.call(calls.TOKENIZE, request)

    async def map_rows(self, request: pb.MapRowsRequest) -> pb.MapRowsResult:
        """See `Worker.map_rows`."""
        return await self.call(calls.MAP_ROWS, request)

    async def embed(self, texts: list[str]) -> pb.EmbedResult:
        """See `Worker.embed`."""
        return await self.call(calls.EMBED, pb.EmbedRequest(texts=texts))

    async def build_episodes(self, request: pb.BuildEpisodesRequest) -> pb.BuildEpisodesResult:
        """See `Worker.build_episodes`."""
        return await self.call(calls.BUILD_EPISODES, request)

    async def memory(self, session: str) -> pb.MemoryReport:
        """See `Worker.memory`."""
        return await self.call(calls.MEMORY, pb.MemoryRequest(session=session))

    async def delete(self, request: pb.DeleteRequest) -> None:
        """See `Worker.delete`."""
        await self.call(calls.DELETE, request)
