"""Keys and queries to scan: synthetic with a model's statistics, or the reference model's."""

import math
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.app.wiring import build_store
from reference import MODEL_PATH
from reference.conversation import generate
from workers.cache.active_cache import KVShape
from workers.engine.engine import Engine, Parts
from workers.engine.settings import WorkerSettings
from workers.model.loader import load_model
from workers.model.tokenizer import load_tokenizer
from workers.primitives.observation import Observed

SINKS = 4
# Tokens whose keys are generated at once.
_PIECE = 1024
_NEEDLE_TOKENS = 6
_NEEDLES_EVERY = 1500
# Context length at which the sinks get about half of a query's attention.
_MASS_AT = 32_768


@dataclass(frozen=True)
class SyntheticKeys:
    """Synthetic keys, a function of the seed: `[n_layers, n_kv_heads, tokens, head_dim]` in pieces.

    Channels have means and scales of their own, heavy-tailed; half of them rotate with the
    position, as under RoPE, at speeds from one radian a token down to one in ten thousand. Topics
    change and shift the keys of some hundred tokens together. The first tokens are sinks with about
    half of the attention. Heads are flat or sharp: the logits of noise have a standard deviation
    from 0.7 to 3. Needles of six tokens lie about 1,500 tokens apart; in a sixth of the layers and
    heads one query token of the signal attends to them, with logits that are higher by 4 to 10.
    """

    shape: KVShape
    dtype: torch.dtype
    seed: int
    signal_tokens: int = 16

    @property
    def name(self) -> str:
        """Name in the result file."""
        return "synthetic keys"

    def keys(self, tokens: int) -> Iterator[Tensor]:
        """The first `tokens` keys, in pieces of at most 1,024 tokens."""
        for first in range(0, tokens, _PIECE):
            yield self._piece(first)[:, :, : tokens - first].to(self.dtype)

    @cached_property
    def observed(self) -> Observed:
        """Queries of the signal; their common part points at the sinks."""
        shape = self.shape
        random = self._random(1)
        kv_head_shape = (shape.n_layers, shape.n_kv_heads, 1, 1, shape.head_dim)
        varied = torch.randn(
            *kv_head_shape[:2], shape.group, self.signal_tokens, shape.head_dim, generator=random
        )
        queries = varied / self._heads.scale[:, :, None, None] + torch.randn(
            kv_head_shape, generator=random
        )
        noise = (queries * self._heads.scale[:, :, None, None]).norm(
            dim=-1, keepdim=True
        ) / math.sqrt(shape.head_dim)
        queries = queries / noise * self._heads.sharpness[:, :, None, None, None]
        by_layer = queries.reshape(
            shape.n_layers, shape.n_heads, self.signal_tokens, shape.head_dim
        )
        return Observed(
            tuple(by_layer.to(self.dtype)), torch.arange(self.signal_tokens, dtype=torch.int32)
        )

    @cached_property
    def _heads(self) -> "_Heads":
        return _Heads.draw(self.shape, self._random(0))

    def _random(self, stream: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1_000_003 + stream)

    def _piece(self, first: int) -> Tensor:
        shape = self.shape
        heads = self._heads
        random = self._random(2 + first)
        heads_shape = (shape.n_layers, shape.n_kv_heads)
        noise = torch.randn(*heads_shape, _PIECE, shape.head_dim, generator=random)
        topics = torch.randn(*heads_shape, _PIECE // 128 + 1, shape.head_dim, generator=random)
        noise = 0.8 * noise + 0.6 * topics.repeat_interleave(128, 2)[:, :, 64 : 64 + _PIECE]
        keys = noise.mul_(heads.scale.unsqueeze(2)).add_(heads.mean.unsqueeze(2))
        _rotate(keys, torch.arange(first, first + _PIECE))
        if first == 0:
            self._put_sinks(keys)
        for needle in range(first - first % _NEEDLES_EVERY, first + _PIECE, _NEEDLES_EVERY):
            self._put_needle(keys, needle + 700 - first, self._random(-1 - needle))
        return keys

    def _queries(self) -> Tensor:
        """float32 `[n_layers, n_kv_heads, group * t, head_dim]`."""
        queries = torch.stack(self.observed.queries).float()
        return queries.reshape(self.shape.n_layers, self.shape.n_kv_heads, -1, self.shape.head_dim)

    def _put_sinks(self, keys: Tensor) -> None:
        common = self._queries().mean(2, keepdim=True)
        logit = math.log(_MASS_AT / SINKS) + self._heads.sharpness[..., None, None] ** 2 / 2
        aimed = (
            common / common.square().sum(-1, keepdim=True) * logit * math.sqrt(self.shape.head_dim)
        )
        keys[:, :, :SINKS] = aimed + 0.05 * keys[:, :, :SINKS]

    def _put_needle(self, keys: Tensor, index: int, random: torch.Generator) -> None:
        """Add a needle that query tokens attend to; its tokens outside this piece are left out."""
        queries = self._queries()
        layers, heads, rows, _ = queries.shape
        chosen = torch.randint(rows, (layers, heads), generator=random)
        aimed = queries.gather(
            2, chosen[..., None, None].expand(-1, -1, 1, queries.shape[-1])
        ).squeeze(2)
        aimed = aimed / aimed.square().sum(-1, keepdim=True) * math.sqrt(self.shape.head_dim)
        attends = (torch.rand(layers, heads, 1, generator=random) < 1 / 6).float()
        for token in range(_NEEDLE_TOKENS):
            strength = 4 + 6 * torch.rand(layers, heads, 1, generator=random)
            if 0 <= index + token < keys.shape[2]:
                keys[:, :, index + token] += aimed * strength * attends


@dataclass(frozen=True)
class _Heads:
    """Mean and scale of the channels, and sharpness of attention, of every layer and KV head."""

    mean: Tensor
    scale: Tensor
    sharpness: Tensor

    @classmethod
    def draw(cls, shape: KVShape, random: torch.Generator) -> "_Heads":
        channels_shape = (shape.n_layers, shape.n_kv_heads, shape.head_dim)
        scale = torch.exp(0.5 * torch.randn(channels_shape, generator=random))
        mean = torch.exp(0.8 * torch.randn(channels_shape, generator=random))
        mean *= torch.randn(channels_shape, generator=random).sign()
        return cls(mean, scale, 0.7 + 2.3 * torch.rand(channels_shape[:2], generator=random))


def _rotate(keys: Tensor, positions: Tensor) -> None:
    """Rotate pairs of channels of the second half with the position, in index."""
    pairs = keys.shape[-1] // 4
    speeds = 10_000.0 ** -(torch.arange(pairs) / max(1, pairs))
    angles = positions[:, None] * speeds
    first = keys[..., -2 * pairs : -pairs].clone()
    second = keys[..., -pairs:].clone()
    keys[..., -2 * pairs : -pairs] = first * angles.cos() - second * angles.sin()
    keys[..., -pairs:] = first * angles.sin() + second * angles.cos()


@dataclass(frozen=True)
class ReferenceKeys:
    """Keys of the reference model on generated conversations of 8,192 tokens, one after the other.

    Each conversation begins at position 0, since the model's context is 16,384. The signal is a
    question of the first. Repeating a single conversation would make every token tie with another.
    """

    seed: int
    conversation_tokens: int = 8192
    _made: list[tuple[Tensor, Observed]] = field(default_factory=list, compare=False)

    @property
    def name(self) -> str:
        """Name in the result file."""
        return "the reference model's keys"

    @property
    def shape(self) -> KVShape:
        """Shape of the reference model."""
        return load_model(MODEL_PATH).shape

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the reference model."""
        return load_model(MODEL_PATH).dtype

    @property
    def observed(self) -> Observed:
        """Queries of a question of the first conversation."""
        return self._conversation(0)[1]

    def keys(self, tokens: int) -> Iterator[Tensor]:
        """The first `tokens` keys, conversation by conversation."""
        for first in range(0, tokens, self.conversation_tokens):
            keys, _ = self._conversation(first // self.conversation_tokens)
            yield keys[:, :, : tokens - first]

    def _conversation(self, index: int) -> tuple[Tensor, Observed]:
        while len(self._made) <= index:
            self._made.append(_prefill(self.seed + len(self._made), self.conversation_tokens))
        return self._made[index]


def _prefill(seed: int, tokens: int) -> tuple[Tensor, Observed]:
    """Keys of a conversation, and the queries of its last question.

    Keys are `[n_layers, n_kv_heads, tokens, head_dim]`.
    """
    model = load_model(MODEL_PATH)
    tokenizer = load_tokenizer(MODEL_PATH, model.eos_token_ids)
    conversation = generate(seed, tokens + tokens // 8, split="held_out")
    token_ids = [
        t
        for segment in tokenizer.prompt([], conversation.messages(), [], False)
        for t in segment.token_ids
    ]
    assert len(token_ids) >= tokens, "the conversation is long enough"
    question = next(
        exchange.user
        for exchange in reversed(conversation.exchanges)
        if exchange.kind == "question"
    )
    settings = WorkerSettings(slots=1, max_budget=tokens + 512, block_tokens=512)
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(build_store(model, Path(folder))) as store,
    ):
        engine = Engine(Parts(model, tokenizer, store, settings))
        spec = pb.SessionSpec(session="s", epoch=1, method="full", budget=tokens + 512)
        session = engine.swap_in(engine.open(spec, pb.SessionState()))
        for block in torch.tensor(token_ids[:tokens]).chunk(-(-tokens // 512)):
            engine.forward([session], block[None].to(model.device))
        observed = engine.observe(session, tokenizer.encode(question))
        engine.store_io.flush(session.session)
        engine.store_io.wait_written(session.session)
        keys = store.gather("s", torch.arange(tokens))[:, 0].clone()
        engine.close()
    return keys, observed
