"""Stream replies of several sessions at once with the async client."""

import argparse
import asyncio

from kvrecall import AsyncKvrecallClient
from kvrecall.client import TextDelta, TurnCompleted

NAMES = ("Melnor", "Barki", "Venbak")


async def ask(client: AsyncKvrecallClient, name: str, code: str) -> str:
    """State a fact in a new session and stream the reply to a question about it."""
    async with client.session(budget=256, seed=1) as session:
        await session.say(f"Please note that the badge list says {name} {code}.", max_tokens=40)
        pieces = []
        async with session.stream(f"What is {name}'s badge?", max_tokens=40) as stream:
            async for event in stream:
                match event:
                    case TextDelta(text):
                        pieces.append(text)
                    case TurnCompleted(turn):
                        first = turn.seconds_to_first_token
                        print(f"{name}: {len(pieces)} pieces, the first after {first:.3f} s")
        return "".join(pieces)


async def run(url: str) -> None:
    """Ask in all sessions concurrently and print the replies."""
    async with AsyncKvrecallClient(url, max_retries=3) as client:
        tasks = [ask(client, name, f"K482{index}") for index, name in enumerate(NAMES)]
        for reply in await asyncio.gather(*tasks):
            print(reply)


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8420", help="address of the service")
    asyncio.run(run(parser.parse_args().url))


if __name__ == "__main__":
    main()
