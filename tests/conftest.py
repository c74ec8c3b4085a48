"""For every test: OpenMP's threads sleep while they wait, as under the `radixcache` command."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before anything imports torch
