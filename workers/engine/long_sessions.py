"""Sessions that go on behind the model's window: which do, and how their passes see rows."""

from collections.abc import Sequence

from torch import Tensor

from kvrecall.domain.worker_info import ENDLESS
from workers.cache.forward_step import ForwardStep
from workers.engine.session import SessionConfig, WorkerSession
from workers.engine.settings import WorkerSettings
from workers.model.loader import LoadedModel
from workers.positions.chunks import Chunks, Segment, choose_size, merge_segments
from workers.positions.placement import Placement
from workers.positions.seen_rows import SeenRows
from workers.positions.tables import RotationTables


class LongSessions:
    """Positions of sessions with recall, which do not end with the window. All others end there.

    Attributes:
        chunks: Places behind the window; None for a model whose keys cannot be turned.
        most_tokens: Of a session that goes on, where the model lets one.
    """

    def __init__(self, model: LoadedModel, settings: WorkerSettings, page_tokens: int) -> None:
        """Take what a model's keys are turned by."""
        self._model = model
        self._most = settings.max_session_tokens
        plan, window = model.plan, model.max_context
        size = settings.chunk_tokens or choose_size(window, page_tokens)
        size = size if model.rotations else None
        self.chunks = None if size is None else Chunks(window, size)
        layers = model.rotations
        most = model.max_context if self.chunks is None else ENDLESS
        self.most_tokens = min(most, settings.max_session_tokens or most)
        self._rows = RotationTables([layers[i] for i in plan.rows if layers])
        self._windows = RotationTables([layers[i] for i in plan.windows if layers])

    def goes_on(self, config: SessionConfig) -> bool:
        """Check if a session goes on: its rows follow from its tokens, and steps find all of them."""
        return self.chunks is not None and config.recalls and config.retrieval is not None

    def get_limit(self, config: SessionConfig) -> int:
        """Return the most tokens of a session, but for what its slot can hold."""
        return (
            self.most_tokens
            if self.goes_on(config)
            else min(self._model.max_context, self.most_tokens)
        )

    def explain_limit(self, config: SessionConfig, limit: int) -> str:
        """Explain where a session ends, and how it may go on, for messages; limit: its tokens."""
        if limit < self.get_limit(config):
            return (
                f"a session without recall ends with its slot, at {limit} rows. Send less, or open a new "
                "session with recall"
            )
        if limit == self._most:
            return f"max_session_tokens of this worker is {limit}. Send less, or open a new session"
        if not config.recalls or config.retrieval is None:
            more = "" if self.chunks is None else "; one with recall goes on behind it"
            return f"the model's context ends at {limit}. Send less, or open a new session{more}"
        name = self._model.module.config.model_type
        reason = self._model.unrotated or "has a window of less than three pages"
        return (
            f"the model's context ends at {limit}, and no session goes on behind it: {name} {reason}. "
            "Send less, or open a new session"
        )

    def is_behind(self, session: WorkerSession) -> bool:
        """Return whether the session's next pass is behind the window."""
        return (
            self.chunks is not None
            and self.goes_on(session.config)
            and session.length >= self.chunks.window
        )

    def view(self, session: WorkerSession) -> SeenRows | None:
        """Return how the session's next pass sees its rows; None: where they were computed."""
        return self._view(session, self._rows)

    def find_cuts(self, session: WorkerSession, tokens: int) -> list[int]:
        """Find where blocks of the session's next tokens have to end, as numbers of tokens."""
        if self.chunks is None or not self.goes_on(session.config):
            return []
        return self.chunks.find_cuts(session.length, tokens)

    def can_place(self, config: SessionConfig) -> bool:
        """Check if a session sees rows of others at other places than they were computed at.

        Layers with windows would not see them, and count positions without a gap.
        """
        return self.goes_on(config) and not self._model.plan.windows

    def turn_rows(self, rows: Tensor, computed: Sequence[int], first: int) -> Tensor:
        """Turn the keys of rows of other sessions to where a session sees its tokens from position `first` on.

        rows: `[n_layers, parts, n_kv_heads, t, head_dim]` on the host; computed: the position of each in
        its own session. Returns a copy. For sessions that `can_place` them.
        """
        assert self.chunks is not None, "a session that can place them"
        places = enumerate(computed)
        shifts = [self.chunks.place(first + i) - self.chunks.place(at) for i, at in places]
        segments = [Segment(index, shift) for index, shift in enumerate(shifts)]
        seen = SeenRows(self._rows, merge_segments(segments))
        turned = rows.clone()
        for layer, (keys, *_) in enumerate(turned):
            seen.turn_run_in_place(layer, keys)
        return turned

    def place(self, step: ForwardStep, sessions: Sequence[WorkerSession]) -> None:
        """Place a pass's tokens and rows, if one of its sessions is behind the window."""
        seen = [self.view(session) for session in sessions]
        if self.chunks is None or not any(seen):
            return
        places = step.query_positions.clone()
        for index, (own, session) in enumerate(zip(seen, sessions, strict=True)):
            if own is not None:
                places[index] += self.chunks.place(session.length) - session.length
        step.placement = Placement(places, seen)
        if step.windows is not None:
            windows = [self._view(session, self._windows) for session in sessions]
            step.windows.placement = Placement(places, windows)

    def _view(self, session: WorkerSession, tables: RotationTables) -> SeenRows | None:
        if self.chunks is None or not self.is_behind(session):
            return None
        return SeenRows(tables, self.chunks.find_segments(session.length))
