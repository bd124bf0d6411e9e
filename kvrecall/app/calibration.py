"""The layer profile of the model that is served: loaded from the data directory, or measured on a text and kept there.

The reference model reads a conversation of its own language, since it knows no other. Any other model reads
`calibration.txt`, a conversation in plain English written for this purpose, or a text that an operator names: which
text it is matters little, since sensitivity belongs to the model (EpiCache, section 3.2).
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
    """A conversation to measure on, and what it is called."""

    name: str
    messages: list[ChatMessage]


def profile_path(data: Path, model: LoadedModel) -> Path:
    """Where the model's profile is kept."""
    return data / "profiles" / f"{model.fingerprint}.json"


def known_profile(
    model: LoadedModel, tokenizer: ChatTokenizer, data: Path, name: str
) -> Profile | None:
    """The model's profile; measured and kept, once, where there is none. `name` is the model's path or hub name.

    None for a model whose context is too short to measure in. Raises ProfileRefused for another model's file.
    """
    path = profile_path(data, model)
    if path.exists():
        return profile.load(path, model)
    log = structlog.get_logger()
    if model.max_context < profile.LEAST_TOKENS:
        log.warning(
            "context too short for a layer profile: no layer budgets by sensitivity", model=name
        )
        return None
    log.info("measuring the layers' sensitivity, once for this model", model=name)
    started = time.perf_counter()
    found = measured(model, tokenizer, name, packaged_text(name))
    profile.save(found, path)
    log.info("layer profile kept", path=str(path), seconds=round(time.perf_counter() - started, 1))
    return found


def measured(
    model: LoadedModel,
    tokenizer: ChatTokenizer,
    name: str,
    text: CalibrationText,
    tokens: int = profile.TOKENS,
) -> Profile:
    """Measure on the first `tokens` tokens of a text. Raises ProfileRefused."""
    token_ids = [
        token for said in tokenizer.prompt([], text.messages, [], False) for token in said.token_ids
    ]
    shown = "the reference model" if _is_reference(name) else name
    return profile.measure(model, token_ids[:tokens], name=shown, text=text.name)


def packaged_text(name: str, tokens: int = profile.TOKENS) -> CalibrationText:
    """What a model is measured on where nobody says: its own language for the reference, English for others."""
    if _is_reference(name):
        # A conversation comes out a little longer or shorter than asked for.
        conversation = generate(SEED, tokens + 512, split="train")
        return CalibrationText(f"a generated conversation, seed {SEED}", conversation.messages())
    return CalibrationText(
        PACKAGED, _turns(files("kvrecall.app").joinpath(PACKAGED).read_text(encoding="utf-8"))
    )


def text_of(path: Path) -> CalibrationText:
    """A text of the user's own: paragraphs are said in turn by user and assistant. Raises BadCalibrationText."""
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
        {"role": ("user", "assistant")[i % 2], "content": said} for i, said in enumerate(paragraphs)
    ]


def _is_reference(name: str) -> bool:
    return Path(name) == MODEL_PATH
