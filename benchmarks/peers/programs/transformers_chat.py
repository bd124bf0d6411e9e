"""transformers' generate over a session: `python -m ... MODEL THREADS kept|each-turn`.

With `kept` the cache lives as long as the process and only new tokens are prefilled, with
`each-turn` the whole session is.
"""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.peers.programs.lines import Request, common_prefix, serve


class Chat:
    """A session on a model of transformers. `keep`: whether the cache is kept between turns."""

    def __init__(self, path: str, keep: bool) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        self.keep = keep
        self.cache = DynamicCache(config=self.model.config)
        self.held: list[int] = []
        # One thread for all turns: a new one would have torch start its threads again.
        self.thread = ThreadPoolExecutor(max_workers=1)

    def answer(self, request: Request) -> Iterator[int]:
        """Tokens as they come; a thread generates, as transformers' own streamers have it."""
        if request.max_tokens == 0:
            if self.keep:
                self._append(request.prompt)
            return
        if not self.keep:
            self._cut(0)
        self._cut(common_prefix(self.held, request.prompt))
        tokens: SimpleQueue[int | None] = SimpleQueue()
        self.thread.submit(self._generate, request, _Streamer(tokens))
        ends = self._end_token_ids()
        while (token := tokens.get()) is not None:
            if token not in ends:
                yield token

    @torch.inference_mode()
    def _append(self, prompt: list[int]) -> None:
        same = common_prefix(self.held, prompt)
        self._cut(same)
        ids = torch.tensor([prompt[same:]])
        self.model(input_ids=ids, past_key_values=self.cache, logits_to_keep=1)
        self.held = list(prompt)

    def _cut(self, length: int) -> None:
        """Cut the cache to its first tokens."""
        if length == 0:
            self.cache = DynamicCache(config=self.model.config)
        elif length < len(self.held):
            self.cache.crop(length)
        self.held = self.held[:length]

    @torch.inference_mode()
    def _generate(self, request: Request, streamer: "_Streamer") -> None:
        ids = torch.tensor([request.prompt])
        try:
            output = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=self.cache,
                max_new_tokens=request.max_tokens,
                do_sample=False,
                pad_token_id=0,
                streamer=streamer,
            )
            # The last token is not in the cache.
            self.held = output[0, :-1].tolist()
        finally:
            streamer.tokens.put(None)

    def _end_token_ids(self) -> set[int]:
        ends = self.model.generation_config.eos_token_id
        return set(ends) if isinstance(ends, list) else {ends}


class _Streamer:
    """Puts generated tokens into a queue; generate hands it the prompt first."""

    def __init__(self, tokens: "SimpleQueue[int | None]") -> None:
        self.tokens = tokens
        self.prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt or a token."""
        if self.prompt_seen:
            self.tokens.put(int(value.reshape(-1)[-1]))
        self.prompt_seen = True

    def end(self) -> None:
        """End of the generation: nothing to do."""


def main() -> None:
    """Serve the session."""
    path, threads, mode = sys.argv[1:]
    torch.set_num_threads(int(threads))
    serve(Chat(path, mode == "kept").answer, ("transformers", "torch"))


if __name__ == "__main__":
    main()
