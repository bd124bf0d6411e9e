"""The layer profile of the served model, measured when a session first needs it, and kept.

The profile in the data directory is the one that counts. A copy in the cache directory saves the
measurement in the next data directory.

The reference model is measured on a conversation in its own generated language, any other model on
`calibration.txt`, a conversation in plain English, or on an operator's text. The choice of the text
matters little, since sensitivity is a property of the model (EpiCache, section 3.2).
"""

import time
from collections.abc import Generator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import structlog

from kvrecall_server.app.errors import BadCalibrationText
from kvrecall_server.app.models import cache_directory, is_reference
from reference.conversation import generate
from workers.errors import ProfileRefused
from workers.model import layer_sensitivity as profile
from workers.model.layer_sensitivity import Profile
from workers.model.loader import LoadedModel
from workers.model.tokenizer import ChatMessage, ChatTokenizer

SEED = 0
PACKAGED = "calibration.txt"
# Of a measurement, between two lines of the log.
_LOGGED_SHARE = 0.1


@dataclass(frozen=True)
class CalibrationText:
    """A conversation to measure on, and its name in the profile."""

    name: str
    messages: list[ChatMessage]


def profile_path(data: Path, model: LoadedModel) -> Path:
    """The file of the model's profile, named by the fingerprint of its weights."""
    return data / "profiles" / f"{model.fingerprint}.json"


def find_profile(data: Path, model: LoadedModel) -> Profile | None:
    """The model's profile in a data directory. Raises ProfileRefused for a file of another model."""
    path = profile_path(data, model)
    return profile.load(path, model) if path.exists() else None


def measure_once(
    model: LoadedModel, tokenizer: ChatTokenizer, data: Path, name: str
) -> Generator[None, Any, tuple[float, ...]]:
    """Measure the layers' sensitivity on the packaged text, and save the profile.

    A profile in the cache directory, of the same weights on the same text, is taken instead. Yields
    after each forward pass. `name` is the model's, for the profile. Raises ProfileRefused.
    """
    text = packaged_text(name)
    token_ids = _encode(tokenizer, text, profile.TOKENS)
    digest = profile.text_digest(token_ids)
    cached = cache_directory() / "profiles" / f"{model.fingerprint}-{digest}.json"
    measured = _load_cached(cached, model)
    if measured is None:
        steps = profile.measure_steps(model, token_ids, name=_shown(name), text=text.name)
        measured = yield from _log_progress(steps, name)
        _save(measured, cached)
    _save(measured, profile_path(data, model))
    return measured.sensitivity


def measure(
    model: LoadedModel,
    tokenizer: ChatTokenizer,
    name: str,
    text: CalibrationText,
    tokens: int = profile.TOKENS,
) -> Profile:
    """Measure the layers' sensitivity on the first `tokens` tokens. Raises ProfileRefused."""
    token_ids = _encode(tokenizer, text, tokens)
    return profile.measure(model, token_ids, name=_shown(name), text=text.name)


def packaged_text(name: str, tokens: int = profile.TOKENS) -> CalibrationText:
    """The default text: a generated conversation for the reference model, English for others."""
    if is_reference(name):
        # A conversation comes out a little longer or shorter than asked for.
        conversation = generate(SEED, tokens + 512, split="train")
        return CalibrationText(f"a generated conversation, seed {SEED}", conversation.messages())
    return CalibrationText(
        PACKAGED,
        _turns(files("kvrecall_server.app").joinpath(PACKAGED).read_text(encoding="utf-8")),
    )


def read_text(path: Path) -> CalibrationText:
    """An operator's text, in UTF-8; its paragraphs become messages of user and assistant in turn.

    Raises BadCalibrationText.
    """
    try:
        messages = _turns(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadCalibrationText(f"{path} cannot be read as text in UTF-8: {error}") from error
    if not messages:
        raise BadCalibrationText(f"{path} is empty; it needs some {profile.TOKENS} tokens of text")
    return CalibrationText(path.name, messages)


def _turns(text: str) -> list[ChatMessage]:
    paragraphs = [
        paragraph.strip()
        for paragraph in text.replace("\r\n", "\n").split("\n\n")
        if paragraph.strip()
    ]
    return [
        {"role": ("user", "assistant")[i % 2], "content": paragraph}
        for i, paragraph in enumerate(paragraphs)
    ]


def _encode(tokenizer: ChatTokenizer, text: CalibrationText, tokens: int) -> list[int]:
    """The first `tokens` token ids of a text."""
    prompt = tokenizer.prompt([], text.messages, [], False)
    return [token for part in prompt for token in part.token_ids][:tokens]


def _shown(name: str) -> str:
    return "the reference model" if is_reference(name) else name


def _log_progress(
    steps: Generator[float, None, Profile], name: str
) -> Generator[None, Any, Profile]:
    """Run the steps of a measurement; log its beginning, each tenth of it and its end."""
    log = structlog.get_logger()
    log.info("measuring the layers' sensitivity, once for this model", model=name)
    started = time.perf_counter()
    logged = 0.0
    while True:
        try:
            share = next(steps)
        except StopIteration as finished:
            measured: Profile = finished.value
            break
        if share < 1 and share - logged >= _LOGGED_SHARE:
            logged = share
            log.info("measuring the layers' sensitivity", done=f"{share:.0%}")
        yield
    log.info("layers' sensitivity measured", seconds=round(time.perf_counter() - started, 1))
    return measured


def _load_cached(path: Path, model: LoadedModel) -> Profile | None:
    """A profile of the cache directory; None if it is not there or not readable."""
    try:
        return profile.load(path, model) if path.exists() else None
    except ProfileRefused:
        return None


def _save(measured: Profile, path: Path) -> None:
    """Save a profile; a disk that refuses it costs only another measurement after a restart."""
    try:
        profile.save(measured, path)
    except OSError as error:
        structlog.get_logger().warning("layer profile not saved", path=str(path), error=str(error))
