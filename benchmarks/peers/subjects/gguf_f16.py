"""A GGUF file's weights as float16 in another GGUF file, for llama.cpp without its quantization."""

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np

# Written by the writer itself.
_OWN_FIELDS = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture")
_FILE_TYPES = ("general.file_type", "general.quantization_version")


def find_float16(file: Path, folder: Path) -> Path:
    """Find the float16 copy of a GGUF file under `folder`; write it where there is none."""
    copy = folder / f"{file.stem}.f16.gguf"
    if not copy.exists():
        folder.mkdir(parents=True, exist_ok=True)
        draft = copy.with_suffix(".draft")
        write_float16(file, draft)
        os.replace(draft, copy)
    return copy


def write_float16(file: Path, copy: Path) -> None:
    """Write all fields and tensors of `file` to `copy`: matrices in float16, vectors in float32."""
    reader = gguf.GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(copy, str(architecture))
    for name, field in reader.fields.items():
        if name not in (*_OWN_FIELDS, *_FILE_TYPES):
            _copy_field(writer, name, field)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        dtype = np.float16 if values.ndim > 1 else np.float32
        writer.add_tensor(tensor.name, values.astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_field(writer: Any, name: str, field: Any) -> None:
    kind = field.types[0]
    items = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
    writer.add_key_value(name, field.contents(), kind, sub_type=items)
