"""`python -m pagedkv.cli`."""

import sys

from . import main

sys.exit(main())
