"""`python -m asyncllm` is the command line."""

import sys

from asyncllm.cli import main

sys.exit(main())
