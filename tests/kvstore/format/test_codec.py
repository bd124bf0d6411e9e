"""INT8 pages take about half the bytes; every error is at most half a step of its group."""

from dataclasses import replace
from importlib import resources

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvstore.errors import PageFormatError
from kvstore.format.codec import Codec, decode_page, encode_page, payload_bytes
from kvstore.format.page import ID_BYTES, PageLayout, parse_header, seal
from reference import MODEL_PATH

LAYOUT = PageLayout(
    n_layers=2, n_kv_heads=2, head_dim=6, dtype=torch.float32, fingerprint="model A", page_tokens=8
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ID = bytes(range(ID_BYTES))


def encode(layout: PageLayout, rows: Tensor, codec: Codec = Codec.INT8) -> memoryview:
    """Encode rows as a page of so many tokens as there are."""
    return encode_page(replace(layout, page_tokens=rows.shape[3]), ID, rows, codec, written_at=1)


def round_trip(layout: PageLayout, rows: Tensor, codec: Codec = Codec.INT8) -> Tensor:
    """Encode and decode rows, as a page of so many tokens as there are."""
    blob = encode(layout, rows, codec)
    return decode_page(replace(layout, page_tokens=rows.shape[3]), parse_header(blob), blob)


def get_codec(layout: PageLayout, rows: Tensor) -> int:
    return parse_header(encode(layout, rows)).codec


def split_sides(rows: Tensor) -> list[tuple[Tensor, int]]:
    """Keys and values, each with the axis that shares a zero and a step."""
    return [(rows[:, 0].double(), 2), (rows[:, 1].double(), 3)]


def allowed_errors(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Largest allowed error per number: half a step (rounded up to bfloat16) and rounding."""
    allowed = []
    for side, axis in split_sides(rows):
        spread = side.amax(axis, keepdim=True) - side.amin(axis, keepdim=True)
        # Subnormal numbers are rounded by as much as the smallest normal number.
        largest = side.abs().amax(axis, keepdim=True).clamp_min(torch.finfo(dtype).smallest_normal)
        rounding = largest * torch.finfo(dtype).eps
        # A step is a 255th of the range, up to 1/128 more by rounding, and at least 2 ** -126.
        step = (spread / 255 * (1 + 2**-7)).clamp_min(2.0**-126) * (spread > 0)
        allowed.append((step / 2 + rounding).expand_as(side))
    return torch.stack(allowed, 1)


@st.composite
def pages(draw: st.DrawFn) -> tuple[PageLayout, Tensor]:
    """Rows of any dtype and token count: many magnitudes, offsets, constant channels and tokens."""
    layout = replace(LAYOUT, dtype=draw(st.sampled_from(DTYPES)))
    tokens = draw(st.integers(1, layout.page_tokens))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows = torch.randn(layout.rows_shape(tokens), generator=generator)
    spread = 10.0 ** draw(
        st.integers(-44, 37) if layout.dtype is not torch.float16 else st.integers(-8, 3)
    )
    rows = rows * spread + spread * draw(st.sampled_from([0.0, 1.0, -40.0]))
    largest = torch.finfo(layout.dtype).max / 4
    rows = rows.clamp(-largest, largest)
    rows[:, 0, :, :, draw(st.integers(0, layout.head_dim - 1))] = draw(
        st.sampled_from([0.0, 1.5, -3e4])
    )
    rows[:, 1, :, draw(st.integers(0, tokens - 1))] = draw(st.sampled_from([0.0, 0.25]))
    return layout, rows.to(layout.dtype)


@given(page=pages())
@settings(max_examples=300, deadline=None)
def test_no_error_exceeds_half_a_step(page: tuple[PageLayout, Tensor]) -> None:
    layout, rows = page
    assert get_codec(layout, rows) == Codec.INT8
    read = round_trip(layout, rows)
    assert read.dtype == layout.dtype
    assert bool(
        (
            (read.double() - rows.double()).abs() <= allowed_errors(rows, layout.dtype) * (1 + 1e-4)
        ).all()
    )


@given(page=pages())
@settings(max_examples=100, deadline=None)
def test_groups_of_equal_numbers_are_decoded_exactly(page: tuple[PageLayout, Tensor]) -> None:
    layout, rows = page
    read = round_trip(layout, rows)
    for (side, axis), (found, _) in zip(split_sides(rows), split_sides(read), strict=True):
        constant = (side.amax(axis, keepdim=True) == side.amin(axis, keepdim=True)).expand_as(side)
        assert torch.equal(found[constant], side[constant])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("side", [0, 1])
def test_rows_that_are_not_finite_are_stored_raw(dtype: torch.dtype, bad: float, side: int) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    rows = torch.ones(layout.rows_shape(5), dtype=dtype)
    rows[1, side, 0, 3, 2] = bad
    assert get_codec(layout, rows) == Codec.RAW
    assert torch.equal(round_trip(layout, rows).nan_to_num(7.0), rows.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [1.0, 0.999])
def test_rows_at_the_limit_of_the_dtype_never_become_infinite(
    dtype: torch.dtype, share: float
) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    largest = torch.finfo(dtype).max * share
    rows = torch.linspace(-largest / 2, largest / 2, 96, dtype=torch.float64) * 2
    read = round_trip(layout, rows.to(dtype).repeat(2).view(layout.rows_shape(4)))
    assert bool(read.isfinite().all())


@pytest.mark.parametrize(
    ("head_dim", "dtype", "ratio"),
    [
        (32, torch.bfloat16, 0.547),
        (64, torch.bfloat16, 0.532),
        (128, torch.bfloat16, 0.524),
        (32, torch.float16, 0.547),
        (64, torch.float16, 0.532),
        (128, torch.float16, 0.524),
        (32, torch.float32, 0.286),
        (64, torch.float32, 0.274),
        (128, torch.float32, 0.268),
    ],
)
def test_a_page_takes_little_more_than_its_codes(
    head_dim: int, dtype: torch.dtype, ratio: float
) -> None:
    layout = PageLayout(
        n_layers=2, n_kv_heads=2, head_dim=head_dim, dtype=dtype, fingerprint="model A"
    )
    rows = torch.randn(layout.rows_shape(64), generator=torch.Generator().manual_seed(1)).to(dtype)
    raw = encode(layout, rows, Codec.RAW)
    small = encode(layout, rows)
    share = payload_bytes(layout, Codec.INT8) / payload_bytes(layout, Codec.RAW)
    assert ratio - 0.002 < share <= ratio
    assert len(small) <= 0.55 * len(raw)


def test_a_payload_of_a_wrong_length_is_refused() -> None:
    rows = torch.randn(LAYOUT.rows_shape(8), generator=torch.Generator().manual_seed(2))
    blob = bytes(encode(LAYOUT, rows))
    header = parse_header(blob)
    for payload in (blob[header.record_bytes - header.payload_bytes : -1], blob[192:] + b"\0"):
        changed = seal(replace(header, payload_bytes=len(payload)), payload)
        with pytest.raises(PageFormatError, match="payload"):
            decode_page(LAYOUT, parse_header(changed), changed)


@pytest.fixture(scope="module")
def trained_rows() -> Tensor:
    """Rows of 512 tokens of text from the reference model."""
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH)
    text = (resources.files("kvrecall_server.app") / "calibration.txt").read_text()
    ids = AutoTokenizer.from_pretrained(MODEL_PATH)(text, return_tensors="pt").input_ids[:, :512]
    with torch.no_grad():
        layers = model(ids, use_cache=True).past_key_values.layers
    return torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in layers])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", [0, 1], ids=["keys", "values"])
def test_the_int8_error_of_rows_of_a_trained_model(
    trained_rows: Tensor, dtype: torch.dtype, side: int
) -> None:
    """Bounds on the error, relative to the root mean square and to the largest number.

    Measured in float32: 0.0036 (keys) and 0.0053 (values) of the root mean square; the largest
    error is 0.0035 and 0.0031 of the largest number. bfloat16 adds its rounding: 0.0038 and
    0.0056, 0.0036 and 0.0042.
    """
    rows = trained_rows.to(dtype)
    n_layers, _, n_kv_heads, _, head_dim = rows.shape
    layout = PageLayout(n_layers, n_kv_heads, head_dim, dtype, "reference")
    read = torch.cat([round_trip(layout, page.contiguous()) for page in rows.split(64, 3)], 3)
    exact = rows[:, side].double()
    error = (read[:, side].double() - exact).abs()
    root_mean_square = float(error.square().mean().sqrt() / exact.square().mean().sqrt())
    largest = float(error.max() / exact.abs().max())
    assert 0 < root_mean_square < 0.006
    assert largest < 0.005
