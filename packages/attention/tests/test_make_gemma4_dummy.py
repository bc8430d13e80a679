# SPDX-License-Identifier: Apache-2.0
"""The dummy of the engine proof: Gemma 4's attention, weights that Transformers takes for the same model, answers that depend on the prompt."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "make_gemma4_dummy.py"


@pytest.fixture(scope="module")
def dummy() -> Any:
    pytest.importorskip("safetensors", reason="dummies are written as safetensors")
    spec = importlib.util.spec_from_file_location("make_gemma4_dummy", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_attention_is_that_of_gemma4_31b(dummy: Any) -> None:
    config = dummy.config_of(tiny=False, layers=None)
    kinds = config["layer_types"]
    assert len(kinds) == 12
    assert [n for n, kind in enumerate(kinds) if kind == "full_attention"] == [5, 11]
    heads, window = config["num_attention_heads"], config["sliding_window"]
    assert (heads, window) == (32, 1024)
    assert (config["num_key_value_heads"], config["head_dim"]) == (4, 512)
    assert (config["swa_num_key_value_heads"], config["swa_head_dim"]) == (16, 256)
    size = sum(torch.Size(w.shape).numel() for shard in dummy.weights(config) for w in shard)
    assert 2.7e9 < 2 * size < 2.9e9, "as the script says"


def test_layers_are_multiples_of_the_pattern(dummy: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        dummy.main(["--out", str(tmp_path), "--layers", "7"])


def test_transformers_reads_the_same_model(dummy: Any, tmp_path: Path) -> None:
    """With the fields named as it names them; a window is 64 tokens, so the first 20 reach the last by full layers alone."""
    transformers = pytest.importorskip("transformers", reason="the reading is Transformers'")
    from safetensors.torch import load_file

    dummy.write(tmp_path / "tiny", tiny=True)
    config = json.loads((tmp_path / "tiny" / "config.json").read_text())
    named = {k: v for k, v in config.items() if not k.startswith(("swa_", "v_head", "architectures", "model_type"))}  # fmt: skip
    named |= {
        "head_dim": config["swa_head_dim"],
        "num_key_value_heads": config["swa_num_key_value_heads"],
        "num_global_key_value_heads": config["num_key_value_heads"],
    }
    model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**named)).float().eval()
    state: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "tiny").glob("*.safetensors"):
        state |= {name: tensor.float() for name, tensor in load_file(path).items()}
    model.load_state_dict(state)
    one = torch.randint(0, 256, (2, 100), generator=torch.Generator().manual_seed(1))
    other = one.clone()
    other[:, :20] = one[:, :20].flip(1)
    with torch.no_grad():
        first, second = model(one).logits, model(other).logits
    assert 2 < float(first.std()) < 4
    assert float((first[:, -1] - second[:, -1]).abs().max()) > 0.5
    assert len(set(first.argmax(-1).flatten().tolist())) > 50, "not one answer for everything"
    assert float((first.argmax(-1) == one).float().mean()) < 0.2, "and not its input"
