"""What all tests share: reproducible draws, one thread, no window."""

import os
from collections.abc import Iterator

os.environ["MPLBACKEND"] = "Agg"  # before anything imports matplotlib

import numpy as np
import pytest
import torch
from hypothesis import settings

settings.register_profile("repository", derandomize=True, deadline=None, database=None)
settings.load_profile("repository")
torch.set_num_threads(1)  # the tensors of the tests are too small for more


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Each test starts from the same global seeds, whatever ran before it, and leaves no seed."""
    torch.manual_seed(0)
    np.random.seed(0)
    yield
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # set by Lightning's seed_everything
        os.environ.pop(name, None)
