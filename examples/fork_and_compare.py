"""Fork a session and continue it in two ways; both share the stored rows of their past."""

import argparse

from kvrecall import KvrecallClient

QUESTION = "What is Melnor's extension?"


def main() -> None:
    """Correct a fact in a fork, and ask both sessions for it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8420", help="address of the service")
    url = parser.parse_args().url
    with KvrecallClient(url) as client, client.session(budget=256, seed=1) as session:
        session.say("Please note that the extension list says Melnor K4821.", max_tokens=40)
        session.say("Hello, are you there?", max_tokens=40)
        with session.fork(metadata={"branch": "corrected"}) as fork:
            origin = fork.get().forked_from
            print(f"forked at turn {origin.turn if origin else 0}")
            fork.say("I was wrong, the extension list now says Melnor Q1200.", max_tokens=40)
            print(f"session: {session.say(QUESTION, max_tokens=40, temperature=0).text}")
            print(f"fork:    {fork.say(QUESTION, max_tokens=40, temperature=0).text}")
        with session.fork(turn=1) as earlier:
            length = session.get().length
            print(f"a fork at turn 1 has {earlier.get().length} of {length} tokens")


if __name__ == "__main__":
    main()
