"""What the service asks of a worker, whoever carries the call: the process itself or the network."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from kvrecall.protocol.v1 import worker_pb2 as wire


class Worker(Protocol):
    """One process that computes, with its slots and its row store.

    Every method raises `kvrecall.domain.errors.WorkerRefused` when the request cannot be served as it stands (its
    `code` says why) and `kvrecall.domain.errors.WorkerLost` when the worker itself is gone or broken. A refused
    request has changed nothing.
    """

    async def describe(self) -> wire.WorkerInfo:
        """Model, shape and limits: fixed while the worker lives."""
        ...

    def place(self, session: str, owner: str, avoid: Sequence[str] = ()) -> str:
        """Which worker is to have the session from its next `open` on: `owner` while it is well, else another.

        Raises WorkerLost when there is none but those to `avoid`. An empty `owner`: whichever is best.
        """
        ...

    async def workers(self) -> list[wire.WorkerRecord]:
        """The workers that can be reached, with what each has to do."""
        ...

    async def retain(self, request: wire.RetainRequest) -> None:
        """Drop the rows of sessions that are not named, of those that were stored before the worker started."""
        ...

    async def open(self, request: wire.OpenRequest) -> wire.MemoryReport:
        """Make the session be exactly `request.state`: new, resumed after a restart, or rolled back.

        Rows that were stored beyond `state.length` are dropped. Refused with `rows_missing` when committed rows
        are not in the row store.
        """
        ...

    async def fork(self, request: wire.ForkRequest) -> wire.ForkResult:
        """Make a session that begins as another was, in the worker where that one is open, and open it.

        No rows are copied but those of an unfinished page. Refused with `rows_missing` when the parent has lost pages.
        """
        ...

    async def rebuild(self, request: wire.RebuildRequest) -> wire.RebuildResult:
        """Compute the session's lost pages again from its turns, and open it: after `rows_missing`."""
        ...

    async def release(self, request: wire.ReleaseRequest) -> None:
        """The session goes on elsewhere: free what a worker holds of it that it was not opened in last."""
        ...

    def turn(self, request: wire.TurnRequest) -> AsyncGenerator[wire.TurnEvent, None]:
        """Run one turn; the last event is `done`. Closing the iterator early cancels the turn.

        With `request.episode`, that episode's rows are made active before anything is said, and only those that are
        not active yet are moved; `bad_episode` when it does not fit the session as it is now.
        What a cancelled or failed turn leaves in the worker is undone by the next `open` with the committed state.
        `done` comes after every row of the turn is durable.
        """
        ...

    async def repair(self, request: wire.RepairRequest) -> wire.RepairResult:
        """Score the session's rows against a signal and promote the best evicted ones."""
        ...

    async def hurry(self, request: wire.HurryRequest) -> None:
        """A turn has come: the session's repair ends at once, with what it has found so far, and says so (`cut`).

        It does not wait for that end; nothing happens where none runs or waits.
        """
        ...

    async def detokenize(self, request: wire.DetokenizeRequest) -> wire.DetokenizeResult:
        """The text of each chunk of token ids, special tokens included."""
        ...

    async def embed(self, texts: list[str]) -> wire.EmbedResult:
        """A unit vector per text, from the worker's sentence encoder; `dimensions` is set for no texts as well.

        The encoder is loaded with the first call, which takes seconds then. It runs beside turns and does not hold
        them up. Refused with `embedder_refused` when the encoder cannot be loaded.
        """
        ...

    async def build_episodes(self, request: wire.BuildEpisodesRequest) -> wire.BuildEpisodesResult:
        """Choose the rows of each planned episode from all rows of the session; the session stays as it is.

        It takes the session's turn in the worker, and gives way to other sessions' decoding between two steps.
        Cancelling the call cancels it, and the session may go on at once. Without `token_ids` all plans are scored
        in one pass over the stored rows; with them, the session's own tokens from the first on, all of these are
        prefilled once per plan (EpiCache's own build). Refused with `bad_settings` when the session's method keeps
        every row, with `bad_episode` when a plan has no prompt or names rows that the session does not have.
        """
        ...

    async def memory(self, session: str) -> wire.MemoryReport:
        """What the session holds now, of every kind; the session must have been opened."""
        ...

    async def drop(self, request: wire.DropRequest) -> None:
        """Forget the session: its slot and its rows, but for pages that are kept. No error if it is unknown."""
        ...

    async def stats(self) -> dict[str, wire.WorkerStats]:
        """Counters for the metrics page, by the worker's name."""
        ...

    async def close(self) -> None:
        """Finish what was acknowledged and stop."""
        ...
