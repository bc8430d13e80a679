# SPDX-License-Identifier: Apache-2.0
"""Write a GGUF file once more with matrices in F16 and vectors in F32; names, rows and metadata stay as they are.

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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write a GGUF file with its matrices in F16.")
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args(argv)
    if options.out.exists():
        print(f"gguf_as_f16: {options.out} is there already; name another", file=sys.stderr)
        return 2
    rewrite(options.source, options.out)
    return 0


def rewrite(source: Path, out: Path) -> None:
    """Dequantise every tensor of `source` into `out`."""
    reader = gguf.GGUFReader(source)
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
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(
            tensor.name, values.astype(np.float32 if values.ndim == 1 else np.float16)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    sys.exit(main())
