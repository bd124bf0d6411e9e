"""Keys and queries to scan: made up in the likeness of a model's, or the reference model's own."""

import math
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from kvrecall.app.wiring import build_store
from kvrecall.protocol.v1 import worker_pb2 as wire
from reference import MODEL_PATH
from reference.conversation import generate
from workers.cache.active_cache import KVShape
from workers.engine.engine import Engine, Parts
from workers.engine.settings import WorkerSettings
from workers.model.loader import load_model
from workers.model.tokenizer import load_tokenizer
from workers.primitives.observation import Observed

SINKS = 4
_PIECE = 1024
"""Tokens whose keys are made at once."""
_NEEDLE_TOKENS = 6
_NEEDLES_EVERY = 1500
_MASS_AT = 32_768
"""Tokens among which the sinks get about half of a query's attention."""


@dataclass(frozen=True)
class MadeUp:
    """Keys of no model, the same for the same seed: `[n_layers, n_kv_heads, tokens, head_dim]`, piece by piece.

    Channels have means and scales of their own, heavy-tailed; half of them turn with the position, as under RoPE, at
    speeds from one radian a token down to one in ten thousand. What is said changes its topic, which moves the keys of
    some hundred tokens together. The first tokens are sinks that draw about half of the attention. Heads are flat or
    sharp: the logits of noise have a standard deviation from 0.7 to 3. Needles of six tokens lie about 1,500 tokens
    apart; in a sixth of the layers and heads one query token of the signal looks at them, with 4 to 10 more.
    """

    shape: KVShape
    dtype: torch.dtype
    seed: int
    signal_tokens: int = 16

    @property
    def name(self) -> str:
        """As the result file calls it."""
        return "synthetic keys"

    def keys(self, tokens: int) -> Iterator[Tensor]:
        """The first `tokens` keys, in pieces of up to 1,024."""
        for first in range(0, tokens, _PIECE):
            yield self._piece(first)[:, :, : tokens - first].to(self.dtype)

    @cached_property
    def observed(self) -> Observed:
        """The signal's queries: what they have in common points at the sinks."""
        shape = self.shape
        random = self._random(1)
        of_kv_head = (shape.n_layers, shape.n_kv_heads, 1, 1, shape.head_dim)
        varied = torch.randn(
            *of_kv_head[:2], shape.group, self.signal_tokens, shape.head_dim, generator=random
        )
        queries = varied / self._heads.scale[:, :, None, None] + torch.randn(
            of_kv_head, generator=random
        )
        noise = (queries * self._heads.scale[:, :, None, None]).norm(
            dim=-1, keepdim=True
        ) / math.sqrt(shape.head_dim)
        queries = queries / noise * self._heads.sharpness[:, :, None, None, None]
        of_layers = queries.reshape(
            shape.n_layers, shape.n_heads, self.signal_tokens, shape.head_dim
        )
        return Observed(
            tuple(of_layers.to(self.dtype)), torch.arange(self.signal_tokens, dtype=torch.int32)
        )

    @cached_property
    def _heads(self) -> "_Heads":
        return _Heads.drawn(self.shape, self._random(0))

    def _random(self, stream: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1_000_003 + stream)

    def _piece(self, first: int) -> Tensor:
        shape = self.shape
        heads = self._heads
        random = self._random(2 + first)
        place = (shape.n_layers, shape.n_kv_heads)
        noise = torch.randn(*place, _PIECE, shape.head_dim, generator=random)
        topics = torch.randn(*place, _PIECE // 128 + 1, shape.head_dim, generator=random)
        noise = 0.8 * noise + 0.6 * topics.repeat_interleave(128, 2)[:, :, 64 : 64 + _PIECE]
        keys = noise.mul_(heads.scale.unsqueeze(2)).add_(heads.mean.unsqueeze(2))
        _turn(keys, torch.arange(first, first + _PIECE))
        if first == 0:
            self._put_sinks(keys)
        for place_of_needle in range(
            first - first % _NEEDLES_EVERY, first + _PIECE, _NEEDLES_EVERY
        ):
            self._put_needle(
                keys, place_of_needle + 700 - first, self._random(-1 - place_of_needle)
            )
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

    def _put_needle(self, keys: Tensor, place: int, random: torch.Generator) -> None:
        """A run of tokens that query tokens look at; what of it is not in this piece is left out."""
        queries = self._queries()
        layers, heads, rows, _ = queries.shape
        chosen = torch.randint(rows, (layers, heads), generator=random)
        aimed = queries.gather(
            2, chosen[..., None, None].expand(-1, -1, 1, queries.shape[-1])
        ).squeeze(2)
        aimed = aimed / aimed.square().sum(-1, keepdim=True) * math.sqrt(self.shape.head_dim)
        looks = (torch.rand(layers, heads, 1, generator=random) < 1 / 6).float()
        for token in range(_NEEDLE_TOKENS):
            strength = 4 + 6 * torch.rand(layers, heads, 1, generator=random)
            if 0 <= place + token < keys.shape[2]:
                keys[:, :, place + token] += aimed * strength * looks


@dataclass(frozen=True)
class _Heads:
    """Of every layer and KV head: mean and scale of the channels, and how sharply it attends."""

    mean: Tensor
    scale: Tensor
    sharpness: Tensor

    @classmethod
    def drawn(cls, shape: KVShape, random: torch.Generator) -> "_Heads":
        of_channels = (shape.n_layers, shape.n_kv_heads, shape.head_dim)
        scale = torch.exp(0.5 * torch.randn(of_channels, generator=random))
        mean = torch.exp(0.8 * torch.randn(of_channels, generator=random))
        mean *= torch.randn(of_channels, generator=random).sign()
        return cls(mean, scale, 0.7 + 2.3 * torch.rand(of_channels[:2], generator=random))


def _turn(keys: Tensor, positions: Tensor) -> None:
    """Turn pairs of channels of the second half with the position, in place."""
    pairs = keys.shape[-1] // 4
    speeds = 10_000.0 ** -(torch.arange(pairs) / max(1, pairs))
    angles = positions[:, None] * speeds
    first = keys[..., -2 * pairs : -pairs].clone()
    second = keys[..., -pairs:].clone()
    keys[..., -2 * pairs : -pairs] = first * angles.cos() - second * angles.sin()
    keys[..., -pairs:] = first * angles.sin() + second * angles.cos()


@dataclass(frozen=True)
class ReferenceKeys:
    """The reference model's keys of generated conversations of 8,192 tokens, one after the other.

    Each begins at position 0: the model's context is 16,384. The signal is a question of the first. The same
    conversation again would make every token tie with another.
    """

    seed: int
    conversation_tokens: int = 8192
    _made: list[tuple[Tensor, Observed]] = field(default_factory=list, compare=False)

    @property
    def name(self) -> str:
        """As the result file calls it."""
        return "the reference model's keys"

    @property
    def shape(self) -> KVShape:
        """The reference model's."""
        return load_model(MODEL_PATH).shape

    @property
    def dtype(self) -> torch.dtype:
        """The reference model's."""
        return load_model(MODEL_PATH).dtype

    @property
    def observed(self) -> Observed:
        """The queries of a question of the first conversation."""
        return self._conversation(0)[1]

    def keys(self, tokens: int) -> Iterator[Tensor]:
        """The first `tokens` keys, conversation by conversation."""
        for first in range(0, tokens, self.conversation_tokens):
            keys, _ = self._conversation(first // self.conversation_tokens)
            yield keys[:, :, : tokens - first]

    def _conversation(self, index: int) -> tuple[Tensor, Observed]:
        while len(self._made) <= index:
            self._made.append(_prefilled(self.seed + len(self._made), self.conversation_tokens))
        return self._made[index]


def _prefilled(seed: int, tokens: int) -> tuple[Tensor, Observed]:
    """Keys `[n_layers, n_kv_heads, tokens, head_dim]` of a conversation, and the queries of its last question."""
    model = load_model(MODEL_PATH)
    tokenizer = load_tokenizer(MODEL_PATH, model.eos_token_ids)
    said = generate(seed, tokens + tokens // 8, split="held_out")
    token_ids = [
        t for segment in tokenizer.prompt([], said.messages(), [], False) for t in segment.token_ids
    ]
    assert len(token_ids) >= tokens, "the conversation is longer than what is taken of it"
    question = next(
        exchange.user for exchange in reversed(said.exchanges) if exchange.kind == "question"
    )
    settings = WorkerSettings(slots=1, max_budget=tokens + 512, block_tokens=512)
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(build_store(model, Path(folder), 1 << 30)) as store,
    ):
        engine = Engine(Parts(model, tokenizer, store, settings))
        spec = wire.SessionSpec(session="s", epoch=1, method="full", budget=tokens + 512)
        session = engine.swap_in(engine.open(spec, wire.SessionState()))
        for block in torch.tensor(token_ids[:tokens]).chunk(-(-tokens // 512)):
            engine.forward([session], block[None].to(model.device))
        observed = engine.observe(session, tokenizer.encode(question))
        engine.store_io.flush(session.session)
        engine.store_io.wait_written(session.session)
        keys = store.gather("s", torch.arange(tokens))[:, 0].clone()
        engine.close()
    return keys, observed
