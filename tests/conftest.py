"""Settings of the whole suite: no network, and hypothesis without deadlines, since CI machines are noisy."""

from __future__ import annotations

import os

from hypothesis import settings

from pagedkv.openmp import limit_spinning

limit_spinning(os.environ)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

settings.register_profile("ci", deadline=None, print_blob=True)
settings.load_profile("ci")
