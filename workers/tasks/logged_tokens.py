"""The tokens of a session's log, turn by turn: what each appended, and rewrote before."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvrecall.domain.rewrites.rewrite import apply_edits
from kvrecall.protocol import convert
from kvrecall.protocol.v1 import worker_pb2 as pb


@dataclass(frozen=True)
class LoggedTokens:
    """A session at the end of a turn, as its log tells it.

    `tokens` are all, the last of which are `pending`.
    """

    tokens: tuple[int, ...] = ()
    pending_count: int = 0

    @property
    def rows(self) -> int:
        """Rows that the session has, whole pages."""
        return len(self.tokens) - self.pending_count

    @property
    def pending(self) -> list[int]:
        """Tokens behind the rows."""
        return list(self.tokens[self.rows :])

    def rewritten(self, turn: pb.LoggedTurn) -> "LoggedTokens":
        """Apply what a turn rewrote before it appended its own tokens."""
        rewrite = convert.rewrite_from_wire(turn)
        if rewrite is None:
            return self
        tokens = tuple(apply_edits(self.tokens, rewrite.edits))
        return LoggedTokens(tokens, len(tokens) - rewrite.kept)

    def after(self, turn: pb.LoggedTurn) -> "LoggedTokens":
        """Follow a turn to its end."""
        tokens = (*self.rewritten(turn).tokens, *turn.token_ids)
        return LoggedTokens(tokens, count_pending(turn))


def fold_turns(turns: Sequence[pb.LoggedTurn]) -> LoggedTokens:
    """Follow a session's first turns to the end of the last."""
    log = LoggedTokens()
    for turn in turns:
        log = log.after(turn)
    return log


def count_pending(turn: pb.LoggedTurn) -> int:
    """Count the tokens that are pending at a turn's end.

    The last one generated, an end of turn that was added, and those before them whose rows it dropped.
    """
    if not turn.output_tokens:
        return turn.unsettled_tokens
    closing = len(turn.token_ids) - turn.prompt_tokens - turn.output_tokens
    return 1 + closing + turn.unsettled_tokens
