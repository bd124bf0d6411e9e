"""Compare three sessions of one conversation: full cache, budget alone, budget with repair.

All budgeted rows count: the rows reserved for repair are part of the same budget.
"""

import argparse

from kvrecall import KvrecallClient
from kvrecall.client import Message, SessionHandle, SessionOptions

CONFIGURATIONS: dict[str, SessionOptions] = {
    "full cache": {"recall": False, "budget": 1024},
    "budget alone": {"research": {"method": "snapkv", "repair_rows": 0}, "budget": 128},
    "with repair": {
        "research": {"method": "snapkv", "repair_rows": 64, "repair_on": ["turn"]},
        "budget": 128,
    },
}
# A recorded exchange, appended without generating.
SMALL_TALK = [
    Message.user("Let us talk about sport for a moment. There is a dull race near the match."),
    Message("assistant", "I see, sport it is. Tell me more about the race."),
]


def hold_conversation(session: SessionHandle) -> str:
    """State a fact, talk about something else, and ask for the fact."""
    session.say("Please note that the extension list says Melnor K4821.", max_tokens=40)
    session.say(SMALL_TALK * 15, generate=False)
    return session.say("What is Melnor's extension?", max_tokens=40).text


def main() -> None:
    """Print the reply and the memory of each session."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8420", help="address of the service")
    with KvrecallClient(parser.parse_args().url) as client:
        for name, options in CONFIGURATIONS.items():
            with client.session(**options) as session:
                reply = hold_conversation(session)
                memory = session.memory()
                print(f"{name}: {memory.active_rows} of {memory.length} rows active")
                print(f"  {reply}")
                for repair in session.repairs(limit=1):
                    promoted = "".join(passage.promoted for passage in repair.passages)
                    print(f"  promoted for {repair.signal!r}: {promoted!r}")


if __name__ == "__main__":
    main()
