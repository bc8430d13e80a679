# SPDX-License-Identifier: Apache-2.0
"""The fixed token sequences that both arms score: windows of plain text and of agent transcripts.

*Plain text*: UTF-8; documents are separated by lines that hold only U+001E. *Transcripts*: JSON lines (``.jsonl``,
also ``.jsonl.gz``), each an object with ``messages`` in the OpenAI form. They are written out in ChatML with tool calls
as ``<tool_call>`` JSON whatever the model's own template is: what counts is that both arms see the same tokens. Tokens
of tool calls, of JSON documents and of fenced blocks in assistant messages are marked as *protocol*: a wrong one of
those breaks an agent where a wrong word would not.

Segments are tokenised apart, so that the mark's edges are exact.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from numinous_tooling.gate.errors import GateError

Tokenize = Callable[[list[str]], list[list[int]]]

# Kind -> file of the package's own texts, written for it; used where no --text is given.
BUILT_IN = {"prose": "prose.txt", "code": "code.txt", "agent": "agent.jsonl"}
DOCUMENT_SEPARATOR = re.compile(r"^\x1e$", re.MULTILINE)
# More than any tokeniser needs for running text; what is too much is cut off.
CHARACTERS_PER_TOKEN = 8
MIN_TOKENS = 16

_PROTOCOL = re.compile(r"<tool_call>.*?</tool_call>|```.*?```", re.DOTALL)


@dataclass(frozen=True)
class Segment:
    """A piece of a document that is protocol or not, as a whole."""

    text: str
    protocol: bool = False


Document = tuple[Segment, ...]


@dataclass(frozen=True)
class TokenSequence:
    """Token ids that both arms are forced along; `protocol` marks those of tool calls and JSON."""

    name: str
    kind: str
    ids: tuple[int, ...]
    protocol: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.ids)


def load_texts(paths: Mapping[str, Path]) -> dict[str, list[Document]]:
    """Read texts by kind; the package's own where `paths` is empty.

    Raises:
        GateError: a file cannot be read or holds no text.
    """
    if not paths:
        folder = resources.files("numinous_tooling.gate.accuracy").joinpath("data")
        contents = {kind: folder.joinpath(name).read_bytes() for kind, name in BUILT_IN.items()}
        names = dict(BUILT_IN)
    else:
        contents = {kind: _read(kind, path) for kind, path in paths.items()}
        names = {kind: path.name for kind, path in paths.items()}
    texts = {}
    for kind, content in contents.items():
        where = f"--text {kind}={names[kind]}"
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise GateError(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from error
        transcript = names[kind].removesuffix(".gz").endswith(".jsonl")
        documents = list(parse_transcripts(text, where) if transcript else parse_plain(text))
        if not documents:
            raise GateError(f"{where}: no text in it")
        texts[kind] = documents
    return texts


def _read(kind: str, path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise GateError(f"--text {kind}={path}: {reason}") from error


def parse_plain(text: str) -> Iterator[Document]:
    """Yield the documents of a plain text."""
    for part in DOCUMENT_SEPARATOR.split(text):
        if part.strip():
            yield (Segment(part.strip("\n") + "\n"),)


def parse_transcripts(text: str, where: str) -> Iterator[Document]:
    """Yield one document per transcript; `where` names the input in errors."""
    # Not splitlines: inside a JSON string U+2028 and U+0085 are characters like others.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            messages = json.loads(line)["messages"]
            yield tuple(segment for message in messages for segment in _render(message))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise GateError(
                f"{where}, line {number}: no transcript (an object with a list of messages, each with role and content)"
            ) from error


def _render(message: Mapping[str, Any]) -> Iterator[Segment]:
    """Yield the segments of one message in ChatML."""
    role = str(message["role"])
    content = message.get("content") or ""
    if not isinstance(content, str):  # parts of the newer form; only their text is used
        content = "".join(part.get("text", "") for part in content)
    yield Segment(f"<|im_start|>{role}\n")
    if role == "assistant":
        end = 0
        for found in _PROTOCOL.finditer(content):
            yield Segment(content[end : found.start()])
            yield Segment(found[0], protocol=True)
            end = found.end()
        yield Segment(content[end:])
    else:
        yield Segment(content, protocol=_is_json(content))
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function.get("arguments", "{}")
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
        body = f'{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}'
        yield Segment(f"\n<tool_call>\n{body}\n</tool_call>", protocol=True)
    yield Segment("<|im_end|>\n")


def _is_json(text: str) -> bool:
    if not text.lstrip().startswith(("{", "[")):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def build_sequences(
    texts: Mapping[str, Sequence[Document]],
    tokenize: Tokenize,
    *,
    per_kind: int,
    length: int,
    seed: int,
) -> list[TokenSequence]:
    """Return up to `per_kind` windows of at most `length` tokens of each kind, kinds taking turns.

    Windows are spread evenly over a kind's text; `seed` moves them. Those of transcripts lie around protocol tokens.
    Windows that come out shorter than `MIN_TOKENS` are left out, and of equal ones, as a text that is hardly longer than a window
    gives, all but one: a bootstrap would take them for so many samples.
    """
    columns = []
    for kind, documents in texts.items():
        generator = random.Random(f"{seed}/{kind}/{length}")
        column: list[TokenSequence] = []
        for index in range(per_kind):
            point = (index + generator.random()) / per_kind
            tokens, marks = _window(documents, point, length, tokenize)
            known = {sequence.ids for sequence in column}
            if len(tokens) >= min(MIN_TOKENS, length) and tokens not in known:
                column.append(TokenSequence(f"{kind}-{index}", kind, tokens, marks))
        columns.append(column)
    return [column[index] for index in range(per_kind) for column in columns if index < len(column)]


def _window(
    documents: Sequence[Document], point: float, length: int, tokenize: Tokenize
) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Return a window at `point`, a share of the whole text from 0 to 1."""
    characters = CHARACTERS_PER_TOKEN * length
    # Weighed by the places at which a whole window can begin.
    room = [max(1, sum(len(s.text) for s in document) - characters) for document in documents]
    place = int(point * sum(room))
    chosen = 0
    while place >= room[chosen] and chosen + 1 < len(room):
        place -= room[chosen]
        chosen += 1
    return _cut(documents[chosen], place, characters, length, tokenize)


def _cut(
    document: Document, place: int, characters: int, length: int, tokenize: Tokenize
) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Return `length` tokens from about the character `place` on, or around the next protocol token after it."""
    start = place
    if len(document) == 1:
        text = document[0].text
        start = text.rfind("\n", 0, place) + 1
    else:
        edges = [0]
        for segment in document:
            edges.append(edges[-1] + len(segment.text))
        marked = [edge for edge, segment in zip(edges, document, strict=False) if segment.protocol]
        target = next((edge for edge in marked if edge >= place), marked[-1] if marked else place)
        # Before it, half a window of characters: an eighth of the window, with common tokenisers.
        start = max(0, min(target, edges[-1]) - length // 2)
    pieces: list[tuple[str, bool]] = []
    at = 0
    for segment in document:
        piece = segment.text[max(0, start - at) : max(0, start + characters - at)]
        at += len(segment.text)
        if piece:
            pieces.append((piece, segment.protocol))
    tokens: list[int] = []
    marks: list[bool] = []
    for ids, (_, protocol) in zip(tokenize([text for text, _ in pieces]), pieces, strict=True):
        tokens += ids
        marks += [protocol] * len(ids)
    return tuple(tokens[:length]), tuple(marks[:length])
