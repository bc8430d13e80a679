# SPDX-License-Identifier: Apache-2.0
"""Whether an answer is one that a program can read: a tool call, JSON, or the one shell block of an agent.

A patched server that still writes fluent text may break exactly these. A turn is judged only where the recorded answer
had such a form; an answer that failed counts as invalid, so that nothing is dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Literal

AnswerFormat = Literal["tool_call", "json", "bash_block"]

_TAGGED_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_JSON_FENCE = re.compile(r"^```(?:json)?\s*\n(.*)\n```$", re.DOTALL)
_BASH_BLOCK = re.compile(r"^```bash\s*\n(.*?)\n```\s*$", re.DOTALL | re.MULTILINE)


def answer_format(text: str, tool_arguments: Sequence[str] = ()) -> AnswerFormat | None:
    """Return the machine-readable form of an answer, or None.

    Args:
        text: the answer's content.
        tool_arguments: the `arguments` of each tool call that the API reported apart from the content.
    """
    if tool_arguments:
        return "tool_call" if all(map(_is_json_container, tool_arguments)) else None
    tagged = _TAGGED_CALL.findall(text)
    if tagged:
        return "tool_call" if all(map(_is_json_container, tagged)) else None
    stripped = text.strip()
    fenced = _JSON_FENCE.match(stripped)
    if _is_json_container(fenced.group(1) if fenced else stripped):
        return "json"
    blocks = _BASH_BLOCK.findall(text)
    return "bash_block" if len(blocks) == 1 and blocks[0].strip() else None


def _is_json_container(text: str) -> bool:
    try:
        return isinstance(json.loads(text), (dict, list))
    except ValueError:
        return False
