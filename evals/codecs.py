"""The store's codec as one more thing to compare: the same units with raw pages and with int8 pages, in one run.

A row changes only when its page is finished, and is met changed only where it comes back from the store. So a session
with int8 pages is read back from them before every turn here, as if it had been swapped out in every pause: what is
measured is the most that int8 can cost.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from evals.errors import BadCodec
from evals.suite import Record
from evals.summary import Key, difference_row, grouped, mean, values_of
from kvrecall.reporting.results import Row, speed_row
from kvstore.format.codec import Codec, payload_bytes
from kvstore.format.page import HEADER_BYTES, PageLayout
from kvstore.settings import CodecName, StoreSettings
from kvstore.store import RowStore

RAW: CodecName = "raw"
INT8: CodecName = "int8"
_CODECS: Mapping[str, CodecName] = {RAW: RAW, INT8: INT8}
_DTYPES = (torch.float32, torch.bfloat16)
_FILES = "nvme"
_STORED = "bytes of a token's stored rows"


def codecs_of(names: Sequence[str]) -> tuple[CodecName, ...]:
    """The named codecs, raw where none is named. Raises BadCodec."""
    if unknown := [name for name in names if name not in _CODECS]:
        raise BadCodec(f"{unknown[0]!r} is no codec: there are {', '.join(_CODECS)}")
    return tuple(dict.fromkeys(_CODECS[name] for name in names)) or (RAW,)


def tiers_of(codec: CodecName) -> StoreSettings:
    """Memory and files, every finished page in that codec: nothing is read that did not go through it."""
    return StoreSettings(ram_codec=codec, nvme_codec=codec)


def rows_by_codec(
    records: Sequence[Record], rows_of: Callable[[Sequence[Record]], list[Row]], labelled: str
) -> list[Row]:
    """A suite's rows of each codec's records; those of int8 say so under `labelled`, the key of what was compared."""
    rows: list[Row] = []
    for (codec,), own in grouped(records, "codec").items():
        rows += [_labelled(row, labelled) if codec == INT8 else row for row in rows_of(own)]
    return rows


def cost_rows(
    records: Sequence[Record],
    asked: tuple[str, ...],
    paired: tuple[str, ...],
    told: Callable[[Record], dict[str, Any]],
    seed: int,
) -> list[Row]:
    """int8 minus raw, question by question: what is compared has the same `asked` keys, a pair the same `paired`."""
    rows: list[Row] = []
    found = grouped(records, "codec", *asked)
    for (codec, *key), own in found.items():
        theirs = found.get((RAW, *key))
        if codec == RAW or theirs is None:
            continue
        common = {**told(own[0]), "against": RAW, "measure": "int8 minus raw"}
        ours, raw = (_right(each, paired) for each in (own, theirs))
        rows += difference_row(f"{key[0]}: int8 minus raw", ours, raw, seed, **common)
    return rows


def stored_of(store: RowStore, tokens: int) -> dict[str, Any]:
    """What a record says of the bytes of a session of `tokens` tokens, which is alone in its store."""
    return {
        "stored_bytes": store.usage()[_FILES] / tokens,
        "page_shares": page_shares(store.layout),
    }


def page_shares(layout: PageLayout) -> dict[str, float]:
    """Bytes of a full int8 page as a share of a raw one's, for rows of the layout's shape in either dtype."""
    sizes = (layout.n_layers, layout.n_kv_heads, layout.head_dim)
    layouts = [
        PageLayout(*sizes, dtype, layout.fingerprint, layout.page_tokens) for dtype in _DTYPES
    ]
    return {
        str(own.dtype).removeprefix("torch."): round(
            _page_bytes(own, Codec.INT8) / own.page_bytes, 4
        )
        for own in layouts
    }


def byte_rows(records: Sequence[Record]) -> list[Row]:
    """Bytes of a token's stored rows in each codec, and of full pages in each dtype; for two codecs only.

    records: one per session, each with what `stored_of` says.
    """
    found = {
        codec: [each["stored_bytes"] for each in own]
        for (codec,), own in grouped(records, "codec").items()
    }
    if set(found) != set(_CODECS):
        return []
    ratio = round(mean(found[INT8]) / mean(found[RAW]), 4)
    rows = [speed_row(RAW, _STORED, "bytes", found[RAW])]
    rows.append(speed_row(INT8, _STORED, "bytes", found[INT8], ratio_to=RAW, ratio=ratio))
    for dtype, share in records[0]["page_shares"].items():
        rows.append(
            speed_row(f"{INT8}, {dtype} rows", "bytes of a full page", "share of raw", [share])
        )
    return rows


def _page_bytes(layout: PageLayout, codec: Codec) -> int:
    return HEADER_BYTES + payload_bytes(layout, layout.page_tokens, codec)


def _labelled(row: Row, labelled: str) -> Row:
    """The row with int8 said in what names it; a condition that begins with that name has it inside."""
    name = str(row.get(labelled, ""))
    told = {labelled: f"{name}, {INT8}"} if name else {}
    condition = str(row["condition"])
    if "metric" in row or (name and condition.startswith(name)):
        told["condition"] = f"{condition}, {INT8}"
    return {**row, **told}


def _right(records: Sequence[Record], paired: tuple[str, ...]) -> dict[Key, float]:
    return values_of(records, lambda each: float(each["right"]), *paired)
