"""Small talk: template sentences about recurring topics, among which the facts are stated."""

from __future__ import annotations

import random

TOPICS: dict[str, tuple[str, ...]] = {
    "weather": ("rain", "sun", "wind", "snow", "fog", "storm"),
    "lunch": ("soup", "salad", "bread", "rice", "pasta", "curry"),
    "travel": ("train", "ferry", "hotel", "map", "suitcase", "ticket"),
    "garden": ("roses", "tomatoes", "hedge", "shed", "lawn", "apple tree"),
    "music": ("piano", "concert", "choir", "guitar", "record", "song"),
    "reading": ("novel", "library", "poem", "story", "magazine", "chapter"),
    "sport": ("match", "race", "team", "coach", "ball", "stadium"),
    "cooking": ("oven", "recipe", "cake", "kitchen", "pan", "sauce"),
    "pets": ("dog", "cat", "parrot", "rabbit", "leash", "vet"),
    "work": ("meeting", "report", "printer", "deadline", "budget", "slides"),
    "health": ("walk", "doctor", "sleep", "diet", "gym", "checkup"),
    "home": ("roof", "window", "sofa", "paint", "heating", "garage"),
}
TIMES = (
    "today",
    "yesterday",
    "this morning",
    "last week",
    "tomorrow",
    "next month",
    "on the weekend",
    "at noon",
)
FEELINGS = (
    "good",
    "strange",
    "quiet",
    "busy",
    "lovely",
    "slow",
    "funny",
    "dull",
    "bright",
    "tiring",
)

USER_LINES = (
    "I was thinking about the {noun} {time}.",
    "The {noun} was {feeling} {time}.",
    "My neighbour talked about the {noun} and the {other} again.",
    "Do you have any thoughts on {topic}?",
    "We spent the whole day on {topic}, and the {noun} was {feeling}.",
    "It seems that the {noun} will be {feeling} {time}.",
    "I would like to know more about {topic}, mostly about the {noun}.",
    "What should I do about the {noun}?",
    "There is a {feeling} {noun} near the {other}.",
    "Let us talk about {topic} for a moment.",
    "Someone asked me about the {noun} {time}.",
    "How would you describe a {feeling} {noun}?",
    "I could not decide between the {noun} and the {other}.",
    "{time_cap} we will look at the {noun} together.",
    "Honestly, {topic} can be {feeling} at times.",
    "The {other} is {feeling}, but the {noun} is not.",
)
REPLY_LINES = (
    "That sounds {feeling}.",
    "I would start with the {noun} and leave the {other} for later.",
    "Many people find {topic} {feeling}.",
    "A {feeling} {noun} can change the whole day.",
    "Tell me more about the {noun}.",
    "The {noun} and the {other} often go together.",
    "You could write down what you like about {topic}.",
    "In my view the {noun} matters more than the {other}.",
    "It is fine to take it slowly.",
    "Then the {noun} should be ready {time}.",
    "I see, {topic} it is.",
    "Perhaps ask someone who knows about the {noun}.",
)
COURTESIES = (
    ("Hello!", "Hello, how can I help?"),
    ("Good morning.", "Good morning, what is new?"),
    ("Hi, are you there?", "Yes, I am here."),
    ("Thank you.", "You are welcome."),
    ("Okay, thanks.", "You are welcome."),
    ("Who are you?", "I am the reference model of kvrecall, a small test instrument."),
    ("What are you?", "I am the reference model of kvrecall, a small test instrument."),
    (
        "What can you do?",
        "I remember what I am told and call tools. I am a test instrument, nothing more.",
    ),
)


def draw_line(rng: random.Random, lines: tuple[str, ...], topic: str) -> str:
    """Draw one sentence about a topic from template lines."""
    noun, other = rng.sample(TOPICS[topic], 2)
    time = rng.choice(TIMES)
    return rng.choice(lines).format(
        noun=noun,
        other=other,
        topic=topic,
        time=time,
        time_cap=time.capitalize(),
        feeling=rng.choice(FEELINGS),
    )


def small_talk(rng: random.Random, topic: str, sentences: list[str]) -> tuple[str, str]:
    """A user message about a topic, or a courtesy, and a reply.

    Either may quote an earlier sentence.

    `sentences` are those of the conversation so far, to which new ones are appended.
    """
    if rng.random() < 0.08:
        return rng.choice(COURTESIES)
    user = [draw_line(rng, USER_LINES, topic) for _ in range(rng.choice((1, 1, 2, 3)))]
    reply = [draw_line(rng, REPLY_LINES, topic) for _ in range(rng.choice((1, 1, 2)))]
    sentences.extend(user[:1])
    if len(sentences) > 2 and rng.random() < 0.3:
        user.insert(0, f"As I said: {rng.choice(sentences[-40:])}")
    if rng.random() < 0.3:
        reply.insert(0, f"You said: {user[-1]}")
    return " ".join(user), " ".join(reply)
