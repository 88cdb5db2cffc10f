"""`python -m e2e.real install`: the real engine into this machine's cache; prints its directory."""

import argparse
import functools
import sys

from e2e.bed.errors import BedError
from e2e.real.install import install


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m e2e.real", description=__doc__)
    parser.add_argument("command", choices=["install"])
    parser.parse_args()
    try:
        print(install(functools.partial(print, file=sys.stderr, flush=True)))
    except BedError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
