"""`pycoll advise`: whether compressed gradients pay on a link, and with which codec."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from pycoll.cli.usage import UsageError, amount, size

if TYPE_CHECKING:
    from pycoll.advisor import Advice, Estimate, Workload

DESCRIPTION = """\
Measures this machine's codecs, one core, simulates the all_reduces of one training step on a link,
and says which codec pays there, if any; and whether sending only the largest gradients would be
faster (top_k, with torch). Times are of all buckets of one step, without what hides behind the
backward pass; a codec's time runs beside the wire's, piece by piece."""

EPILOG = """\
A codec is recommended if a step is at least 1.1 times faster and its error (relative L2 error of
the mean of gaussian values, both quantisations) is at most --error. Above 0.1 or so training needs
error feedback: residual= of pycoll.all_reduce. Link rates from some 40 Gbit/s on do not matter to
TCP, which then waits for a core that copies 5 GB/s.

example: pycoll advise --model-bytes 500M --link 10gbit --world-size 16 --hosts 16
"""

NEEDS_FEEDBACK = 0.1


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "advise",
        help="whether compressed gradients pay on a link",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model-bytes", type=size, required=True, metavar="SIZE", help="of all gradients: 100M"
    )
    parser.add_argument(
        "--link", required=True, metavar="RATE", help="of a host: 1gbit, 100mbit, 1.1GB/s"
    )
    parser.add_argument("--world-size", type=int, default=2, metavar="N", help="ranks (default 2)")
    parser.add_argument("--hosts", type=int, metavar="H", help="default: one a rank")
    parser.add_argument(
        "--bucket", type=size, default=25 << 20, metavar="SIZE", help="of an all_reduce: 25M"
    )
    parser.add_argument("--dtype", default="float32", help="or float16, bfloat16")
    parser.add_argument(
        "--error", type=amount, default=0.02, help="the largest that is acceptable (default 0.02)"
    )
    parser.add_argument("--json", action="store_true", help="all figures, to standard output")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from pycoll import _core, advisor, sparse_advice
    from pycoll.codecs import codec_of

    hosts = arguments.world_size if arguments.hosts is None else arguments.hosts
    try:
        link = advisor.Link.of(arguments.link)
        workload = advisor.Workload(
            arguments.model_bytes, arguments.world_size, hosts, arguments.bucket, arguments.dtype
        )
        names = [row[0] for row in _core.codecs()] if hosts > 1 else []
        speeds = [advisor.measure_speed(codec_of(name), workload.dtype) for name in names]
        wire = advisor.Wire(workload, link)
        few = sparse_advice.estimates(workload, wire, max_error=arguments.error)
        advice = advisor.advise(
            workload, link, speeds, max_error=arguments.error, wire=wire, others=few
        )
    except _core.InvalidArgumentError as error:
        raise UsageError(str(error)) from error
    if arguments.json:
        print(as_json(arguments.link, workload, advice))
    else:
        print("\n".join(report(arguments.link, workload, advice)))
    return 0


def report(link: str, workload: Workload, advice: Advice) -> list[str]:
    from pycoll.cli.simulate import format_size
    from pycoll.sparse_advice import proposal

    per_host = f", {workload.ranks_per_host} ranks a host" if workload.ranks_per_host > 1 else ""
    lines = [
        f"{format_size(workload.model_bytes)} of {workload.dtype} gradients in buckets of "
        f"{format_size(workload.bucket_bytes)}, {workload.world_size} ranks on {workload.hosts} "
        f"host{'s' if workload.hosts > 1 else ''}{per_host}, {link}",
        "",
    ]
    if len(advice.estimates) > 1:
        lines += [*table(advice), ""]
    beside = proposal(advice)
    return [*lines, advice.reason, *([beside] if beside else [])]


def table(advice: Advice) -> list[str]:
    from pycoll.advisor import format_seconds

    exact = advice.estimates[0]
    rows = [["codec", "bits", "error", "wire", "codec time", "step", "x", ""]]
    for estimate in sorted(advice.estimates, key=lambda e: e.seconds):
        rows.append(
            [
                estimate.name,
                f"{estimate.bits:.4g}",
                f"{estimate.error:.2g}",
                *map(format_seconds, (estimate.wire, estimate.codec, estimate.seconds)),
                f"{exact.seconds / estimate.seconds:.2f}",
                note(estimate, advice),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
            + [row[-1]]
        ).rstrip()
        for row in rows
    ]


def note(estimate: Estimate, advice: Advice) -> str:
    parts = ["recommended"] if estimate is advice.best else []
    if estimate.refused:
        parts.append(estimate.refused)
    if estimate.error >= NEEDS_FEEDBACK:
        parts.append("needs error feedback")
    return ", ".join(parts)


def as_json(link: str, workload: Workload, advice: Advice) -> str:
    import json
    from dataclasses import asdict

    from pycoll.sparse_advice import proposal

    content = {
        "workload": asdict(workload),
        "link": link,
        "estimates": [asdict(estimate) for estimate in advice.estimates],
        "recommended": advice.best.name,
        "reason": advice.reason,
        "proposal": proposal(advice),
    }
    return json.dumps(content, indent=1)
