# SPDX-License-Identifier: Apache-2.0
"""Script: run prompts through `sglang.Engine` (no HTTP server) on the CPU platform.

stdin: {"model": DIR, "options": {engine keyword: value}, "prompts": [[token ids], ...], "new": N}
stdout, last line: {"ids": [[...], ...], "logprobs": [[...], ...], "backend": NAME}

The engine starts its scheduler with `spawn`, which imports this file again: hence the guard at the end.
"""

from __future__ import annotations

import json
import sys

from numinous_cpu_platform import serve_defaults


def keyword(flag: str) -> tuple[str, str | int | bool]:
    """`--max-total-tokens=16384` -> ("max_total_tokens", 16384)."""
    name, equals, value = flag.removeprefix("--").partition("=")
    return name.replace("-", "_"), (int(value) if value.isdigit() else value) if equals else True


def main() -> None:
    import sglang

    request = json.load(sys.stdin)
    _, flags = serve_defaults(request["model"])
    options = dict(map(keyword, flags))
    options |= {"skip_tokenizer_init": True, "log_level": "warning", **request["options"]}
    engine = sglang.Engine(model_path=request["model"], **options)
    try:
        outputs = engine.generate(
            input_ids=request["prompts"],
            sampling_params={
                "temperature": 0,
                "max_new_tokens": request["new"],
                "ignore_eos": True,
            },
            return_logprob=True,
        )
        answer = {
            "ids": [out["output_ids"] for out in outputs],
            "logprobs": [
                [entry[0] for entry in out["meta_info"]["output_token_logprobs"]] for out in outputs
            ],
            "backend": engine.get_server_info()["attention_backend"],
        }
    finally:
        engine.shutdown()
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
