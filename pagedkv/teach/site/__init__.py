"""The course as pages that need no kernel: `python -m pagedkv.teach.site`, or `make site`.

`build` writes the pages, `lesson` turns one stored notebook into HTML, `players` runs a lesson's widgets through all
positions of their controls, `words` links the glossary. What a reader's browser runs is in static/.
"""

import os

# Where the notebooks live on GitHub; the Binder links name it. The workflow of a fork sets the variable.
REPOSITORY = os.environ.get("GITHUB_REPOSITORY") or "pagedkv/pagedkv"
BRANCH = "main"
