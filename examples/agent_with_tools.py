"""Agent with a tool: the pause between a call and its result is used to repair the session.

The extension is stated early and its rows are evicted. The tool's result names a person; the
repair conditioned on it promotes the rows that the next turn needs.
"""

import argparse
import json

from kvrecall import KvrecallClient
from kvrecall.client import Message, SessionHandle, ToolCall, Turn

ON_CALL = {
    "type": "function",
    "function": {
        "name": "on_call",
        "description": "Who is on call on a day.",
        "parameters": {
            "type": "object",
            "properties": {"day": {"type": "string"}},
            "required": ["day"],
        },
    },
}
# Recorded exchanges, appended without generating.
SMALL_TALK = [
    Message.user("Hi, are you there?"),
    Message("assistant", "Yes, I am here."),
    Message.user("There is a dull race near the match."),
    Message("assistant", "I see, sport it is."),
    Message.user("Someone asked me about the match today."),
    Message("assistant", "Tell me more about the stadium."),
    Message.user("What should I do about the leash?"),
    Message("assistant", "You could write down what you like about pets."),
    Message.user("The vet was strange."),
    Message("assistant", "Perhaps ask someone who knows about the vet."),
]


def run_tool(call: ToolCall) -> str:
    """Run a tool call; a real agent would look it up somewhere."""
    print(f"the model calls {call.name}({call.arguments})")
    return json.dumps({"person": "Melnor"})


def run_turn(session: SessionHandle, text: str) -> Turn:
    """Send a message and run tools until the model replies without a call."""
    turn = session.say(text, max_tokens=60)
    while turn.tool_calls:
        for call in turn.tool_calls:
            session.tool_started(call.id)
            session.tool_result(call.id, run_tool(call))
        turn = session.say(wait_for_repairs=True, max_tokens=60)
    return turn


def main() -> None:
    """Hold a conversation longer than the budget, then ask for its first fact."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8420", help="address of the service")
    url = parser.parse_args().url
    with (
        KvrecallClient(url) as client,
        client.session(
            budget=256, research={"repair_rows": 64}, seed=1, tools=[ON_CALL]
        ) as session,
    ):
        session.say(Message.system("Answer shortly and use the latest facts."), generate=False)
        session.say("Please note that the extension list says Melnor K4821.", max_tokens=40)
        session.say(SMALL_TALK * 10, generate=False)
        turn = run_turn(session, "Who is on call tonight, and what is their extension?")
        print(f"{turn.memory.evicted_rows} of {turn.memory.length} tokens have evicted rows")
        for repair in turn.memory.repairs:
            print(f"repair on {repair.trigger}: {repair.promoted} rows in {repair.seconds:.3f} s")
        print(turn.text)


if __name__ == "__main__":
    main()
