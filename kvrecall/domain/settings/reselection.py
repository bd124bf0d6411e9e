"""The settings of re-selections while a session answers."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field


@dataclass(frozen=True)
class Reselection:
    """When an answer's own queries select the active rows anew, among all stored rows.

    After `first` tokens of the answer and every `every` tokens after that; `first` 0 is the end of
    the prompt, by the queries of its last tokens. A session chooses `every`; only research replaces the
    others. `token_share` of the rows are whole tokens, which
    all layers and heads select together as repairs do: by their mean attention less that of a
    neutral signal, with their neighbours. Each head selects the others by its own attention.
    """

    every: Annotated[int, Field(ge=1, le=256)] = 2
    first: Annotated[int, Field(ge=0, lt=2**31)] = 0
    token_share: Annotated[float, Field(ge=0, le=1)] = 0.5

    @property
    def window(self) -> int:
        """Newest tokens, of the prompt and the answer, whose queries score the rows.

        The one token in front of a selection may look for nothing, and what comes long before it
        counts for little (docs/design/loopserve.md). Where each head selects on its own as in LoopServe,
        those between two selections, as there.
        """
        return 8 if self.token_share else max(8, self.every)
