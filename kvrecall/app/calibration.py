"""The layer profile of the served model, measured once and saved in the data directory.

The reference model is measured on a conversation in its own generated language, any other model on
`calibration.txt`, a conversation in plain English, or on an operator's text. The choice of the text
matters little, since sensitivity is a property of the model (EpiCache, section 3.2).
"""

import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import structlog

from kvrecall.app.errors import BadCalibrationText
from reference import MODEL_PATH
from reference.conversation import generate
from workers.model import layer_sensitivity as profile
from workers.model.layer_sensitivity import Profile
from workers.model.loader import LoadedModel
from workers.model.tokenizer import ChatMessage, ChatTokenizer

SEED = 0
PACKAGED = "calibration.txt"


@dataclass(frozen=True)
class CalibrationText:
    """A conversation to measure on, and its name in the profile."""

    name: str
    messages: list[ChatMessage]


def profile_path(data: Path, model: LoadedModel) -> Path:
    """The file of the model's profile, named by the fingerprint of its weights."""
    return data / "profiles" / f"{model.fingerprint}.json"


def known_profile(
    model: LoadedModel, tokenizer: ChatTokenizer, data: Path, name: str
) -> Profile | None:
    """The model's profile; measured and saved if there is none.

    `name` is the model's path or hub name. None for a model whose context is too short to measure
    in. Raises ProfileRefused for a file of another model.
    """
    path = profile_path(data, model)
    if path.exists():
        return profile.load(path, model)
    log = structlog.get_logger()
    if model.max_context < profile.MIN_TOKENS:
        log.warning(
            "context too short for a layer profile: no layer budgets by sensitivity", model=name
        )
        return None
    log.info("measuring the layers' sensitivity, once for this model", model=name)
    started = time.perf_counter()
    measured = measure(model, tokenizer, name, packaged_text(name))
    profile.save(measured, path)
    log.info("layer profile saved", path=str(path), seconds=round(time.perf_counter() - started, 1))
    return measured


def measure(
    model: LoadedModel,
    tokenizer: ChatTokenizer,
    name: str,
    text: CalibrationText,
    tokens: int = profile.TOKENS,
) -> Profile:
    """Measure the layers' sensitivity on the first `tokens` tokens. Raises ProfileRefused."""
    token_ids = [
        token for part in tokenizer.prompt([], text.messages, [], False) for token in part.token_ids
    ]
    shown = "the reference model" if _is_reference(name) else name
    return profile.measure(model, token_ids[:tokens], name=shown, text=text.name)


def packaged_text(name: str, tokens: int = profile.TOKENS) -> CalibrationText:
    """The default text: a generated conversation for the reference model, English for others."""
    if _is_reference(name):
        # A conversation comes out a little longer or shorter than asked for.
        conversation = generate(SEED, tokens + 512, split="train")
        return CalibrationText(f"a generated conversation, seed {SEED}", conversation.messages())
    return CalibrationText(
        PACKAGED, _turns(files("kvrecall.app").joinpath(PACKAGED).read_text(encoding="utf-8"))
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


def _is_reference(name: str) -> bool:
    return Path(name) == MODEL_PATH
