"""A session under a press of kvpress: `python -m ... MODEL THREADS ROWS PRESS`.

A press compresses the cache once, behind a prefill, so every turn prefills the session up to its
newest message, compresses it to so many rows per head, and reads the message with what is left, as
kvpress's own pipeline does with a context and a question.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.peers.press_cases import compress, forward
from benchmarks.peers.programs.lines import Request, serve


class Chat:
    """A session on a model whose cache is pressed to `rows` rows per head."""

    def __init__(self, path: str, rows: int, press: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        self.rows = rows
        self.press = {"name": press, "arguments": {}}

    @torch.inference_mode()
    def answer(self, request: Request) -> Iterator[int]:
        """Tokens as they come; nothing is kept between turns."""
        if request.max_tokens == 0:
            return
        context = torch.tensor([request.prompt[: request.last]])
        cache = self._prefill(context)
        position = request.last
        token_ids = request.prompt[request.last :]
        ends = self.model.generation_config.eos_token_id
        for _ in range(request.max_tokens):
            logits = forward(self.model, cache, token_ids, position)
            position += len(token_ids)
            token = int(logits[-1].argmax())
            if token in (ends if isinstance(ends, list) else [ends]):
                return
            yield token
            token_ids = [token]

    def _prefill(self, context: torch.Tensor) -> Any:
        if context.shape[1] > self.rows:
            return compress(self.model, self.press, context, self.rows)
        cache: Any = DynamicCache()
        self.model.model(input_ids=context, past_key_values=cache)
        return cache


def main() -> None:
    """Serve the session."""
    path, threads, rows, press = sys.argv[1:]
    torch.set_num_threads(int(threads))
    serve(Chat(path, int(rows), press).answer, ("kvpress", "transformers", "torch"))


if __name__ == "__main__":
    main()
