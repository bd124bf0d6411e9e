"""A worker's reports of its work, as plain values that are stored and shown."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvrecall.domain.messages import Message, TokenLogprob
from kvrecall.domain.rewrites.rewrite import Rewrite


@dataclass(frozen=True)
class RepairReport:
    """One repair: what it looked at and how many tokens it brought back.

    `scored_rows` of `candidates` evicted tokens were scored: fewer when a deadline or a new turn
    `truncated` the repair. `demoted` are the rows per KV head, mean over layers, that left the active
    set in exchange. `bytes_read` are the bytes of stored rows. `observed_tokens` of `signal_tokens`
    were observed: fewer beyond the worker's limit or in a `truncated` repair.
    `in_pause`: it ended before the next turn. `started_at` is its beginning in Unix seconds, None
    where that was not stored; `call_id` the tool call that it is conditioned on, if it is one.
    """

    trigger: str
    signal_tokens: int
    scored_rows: int
    promoted: int
    seconds: float
    candidates: int = 0
    demoted: int = 0
    truncated: bool = False
    bytes_read: int = 0
    observed_tokens: int = 0
    in_pause: bool = False
    started_at: float | None = None
    call_id: str = ""

    @property
    def share_scanned(self) -> float:
        """The share of the candidates that was scored; 1.0 when there was none."""
        return self.scored_rows / self.candidates if self.candidates else 1.0


@dataclass(frozen=True)
class MemoryReport:
    """A session's rows and bytes.

    `length` counts the tokens that were computed, `rows` those whose rows are kept: whole pages, before
    the first row that a step computed over active rows alone. The last `unsettled` tokens are pending.
    Rows are counted per layer: `active_rows` and its like are the largest layer's. `durable`: as of the
    last turn, the rows survive their worker; None where that is not known. `retrieval_bytes`: of the
    worker's host, of the rows that answers and repairs search, and their index. `dropped_tokens`
    are all that it lost when the chat template rewrote earlier turns (`Rewrite`).
    """

    length: int = 0
    budget: int = 0
    active_rows: int = 0
    peak_rows: int = 0
    bound_rows: int = 0
    active_bytes: int = 0
    evicted_rows: int = 0
    promoted_rows: int = 0
    layer_active_rows: tuple[int, ...] = ()
    layer_peak_rows: tuple[int, ...] = ()
    layer_bound_rows: tuple[int, ...] = ()
    tier_bytes: Mapping[str, int] = field(default_factory=dict)
    in_slot: bool = False
    retrieval_bytes: int = 0
    durable: bool | None = None
    unsettled: int = 0
    dropped_tokens: int = 0

    @property
    def rows(self) -> int:
        """Tokens with stored rows."""
        return self.length - self.unsettled


@dataclass(frozen=True)
class Fidelity:
    """Divergence of a session's next-token distributions from another's, over recorded assistant tokens.

    `kl_mean` is in nats, `top1_agreement` a share of tokens.
    """

    tokens: int
    kl_mean: float
    top1_agreement: float


@dataclass(frozen=True)
class EpisodeReport:
    """The episode that a turn matched, the cosine of the match, and the rows moved by the switch.

    A turn that stays in its episode moves nothing. Rows are counted over all layers and KV heads.
    """

    episode: str
    similarity: float
    switched: bool = False
    rows_moved: int = 0
    rows_kept: int = 0
    bytes_moved: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class ReselectionReport:
    """The selections that an answer made among all stored rows, together.

    `rows_in` became active and `rows_out` left, over all layers and KV heads. `seconds` include what
    other sessions decoded meanwhile.
    """

    count: int
    rows_in: int
    rows_out: int
    seconds: float


@dataclass(frozen=True)
class PrefillReport:
    """Blocks of a turn that were prefilled sparsely.

    `cover` is the share of attention weight that was computed, on the queries that checked it: the
    least of a layer and head, and the mean. `density`: mean share of the rows that queries attended
    to.
    """

    blocks: int
    cover_min: float
    cover_mean: float
    density: float


@dataclass(frozen=True)
class RetrievalReport:
    """What the steps of a turn retrieved from rows that were not active.

    `rows` are counted over all steps, layers and KV heads; `seconds` are of search and reading.
    `refused`: the worker had no memory to retrieve from, and the answer saw its active rows alone.
    """

    steps: int
    rows: int
    seconds: float
    refused: bool = False


@dataclass(frozen=True)
class RememberedReport:
    """What a turn saw of its memory, behind the first `behind` tokens of its prompt.

    `passages` of `sessions`, with so many `tokens`: of all but `prefilled_tokens` the rows that they had
    there.
    """

    passages: int
    tokens: int
    prefilled_tokens: int
    behind: int
    sessions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sender:
    """Who sent a turn: through which API, with the key of which id, and which program, by its own word."""

    api: str
    key: str | None = None
    client: str | None = None


@dataclass(frozen=True)
class TurnOutcome:
    """The result of a committed turn; it is stored with the turn.

    `repairs` are those since the previous turn; `own_repair` is the last of them when the turn ran
    it itself. `repairs_skipped` counts those that were due but not started. `durable`: the
    session's rows survive their worker; otherwise they are rebuilt from the turn log if they are
    lost. `seconds` are by phase, `phase_starts` those from the turn's arrival to each phase's first
    beginning, empty in turns that were stored without. `stop_sequence` is the one that the answer
    ended at, if any.
    `reasoning_tokens` of the output are not of the answer itself. `deferred_tokens` at the
    session's end wait for the next repair before a turn. The last `recorded_tokens` of the prompt
    are recorded text that was appended as an answer's tokens are. `logprobs` are those of the
    text's tokens, and `prompt_logprobs` those of the prompt's, in an answer that asked for them;
    they are never stored. `prefilled_tokens` were computed before the answer: those of the prompt
    that no shared page has, and pending ones. The first `settled_tokens` of them were settled.
    `shared_tokens` are those whose pages were stored already, of a session's first turn.

    `started_at` and `committed_at` are Unix seconds, `worker` the one that ran the turn, after
    `retries` others were lost, and `stop` the position after its last token. `prefill` is
    of a turn with sparse blocks, `retrieval` of one with steps that retrieved, `remembered` of one
    that was given passages of a memory. `opening` is what
    the client began the message with. `rewrite` is of the tokens before the turn's own. `request_id`
    and `trace_id` are of the request that ran it, empty where there is none, `sender` is who sent that.
    """

    session: str
    turn: int
    message: Message | None
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    memory: MemoryReport
    repairs: tuple[RepairReport, ...]
    seconds: Mapping[str, float]
    fidelity: Fidelity | None = None
    own_repair: RepairReport | None = None
    episode: EpisodeReport | None = None
    repairs_skipped: int = 0
    durable: bool = True
    stop_sequence: str = ""
    reasoning_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    deferred_tokens: int = 0
    recorded_tokens: int = 0
    prefilled_tokens: int = 0
    settled_tokens: int = 0
    shared_tokens: int = 0
    started_at: float = 0.0
    committed_at: float = 0.0
    worker: str = ""
    retries: int = 0
    stop: int = 0
    reselections: ReselectionReport | None = None
    prefill: PrefillReport | None = None
    retrieval: RetrievalReport | None = None
    remembered: RememberedReport | None = None
    opening: str = ""
    rewrite: Rewrite | None = None
    request_id: str = ""
    trace_id: str = ""
    phase_starts: Mapping[str, float] = field(default_factory=dict)
    sender: Sender | None = None

    @property
    def dropped_tokens(self) -> int:
        """Tokens that the session has less since the chat template rewrote earlier turns."""
        return 0 if self.rewrite is None else self.rewrite.dropped_tokens

    @property
    def generated(self) -> Message | None:
        """The message without its opening: what was generated in this turn."""
        if self.message is None or not self.opening:
            return self.message
        return replace(self.message, content=self.message.content[len(self.opening) :])
