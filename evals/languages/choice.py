"""Choice of a language: by the model, with small talk from recordings where some are given."""

from functools import cache
from pathlib import Path

from evals.languages.base import Language
from evals.languages.english import ENGLISH
from evals.languages.recorded import with_recorded_talk
from evals.languages.reference import REFERENCE
from kvrecall_server.app.models import is_reference


@cache
def get_language(model: str, data: tuple[str, ...] = ()) -> Language:
    """The language that a model answers: its own for the reference model, else plain English.

    With `data`, files and folders of recordings, its topics are the recordings and its small talk
    their text. Raises BadDataFile, BadReplayFile.
    """
    language = REFERENCE if is_reference(model) else ENGLISH
    return with_recorded_talk(language, [Path(each) for each in data]) if data else language
