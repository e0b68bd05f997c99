"""`python -m hccl_fusion`: the command line."""

import sys

from hccl_fusion.cli import main

if __name__ == "__main__":
    sys.exit(main())
