"""Plain English for models that read it: our own templates, and facts that a small LLM can recall.

A fact is said twice, in its statement and in the reply to it, and a question is as plain as can be: a
model of 135 million parameters answers few others, even with the full cache. A reply that only says
"Noted." would be what it answers to questions, too.
"""

from collections.abc import Callable
from random import Random

from evals.languages.base import Fact, Language, contains_value


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_NAMES = _words(
    "Alice Boris Carla Dimitri Elena Fatima Gregor Hugo Ingrid Jamal Kenji Lucia Marcus Noor Oscar "
    "Priya Quentin Rosa Stefan Tamara Umar Victor Wanda Xavier Yusuf Zelda Amara Bruno Chloe Diego "
    "Esther Felix Greta Hannah Ivan Julia Klaus Leila Miguel Nadia Olga Pedro"
)
_TOWN_STARTS = _words("Ash Black Clay Deep Elm Fair Green High Iron Lake Mill North Oak Red Stone")
_TOWN_ENDS = _words("bridge bury dale field ford gate haven mouth port ridge ton wick wood")
_ANIMALS = _words("badger beaver camel falcon gecko heron jaguar lizard otter panther raven walrus")
_COLOURS = _words("amber bronze copper crimson golden indigo ivory scarlet silver violet")


def _digits(count: int) -> Callable[[Random], str]:
    return lambda rng: str(rng.randrange(10 ** (count - 1), 10**count))


def _town(rng: Random) -> str:
    return rng.choice(_TOWN_STARTS) + rng.choice(_TOWN_ENDS)


def _two_words(rng: Random) -> str:
    return f"{rng.choice(_COLOURS)} {rng.choice(_ANIMALS)}"


_ATTRIBUTES: dict[str, Callable[[Random], str]] = {
    "secret code": _digits(5),
    "locker number": _digits(4),
    "phone extension": _digits(4),
    "badge number": _digits(5),
    "password": _two_words,
    "home town": _town,
}
_CLAUSE = "the {attribute} of {name} is {value}"
_STATEMENTS = (
    "Please remember this: {clause}.",
    "One thing to keep in mind: {clause}.",
    "Before I forget, {clause}.",
    "By the way, {clause}.",
)
_QUESTIONS = ("What is the {attribute} of {name}?", "What was the {attribute} of {name}?")
_SYSTEM_LINES = (
    "You are a helpful assistant.",
    "You are a helpful assistant with a good memory.",
    "You are a careful assistant. Answer in one short sentence.",
)
_NOTED = ("Noted, {clause}.", "Thank you, {clause}.", "Understood, {clause}.", "Okay, {clause}.")

# What is talked about on each topic: things, places, and what one does there.
_TOPICS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "the garden": (
        ("tomato plants", "rose bushes", "apple tree", "lawn", "compost heap", "hedge"),
        ("behind the shed", "along the fence", "next to the greenhouse", "by the pond"),
        ("water the seedlings", "pull the weeds", "trim the branches", "turn the soil"),
    ),
    "the kitchen": (
        ("sourdough bread", "lentil soup", "lemon cake", "mushroom risotto", "pancakes", "stew"),
        ("in the cast iron pan", "on the lower rack", "at my aunt's house", "in the big pot"),
        ("knead the dough", "chop the onions", "taste the sauce", "preheat the oven"),
    ),
    "the train journey": (
        ("night train", "window seat", "dining car", "timetable", "luggage rack", "ticket"),
        ("across the Alps", "along the coast", "at the central station", "near the border"),
        ("change platforms", "show the passport", "book a sleeper", "wait for the connection"),
    ),
    "the choir": (
        ("spring concert", "second soprano part", "old piano", "sheet music", "encore", "solo"),
        ("in the town hall", "at the cathedral", "in the rehearsal room", "on the small stage"),
        ("practise the scales", "tune the piano", "learn the last verse", "sing in harmony"),
    ),
    "the football team": (
        ("home match", "new goalkeeper", "penalty kick", "league table", "corner kick", "coach"),
        ("at the old stadium", "on the muddy pitch", "in the second half", "in the locker room"),
        ("defend the lead", "pass the ball", "train twice a week", "study the opponents"),
    ),
    "the new house": (
        ("kitchen tiles", "leaking roof", "wooden floor", "front door", "boiler", "staircase"),
        ("on the first floor", "in the hallway", "under the window", "in the attic"),
        ("paint the walls", "measure the rooms", "call the plumber", "sand the floor"),
    ),
    "the puppy": (
        ("chewed slipper", "long leash", "squeaky toy", "vaccination", "dog basket", "biscuit"),
        ("in the park", "at the vet's office", "on the beach", "under the table"),
        ("throw the ball", "brush its fur", "teach it to sit", "walk it before breakfast"),
    ),
    "the book club": (
        ("detective novel", "final chapter", "short story", "translator", "narrator", "plot"),
        ("at the library", "in the reading room", "at the corner cafe", "on the last page"),
        ("read aloud", "discuss the ending", "vote for the next book", "take notes"),
    ),
    "the office": (
        ("quarterly report", "meeting room", "printer", "project deadline", "budget", "invoice"),
        ("on the third floor", "in the shared folder", "at the front desk", "in the basement"),
        ("send the minutes", "book a room", "check the figures", "call the client back"),
    ),
    "the mountain hike": (
        ("hiking boots", "steep trail", "weather forecast", "summit cross", "map", "backpack"),
        ("above the tree line", "at the mountain hut", "by the waterfall", "on the ridge"),
        ("start before sunrise", "refill the bottles", "follow the markers", "rest for a while"),
    ),
    "the school play": (
        ("costumes", "stage lights", "painted backdrop", "opening scene", "script", "applause"),
        ("in the school hall", "behind the curtain", "in the front row", "in the art room"),
        ("rehearse the lines", "sew the costumes", "print the programmes", "paint the scenery"),
    ),
    "the old car": (
        ("brake pads", "spare wheel", "gearbox", "cracked mirror", "fuel gauge", "exhaust pipe"),
        ("at the garage", "in the car park", "under the bonnet", "on the motorway"),
        ("change the oil", "charge the battery", "order the parts", "check the tyres"),
    ),
}
_TIMES = (
    "yesterday afternoon",
    "last weekend",
    "this morning",
    "on Thursday",
    "two weeks ago",
    "before lunch",
    "late in the evening",
    "during the holidays",
)
_FEELINGS = (
    "much better than expected",
    "a little disappointing",
    "surprisingly good",
    "more expensive than I thought",
    "quite a challenge",
    "a real pleasure",
    "harder than it looks",
    "rather funny",
)
_USER_LINES = (
    "I spent some time with {topic} {time}, and the {thing} turned out to be {feeling}.",
    "We finally managed to {action} {place}, although nobody had planned it.",
    "My sister keeps asking about the {thing} that she saw {place}.",
    "Do you think it is better to {action} first, or should I {other_action}?",
    "The {thing} {place} was {feeling}, so we stayed longer than usual.",
    "{time_cap} a neighbour told me how to {action}, and it was {feeling}.",
    "If the weather holds, we will {action} and then look at the {other} {place}.",
    "I had no idea that the {thing} and the {other} could cause so much work.",
    "What would you do with the {thing} if you had only one free hour?",
    "Everybody who knows about {topic} says that one should {action} more often.",
    "It took us half a day to {action}, because the {thing} was not where we had left it.",
    "A friend of mine forgot to {action} {time}, and the {other} suffered for it.",
)
_REPLY_LINES = (
    "That sounds {feeling}; perhaps you can {action} next time.",
    "In that case I would leave the {thing} alone and {action} instead.",
    "Many people find the {thing} {feeling} at first, and then they get used to it.",
    "It helps to {action} {time_of_day}, when there is less to distract you.",
    "I would look at the {thing} {place} before spending any money on it.",
    "Good idea, and while you are there you could {action} as well.",
    "The {thing} and the {other} are easier to handle together than one by one.",
    "You might ask someone with experience to {action} with you.",
    "Then the {thing} {place} deserves a second look.",
    "There is no hurry, since {topic} will still be there tomorrow.",
)
_TIMES_OF_DAY = ("early in the morning", "at noon", "in the evening", "right after breakfast")
_CORRECTIONS = (
    "Correction: the {attribute} of {name} is now {value}.",
    "That has changed: the {attribute} of {name} is now {value}.",
    "I was wrong before. The {attribute} of {name} is {value} now.",
)
_MAX_LINES = 3


def _draw_names(rng: Random) -> list[str]:
    return rng.sample(_NAMES, len(_NAMES))


def _draw_value(rng: Random, attribute: str, used: set[str]) -> str:
    """A value that is not among `used`, to which it is added."""
    while (value := _ATTRIBUTES[attribute](rng)) in used:
        pass
    used.add(value)
    return value


def _clause(fact: Fact) -> str:
    return _CLAUSE.format(attribute=fact.attribute, name=fact.name, value=fact.value)


def _state(rng: Random, fact: Fact) -> str:
    return rng.choice(_STATEMENTS).format(clause=_clause(fact))


def _correct(rng: Random, fact: Fact) -> str:
    return rng.choice(_CORRECTIONS).format(
        attribute=fact.attribute, name=fact.name, value=fact.value
    )


def _acknowledge(rng: Random, fact: Fact) -> str:
    return rng.choice(_NOTED).format(clause=_clause(fact))


def _ask(rng: Random, fact: Fact) -> str:
    return rng.choice(_QUESTIONS).format(attribute=fact.attribute, name=fact.name)


def _answer_prefix(fact: Fact) -> str:
    return f"The {fact.attribute} of {fact.name} is"


def _statement_span(fact: Fact) -> str:
    return f"{fact.name} is {fact.value}"


def _draw_lines(rng: Random, lines: tuple[str, ...], topic: str, count: int) -> str:
    """`count` different sentences about a topic, joined."""
    return " ".join(_fill(rng, line, topic) for line in rng.sample(lines, count))


def _fill(rng: Random, line: str, topic: str) -> str:
    things, places, actions = _TOPICS[topic]
    thing, other = rng.sample(things, 2)
    action, other_action = rng.sample(actions, 2)
    time = rng.choice(_TIMES)
    return line.format(
        topic=topic,
        thing=thing,
        other=other,
        action=action,
        other_action=other_action,
        place=rng.choice(places),
        time=time,
        time_cap=time.capitalize(),
        time_of_day=rng.choice(_TIMES_OF_DAY),
        feeling=rng.choice(_FEELINGS),
    )


def _small_talk(rng: Random, topic: str, said: list[str]) -> tuple[str, str]:
    """One to three sentences on a topic and as many in reply; nothing refers to what was `said`."""
    user = _draw_lines(rng, _USER_LINES, topic, rng.randint(1, _MAX_LINES))
    said.append(user)
    return user, _draw_lines(rng, _REPLY_LINES, topic, rng.randint(1, _MAX_LINES - 1))


def _line(rng: Random, topic: str) -> str:
    return _draw_lines(rng, _USER_LINES, topic, 1)


def _lead(rng: Random, topic: str) -> tuple[str, str]:
    return _line(rng, topic), _draw_lines(rng, _REPLY_LINES, topic, 1)


ENGLISH = Language(
    name="english",
    topics=tuple(sorted(_TOPICS)),
    attributes=tuple(sorted(_ATTRIBUTES)),
    worded=("home town", "password"),
    closing_cue="Answer my question.",
    system_lines=_SYSTEM_LINES,
    max_facts=len(_NAMES),
    chat_tokens=95,
    fact_tokens=75,
    draw_names=_draw_names,
    draw_value=_draw_value,
    state=_state,
    correct=_correct,
    acknowledge=_acknowledge,
    ask=_ask,
    answer_prefix=_answer_prefix,
    statement_span=_statement_span,
    small_talk=_small_talk,
    line=_line,
    lead=_lead,
    is_answer=contains_value,
)
