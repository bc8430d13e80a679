# SPDX-License-Identifier: Apache-2.0
"""Workload `agents`: recorded coding-agent sessions as token counts, replayed with synthetic tokens.

What is taken from the recording (`data/README.md`): prompt and completion tokens of every call, and the time between
calls. All lengths are multiplied by a *length scale*. What is made up, and how:

- **Tokens** are drawn by a seeded generator from the plain words of the model's vocabulary, so every count is exact
  where they are sent as ids (`prompts.py` says what holds where they are sent as text). The seed includes the repeat, never the arm: both arms of a repeat see the same requests, and no
  repeat can profit from the cache of another.
- **Answers in the context.** The next prompt holds the *planned* synthetic answer of the recorded length, not the
  answer that the server gave: two arms may round differently, and their requests must not drift apart. The cost: the
  server has to prefill those answer tokens again, so its hit rate is a little lower than a live agent's.
- **Shared prefix.** The first `SHARED_PREFIX_TOKENS` (the recorded agent's system message) are the same in all
  sessions of a repeat.
- **Tool gaps.** The recording has one interval per call, model and tool together. The model's part is taken as
  `MODEL_LATENCY_S + completion / MODEL_TOKENS_PER_S`, which follows the fastest tenth of the recorded intervals at
  completions of 30 to 3,000 tokens; the rest, at most `MAX_GAP_S`, is the tool's, and is divided by a *speedup*.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from numinous_tooling.gate.errors import GateError
from numinous_tooling.gate.plan import (
    CONTEXT_MARGIN_TOKENS,
    ModelFacts,
    SessionPlan,
    Turn,
    check_size,
    draw,
)

RECORDING = "swebench-turn-metrics.jsonl"
RECORDING_SHA256 = "6bdf11df34c252474f88734a1300c640ae0d32fbec262257f7e36a0c94590b45"

SHARED_PREFIX_TOKENS = 140
MODEL_LATENCY_S = 1.5
MODEL_TOKENS_PER_S = 150.0
MAX_GAP_S = 120.0
# Sessions start within this recorded time (divided by the speedup like every gap), not all in one instant.
START_SPREAD_S = 10.0
# A vocabulary marks a token that begins with a space.
_SPACE_MARKS = "Ġ▁"
_PLAIN_WORD = re.compile(rf"^[{_SPACE_MARKS}]?[a-z]{{2,}}$")
_MIN_WORDS = 256


@dataclass(frozen=True)
class Call:
    """One recorded model call: token counts, and seconds since the session's first call."""

    prompt: int
    completion: int
    reasoning: int
    at_s: float


@dataclass(frozen=True)
class Recording:
    """One recorded session."""

    name: str
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class WorkloadSpec:
    """Everything that decides the requests, besides model and repeat."""

    sessions: int
    turns: int
    length_scale: float
    speedup: float
    seed: int

    kind = "agents"
    is_text = False

    def build(self, model: ModelFacts, repeat: int) -> tuple[SessionPlan, ...]:
        """Return the sessions of one repeat."""
        return build_workload(self, model, repeat)

    def describe(self) -> dict[str, Any]:
        """Return the settings for verdict.json."""
        return {"speedup": self.speedup}


def load_recording() -> tuple[Recording, ...]:
    """Read the recorded sessions that ship with the package; refuse a file that is not the one named above."""
    data = resources.files("numinous_tooling.gate").joinpath("data", RECORDING).read_bytes()
    return parse_recording(data)


def parse_recording(data: bytes) -> tuple[Recording, ...]:
    """Check the bytes against `RECORDING_SHA256` and parse them."""
    digest = hashlib.sha256(data).hexdigest()
    if digest != RECORDING_SHA256:
        raise GateError(
            f"{RECORDING} has sha256 {digest[:16]}…, expected {RECORDING_SHA256[:16]}…; "
            "the recorded workload was changed: reinstall numinous-tooling"
        )
    sessions = []
    for line in data.splitlines():
        row = json.loads(line)
        calls = tuple(Call(p, c, r, float(t)) for p, c, r, _cached, t in row["turns"])
        sessions.append(Recording(row["session"], calls))
    return tuple(sessions)


def tool_gap_s(interval_s: float, completion_tokens: int) -> float:
    """Return the tool's share, in seconds, of a recorded interval that followed `completion_tokens`."""
    model_s = MODEL_LATENCY_S + completion_tokens / MODEL_TOKENS_PER_S
    return min(max(0.0, interval_s - model_s), MAX_GAP_S)


def plan_turns(
    recording: Recording, turns: int, length_scale: float, speedup: float
) -> tuple[Turn, ...]:
    """Scale the first `turns` calls of a recording; prompts only grow, each by at least one token.

    A recorded prompt may be shorter than the context before it (the provider counts slightly differently from call
    to call); then the plan runs ahead and falls back to the recorded count as soon as that is large enough.
    """
    planned: list[Turn] = []
    floor = 1
    for index, call in enumerate(recording.calls[:turns]):
        prompt = max(floor, round(call.prompt * length_scale))
        completion = max(1, round(call.completion * length_scale))
        gap_s = 0.0
        if index:
            before = recording.calls[index - 1]
            gap_s = tool_gap_s(call.at_s - before.at_s, before.completion) / speedup
        visible = max(0, call.completion - call.reasoning)
        answer = min(completion, round(visible * length_scale))
        planned.append(Turn(prompt, completion, gap_s, answer_tokens=answer))
        floor = prompt + answer + 1
    return tuple(planned)


def choose_sessions(
    recordings: tuple[Recording, ...], spec: WorkloadSpec, context_tokens: int
) -> list[tuple[Recording, tuple[Turn, ...]]]:
    """Choose `spec.sessions` recordings by seed among those that are long enough and fit the context."""
    limit = context_tokens - CONTEXT_MARGIN_TOKENS
    fitting = []
    for recording in recordings:
        if len(recording.calls) < spec.turns:
            continue
        turns = plan_turns(recording, spec.turns, spec.length_scale, spec.speedup)
        if all(turn.prompt_tokens + turn.max_new_tokens <= limit for turn in turns):
            fitting.append((recording, turns))
    if len(fitting) < spec.sessions:
        raise GateError(
            f"only {len(fitting)} of {len(recordings)} recorded sessions have {spec.turns} turns and fit "
            f"{context_tokens} tokens of context at length scale {spec.length_scale:g}, {spec.sessions} wanted; "
            "lower --sessions, --turns or --length-scale"
        )
    return random.Random(f"sessions/{spec.seed}").sample(fitting, spec.sessions)


def build_workload(spec: WorkloadSpec, model: ModelFacts, repeat: int) -> tuple[SessionPlan, ...]:
    """Return the sessions of one repeat: lengths and gaps are the same in all repeats, token ids are not."""
    shared_tokens = max(1, round(SHARED_PREFIX_TOKENS * spec.length_scale))
    shared = draw(model, f"shared/{spec.seed}/{repeat}", shared_tokens)
    plans = []
    for recording, turns in choose_sessions(load_recording(), spec, model.context_tokens):
        length = turns[-1].prompt_tokens
        prefix = shared[: min(shared_tokens, turns[0].prompt_tokens)]
        own = draw(model, f"session/{spec.seed}/{repeat}/{recording.name}", length - len(prefix))
        start = random.Random(f"start/{spec.seed}/{recording.name}").uniform(0, START_SPREAD_S)
        plans.append(
            SessionPlan(recording.name, start / spec.speedup, prefix + own, turns, len(prefix))
        )
    check_size(plans)
    return tuple(plans)


def read_model(name: str, context_limit: int | None = None) -> ModelFacts:
    """Read context length and vocabulary of a model: a Hugging Face directory, or an id that is then looked up.

    `context_limit` is the least that the server flags allow one request, where they say so.
    """
    folder = Path(name).expanduser()
    path = str(folder.resolve()) if folder.is_dir() else name
    if not folder.is_dir():
        folder = _fetch_config(name)
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise GateError(
            f"{folder} has no config.json; --model wants a Hugging Face model directory or id"
        )
    config = _json_object(config_file)
    text_config: Any = config.get("text_config")
    if not isinstance(text_config, dict):
        text_config = config
    context = text_config.get("max_position_embeddings") or config.get("max_position_embeddings")
    if context_limit is not None:
        known = context if isinstance(context, int) and context > 0 else context_limit
        context = min(known, context_limit)
    if not isinstance(context, int) or context < 1:
        raise GateError(
            f"{config_file} names no max_position_embeddings; set the context with --flags-all '--context-length N'"
        )
    vocab_size = text_config.get("vocab_size") or config.get("vocab_size") or 0
    ids, words = _words(folder / "tokenizer.json", int(vocab_size))
    return ModelFacts(path, int(context), ids, words)


def _fetch_config(name: str) -> Path:
    """Fetch only the two small files of a hub model that the workload needs."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=["config.json", "tokenizer.json"]))
    except Exception as error:  # the hub client raises many kinds; all mean the same to the user
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise GateError(
            f"model {name!r} is no directory and could not be fetched ({reason}); give --model a local directory"
        ) from error


def _json_object(file: Path) -> dict[str, Any]:
    """Read a file of the model."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise GateError(f"{file} cannot be read ({error.strerror}); see --model") from error
    except (ValueError, RecursionError) as error:
        raise GateError(f"{file} is no JSON ({error}); see --model") from error
    if not isinstance(content, dict):
        raise GateError(f"{file} holds no JSON object; see --model")
    return content


def _words(tokenizer_file: Path, vocab_size: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return ids of plain lower-case words, and the words where each is one token with and without a space before it.

    Without a tokenizer.json, the safe middle of the vocabulary.
    """
    vocab: Any = {}
    if tokenizer_file.is_file():
        model = _json_object(tokenizer_file).get("model")
        vocab = model.get("vocab", {}) if isinstance(model, dict) else {}
    if isinstance(vocab, list):  # Unigram models list [token, score], the index is the id
        vocab = {entry[0]: index for index, entry in enumerate(vocab)}
    plain = {token: index for token, index in vocab.items() if _PLAIN_WORD.match(token)}
    spaced = {
        index: token[1:]
        for token, index in plain.items()
        if token[0] in _SPACE_MARKS and token[1:] in plain
    }
    if len(spaced) >= _MIN_WORDS:
        ids = sorted(spaced)
        return tuple(ids), tuple(spaced[index] for index in ids)
    if len(plain) >= _MIN_WORDS:
        return tuple(sorted(plain.values())), ()
    # Special tokens sit at either end of a vocabulary, so its middle half holds none of them.
    middle = range(vocab_size // 4, vocab_size * 3 // 4)
    if len(middle) < _MIN_WORDS:
        raise GateError(
            f"{tokenizer_file.parent} has no usable tokenizer.json and a vocabulary of {vocab_size}; "
            "use a model with a tokenizer.json"
        )
    return tuple(middle), ()
