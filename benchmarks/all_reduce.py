"""all_reduce on this machine: pycoll and Gloo side by side, through torch.distributed.

    python benchmarks/all_reduce.py                  # 2 and 4 ranks, 4 bytes to 256 MiB
    python benchmarks/all_reduce.py --quick          # fewer sizes, shorter rounds
    python benchmarks/all_reduce.py --algorithms     # every algorithm of pycoll, forced in turn

It is `pycoll bench all_reduce --compare -g 2,4 -c 0`, and takes the same options. See
benchmarks/README.md for what is compared and how to read it.
"""

from __future__ import annotations

import argparse
import sys

from pycoll.cli import bench
from pycoll.cli.usage import UsageError


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    bench.add_options(parser)
    parser.set_defaults(collective="all_reduce", compare=True, ranks=[2, 4], check=0)
    try:
        return bench.run(parser.parse_args())
    except UsageError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
