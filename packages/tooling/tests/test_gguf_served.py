# SPDX-License-Identifier: Apache-2.0
"""The scripts around GGUF files: what they keep of a file, and one line for what they cannot take."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from numinous_tooling.repo.checkout import find_checkout

gguf = pytest.importorskip("gguf", reason="pip install gguf")
np = pytest.importorskip("numpy", reason="pip install numpy")
for module in ("torch", "httpx"):
    pytest.importorskip(module, reason=f"pip install {module}")

SCRIPTS = find_checkout(Path(__file__).parent).root / "packages/tooling/benchmarks/gguf_served"
sys.path.insert(0, str(SCRIPTS))

import gguf_as_f16  # noqa: E402
import gguf_served  # noqa: E402


def write(path: Path, tensors: dict[str, tuple[Any, Any]]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bü"])
    writer.add_file_type(7)
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_odd_tensors_stay_what_they_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    types = gguf.GGMLQuantizationType
    packed = gguf.quantize(rng.standard_normal((4, 64), dtype=np.float32), types.Q8_0)
    ids = (np.arange(64, dtype=np.int32) * 100_003).reshape(2, 32)
    three = rng.standard_normal((2, 4, 32), dtype=np.float32)
    vector = np.full(32, 1e6, np.float32)
    source = write(
        tmp_path / "in.gguf",
        {
            "packed.weight": (packed, types.Q8_0),
            "ids": (ids, None),
            "three": (three, None),
            "vector": (vector, None),
        },
    )
    out = tmp_path / "out.gguf"
    assert gguf_as_f16.main([str(source), str(out)]) == 0
    reader = gguf.GGUFReader(out)
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    unpacked = gguf.dequantize(packed, types.Q8_0).astype(np.float16)
    assert np.array_equal(found["packed.weight"], unpacked)
    assert found["ids"].dtype == np.int32
    assert np.array_equal(found["ids"], ids)
    assert np.array_equal(found["three"], three.astype(np.float16))
    assert np.array_equal(found["vector"], vector)
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "bü"]
    assert reader.fields["general.file_type"].contents() == gguf_as_f16.MOSTLY_F16


def test_what_f16_cannot_take_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = write(tmp_path / "large.gguf", {"w": (np.full((2, 32), 1e6, np.float32), None)})
    other = tmp_path / "other.gguf"
    other.write_bytes(b"no file of this kind" * 4)
    for source, said in (
        (large, "w has numbers that F16 cannot hold"),
        (other, "magic"),
        (tmp_path / "gone.gguf", "No such file"),
    ):
        out = tmp_path / "out.gguf"
        assert gguf_as_f16.main([str(source), str(out)]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
        assert not out.exists()
    assert gguf_as_f16.main([str(large), str(other)]) == 2
    assert "there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fix", "said"),
    [
        ("9999", "names 0 fixes"),
        ("006*", "want one"),
        ("flashinfer/0001-merge-empty-states", "want a fix of sglang"),
    ],
)
def test_a_wrong_fix_is_refused(
    fix: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--gguf", str(tmp_path / "m.gguf"), "--text", str(tmp_path / "t.txt"), "--device", "cpu"]  # fmt: skip
    good = "0061-gguf-llama-rope-layout"
    for flags in (["--fix", fix], ["--base", fix, "--fix", good]):
        assert gguf_served.main([*words, *flags]) == 2
        assert said in capsys.readouterr().err
    assert gguf_served.main([*words, "--base", "0061*", "--fix", good]) == 2
    assert "stands twice" in capsys.readouterr().err
