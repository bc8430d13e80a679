# SPDX-License-Identifier: Apache-2.0
"""``numinous roofline`` and ``numinous bytes``; exit codes 0 and, for bad usage or what is not modelled, 2."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numinous_tooling.workbench.discover import NoSuchOp, load_op

from . import RooflineError, models, ops
from .gpus import GPUS, Gpu, gpu
from .pools import KV_DTYPES, PoolOptions
from .report import Question, bytes_report, roofline_report
from .weights import PRECISIONS


def roofline(arguments: Sequence[str]) -> int:
    """``numinous roofline TARGET``: floors of an op or of a model on each GPU."""
    parser = _parser(
        "numinous roofline",
        "Floor time of an op, or tokens per second of a model at most, from bytes and FLOPs.",
        "a model that comes with the package, a config.json, a folder that holds one, an op, or module:OP; models: "
        + ", ".join(models.shipped()),
    )
    parser.add_argument(
        "--gpu", action="append", metavar="GPU", help=f"one of {', '.join(GPUS)}; default: all"
    )
    return _run(parser, arguments, _roofline, _print_roofline)


def bytes_(arguments: Sequence[str]) -> int:
    """``numinous bytes TARGET``: memory and byte model of a model's config."""
    parser = _parser(
        "numinous bytes",
        "Weights, cached bytes, pools and bytes of a pass, from a model's config.json; of one tensor-parallel rank.",
        f"a config.json, a folder that holds one, or one of {', '.join(models.shipped())}",
    )
    return _run(
        parser,
        arguments,
        lambda given: bytes_report(models.read(given.target), _question(given)),
        _print_bytes,
    )


def _parser(name: str, text: str, target: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=name, description=text)
    parser.add_argument("target", help=target)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (1)")
    parser.add_argument(
        "--weights",
        default="checkpoint",
        help=f"checkpoint (as published), {', '.join(PRECISIONS)}; 4 bits are for routed experts, FP8 for the rest",
    )
    parser.add_argument("--kv-dtype", help=f"{', '.join(KV_DTYPES)}; default bf16, DeepSeek V4 fp8")
    parser.add_argument("--prompt", type=int, default=Question.prompt, help="tokens of a prefill")
    parser.add_argument(
        "--context", type=int, default=Question.context, help="cached tokens of a decoding request"
    )
    parser.add_argument("--batch", type=int, default=Question.batch, help="decoding requests")
    parser.add_argument(
        "--memory-gb",
        type=float,
        help="pools of one rank in 10^9 bytes; default of roofline: 90%% of the GPU's memory less the weights",
    )
    parser.add_argument("--page-size", type=int, help="tokens; default: the engine's for the model")
    parser.add_argument(
        "--max-running",
        type=int,
        help="--max-running-requests of the engine (DeepSeek V4's states)",
    )
    parser.add_argument(
        "--state-slots", type=int, help="--max-mamba-cache-size of the engine (linear attention)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def _run(parser: argparse.ArgumentParser, arguments: Sequence[str], make: Any, show: Any) -> int:
    given = parser.parse_args(list(arguments))
    try:
        report = make(given)
    except (RooflineError, NoSuchOp) as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 2
    if given.json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        show(report)
    return 0


def _question(given: argparse.Namespace) -> Question:
    return Question(
        weights=given.weights,
        kv=given.kv_dtype,
        tp=given.tp,
        memory_bytes=None if given.memory_gb is None else int(given.memory_gb * 1e9),
        prompt=given.prompt,
        context=given.context,
        batch=given.batch,
        pools=PoolOptions(
            page_size=given.page_size,
            max_running_requests=given.max_running,
            state_slots=given.state_slots,
        ),
    )


def _roofline(given: argparse.Namespace) -> dict[str, Any]:
    gpus = [gpu(name) for name in given.gpu] if given.gpu else list(GPUS.values())
    if _is_model(given.target):
        return roofline_report(models.read(given.target), _question(given), gpus)
    return _op_report(given.target, gpus)


def _is_model(target: str) -> bool:
    return target in models.shipped() or target.endswith(".json") or Path(target).is_dir()


def _op_report(target: str, gpus: list[Gpu]) -> dict[str, Any]:
    try:
        op = load_op(target)
    except NoSuchOp as error:
        raise RooflineError(
            f"{target} is no model ({', '.join(models.shipped())}, or a config.json) and no op: {error}"
        ) from error
    return ops.report(op, gpus)


def _print_roofline(report: dict[str, Any]) -> None:
    if "op" in report:
        _print_op(report)
        return
    _print_model(report)
    rows = []
    for entry in report["gpus"]:
        start = [entry["gpu"], _gb(entry["weights_bytes"]), entry["kv"]["dtype"]]
        if entry["pool"] is None:
            rows.append([*start, "does not fit", *[""] * 7])
            continue
        prefill, decode = entry["phases"]["prefill"], entry["phases"].get("decode")
        rows.append(
            [
                *start,
                f"{entry['pool']['tokens']:,}",
                f"{prefill['tokens_per_second']:,.0f}",
                prefill["bound"],
                *(
                    ["none fits", "", "", "", ""]
                    if decode is None
                    else [
                        f"{decode['requests']}",
                        f"{decode['floor_ms']:.2f}",
                        f"{decode['tokens_per_second']:,.0f}",
                        f"{decode['tokens_per_second_per_user']:.1f}",
                        decode["bound"],
                    ]
                ),
            ]
        )
    head = "GPU|weights GB|KV rows|pool tokens|prefill tok/s|bound|requests|decode ms|decode tok/s|per user|bound"
    _table(head.split("|"), rows)
    for entry in report["gpus"]:
        if entry["reason"]:
            _line(f"{entry['gpu']}: {entry['reason']}")
    _line(
        f"prefill: one prompt of {report['prompt']:,} tokens; decode: {report['batch']} requests, or what the pool holds, with "
        f"{report['context']:,} cached tokens each; {report['tp']} ranks together; all figures derived, GPU rates reported"
    )


def _print_op(report: dict[str, Any]) -> None:
    _line(f"{report['op']} of {report['package']}: floor per case, derived")
    names = list(report["cases"][0]["gpus"]) if report["cases"] else []
    rows = [
        [
            case["case"],
            f"{case['bytes']:,}",
            f"{case['flops']:,} {case['unit']}" + ("" if case["flops_counted"] else " (no roof)"),
            f"{case['intensity']:.2f}",
            *(
                f"{case['gpus'][name]['floor_us']:.2f} {case['gpus'][name]['bound']}"
                for name in names
            ),
        ]
        for case in report["cases"]
    ]
    _table(["case", "bytes", "FLOPs", "FLOPs/byte", *(f"{name} us" for name in names)], rows)


def _print_bytes(report: dict[str, Any]) -> None:
    _print_model(report)
    _table(
        ["component", "parameters", "GB per rank"],
        [
            [name, f"{count:,}", _gb(report["weights_bytes_by_component"][name])]
            for name, count in report["parameters_by_component"].items()
        ],
    )
    kv = report["kv"]
    _line(
        f"KV rows {kv['dtype']} ({kv['note']}): {kv['bytes_per_token']:,} bytes per token, "
        f"{kv['state_bytes_per_request']:,} bytes of states per request"
    )
    _table(
        ["layers", "attention", "bytes of a row", "index row", "state bytes"],
        [
            [
                str(entry["layers"]),
                title,
                *(
                    f"{entry[key]:,}" if entry.get(key) else ""
                    for key in ("row_bytes", "index_row_bytes", "state_bytes")
                ),
            ]
            for title, entry in kv["per_layer"].items()
        ],
    )
    if pool := report.get("pool"):
        more = [
            f"{pool[key]:,} {text}"
            for key, text in (
                ("sliding_tokens", "window tokens"),
                ("state_slots", "state slots"),
            )
            if pool[key]
        ]
        _line(
            f"pool: {pool['tokens']:,} tokens in pages of {pool['page_size']}, {pool['bytes_per_token']:,.1f} bytes each"
            + "".join(f"; {text}" for text in more)
        )
    rows = [
        [
            name,
            str(entry["layers"]),
            entry["layer"],
            f"{entry['bytes'] / 1e6:,.1f}",
            f"{entry['bytes_by_kind'].get('weights', 0) / 1e6:,.1f}",
            f"{entry['bytes_by_kind'].get('KV read', 0) / 1e6:,.1f}",
            f"{entry['flops'] / 1e9:,.1f}",
        ]
        for name, phase in report["phases"].items()
        for entry in phase["layers"]
    ]
    _table(["phase", "layers", "kind", "MB per layer", "weights", "KV read", "GFLOP"], rows)
    _line(
        f"prefill: one prompt of {report['prompt']:,} tokens; decode: {report['batch']} requests with {report['context']:,} cached "
        "tokens each; per rank; all figures derived"
    )


def _print_model(report: dict[str, Any]) -> None:
    layers = ", ".join(f"{count} x {kind}" for kind, count in report["layers"].items())
    _line(
        f"{report['model']} ({report['architecture']}): {report['parameters'] / 1e9:,.2f} B parameters, "
        f"{report['active_parameters'] / 1e9:.2f} B met by a token; layers: {layers}"
    )
    _line(
        f"weights {report['weights']}: {_gb(report['weights_bytes'])} GB on each of {report['tp']} ranks; "
        f"numbers: {report['source']}"
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:,.2f}"


def _line(text: str) -> None:
    sys.stdout.write(text + "\n")


def _table(head: list[str], rows: list[list[str]]) -> None:
    """Columns of plain text: the first to the left, figures to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, *rows]:
        cells = [
            cell.rjust(width) if _is_figure(cell) else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ]
        _line("  " + "  ".join(cells).rstrip())


def _is_figure(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "", 1).isdigit()
