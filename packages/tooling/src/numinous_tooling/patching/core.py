# SPDX-License-Identifier: Apache-2.0
"""numinous' own hooks, installed whenever at least one feature is on.

They reach the processes that load no plugins (the detokenizer and the data-parallel controller are spawned straight
into their main function), let features judge the resolved server arguments, and add the features to ``/metrics``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .feature import Feature, Hook, stock_pin

ENGINE = "sglang.srt.entrypoints.engine"
VALIDATION = "sglang.srt.arg_groups.validation_hook:check_server_args"
DETOKENIZER = f"{ENGINE}:Engine._launch_detokenizer_subprocesses"
SCHEDULERS = f"{ENGINE}:Engine._launch_scheduler_processes"
METRICS = "sglang.srt.utils.common:add_prometheus_middleware"

CORE = Feature(
    id="tooling.core",
    sentence="Boots numinous in every engine process, judges the launch, and reports features on /metrics.",
    arch={},
    patches=(
        Hook(
            id="tooling.core.judge",
            target=VALIDATION,
            kind="after",
            call="numinous_tooling.patching.core:judge_launch",
            pins=(stock_pin(VALIDATION, "6983060e1a7bff21"),),
            roles=("main",),
        ),
        Hook(
            id="tooling.core.detokenizer",
            target=DETOKENIZER,
            kind="around",
            call="numinous_tooling.patching.core:around_launch_detokenizer",
            pins=(
                stock_pin(DETOKENIZER, "037807804938c17e"),
                stock_pin(
                    "sglang.srt.managers.detokenizer_manager:run_detokenizer_process",
                    "86e563efcbdbb6b6",
                ),
            ),
            roles=("main",),
        ),
        Hook(
            id="tooling.core.schedulers",
            target=SCHEDULERS,
            kind="around",
            call="numinous_tooling.patching.core:around_launch_schedulers",
            pins=(
                stock_pin(SCHEDULERS, "b4e95c63b89b4905"),
                stock_pin(
                    "sglang.srt.managers.data_parallel_controller:run_data_parallel_controller_process",
                    "26a8644845a3f5ef",
                ),
                # First statement: load_plugins(). If that moves, schedulers would boot without numinous.
                stock_pin(
                    "sglang.srt.managers.scheduler:run_scheduler_process",
                    "87e9dacac0312367",
                ),
            ),
            roles=("main",),
        ),
        Hook(
            id="tooling.core.metrics",
            target=METRICS,
            kind="around",
            call="numinous_tooling.patching.core:around_add_prometheus_middleware",
            pins=(stock_pin(METRICS, "3c222cfd27ced2b9"),),
            roles=("main",),
        ),
    ),
)


@dataclass(frozen=True)
class BootedTarget:
    """A picklable process target that boots numinous before the engine's own function runs in the child."""

    role: str
    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs in the spawned child."""
        from . import boot

        boot.boot_process(self.role)
        return self.function(*args, **kwargs)


def judge_launch(result: Any, server_args: Any) -> None:
    """After the engine accepted its arguments: refuse the launch if an enabled feature cannot serve it."""
    from . import boot
    from .serve_command import from_server_args

    boot.judge_launch(from_server_args(server_args))


def around_launch_detokenizer(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Spawn the detokenizer through `BootedTarget`; the engine passes its function by keyword."""
    function = kwargs["run_detokenizer_process_func"]
    return original(
        *args, **{**kwargs, "run_detokenizer_process_func": BootedTarget("detokenizer", function)}
    )


def around_launch_schedulers(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Spawn the data-parallel controller through `BootedTarget`; when all are ready, see that each has booted."""
    from . import boot

    engine: Any = sys.modules[ENGINE]
    stock = engine.run_data_parallel_controller_process
    engine.run_data_parallel_controller_process = BootedTarget("dp_controller", stock)
    try:
        launched, processes = original(*args, **kwargs)
    finally:
        engine.run_data_parallel_controller_process = stock
    wait_for_ready = launched.wait_for_ready

    def numinous_wait_for_ready() -> Any:
        ready = wait_for_ready()
        pids = [process.pid for process in processes or ()]
        for info in launched.scheduler_infos:
            pids.extend(info.get(engine.SCHEDULER_PIDS_ARG, ()))
        boot.prove_children(pids)
        return ready

    launched.wait_for_ready = numinous_wait_for_ready
    return launched, processes


def around_add_prometheus_middleware(original: Callable[..., Any], app: Any) -> Any:
    """Add `FeatureCollector` to the registry that the engine creates and serves under ``/metrics``."""
    import prometheus_client

    make_asgi_app = prometheus_client.make_asgi_app

    def numinous_make_asgi_app(*args: Any, **kwargs: Any) -> Any:
        kwargs["registry"].register(FeatureCollector())
        return make_asgi_app(*args, **kwargs)

    prometheus_client.make_asgi_app = numinous_make_asgi_app
    try:
        return original(app)
    finally:
        prometheus_client.make_asgi_app = make_asgi_app


class FeatureCollector:
    """Prometheus view of the features of this server: which are in place where, and their counters."""

    def collect(self) -> Iterator[Any]:
        """Called at each scrape; reads the counter files of this run's processes."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        from . import boot, counters

        run = boot.run_id()
        places = GaugeMetricFamily(
            "numinous_feature_in_place",
            "Engine processes in which the feature is proven in place",
            labels=["feature", "role"],
        )
        found: dict[tuple[str, str], int] = {}
        processes = [process for process in counters.read_processes() if process.run == run]
        for process in processes:
            if process.alive:
                for feature in process.record["features"]:
                    found[feature, process.role] = found.get((feature, process.role), 0) + 1
        for (feature, role), number in sorted(found.items()):
            places.add_metric([feature, role], number)
        yield places
        calls = CounterMetricFamily(
            "numinous_feature_calls",
            "Calls that a feature served (engaged) or left to stock, by reason",
            labels=["feature", "outcome"],
        )
        for feature, values in sorted(counters.summed(processes).items()):
            for counter, value in sorted(values.items()):
                calls.add_metric([feature, counter], value)
        yield calls
