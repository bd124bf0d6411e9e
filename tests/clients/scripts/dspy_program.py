"""DSPy's modules: fields in prompts, and no tools of the API."""

import asyncio

# --8<-- [start:example]
import os

import dspy
from _case import NAME, TURNS, run

dspy.configure(
    lm=dspy.LM(
        "openai/" + os.environ.get("KVRECALL_MODEL", "reference"),
        api_base=os.environ.get("KVRECALL_URL", "http://127.0.0.1:8420") + "/v1",
        api_key="any",
        cache=False,
    )
)
answerer = dspy.Predict("question -> answer")


def ask(text: str) -> str:
    return answerer(question=text).answer


# --8<-- [end:example]


class Talk(dspy.Signature):
    """Answer in a conversation."""

    question: str = dspy.InputField()
    history: dspy.History = dspy.InputField()
    answer: str = dspy.OutputField()


async def stream(text):
    listeners = [dspy.streaming.StreamListener(signature_field_name="answer")]
    program = dspy.streamify(answerer, stream_listeners=listeners)
    pieces = [piece async for piece in program(question=text)]
    return "".join(
        piece.chunk for piece in pieces if isinstance(piece, dspy.streaming.StreamResponse)
    )


def turns():
    predict = dspy.Predict(Talk)
    said = []
    for text in TURNS:
        answer = predict(question=text, history=dspy.History(messages=said)).answer
        said = [*said, {"question": text, "answer": answer}]
    return answer


if __name__ == "__main__":
    run(plain=lambda: ask(NAME), streamed=lambda: asyncio.run(stream(NAME)), turns=turns)
