"""Comparison of store codecs: the same units with raw pages and with int8 pages, in one run.

Encoding changes a row only when its page is finished, and the changed row is seen only when it
comes back from the store. With int8 pages a session is therefore read back from the store before
every turn, as if it had been swapped out in every pause: the result is an upper bound on what int8
costs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from evals.errors import BadCodec
from evals.suite import Record
from evals.summary import Key, difference_row, group_by, mean, values_by_key
from kvrecall_server.reporting.results import Row, speed_row
from kvstore.format.codec import Codec, payload_bytes
from kvstore.format.page import HEADER_BYTES, PageLayout
from kvstore.settings import CodecName, StoreSettings
from kvstore.store import RowStore

RAW: CodecName = "raw"
INT8: CodecName = "int8"
_CODECS: Mapping[str, CodecName] = {RAW: RAW, INT8: INT8}
_DTYPES = (torch.float32, torch.bfloat16)
# The tier of the row store that holds every page.
_FILE_TIER = "nvme"
_STORED = "bytes of a token's stored rows"


def parse_codecs(names: Sequence[str]) -> tuple[CodecName, ...]:
    """The named codecs without repetitions; raw if `names` is empty. Raises BadCodec."""
    if unknown := [name for name in names if name not in _CODECS]:
        raise BadCodec(f"{unknown[0]!r} is no codec: there are {', '.join(_CODECS)}")
    return tuple(dict.fromkeys(_CODECS[name] for name in names)) or (RAW,)


def store_settings(codec: CodecName) -> StoreSettings:
    """Settings of a store that encodes every finished page with `codec`, in memory and in files."""
    return StoreSettings(ram_codec=codec, nvme_codec=codec)


def rows_by_codec(
    records: Sequence[Record], build_rows: Callable[[Sequence[Record]], list[Row]], label_key: str
) -> list[Row]:
    """Result rows of each codec's records, built separately.

    Rows of int8 records have the codec's name appended to their `label_key` column.
    """
    rows: list[Row] = []
    for (codec,), group in group_by(records, "codec").items():
        rows += [_label(row, label_key) if codec == INT8 else row for row in build_rows(group)]
    return rows


def cost_rows(
    records: Sequence[Record],
    group_keys: tuple[str, ...],
    pair_keys: tuple[str, ...],
    get_columns: Callable[[Record], dict[str, Any]],
    seed: int,
) -> list[Row]:
    """Paired differences of int8 minus raw, question by question.

    Groups with equal `group_keys` are compared; within them, records with equal `pair_keys` are
    paired. `get_columns` gives the common columns of a group from its first record.
    """
    rows: list[Row] = []
    groups = group_by(records, "codec", *group_keys)
    for (codec, *key), group in groups.items():
        raw_group = groups.get((RAW, *key))
        if codec == RAW or raw_group is None:
            continue
        common = {**get_columns(group[0]), "against": RAW, "measure": "int8 minus raw"}
        int8, raw = (_values_right(each, pair_keys) for each in (group, raw_group))
        rows += difference_row(f"{key[0]}: int8 minus raw", int8, raw, seed, **common)
    return rows


def storage_columns(store: RowStore, tokens: int) -> dict[str, Any]:
    """Record columns on stored bytes of a session of `tokens` tokens, the only one in `store`."""
    return {
        "stored_bytes": store.usage()[_FILE_TIER] / tokens,
        "page_shares": page_shares(store.layout),
    }


def page_shares(layout: PageLayout) -> dict[str, float]:
    """Bytes of a full int8 page as a share of a raw one, by dtype, for rows of `layout`'s shape."""
    sizes = (layout.n_layers, layout.n_kv_heads, layout.head_dim)
    layouts = [
        PageLayout(*sizes, dtype, layout.fingerprint, layout.page_tokens) for dtype in _DTYPES
    ]
    return {
        str(each.dtype).removeprefix("torch."): round(
            _page_bytes(each, Codec.INT8) / each.page_bytes, 4
        )
        for each in layouts
    }


def byte_rows(records: Sequence[Record]) -> list[Row]:
    """Bytes of a token's stored rows in each codec, and of full pages in each dtype.

    `records` has one record per session, with the columns of `storage_columns`. No rows unless
    both codecs are there.
    """
    sizes = {
        codec: [each["stored_bytes"] for each in group]
        for (codec,), group in group_by(records, "codec").items()
    }
    if set(sizes) != set(_CODECS):
        return []
    ratio = round(mean(sizes[INT8]) / mean(sizes[RAW]), 4)
    rows = [speed_row(RAW, _STORED, "bytes", sizes[RAW])]
    rows.append(speed_row(INT8, _STORED, "bytes", sizes[INT8], ratio_to=RAW, ratio=ratio))
    for dtype, share in records[0]["page_shares"].items():
        rows.append(
            speed_row(f"{INT8}, {dtype} rows", "bytes of a full page", "share of raw", [share])
        )
    return rows


def _page_bytes(layout: PageLayout, codec: Codec) -> int:
    return HEADER_BYTES + payload_bytes(layout, codec)


def _label(row: Row, label_key: str) -> Row:
    """Append int8 to the row's label, and to a condition that begins with the label."""
    name = str(row.get(label_key, ""))
    changed = {label_key: f"{name}, {INT8}"} if name else {}
    condition = str(row["condition"])
    if "metric" in row or (name and condition.startswith(name)):
        changed["condition"] = f"{condition}, {INT8}"
    return {**row, **changed}


def _values_right(records: Sequence[Record], pair_keys: tuple[str, ...]) -> dict[Key, float]:
    return values_by_key(records, lambda each: float(each["right"]), *pair_keys)
