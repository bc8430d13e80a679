# SPDX-License-Identifier: Apache-2.0
"""Text to tokens: documents, a byte-level BPE vocabulary, windows.

Files hold documents divided by a line with U+001E alone; `.xz` files are unpacked. The vocabulary is learned on
every `SAMPLE_STEP`-th piece of 4,096 characters of the training text, the same pieces every time.
"""

from __future__ import annotations

import hashlib
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from judge_configs import END_OF_TEXT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SEPARATOR = "\n\x1e\n"
SPECIAL = ("<|endoftext|>", "<|padding|>")
PIECE, SAMPLE_STEP = 4096, 6


@dataclass(frozen=True)
class Tokens:
    """Token ids of a text, and how many bytes each id stands for."""

    ids: np.ndarray[Any, np.dtype[np.int32]]
    id_bytes: np.ndarray[Any, np.dtype[np.int32]]


def read_documents(path: Path) -> list[str]:
    """The documents of a file, empty ones dropped."""
    data = path.read_bytes()
    text = (lzma.decompress(data) if path.suffix == ".xz" else data).decode("utf-8")
    return [document for document in text.split(SEPARATOR) if document.strip()]


def sha256(path: Path) -> str:
    """Of the file as it lies there."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def train_tokenizer(documents: list[str], vocabulary: int, step: int = SAMPLE_STEP) -> Tokenizer:
    """Byte-level BPE for a model of `vocabulary` rows; raises ValueError when the text has too few pairs for that.

    The last row stays without a token: where SGLang 0.5.20 gives log-probabilities of a prompt, it names the last
    id 0.
    """
    want = vocabulary - 1
    pieces = [doc[i : i + PIECE] for doc in documents for i in range(0, len(doc), PIECE)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=want,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces[::step], trainer)
    if tokenizer.get_vocab_size() != want:
        raise ValueError(
            f"the text gives a vocabulary of {tokenizer.get_vocab_size()}, not {want}; give more text"
        )
    return tokenizer


def bytes_of_ids(tokenizer: Tokenizer) -> np.ndarray[Any, np.dtype[np.int32]]:
    """How many bytes of text each id stands for; special tokens stand for none."""
    out = np.zeros(tokenizer.get_vocab_size(), dtype=np.int32)
    for token, number in tokenizer.get_vocab().items():
        # The byte-level alphabet has one character for each byte.
        out[number] = 0 if token in SPECIAL else len(token)
    return out


def encode(tokenizer: Tokenizer, documents: list[str]) -> Tokens:
    """All documents in one row, each after an end-of-text token."""
    parts = [
        np.asarray([END_OF_TEXT, *encoded.ids], dtype=np.int32)
        for encoded in tokenizer.encode_batch_fast(documents, add_special_tokens=False)
    ]
    return Tokens(np.concatenate(parts), bytes_of_ids(tokenizer))


def windows(
    ids: np.ndarray[Any, np.dtype[np.int32]], length: int
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Rows [n, length + 1] of consecutive tokens: inputs and, one further, targets."""
    count = (len(ids) - 1) // length
    if count < 1:
        raise ValueError(f"a text of {len(ids)} tokens has no window of {length}; give more text")
    starts = np.arange(count)[:, None] * length
    return ids[starts + np.arange(length + 1)]
