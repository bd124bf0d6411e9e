"""Float16 copies of GGUF files."""

from pathlib import Path

import gguf
import numpy as np

from benchmarks.peers.subjects.gguf_f16 import find_float16


def write_quantized(path: Path) -> np.ndarray:
    """A file with one matrix of four bits and one vector; returns the matrix as it reads back."""
    matrix = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64)
    packed = gguf.quantize(matrix, gguf.GGMLQuantizationType.Q4_1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_tensor("matrix", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("vector", np.ones(3, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)


def test_a_copy_has_the_same_weights_and_fields_in_float16(tmp_path: Path) -> None:
    expected = write_quantized(tmp_path / "model.gguf")
    copy = find_float16(tmp_path / "model.gguf", tmp_path / "copies")
    reader = gguf.GGUFReader(copy)
    matrix, vector = reader.tensors
    assert matrix.tensor_type == gguf.GGMLQuantizationType.F16
    assert np.array_equal(matrix.data, expected.astype(np.float16))
    assert vector.tensor_type == gguf.GGMLQuantizationType.F32
    assert reader.fields["llama.context_length"].contents() == 64
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_F16


def test_a_copy_is_written_once(tmp_path: Path) -> None:
    write_quantized(tmp_path / "model.gguf")
    copy = find_float16(tmp_path / "model.gguf", tmp_path)
    before = copy.stat().st_mtime_ns
    assert find_float16(tmp_path / "model.gguf", tmp_path).stat().st_mtime_ns == before
