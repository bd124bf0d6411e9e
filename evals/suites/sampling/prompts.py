"""Prompts of the suite: simple facts, open requests, and conversations of five turns."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

Split = Literal["tuning", "held-out"]

# A question, and the words of which one has to be in the answer.
Fact = tuple[str, tuple[str, ...]]

_TUNING_FACTS: tuple[Fact, ...] = (
    ("What is the capital of France?", ("paris",)),
    ("What is the capital of Italy?", ("rome",)),
    ("What is the capital of Japan?", ("tokyo",)),
    ("What is the capital of Egypt?", ("cairo",)),
    ("What is the capital of Spain?", ("madrid",)),
    ("Which planet is known as the Red Planet?", ("mars",)),
    ("How many days are in a week?", ("seven", "7")),
    ("What is the chemical formula of water?", ("h2o", "h₂o")),
    ("Who wrote Romeo and Juliet?", ("shakespeare",)),
    ("What is the largest ocean on Earth?", ("pacific",)),
    ("What color is the sky on a clear day?", ("blue",)),
    ("What do bees make?", ("honey",)),
    ("What is the opposite of hot?", ("cold",)),
    ("How many legs does a spider have?", ("eight", "8")),
    ("On which continent is Brazil?", ("south america",)),
    ("What is 2 + 2?", ("4", "four")),
)
_HELD_OUT_FACTS: tuple[Fact, ...] = (
    ("What is the capital of Germany?", ("berlin",)),
    ("What is the capital of China?", ("beijing",)),
    ("What is the capital of Greece?", ("athens",)),
    ("What is the capital of Russia?", ("moscow",)),
    ("What is the capital of England?", ("london",)),
    ("Which planet is the closest to the Sun?", ("mercury",)),
    ("How many months are in a year?", ("twelve", "12")),
    ("What is frozen water called?", ("ice",)),
    ("Who painted the Mona Lisa?", ("vinci", "leonardo")),
    ("What is the tallest mountain on Earth?", ("everest",)),
    ("What color is grass?", ("green",)),
    ("What animal gives us milk and says moo?", ("cow",)),
    ("What is the opposite of day?", ("night",)),
    ("How many legs does a dog have?", ("four", "4")),
    ("On which continent is Kenya?", ("africa",)),
    ("What is 5 + 3?", ("8", "eight")),
)
_TUNING_OPEN: tuple[str, ...] = (
    "Hello.",
    "Tell me about cats.",
    "Write a short story about a lighthouse.",
    "How do I make a good cup of tea?",
    "Explain what photosynthesis is.",
    "Give me three tips for a job interview.",
    "Write a poem about the sea.",
    "What should I see in Paris?",
)
_HELD_OUT_OPEN: tuple[str, ...] = (
    "Hi, how are you?",
    "Tell me about dogs.",
    "Write a short story about a train.",
    "How do I bake bread?",
    "Explain how a rainbow forms.",
    "Give me three ideas for a birthday party.",
    "Write a poem about autumn.",
    "What should I see in London?",
)
_TUNING_TALKS: tuple[tuple[str, ...], ...] = (
    (
        "Hi! My name is Anna and I have a cat called Milo.",
        "What could I feed him?",
        "How often should he see a vet?",
        "He sleeps all day. Is that normal?",
        "What was the name of my cat?",
    ),
    (
        "I want to learn to cook. Where do I start?",
        "What tools do I need in the kitchen?",
        "Give me a recipe for soup.",
        "How long does it keep in the fridge?",
        "Thank you! Summarize what we talked about.",
    ),
)
_HELD_OUT_TALKS: tuple[tuple[str, ...], ...] = (
    (
        "Hello, I am Tom and I plan a trip to Rome.",
        "Which sights should I visit?",
        "What should I eat there?",
        "How do I get around in the city?",
        "Which city do I visit?",
    ),
    (
        "I would like to grow vegetables.",
        "Which ones are easy for beginners?",
        "How often do I water tomatoes?",
        "What can I do about snails?",
        "Thanks! What should I do first?",
    ),
)
FACTS: Mapping[Split, Sequence[Fact]] = MappingProxyType(
    {"tuning": _TUNING_FACTS, "held-out": _HELD_OUT_FACTS}
)
OPEN: Mapping[Split, Sequence[str]] = MappingProxyType(
    {"tuning": _TUNING_OPEN, "held-out": _HELD_OUT_OPEN}
)
TALKS: Mapping[Split, Sequence[Sequence[str]]] = MappingProxyType(
    {"tuning": _TUNING_TALKS, "held-out": _HELD_OUT_TALKS}
)
