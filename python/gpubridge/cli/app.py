# SPDX-License-Identifier: Apache-2.0
"""The commands and their arguments; each body is in a module of its own."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Optional

import typer

app = typer.Typer(
    help="gpubridge: one PyTorch job over GPUs of different vendors, or CPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def doctor(
    device: Annotated[bool, typer.Option("--device", help="try a GPU: copies, events, kernels, collectives")] = False,
    kind: Annotated[str, typer.Option(help="with --device: cuda, hip or auto")] = "auto",
    index: Annotated[int, typer.Option(min=0, help="with --device: which GPU")] = 0,
    out: Annotated[Optional[Path], typer.Option(help="with --device: file of the report, JSON")] = None,  # noqa: UP045
) -> None:
    """Shows what this machine offers: versions, libraries, interfaces, settings, and the island it would join."""
    if not device:
        from gpubridge.cli.doctor import run

        raise typer.Exit(run())
    from gpubridge.cli import device as checks

    if kind != "auto" and kind not in checks.KINDS:
        raise typer.BadParameter(f"{kind!r}: cuda, hip or auto", param_hint="--kind")
    raise typer.Exit(checks.run(kind, index, out))


@app.command()
def settings(
    plain: Annotated[bool, typer.Option("--plain", help="NAME=value lines")] = False,
) -> None:
    """Lists every setting with its value in this environment and what it does."""
    from gpubridge.cli.doctor import show_settings

    show_settings(plain)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="folder of the report")] = Path("demo-report"),
    vendors: Annotated[
        str, typer.Option(help='emulated vendor of each of the four ranks, or "cpu" for two islands of CPU ranks')
    ] = "cuda,cuda,hip,hip",
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps of each run")] = 100,
    data: Annotated[Optional[Path], typer.Option(help="text file or folder to train on")] = None,  # noqa: UP045
) -> None:
    """Trains a language model on 2 + 2 emulated GPUs and compares with a single process."""
    from gpubridge.demo import run_demo

    raise typer.Exit(run_demo(out, vendors, steps, data))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def replay(context: typer.Context) -> None:
    """Recomputes the verdicts of a recorded straggler stream."""
    try:
        module = importlib.import_module("gpubridge.cli.replay")
    except ModuleNotFoundError:
        typer.echo("gpubridge: this build has no replay; it comes with the straggler detector", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(int(module.main(context.args) or 0))


@app.command()
def analyze(
    file: Annotated[
        Path,
        typer.Argument(
            help="parquet operation trace, PyTorch profiler or Flight Recorder output (file or folder of one "
            "file per rank), NCCL inspector JSON, or CSV (docs/records.md)"
        ),
    ],
    learn: Annotated[Optional[int], typer.Option(min=8, help="steps to learn from; default: the first half")] = None,  # noqa: UP045
    alarms: Annotated[float, typer.Option(help="false verdicts per recording that are accepted")] = 0.01,
    out: Annotated[Optional[Path], typer.Option(help="folder for the HTML page and its plots")] = None,  # noqa: UP045
    csv: Annotated[Optional[Path], typer.Option(help="also write the records as CSV")] = None,  # noqa: UP045
    passports: Annotated[
        bool, typer.Option("--passports", help="compare devices with earlier jobs, and remember")
    ] = False,
    read_only: Annotated[bool, typer.Option("--read-only", help="with -: only read, to compare the speed")] = False,
) -> None:
    """Says who or what slowed a recorded job down. FILE -: judges a recording of the engine from standard input."""
    from gpubridge.cli.analyze import run, stream

    if str(file) == "-":
        raise typer.Exit(stream(read_only))
    raise typer.Exit(run(file, learn, alarms, out, csv, passports))


@app.command()
def simulate(
    suite: Annotated[
        list[str] | None, typer.Option(help="faults, healthy, fleets, slow-part, fastest, pair; default: all")
    ] = None,
    episodes: Annotated[Optional[int], typer.Option(min=1, help="of each suite; default: its own number")] = None,  # noqa: UP045
    out: Annotated[Path, typer.Option(help="folder of results, plots and page; a run goes on where it stopped")] = Path(
        "simulate-report"
    ),
    workers: Annotated[Optional[int], typer.Option(min=1, help="threads; default: all cores")] = None,  # noqa: UP045
    stream: Annotated[
        bool, typer.Option("--stream", help="write one endless recording to standard output instead")
    ] = False,
    ranks: Annotated[int, typer.Option(min=1, help="with --stream")] = 1024,
    steps: Annotated[int, typer.Option(min=1, help="with --stream")] = 100000,
    seed: Annotated[int, typer.Option(help="with --stream")] = 1,
    fault: Annotated[Optional[str], typer.Option(help="with --stream: RANK:SIZE:STEP")] = None,  # noqa: UP045
) -> None:
    """Simulates mixed fleets with faults and without: delay, alarms against the budget, confusion matrix."""
    from gpubridge.cli import simulate as command

    if stream:
        raise typer.Exit(command.stream(ranks, steps, seed, fault))
    raise typer.Exit(command.run(suite or [], episodes, out, workers))
