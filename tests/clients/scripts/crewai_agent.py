"""CrewAI's agent."""

# --8<-- [start:example]
import os

from _case import NAME, TURNS, WEATHER, run
from crewai import LLM, Agent
from crewai.tools import tool

model = LLM(
    model="openai/" + os.environ.get("KVRECALL_MODEL", "reference"),
    base_url=os.environ.get("KVRECALL_URL", "http://127.0.0.1:8420") + "/v1",
    api_key="any",
)


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


agent = Agent(
    role="helper",
    goal="Answer questions.",
    backstory="You look things up.",
    llm=model,
    tools=[get_weather],
)


def ask(text: str) -> str:
    return agent.kickoff(text).raw


# --8<-- [end:example]


def plain():
    return model.call([{"role": "user", "content": NAME}])


streaming = model.model_copy(update={"stream": True})


def streamed():
    return streaming.call([{"role": "user", "content": NAME}])


def turns():
    messages = []
    for text in TURNS:
        messages.append({"role": "user", "content": text})
        answer = model.call(messages)
        messages.append({"role": "assistant", "content": answer})
    return answer


def tools():
    return ask(WEATHER)


def streamed_tools():
    return agent.model_copy(update={"llm": streaming}).kickoff(WEATHER).raw


if __name__ == "__main__":
    run(plain=plain, streamed=streamed, turns=turns, tools=tools, streamed_tools=streamed_tools)
