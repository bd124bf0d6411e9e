"""How much eviction moves each layer's keys, measured once per model and kept as a file."""

import hashlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from workers.cache.active_cache import ActiveCache, ForwardStep
from workers.errors import ProfileRefused
from workers.model.loader import LoadedModel
from workers.primitives.scoring import recency
from workers.primitives.selection import top_per_head

TOKENS = 2048
"""Tokens that are read where no other number is asked for: the first pass holds all their rows."""
MIN_TOKENS = 128
"""With fewer there is next to nothing that eviction could take away."""
SINKS = 4


class Profile(BaseModel):
    """The sensitivity `s_l` of each layer of one model, and how it was measured.

    sensitivity: `1 - sigma_l` of EpiCache's eq. 9, from 0 (eviction does not move the layer's keys) to 2. fingerprint:
    the model's. text: what was read, in words; text_digest: of its token ids. tokens that were read, `compared` of
    them after the first eviction; budget and block in rows.
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
    """Read a text twice, with all rows and with sinks + recent rows only, and compare the keys of the two passes.

    The second pass evicts after each block, as a session would, down to an eighth of the text: how the layers compare
    hardly depends on the budget. Both passes advance together, block by block, so the memory that grows with the text
    is the first one's rows; the text is read up to the model's context. Tokens before the first eviction, which are
    the same in both passes, are not counted. `name` and `text` say what the model and the text are called.

    Source: EpiCache, section 3.2, eq. 8 and 9; the keys are taken after RoPE, which does not change their cosine.
    Raises ProfileRefused for a text under `MIN_TOKENS` tokens, or if the model's keys are not numbers.
    """
    token_ids = list(token_ids[: model.max_context])
    if len(token_ids) < MIN_TOKENS:
        raise ProfileRefused(
            f"{text} has {len(token_ids)} tokens to read; a profile needs {MIN_TOKENS}"
        )
    budget = len(token_ids) // 8
    block = len(token_ids) // 16
    similarity, compared = _similarity(model, token_ids, budget, block)
    if not all(math.isfinite(each) for each in similarity):
        raise ProfileRefused(
            f"the keys of {name} are not finite numbers in {model.dtype}: no layer can be compared"
        )
    return Profile(
        fingerprint=model.fingerprint,
        model=name,
        sensitivity=tuple(min(2.0, max(0.0, 1 - each)) for each in similarity),
        text=text,
        text_digest=hashlib.sha256(str(token_ids).encode()).hexdigest()[:32],
        tokens=len(token_ids),
        compared=compared,
        budget=budget,
        block=block,
        sinks=SINKS,
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
    )


def save(profile: Profile, path: Path) -> None:
    """Write the profile, its folder as well; a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(profile.model_dump_json(indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def load(path: Path, model: LoadedModel) -> Profile:
    """Read the model's profile. Raises ProfileRefused if it is another model's, or no profile at all."""
    try:
        profile = Profile.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise ProfileRefused(
            f"{path} is no layer profile; delete it to have it measured again: {error}"
        ) from error
    if profile.fingerprint != model.fingerprint or len(profile.sensitivity) != model.shape.n_layers:
        raise ProfileRefused(
            f"{path} is the profile of another model ({profile.model}, fingerprint {profile.fingerprint}); "
            f"delete it to have this one's ({model.fingerprint}) measured"
        )
    return profile


def _similarity(
    model: LoadedModel, token_ids: list[int], budget: int, block: int
) -> tuple[list[float], int]:
    """`sigma_l` of every layer, and over how many tokens: the mean cosine over them and the KV heads."""
    full = _cache(model, len(token_ids))
    evicting = _cache(model, budget + block)
    total = torch.zeros(model.shape.n_layers, dtype=torch.float64)
    compared = 0
    for start in range(0, len(token_ids), block):
        said = token_ids[start : start + block]
        passes = [_say(model, cache, said, start) for cache in (full, evicting)]
        if start > budget:
            total += _cosines(*passes)
            compared += len(said)
        _evict(evicting, budget)
    return (total / compared / model.shape.n_kv_heads).tolist(), compared


def _cache(model: LoadedModel, rows: int) -> ActiveCache:
    of_layers = [rows] * model.shape.n_layers
    cache = ActiveCache(model.shape, 1, of_layers, model.dtype, model.device)
    cache.claim(of_layers)
    return cache


def _say(model: LoadedModel, cache: ActiveCache, said: list[int], start: int) -> ForwardStep:
    step = cache.begin_step([0], start + torch.arange(len(said))[None])
    model.forward(torch.tensor([said]), step)
    return step


def _cosines(full: ForwardStep, evicting: ForwardStep) -> torch.Tensor:
    """The cosines of one block's keys in the two passes, summed over tokens and heads: float64 `[n_layers]`."""
    pairs = zip(full.new_keys, evicting.new_keys, strict=True)
    sums = [
        torch.cosine_similarity(ours.float(), theirs.float(), dim=-1).sum()
        for ours, theirs in pairs
    ]
    return torch.stack(sums).double().cpu()


def _evict(cache: ActiveCache, budget: int) -> None:
    """Keep sinks and recent rows, `budget` of them (Xiao et al., 2023)."""
    for layer in range(cache.shape.n_layers):
        _, _, positions = cache.get_rows(0, layer)
        cache.keep(0, layer, top_per_head(recency(positions, SINKS), positions, budget))
