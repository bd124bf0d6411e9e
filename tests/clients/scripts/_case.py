"""What a client's script is asked, and how it reports: standard library only, for any environment.

Each capability is a function that returns what the client's user would read.
"""

import json
import os
import traceback
import urllib.request
from collections.abc import Callable
from typing import Any

URL = os.environ.get("KVRECALL_URL", "http://127.0.0.1:8420")

NAME = "My name is Ada. What is my name?"
NAMED = "Your name is Ada."
TURNS = ("My name is Ada.", "The sky is blue.", "What is my name?")
WEATHER = "What is the weather in Bern?"
SUNNY = "sunny in Bern"
OPTIONS: dict[str, Any] = {}  # of every request

WANTED = {
    "plain": NAMED,
    "streamed": NAMED,
    "turns": NAMED,
    "tools": SUNNY,
    "streamed tools": SUNNY,
}
if os.environ.get("KVRECALL_MODEL") == "reference":
    # What the packaged model was trained on; not the scripts' tools.
    TURNS = (
        "Please note that the badge list says Melnor K4821.",
        "Lovely weather today.",
        "What is Melnor's badge?",
    )
    NAME = f"{TURNS[0]} {TURNS[2]}"
    OPTIONS = {"temperature": 0}
    WANTED = dict.fromkeys(("plain", "streamed", "turns"), "K4821")


def run(**capabilities: Callable[[], str]) -> None:
    """Run each capability and print one line of JSON: what came of it, and in which sessions."""
    report = {}
    for name, ask in capabilities.items():
        capability = name.replace("_", " ")
        if capability not in WANTED:
            continue
        before = _read_sessions()
        error = _try(ask, WANTED[capability])
        new = {id: turns for id, turns in _read_sessions().items() if id not in before}
        report[capability] = {"error": error, "sessions": len(new), "turns": sum(new.values())}
    print(json.dumps(report))


def _try(ask: Callable[[], str], wanted: str) -> str | None:
    try:
        text = ask()
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"[:300]
    return None if wanted in text else f"said {text[:200]!r}"


def _read_sessions() -> dict[str, int]:
    with urllib.request.urlopen(f"{URL}/v1/sessions?limit=100") as response:
        page: dict[str, Any] = json.load(response)
    return {session["id"]: session["turns"] for session in page["sessions"]}
