"""Sensitivity of each layer's keys to eviction, measured once per model and kept as a file."""

import hashlib
import math
import os
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from workers.cache.active_cache import ActiveCache
from workers.cache.caches import Caches
from workers.cache.forward_step import ForwardStep
from workers.errors import ProfileRefused
from workers.model.loader import LoadedModel
from workers.primitives.scoring import recency
from workers.primitives.selection import top_per_head

# Default number of tokens; the first pass holds all their rows.
TOKENS = 2048

# Minimum number of tokens: with fewer there is hardly anything to evict.
MIN_TOKENS = 128

# Sinks of the evicting pass.
SINKS = 4


class Profile(BaseModel):
    """The sensitivity `s_l` of each layer of one model, and the conditions of its measurement.

    Attributes:
        fingerprint: The model's fingerprint.
        model: The model's name.
        sensitivity: `1 - sigma_l` of EpiCache, eq. 9, per layer: from 0 (eviction does not change
            the layer's keys) to 2.
        text: Description of the text.
        text_digest: Digest of the text's token ids.
        tokens: Number of tokens.
        compared: Number of tokens after the first eviction, which were compared.
        budget: Rows per head of the evicting pass.
        block: Tokens per block.
        sinks: First rows that the evicting pass keeps.
        dtype: Data type of the model.
        device: Type of the device.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    fingerprint: str
    model: str
    sensitivity: tuple[Annotated[float, Field(ge=0, le=2)], ...]
    text: str
    text_digest: str
    tokens: int
    compared: int
    budget: int
    block: int
    sinks: int
    dtype: str
    device: str


def measure(model: LoadedModel, token_ids: Sequence[int], *, name: str, text: str) -> Profile:
    """Run `measure_steps` to its end. Raises ProfileRefused."""
    steps = measure_steps(model, token_ids, name=name, text=text)
    while True:
        try:
            next(steps)
        except StopIteration as finished:
            profile: Profile = finished.value
            return profile


def measure_steps(
    model: LoadedModel, token_ids: Sequence[int], *, name: str, text: str
) -> Generator[float, None, Profile]:
    """Compare the keys of two passes over a text: with all rows, and with sinks + recent rows only.

    The second pass evicts after each block, as a session would, down to an eighth of the text; the
    ratios between the layers hardly depend on the budget. Both passes advance together, block by
    block, so only the first one's rows grow with the text. The text is truncated to the model's
    context. Tokens before the first eviction, which are the same in both passes, are not counted.

    After each forward pass the share that is done is yielded, so that a worker can serve its
    sessions meanwhile.

    Source: EpiCache, section 3.2, eq. 8 and 9; the keys are taken after RoPE, which does not change
    their cosine.

    Args:
        model: The model.
        token_ids: Token ids of the text.
        name: Name of the model, for the profile.
        text: Description of the text, for the profile.

    Raises:
        ProfileRefused: The text has fewer than `MIN_TOKENS` tokens, or keys are not finite.
    """
    token_ids = list(token_ids[: model.max_context])
    if len(token_ids) < MIN_TOKENS:
        raise ProfileRefused(
            f"{text} has {len(token_ids)} tokens to read; a profile needs {MIN_TOKENS}"
        )
    budget = len(token_ids) // 8
    block = len(token_ids) // 16
    similarity, compared = yield from _similarity(model, token_ids, budget, block)
    if not all(math.isfinite(each) for each in similarity):
        raise ProfileRefused(
            f"the keys of {name} are not finite numbers in {model.dtype}: no layer can be compared"
        )
    return Profile(
        fingerprint=model.fingerprint,
        model=name,
        sensitivity=tuple(min(2.0, max(0.0, 1 - each)) for each in similarity),
        text=text,
        text_digest=text_digest(token_ids),
        tokens=len(token_ids),
        compared=compared,
        budget=budget,
        block=block,
        sinks=SINKS,
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
    )


def text_digest(token_ids: Sequence[int]) -> str:
    """Compute the hex digest of a text's token ids."""
    return hashlib.sha256(str(list(token_ids)).encode()).hexdigest()[:32]


def save(profile: Profile, path: Path) -> None:
    """Write the profile atomically, creating its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    with draft.open("w", encoding="utf-8") as file:
        file.write(profile.model_dump_json(indent=1) + "\n")
        file.flush()
        # Before the name: a loss of power must not leave an empty profile, which would be refused.
        os.fsync(file.fileno())
    draft.replace(path)


def load(path: Path, model: LoadedModel) -> Profile:
    """Read the model's profile. Raises ProfileRefused if it is invalid or another model's."""
    try:
        profile = Profile.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise ProfileRefused(
            f"{path} is no layer profile; delete it to have it measured again: {error}"
        ) from error
    if profile.fingerprint != model.fingerprint or len(profile.sensitivity) != model.shape.n_layers:
        raise ProfileRefused(
            f"{path} is the profile of another model ({profile.model}, fingerprint "
            f"{profile.fingerprint}); delete it to have this one's ({model.fingerprint}) measured"
        )
    return profile


def _similarity(
    model: LoadedModel, token_ids: list[int], budget: int, block: int
) -> Generator[float, None, tuple[list[float], int]]:
    """`sigma_l` per layer, the mean cosine over tokens and KV heads, and the number of tokens."""
    full = _create_caches(model, len(token_ids), block)
    evicting = _create_caches(model, budget + block, block)
    total = torch.zeros(model.shape.n_layers, dtype=torch.float64)
    compared = 0
    for start in range(0, len(token_ids), block):
        tokens = token_ids[start : start + block]
        steps = []
        for number, caches in enumerate((full, evicting), 1):
            steps.append(_append(model, caches, tokens, start))
            yield (start + len(tokens) * number / 2) / len(token_ids)
        if start > budget:
            total += model.group.mean(_cosines(*steps))
            compared += len(tokens)
        _evict(evicting.active, budget)
    return (total / compared / model.shape.n_kv_heads).tolist(), compared


def _create_caches(model: LoadedModel, rows: int, block: int) -> Caches:
    caches = model.create_caches(1, rows, block)
    caches.active.claim(caches.active.rows)
    return caches


def _append(model: LoadedModel, caches: Caches, tokens: list[int], start: int) -> ForwardStep:
    if caches.side is not None:
        caches.side.make_room(0, start, len(tokens))
    step = caches.begin([0], start + torch.arange(len(tokens))[None])
    model.forward(torch.tensor([tokens]), step)
    step.commit()
    return step


def _cosines(full: ForwardStep, evicting: ForwardStep) -> torch.Tensor:
    """Cosines of one block's keys in both passes, summed over tokens and heads: `[n_layers]`."""
    sums = [
        torch.cosine_similarity(a.float(), b.float(), dim=-1).sum()
        for a, b in zip(full.new_keys, evicting.new_keys, strict=True)
    ]
    return torch.stack(sums).double().cpu()


def _evict(cache: ActiveCache, budget: int) -> None:
    """Keep `budget` rows per head: sinks and the most recent (Xiao et al., 2023)."""
    for layer in range(cache.shape.n_layers):
        _, _, positions = cache.get_rows(0, layer)
        cache.keep(0, layer, top_per_head(recency(positions, SINKS), positions, budget))
