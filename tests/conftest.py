"""What all tests share: one thread, and the same examples on every machine of the continuous integration."""

import os
import signal
from multiprocessing import forkserver

import pytest
import torch
from doors import IMPORTED_ONCE
from gallery import trainer, write_texts
from hypothesis import Phase, settings

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as from a terminal, though nohup may have started the tests
torch.set_num_threads(1)  # bits depend on the number of threads, and test processes share the machine

# Without a deadline anywhere: how long an example takes says more about the machine's load than about the code.
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=100)
settings.register_profile("quick", deadline=None, max_examples=10)
# A failure as it is found, for tests/mutants.py, which looks at none.
found = {"deadline": None, "max_examples": 10, "phases": (Phase.explicit, Phase.generate)}
settings.register_profile("unshrunk", **found)
settings.load_profile("ci" if os.environ.get("CI") else "quick")


def pytest_addoption(parser):
    parser.addoption("--approve", action="store_true", help="write the words of scenarios to tests/analysis/approved")


def import_for_all_files():
    """Let the fork server import what the processes of any test need: what it lacks, each of them imports again."""
    preload = forkserver.set_forkserver_preload
    forkserver.set_forkserver_preload = lambda modules: preload([*IMPORTED_ONCE, *modules])


if "PYTEST_XDIST_WORKER" in os.environ:  # many files, of which the first says what the only fork server imports
    import_for_all_files()


@pytest.fixture(scope="session")
def gallery(tmp_path_factory):
    """A folder that all test processes share."""
    root = tmp_path_factory.getbasetemp()
    root = (root.parent if os.environ.get("PYTEST_XDIST_WORKER") else root) / "gallery"
    root.mkdir(exist_ok=True)
    write_texts(root)
    return root


@pytest.fixture(scope="session")
def small(gallery):
    """Flags of a run that takes a second once everything is imported."""
    flags = f"--data {gallery}/train.txt --cache-dir {gallery}/cache --seq-len 32 --batch-size 4 --vocab-size 512"
    return [*flags.split(), "--eval-samples", "8"]


@pytest.fixture(scope="session")
def train(gallery):
    """Run ``stilt_mlm.py`` with some settings; equal settings run once."""
    return trainer(gallery)
