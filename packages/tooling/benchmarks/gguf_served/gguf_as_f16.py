# SPDX-License-Identifier: Apache-2.0
"""Write a GGUF file once more with matrices in F16 and vectors in F32; names, rows, integers and metadata stay as they are.

    python packages/tooling/benchmarks/gguf_served/gguf_as_f16.py MODEL.gguf OUT.gguf

What such a file shows of a loader does not depend on kernels for packed weights.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import gguf
import numpy as np

MOSTLY_F16 = 1
"""Value of `general.file_type`."""
_TYPES = gguf.GGMLQuantizationType
INTEGERS = (_TYPES.I8, _TYPES.I16, _TYPES.I32, _TYPES.I64)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write a GGUF file with its matrices in F16.")
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args(argv)
    if options.out.exists():
        print(f"gguf_as_f16: {options.out} is there already; name another", file=sys.stderr)
        return 2
    try:
        rewrite(options.source, options.out)
    except (OSError, ValueError, NotImplementedError) as error:
        print(f"gguf_as_f16: {error}", file=sys.stderr)
        return 2
    return 0


def rewrite(source: Path, out: Path) -> None:
    """Dequantise every tensor of `source` into `out`.

    Raises:
        ValueError: `source` is no GGUF file, or has a number that F16 cannot hold.
        NotImplementedError: gguf-py cannot dequantise one of its types.
    """
    reader = gguf.GGUFReader(source)
    if "general.architecture" not in reader.fields:
        raise ValueError(f"{source}: names no general.architecture")
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        # The reader's own fields, and what the writer has written.
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        value = MOSTLY_F16 if field.name == "general.file_type" else field.contents()
        writer.add_key_value(field.name, value, kind, sub_type=inner)
    for tensor in reader.tensors:
        if tensor.tensor_type in INTEGERS:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim > 1 and np.abs(values).max(initial=0) > np.finfo(np.float16).max:
            raise ValueError(f"{source}: {tensor.name} has numbers that F16 cannot hold")
        writer.add_tensor(
            tensor.name, values.astype(np.float32 if values.ndim == 1 else np.float16)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    sys.exit(main())
