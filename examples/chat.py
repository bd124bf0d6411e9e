"""Chat in the terminal: replies are streamed, and each one is followed by the session's memory.

Start a server with `kvrecall serve`, then: `python examples/chat.py`. An empty line ends the chat.
"""

import argparse
from collections.abc import Iterator

from kvrecall import KvrecallClient
from kvrecall.client import Message, SessionHandle, TextDelta

SYSTEM = "Answer shortly and use the latest facts."


def main() -> None:
    """Read lines until an empty one; send each as a turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8420", help="address of the service")
    url = parser.parse_args().url
    with KvrecallClient(url) as client, client.session(budget=256) as session:
        print(f"{client.worker().model}, a budget of {session.get().budget} rows")
        session.say(Message.system(SYSTEM), generate=False)
        for line in read_lines():
            chat(session, line)


def read_lines() -> Iterator[str]:
    """Yield typed lines until an empty one or the end of the input."""
    while True:
        try:
            line = input("you: ").strip()
        except EOFError:
            return
        if not line:
            return
        yield line


def chat(session: SessionHandle, line: str) -> None:
    """Send one message and print the reply as it is generated."""
    with session.stream(line, max_tokens=60) as stream:
        for event in stream:
            if isinstance(event, TextDelta):
                print(event.text, end="", flush=True)
    memory = stream.read().memory
    print(
        f"\n  [{memory.length} tokens, {memory.active_rows} active, {memory.evicted_rows} evicted]"
    )


if __name__ == "__main__":
    main()
