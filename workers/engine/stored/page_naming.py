"""Names of the pages of prompts, by which other sessions' pages are found."""

from collections.abc import Sequence

from kvrecall.domain.page_ids import PageNames, join_ids
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvstore.store import RowStore
from workers.model.tokenize import tokenize
from workers.model.tokenizer import ChatTokenizer


def get_names(store: RowStore, row_key: bytes) -> PageNames:
    """Return the names of a tenant's pages in this store."""
    return PageNames(row_key, store.row_layout, store.layout.page_tokens)


def name_tokens(names: PageNames, token_ids: Sequence[int]) -> list[bytes]:
    """Name the whole pages of a new session's first tokens, of rows as a full cache has them."""
    whole = len(token_ids) - len(token_ids) % names.page_tokens
    return list(names.extend(None, token_ids[:whole]))


def name_prompt(
    tokenizer: ChatTokenizer, store: RowStore, request: pb.TokenizeRequest
) -> pb.TokenizeResult:
    """Name the whole pages of a new session's prompt. Raises as `tokenize`."""
    token_ids = tokenize(tokenizer, request).ids
    named = name_tokens(get_names(store, request.row_key), token_ids)
    return pb.TokenizeResult(page_ids=join_ids(named))
