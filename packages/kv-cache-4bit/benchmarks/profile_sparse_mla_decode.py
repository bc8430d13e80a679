# SPDX-License-Identifier: Apache-2.0
"""Where `sparse_mla_decode` spends its cycles: one case in a loop, for Nsight Compute to look at, and a record of what it saw.

    python profile_sparse_mla_decode.py --metrics > metrics.txt
    ncu --clock-control none --csv --print-units base --log-file case.csv --kernel-name 'regex:^(wide|narrow|packed|combine)' \\
        --launch-skip 4 --launch-count 6 --metrics "$(cat metrics.txt)" \\
        python profile_sparse_mla_decode.py --heads 64 --batch 64
    python profile_sparse_mla_decode.py --heads 64 --batch 64 --summary case.csv --evidence [FILE]

`--set full -o case.ncu-rep` in place of `--csv … --metrics …` leaves a report to be opened by hand; from it,
`ncu --import case.ncu-rep --csv --print-units base --metrics "$(cat metrics.txt)" > case.csv` gives what `--summary` reads.

ncu replays each launch once for every group of counters, with L2 emptied before (its default), so that rows come from device memory as
in the benchmark. Times under it are longer and are no benchmark; they are in the record so that cycles can be read against something. A
metric that this GPU or ncu does not have is missing from the record, not 0. `--summary` runs on the machine that was profiled: the
record names its GPU and versions. Exit 2: nothing could be profiled or read.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from numinous_kv_cache_4bit import __version__
from numinous_kv_cache_4bit.workbench.sparse_mla_decode import OP, Case
from numinous_tooling import evidence
from numinous_tooling.bench import facts
from numinous_tooling.bench.clocks import CpuClock, CudaClock
from numinous_tooling.workbench import case_id

STALLS = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
REASONS = (
    "barrier", "branch_resolve", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "selected", "short_scoreboard",
    "sleeping", "tex_throttle", "wait", "warpgroup_arrive",
)  # fmt: skip
METRICS = {
    "time_ns": "gpu__time_duration.sum",
    "sm_cycles": "sm__cycles_active.avg",
    "tensor_percent": "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "tensor_cycles_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "tensor_hmma_cycles_percent": "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "alu_percent": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "xu_percent": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "shared_percent": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "shared_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "l2_percent": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "l2_bytes": "lts__t_bytes.sum",
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
}


def metrics() -> str:
    """What `ncu --metrics` is given."""
    return ",".join([*METRICS.values(), *(STALLS.format(reason) for reason in REASONS)])


def parse_csv(lines: Iterable[str]) -> dict[str, dict[str, list[float]]]:
    """Kernel -> metric -> its value in each launch, from ncu's CSV with one line a launch and metric.

    Lines before the header are ncu's and the program's own. ValueError: no header, no value, or a unit that `--print-units base` does not
    give.
    """
    rows = iter(lines)
    for line in rows:
        if line.startswith('"ID",'):
            break
    else:
        raise ValueError('no line begins with "ID": is it ncu --csv?')
    head = next(csv.reader([line]))
    missing = {"Kernel Name", "Metric Name", "Metric Unit", "Metric Value"} - set(head)
    if missing:
        raise ValueError(f"no column {', '.join(sorted(missing))}: --page raw is not read")
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cells in csv.reader(line for line in rows if line.startswith('"')):
        row = dict(zip(head, cells, strict=True))
        unit, text = row["Metric Unit"], row["Metric Value"].replace(",", "")
        if unit.lower() in ("usecond", "us", "msecond", "ms", "kbyte", "mbyte", "gbyte"):
            raise ValueError(f"{row['Metric Name']} in {unit}: add --print-units base")
        kernel = row["Kernel Name"].split("(")[0]
        try:
            value = float(text)
        except ValueError:  # "n/a": this GPU does not have it
            continue
        found[kernel][row["Metric Name"]].append(value)
    if not any(found.values()):
        raise ValueError("no launch was profiled")
    return found


def summary(launches: dict[str, list[float]]) -> dict[str, Any]:
    """Means over the launches of a kernel: what `METRICS` names, and stalls as warps a cycle of issue, the largest first."""
    made: dict[str, Any] = {
        name: fmean(launches[metric]) for name, metric in METRICS.items() if metric in launches
    }
    if "time_ns" in made:
        time = made.pop("time_ns")
        made = {"time_us": time / 1e3, **made}
        for memory, names in (("l2", ("l2_bytes",)), ("dram", ("dram_read_bytes", "dram_write_bytes"))):  # fmt: skip
            if all(name in made for name in names):
                made[f"{memory}_bytes_s"] = sum(made[name] for name in names) / time * 1e9
    stalls = {
        reason: fmean(launches[STALLS.format(reason)])
        for reason in REASONS
        if STALLS.format(reason) in launches
    }
    made["stalls"] = dict(sorted(stalls.items(), key=lambda item: -item[1]))
    return made


def records(
    found: dict[str, dict[str, list[float]]], case: Case, common: dict[str, Any], command: str
) -> list[dict[str, Any]]:
    """Evidence of one profile: a record per kernel."""
    return [
        {
            "package": "kv-cache-4bit",
            "version": __version__,
            **common,
            "op": "sparse_mla_decode_profile",
            "case": case_id(case),
            "provider": kernel,
            "provider_version": __version__,
            "n": max(map(len, launches.values())),
            **summary(launches),
            "gate": "none: a profile; answers are judged by the benchmark of the same commit",
            "command": command,
        }
        for kernel, launches in found.items()
        if launches
    ]


def line(record: dict[str, Any]) -> str:
    """One line of a record."""
    shown = [f"{name} {record[name]:.4g}" for name in ("time_us", *METRICS) if name in record]
    stalls = [f"{reason} {value:.2f}" for reason, value in list(record["stalls"].items())[:6]]
    return f"{record['provider']}, {record['n']} launches: {', '.join(shown)}; stalls: {', '.join(stalls)}"


def loop(case: Case, launches: int, device: torch.device, impl: str = "cuda") -> None:
    """Run a CUDA version that often; the first also compiles."""
    inputs = OP.make_inputs(case, 0, device)
    for _ in range(launches):
        OP.implementations[impl].run(case, inputs)
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64, help="requests")
    parser.add_argument("--k", type=int, default=2048, help="rows of a query")
    parser.add_argument("--width", type=int, default=352, help="bytes of a row")
    parser.add_argument("--queries", type=int, default=1, help="of a request")
    parser.add_argument("--splits", type=int, default=0, help="0: the kernel's choice")
    parser.add_argument("--impl", choices=["cuda", "decoded", "packed"], default="cuda")
    parser.add_argument("--launches", type=int, default=12)
    parser.add_argument("--metrics", action="store_true", help="print what ncu is to be asked for")
    parser.add_argument("--summary", type=Path, metavar="FILE.csv", help="read what ncu wrote")
    parser.add_argument(
        "--evidence", type=Path, nargs="?", const=Path(), help="append records (to FILE)"
    )
    options = parser.parse_args(argv)
    if options.metrics:
        print(metrics())
        return 0
    case = Case(
        options.batch, options.heads, options.k, options.width, options.queries, splits=options.splits
    )  # fmt: skip
    gpu = torch.cuda.is_available()
    if options.summary is None:
        if not gpu:
            print("profile_sparse_mla_decode: torch sees no GPU", file=sys.stderr)
            return 2
        loop(case, options.launches, torch.device("cuda"), options.impl)
        return 0
    try:
        found = parse_csv(options.summary.read_text("utf-8").splitlines(keepends=True))
    except (OSError, ValueError) as error:
        print(f"profile_sparse_mla_decode: {options.summary}: {error}", file=sys.stderr)
        return 2
    common = facts.run_facts(CudaClock() if gpu else CpuClock(), os.environ)
    command = " ".join(["profile_sparse_mla_decode.py", *(argv or sys.argv[1:])])
    made = records(found, case, common, command)
    print("\n".join(map(line, made)))
    if options.evidence is not None:
        if not gpu:
            print("profile_sparse_mla_decode: a record names the GPU profiled, here is none", file=sys.stderr)  # fmt: skip
            return 2
        path = options.evidence
        if path == Path():
            folder = evidence.find_evidence(Path(__file__).parent) / "kv-cache-4bit"
            path = folder / "sparse_mla_decode_profile.jsonl"
        evidence.append(path, made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
