"""A GGUF file becomes, once, a folder that the loader reads; a damaged one is refused."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvrecall.domain.answer.sampling_defaults import SamplingDefaults
from workers.errors import ModelRefused
from workers.model.loader import load_model
from workers.model.tokenizer import load_tokenizer
from workers.model.weights import gguf as conversion
from workers.model.weights.gguf import find_conversion

WIDTH, HEADS, KV_HEADS, HIDDEN = 32, 4, 2, 64
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
TOKENS = ["<pad>", "<end>", *(chr(code) for code in range(ord("a"), ord("z") + 1)), "th", "Ġ"]


def write_model(path: Path) -> Path:
    """A GGUF file with a Llama of one layer and random weights."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * 28)
    writer.add_token_merges(["t h"])
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    writer.add_sampling_temp(0.5)
    writer.add_sampling_top_k(20)
    writer.add_sampling_penalty_repeat(1.25)
    random = np.random.default_rng(5)
    kv_width = WIDTH // HEADS * KV_HEADS
    shapes = {
        "token_embd.weight": (len(TOKENS), WIDTH),
        "output.weight": (len(TOKENS), WIDTH),
        "output_norm.weight": (WIDTH,),
        "blk.0.attn_norm.weight": (WIDTH,),
        "blk.0.ffn_norm.weight": (WIDTH,),
        "blk.0.attn_q.weight": (WIDTH, WIDTH),
        "blk.0.attn_k.weight": (kv_width, WIDTH),
        "blk.0.attn_v.weight": (kv_width, WIDTH),
        "blk.0.attn_output.weight": (WIDTH, WIDTH),
        "blk.0.ffn_gate.weight": (HIDDEN, WIDTH),
        "blk.0.ffn_up.weight": (HIDDEN, WIDTH),
        "blk.0.ffn_down.weight": (WIDTH, HIDDEN),
    }
    for name, shape in shapes.items():
        weight = random.normal(size=shape).astype(np.float32)
        if len(shape) == 2:
            packed = gguf.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces conversions by folders with one file; their targets."""
    made: list[Path] = []

    def convert(file: Path, folder: Path) -> None:
        made.append(folder)
        (folder / "config.json").write_text(file.name)

    monkeypatch.setattr(conversion, "convert", convert)
    return made


def test_a_conversion_has_the_weights_and_the_tokenizer_of_the_file(
    file: Path, tmp_path: Path
) -> None:
    folder = find_conversion(file, tmp_path)
    assert AutoConfig.from_pretrained(folder).dtype == torch.bfloat16
    model = load_model(folder, torch.bfloat16, pack=False)
    assert (model.max_context, model.eos_token_ids) == (256, (1,))
    assert model.sampling == SamplingDefaults(0.5, top_k=20, repetition_penalty=1.25)
    read = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    weights = model.module.state_dict()
    assert weights.keys() == read.state_dict().keys()
    for name, weight in read.state_dict().items():
        assert torch.equal(weights[name], weight.bfloat16()), name
    tokenizer = load_tokenizer(folder, model.eos_token_ids)
    assert tokenizer.inner.chat_template == TEMPLATE
    text = "the thaw"
    expected = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert tokenizer.encode(text) == expected.encode(text, add_special_tokens=False)


def test_a_conversion_parses_the_file_once(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []

    class Counted(gguf.GGUFReader):
        def __init__(self, path: str) -> None:
            parsed.append(path)
            super().__init__(path)

    monkeypatch.setattr(gguf, "GGUFReader", Counted)
    find_conversion(file, tmp_path)
    assert len(parsed) == 1
    assert gguf.GGUFReader is Counted, "for this conversion alone"


def test_a_file_is_converted_once_under_any_name_and_again_when_it_changes(
    file: Path, tmp_path: Path, counted: list[Path]
) -> None:
    cache = tmp_path / "cache"
    first = find_conversion(file, cache)
    copy = tmp_path / "another name.gguf"
    copy.write_bytes(file.read_bytes())
    assert find_conversion(copy, cache) == first
    assert len(counted) == 1
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    copy.write_bytes(changed)
    assert find_conversion(copy, cache) != first
    assert len(counted) == 2


def test_of_two_at_once_one_converts_and_the_other_waits(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()
    made = []

    def convert(file: Path, folder: Path) -> None:
        began.set()
        assert go_on.wait(60)
        made.append(folder)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(conversion, "convert", convert)
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(find_conversion, file, tmp_path)
        assert began.wait(60)
        other = pool.submit(find_conversion, file, tmp_path)
        found = {path.suffix for path in tmp_path.iterdir()}
        assert found == {".lock", ".draft"}, "not under its name before it is complete"
        go_on.set()
        assert one.result(60) == other.result(60)
    assert len(made) == 1


def test_a_conversion_that_breaks_off_leaves_nothing_to_be_found(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: list[Path]
) -> None:
    whole = conversion.convert

    def break_off(file: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "convert", break_off)
    with pytest.raises(KeyboardInterrupt):
        find_conversion(file, tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    # As a killed process leaves it.
    draft = next(tmp_path.iterdir()).with_suffix(".draft")
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(b"half")
    monkeypatch.setattr(conversion, "convert", whole)
    folder = find_conversion(file, tmp_path)
    assert {path.name for path in folder.iterdir()} == {"config.json", "converted-from.json"}


@pytest.mark.parametrize("kept", [40, 700, 3000, 0.5])
def test_a_file_that_was_cut_off_is_refused(file: Path, tmp_path: Path, kept: float) -> None:
    content = file.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(content[: int(kept * len(content)) if kept < 1 else int(kept)])
    with pytest.raises(ModelRefused, match=r"cut\.gguf is damaged or incomplete, download it"):
        find_conversion(cut, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("gguf-*[!k]"))


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("missing.gguf", None, "cannot be read"),
        ("page.gguf", b"<html>", "no GGUF file"),
        ("empty.gguf", b"", "no GGUF file"),
        ("pointer.gguf", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("big-00001-of-00003.gguf", b"GGUF", "--merge"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(
    tmp_path: Path, name: str, content: bytes | None, why: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelRefused, match=why):
        find_conversion(tmp_path / name, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_is_named(
    file: Path, tmp_path: Path, counted: list[Path]
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file where a folder is needed: root may write into any folder")
    with pytest.raises(ModelRefused, match="KVRECALL_CACHE"):
        find_conversion(file, taken / "models")
    assert not counted
