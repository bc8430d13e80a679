# SPDX-License-Identifier: Apache-2.0
"""``numinous diag bytes``: the byte model of a config.json beside what a server says of its memory.

*Predicted* by `numinous_tooling.roofline`: weights of one rank, bytes of a token and of a request's states, and the
          tokens that the engine's own arithmetic makes of the memory that was free.
*Measured* from the server's log (start to "max_total_num_tokens="), from ``/server_info`` of a running server, or both;
          the engine's "GB" are GiB in both. The log rounds to 0.01 GiB, /server_info to 0.001: differences below
          that resolution are none.
*Unexplained* what left the GPU between the first line of the load and the end of the start, less what the log names.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from numinous_tooling.diag import DiagError
from numinous_tooling.roofline import RooflineError, models
from numinous_tooling.roofline.models import Model
from numinous_tooling.roofline.pools import (
    KV_DTYPES,
    KvRows,
    PoolOptions,
    is_compressed,
    is_sliding,
    kv_dtype,
    size,
    state_bytes,
    token_bytes,
)
from numinous_tooling.roofline.weights import PRECISIONS

GIB = 1 << 30
LOG_STEP = 0.01 * GIB  # two decimals
INFO_STEP = 0.001 * GIB
URL_TIMEOUT_S = 30
KV_OF_TORCH = {"bfloat16": "bf16", "float16": "bf16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}
"""dtype of the engine's pool -> rows of the byte model; float32 is made from bf16."""

KV_OF_ARGUMENT = {
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
}
"""--kv-cache-dtype -> dtype of the pool; ``auto`` is the model's."""

_NUMBER = r"(-?\d+(?:\.\d+)?)"
# The draft model's pool is not the target's; a pool sized after the graphs were captured says so in other words.
_POOL = r"^(?!.*Draft).*KV [Cc]ache (?:is )?allocated\. dtype: torch\."
_LINES = {
    "begin": rf"Load weight begin\. avail mem={_NUMBER} GB",
    "weights": rf"Load weight end\. .*mem usage={_NUMBER} GB",
    "loaded": rf"Load weight end\. .*avail mem={_NUMBER} GB",
    "k": rf"{_POOL}.*\bK size: {_NUMBER} GB",
    "v": rf"{_POOL}.*\bV size: {_NUMBER} GB",
    "kv": rf"{_POOL}.*\bKV size: {_NUMBER} GB",
    "kv_tokens": rf"{_POOL}.*#tokens: (\d+)",
    "kv_dtype": rf"{_POOL}(\w+)",
    "conv": rf"Mamba Cache is allocated\. .*conv_state size: {_NUMBER}GB",
    "ssm": rf"Mamba Cache is allocated\. .*ssm_state size: {_NUMBER}GB",
    "slots": r"Mamba Cache is allocated\. max_mamba_cache_size: (\d+)",
    "tokens": r"max_total_num_tokens=(\d+), chunked_prefill_size",
    "left": rf"available_[gc]pu_mem={_NUMBER} GB",
}
_GRAPHS = re.compile(rf"Capture .* end\. .*mem usage={_NUMBER} GB")
_ARGUMENTS = {
    "tp_size": r"'tp_size': (\d+)",
    "page_size": r"'page_size': (\d+)",
    "mem_fraction_static": rf"'mem_fraction_static': {_NUMBER}",
    "max_total_tokens": r"'max_total_tokens': (\d+)",
    "dtype": r"'dtype': '(\w+)'",
}
_OTHER_RANK = re.compile(r"\b(?:TP|DP|PP)[1-9]\d*\b[^]]*\]")


@dataclass(frozen=True)
class Measured:
    """What a server says of one rank; bytes, None where it does not say.

    Args:
        weights, kv, states, graphs: allocated.
        kv_tokens: of the pool, without the padding page.
        kv_type: the pool's torch dtype, ``dtype`` the model's.
        state_slots: requests' states, without the padding slot.
        tokens: that the scheduler may fill.
        begin, loaded, left: free memory before the weights, after them, and when the server was ready.
        step: resolution of the sizes.
        tp, page_size, fraction, max_tokens: arguments of the server.
        source: where it is from.
    """

    weights: float | None = None
    kv: float | None = None
    kv_tokens: int | None = None
    kv_type: str | None = None
    dtype: str | None = None
    states: float | None = None
    state_slots: int | None = None
    graphs: float | None = None
    tokens: int | None = None
    begin: float | None = None
    loaded: float | None = None
    left: float | None = None
    step: float = LOG_STEP
    tp: int | None = None
    page_size: int | None = None
    fraction: float | None = None
    max_tokens: int | None = None
    source: str = ""

    def beside(self, other: Measured) -> Measured:
        """This, and from `other` what this does not say."""
        mine = {k: v for k, v in asdict(self).items() if v is not None}
        return Measured(
            **{
                **asdict(other),
                **mine,
                "step": max(self.step, other.step),
                "source": f"{self.source}, {other.source}",
            }
        )


def from_log(text: str, where: str = "log") -> Measured:
    """Read the lines of a start; of several ranks the first one.

    Raises:
        DiagError: neither weights nor a pool are named.
    """
    lines = [line for line in text.splitlines() if not _OTHER_RANK.search(line[:80])]
    found: dict[str, str] = {}
    for name, pattern in {**_LINES, **_ARGUMENTS}.items():
        for line in lines:
            if match := re.search(pattern, line):
                found[name] = match[1]
                break
    if "weights" not in found and "kv_tokens" not in found:
        raise DiagError(
            f"{where} has no line `Load weight end` and none `KV Cache is allocated`; give the log of a server's start"
        )
    graphs = [float(match[1]) for line in lines if (match := _GRAPHS.search(line))]

    def gib(*names: str) -> float | None:
        values = [float(found[name]) * GIB for name in names if name in found]
        return sum(values) if values else None

    def whole(name: str) -> int | None:
        return int(found[name]) if name in found else None

    return Measured(
        weights=gib("weights"),
        kv=gib("k", "v", "kv"),
        kv_tokens=whole("kv_tokens"),
        kv_type=found.get("kv_dtype"),
        dtype=found.get("dtype"),
        states=gib("conv", "ssm"),
        state_slots=whole("slots"),
        graphs=sum(graphs) * GIB if graphs else None,
        tokens=whole("tokens"),
        begin=gib("begin"),
        loaded=gib("loaded"),
        left=gib("left"),
        tp=whole("tp_size"),
        page_size=whole("page_size"),
        fraction=float(found["mem_fraction_static"]) if "mem_fraction_static" in found else None,
        max_tokens=whole("max_total_tokens"),
        source=where,
    )


def from_server_info(info: Mapping[str, Any], where: str = "/server_info") -> Measured:
    """Read the answer of ``/server_info``; of several replicas the first one.

    Raises:
        DiagError: it holds no memory usage, as that of another server.
    """
    states = info.get("internal_states")
    usage = states[0].get("memory_usage") if isinstance(states, list) and states else None
    if not isinstance(usage, dict) or not isinstance(usage.get("weight"), int | float):
        raise DiagError(f"{where} names no memory_usage; is it SGLang 0.5.20?")
    graphs = sum(usage.get("graph", {}).values())
    dtype = str(info.get("dtype") or "auto")
    return Measured(
        weights=usage["weight"] * GIB,
        kv=usage["kvcache"] * GIB,
        kv_tokens=usage["token_capacity"],
        kv_type=KV_OF_ARGUMENT.get(str(info.get("kv_cache_dtype"))),
        dtype=None if dtype == "auto" else dtype,
        graphs=graphs * GIB if graphs else None,
        tokens=info.get("max_total_num_tokens"),
        left=usage["startup_available"] * GIB,
        step=INFO_STEP,
        tp=info.get("tp_size"),
        page_size=info.get("page_size"),
        fraction=info.get("mem_fraction_static"),
        max_tokens=info.get("max_total_tokens"),
        source=where,
    )


def ask(url: str) -> Mapping[str, Any]:
    """``/server_info`` of a running server; raises DiagError in one line."""
    where = url.rstrip("/") + "/server_info"
    if not where.startswith(("http://", "https://")):
        raise DiagError(f"--url {url}: want http://host:port")
    # A proxy of the environment must not stand between this host and a server on it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(where, timeout=URL_TIMEOUT_S) as answer:
            info = json.load(answer)
    except urllib.error.HTTPError as error:
        raise DiagError(f"{where} answers {error.code}; is it an SGLang server?") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise DiagError(f"{where}: {reason}; is a server running there?") from error
    if not isinstance(info, dict):
        raise DiagError(f"{where} answers no JSON object; is it an SGLang server?")
    return info


@dataclass(frozen=True)
class Row:
    """One quantity.

    Args:
        name: with its unit.
        predicted, measured: None where there is none.
        resolution: a smaller difference is none.
        holds: None where one side is missing.
    """

    name: str
    predicted: float | None
    measured: float | None
    resolution: float = 0.0
    holds: bool | None = None


def compare(
    model: Model, measured: Measured, options: argparse.Namespace
) -> tuple[list[Row], list[str]]:
    """Rows of the table, and what they rest on, one line each."""
    tp = options.tp or measured.tp or 1
    rows_of_kv, said = _rows(measured, options.kv_dtype)
    page = options.page_size or measured.page_size or 1
    weights = _weights(model, options.weights, measured.dtype, tp)
    per_token = token_bytes(model, rows_of_kv, tp)
    uniform = not is_compressed(model) and not is_sliding(model)
    table = [Row("weights, GiB", weights / GIB, _gib(measured.weights), measured.step / GIB)]
    notes = [f"{tp} ranks, one of them; KV rows {rows_of_kv.name} ({said}); pages of {page}"]
    if measured.kv is not None and measured.kv_tokens and uniform:
        held = measured.kv_tokens + page  # the padding page is allocated too
        table += [
            Row(
                "KV bytes per token",
                per_token,
                measured.kv / held,
                2 * measured.step / held,
            ),
            Row("KV pool, GiB", per_token * held / GIB, measured.kv / GIB, 2 * measured.step / GIB),
        ]
    elif measured.kv is not None:
        table.append(Row("KV pool, GiB", None, measured.kv / GIB))
        notes.append("pools of windows or compressed rows are not compared: the log names no share")
    per_slot = state_bytes(model, tp)
    if per_slot or measured.states is not None:
        slots = measured.state_slots
        predicted = None if slots is None else per_slot * (slots + 1) / GIB
        table.append(
            Row("request states, GiB", predicted, _gib(measured.states), 2 * measured.step / GIB)
        )
    if measured.graphs is not None:
        table.append(Row("CUDA graphs, GiB", None, measured.graphs / GIB))
    tokens = _tokens(model, rows_of_kv, measured, tp, page)
    if tokens is not None:
        table.append(
            Row("tokens of the pool", tokens, measured.tokens, 3 * measured.step / per_token)
        )
    elif measured.tokens is not None:
        table.append(Row("tokens of the pool", None, measured.tokens))
    if measured.begin is not None and measured.left is not None:
        used = measured.begin - measured.left
        parts = (measured.weights, measured.kv, measured.states, measured.graphs)
        named = sum(part for part in parts if part is not None)
        table += [
            Row("used since the load began, GiB", None, used / GIB),
            Row("unexplained, GiB", None, (used - named) / GIB),
        ]
    return [_judged(row, options.tolerance) for row in table], notes


def _judged(row: Row, tolerance: float) -> Row:
    if row.predicted is None or row.measured is None:
        return row
    allowed = max(tolerance / 100 * row.predicted, row.resolution)
    return replace(row, holds=abs(row.measured - row.predicted) <= allowed)


def _rows(measured: Measured, asked: str | None) -> tuple[KvRows, str]:
    if asked is not None:
        return kv_dtype(asked), "as asked"
    name = measured.kv_type or measured.dtype
    if name is None:
        return kv_dtype("bf16"), "assumed; say --kv-dtype"
    if name == "float32":
        return replace(kv_dtype("bf16"), name="fp32", itemsize=4, note="stock"), "as the server"
    if name not in KV_OF_TORCH:
        raise DiagError(f"the server's KV pool holds {name}; say --kv-dtype {'|'.join(KV_DTYPES)}")
    return kv_dtype(KV_OF_TORCH[name]), "as the server"


def _weights(model: Model, asked: str, dtype: str | None, tp: int) -> int:
    if dtype == "float32" and asked == "checkpoint":
        return sum(-(-4 * weight.parameters // weight.ranks(tp)) for weight in model.weights())
    return sum(model.weight_bytes(model.precision(asked), tp).values())


def _tokens(model: Model, rows: KvRows, measured: Measured, tp: int, page: int) -> int | None:
    """What the engine's arithmetic makes of the free memory; None where a limit was given or a figure is missing."""
    if measured.begin is None or measured.loaded is None or measured.fraction is None:
        return None
    if measured.max_tokens is not None:
        return measured.max_tokens // page * page
    budget = measured.loaded - measured.begin * (1 - measured.fraction)
    slots = measured.state_slots
    return size(model, rows, int(budget), tp, PoolOptions(page_size=page, state_slots=slots)).tokens


def _gib(size_: float | None) -> float | None:
    return None if size_ is None else size_ / GIB


def gpu_processes() -> list[dict[str, Any]]:
    """Memory of each process on this machine's NVIDIA GPUs, MiB; raises DiagError where that cannot be asked."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise DiagError("--nvidia-smi: there is no nvidia-smi here; leave it out")
    query = [tool, "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise DiagError(f"--nvidia-smi: {error}") from error
    return parse_gpu_processes(done.stdout)


def parse_gpu_processes(text: str) -> list[dict[str, Any]]:
    """Lines ``uuid, pid, MiB``; what a container may not see is left out."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3 and cells[1].isdigit() and cells[2].isdigit():
            found.append({"gpu": cells[0], "pid": int(cells[1]), "mib": int(cells[2])})
    return found


# Command -----------------------------------------------------------------------------------------------------------


def add_parser(commands: Any) -> None:
    """``numinous diag bytes``."""
    parser = commands.add_parser(
        "bytes",
        help="predicted against measured memory",
        description="The byte model of a config.json beside what a server says of its memory (one rank).",
    )
    parser.add_argument("--config", required=True, help="config.json of the model, or its folder")
    parser.add_argument("--url", help="a running server: http://host:port")
    parser.add_argument("--log", type=Path, metavar="FILE", help="log of a server's start")
    parser.add_argument("--tp", type=int, help="tensor-parallel ranks; default: the server's")
    parser.add_argument("--page-size", type=int, help="tokens; default: the server's")
    parser.add_argument("--kv-dtype", help=f"{', '.join(KV_DTYPES)}; default: the server's")
    parser.add_argument(
        "--weights", default="checkpoint", help=f"checkpoint, or {', '.join(PRECISIONS)}"
    )
    parser.add_argument(
        "--tolerance", type=float, default=5.0, metavar="PERCENT", help="of the prediction (5)"
    )
    parser.add_argument(
        "--nvidia-smi", action="store_true", help="also memory per process, as the driver says"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Exit 0 if every prediction holds, 1 if one does not; raises DiagError, RooflineError."""
    if given.url is None and given.log is None:
        raise DiagError("bytes: give --url of a running server, --log of its start, or both")
    for name in ("tp", "page_size"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise DiagError(f"--{name.replace('_', '-')} {value}: want a whole number from 1 on")
    if not 0 <= given.tolerance < 100:
        raise DiagError(f"--tolerance {given.tolerance}: want percent from 0 to below 100")
    model = models.read(given.config)
    measured = None
    if given.log is not None:
        try:
            text = given.log.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise DiagError(f"--log {given.log}: {error.strerror}") from error
        measured = from_log(text, given.log.name)
    if given.url is not None:
        info = from_server_info(ask(given.url), "/server_info")
        measured = info if measured is None else measured.beside(info)
    assert measured is not None
    table, notes = compare(model, measured, given)
    processes = gpu_processes() if given.nvidia_smi else None
    report = {
        "model": model.name,
        "source": measured.source,
        "rows": [asdict(row) for row in table],
        "notes": notes,
        "gpu_processes": processes,
    }
    if given.json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        _show(report, table)
    return 1 if any(row.holds is False for row in table) else 0


def _show(report: dict[str, Any], rows: list[Row]) -> None:
    write = sys.stdout.write
    write(f"{report['model']}: byte model against {report['source']}\n")
    width = max(len(row.name) for row in rows)
    write(f"  {'':{width}}  {'predicted':>14}  {'measured':>14}  {'difference':>14}\n")
    for row in rows:
        difference = (
            ""
            if row.predicted is None or row.measured is None
            else f"{row.measured - row.predicted:+,.3f}"
        )
        end = {True: "", False: "  does not hold", None: ""}[row.holds]
        write(
            f"  {row.name:{width}}  {_figure(row.predicted):>14}  {_figure(row.measured):>14}  {difference:>14}{end}\n"
        )
    for note in report["notes"]:
        write(f"{note}\n")
    for process in report["gpu_processes"] or ():
        write(f"GPU {process['gpu']}: process {process['pid']} holds {process['mib']:,} MiB\n")


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.3f}"


__all__ = ["Measured", "RooflineError", "Row", "compare", "from_log", "from_server_info", "run"]
