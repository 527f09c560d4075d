"""A process that is forked after a fit can fit as well."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
import numpy as np, torch
from corefed import Federation

torch.set_num_threads(2)
rng = np.random.default_rng(0)
x = rng.normal(size=(4000, 20))
y, site = (x[:, 0] > 0).astype(int), np.arange(4000) % 4

def fit():
    return Federation(rounds=1, local_steps=2, hidden=(8,)).fit(x, y, groups=site)

torch.randn(500, 500) @ torch.randn(500, 500)
fit()
child = os.fork()
if child == 0:
    signal.alarm(60)
    fit().predict(x[:4], groups=site[:4])
    os._exit(7)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_fits_again() -> None:
    """With the threads of its parent, which it does not have, it would wait for ever."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, timeout=90, check=False)
    assert done.returncode == 7
