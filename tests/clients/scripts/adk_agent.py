"""Google's Agent Development Kit through LiteLLM."""

import asyncio

# --8<-- [start:example]
import os

from _case import NAME, TURNS, WEATHER, run
from google.adk.agents import LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types

model = LiteLlm(
    model="openai/" + os.environ.get("KVRECALL_MODEL", "reference"),
    api_base=os.environ.get("KVRECALL_URL", "http://127.0.0.1:8420") + "/v1",
    api_key="any",
)


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


agent = LlmAgent(name="helper", model=model, tools=[get_weather])
runner = InMemoryRunner(agent=agent, app_name="example")


async def ask(text: str, session: str, **options) -> str:
    message = types.Content(role="user", parts=[types.Part(text=text)])
    texts = []
    async for event in runner.run_async(
        user_id="me", session_id=session, new_message=message, **options
    ):
        parts = event.content.parts if event.content else None
        texts.append("".join(part.text or "" for part in parts or ()))
    return texts[-1]


async def new_session() -> str:
    session = await runner.session_service.create_session(app_name="example", user_id="me")
    return session.id


# --8<-- [end:example]


async def once(text, **options):
    return await ask(text, await new_session(), **options)


async def stream(text):
    from google.adk.agents.run_config import RunConfig, StreamingMode

    return await once(text, run_config=RunConfig(streaming_mode=StreamingMode.SSE))


async def talk():
    session = await new_session()
    for text in TURNS:
        answer = await ask(text, session)
    return answer


if __name__ == "__main__":
    run(
        plain=lambda: asyncio.run(once(NAME)),
        streamed=lambda: asyncio.run(stream(NAME)),
        turns=lambda: asyncio.run(talk()),
        tools=lambda: asyncio.run(once(WEATHER)),
        streamed_tools=lambda: asyncio.run(stream(WEATHER)),
    )
