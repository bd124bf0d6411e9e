"""The tokens of prompts and of plain texts, for clients that ask for them."""

from kvrecall.protocol.convert import to_chat
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.client_json import read_json
from workers.model.restating import render_messages
from workers.model.tokenizer import ChatTokenizer


def tokenize(tokenizer: ChatTokenizer, request: pb.TokenizeRequest) -> pb.TokenizeResult:
    """Return the tokens of a new session's prompt, or of a text.

    Raises BadMessages, BadSettings.
    """
    if request.HasField("text"):
        ids = tokenizer.encode(request.text, special_tokens=request.special_tokens)
    else:
        messages = [to_chat(message) for message in request.messages]
        tools = [read_json("a tool", tool) for tool in request.tools]
        segments = render_messages(
            tokenizer,
            [],
            messages,
            tools,
            not request.without_answer,
            arguments=read_json("template_arguments", request.template_arguments or "{}"),
            opening=request.opening,
            keep_reasoning=request.keep_reasoning,
        )
        ids = [token for segment in segments for token in segment.token_ids]
    pieces = tokenizer.pieces(ids) if request.pieces else []
    return pb.TokenizeResult(ids=ids, pieces=pieces)
