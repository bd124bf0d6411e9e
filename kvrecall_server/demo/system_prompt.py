"""The system prompt of the English conversation: a task, and examples of answers, as agents have."""

from random import Random

from evals.languages.english import ENGLISH

_EXAMPLES = "Answer in the tone of these examples."


def write_system_prompt(rng: Random, characters: int) -> str:
    """Write a prompt of about so many characters. No fact is in it that a question asks for."""
    text = f"{rng.choice(ENGLISH.system_lines)} {_EXAMPLES}"
    while len(text) < characters:
        said, answer = ENGLISH.lead(rng, rng.choice(ENGLISH.topics))
        text += f'\nTo "{said}" you answer: "{answer}"'
    return text
