"""Tag the words of sentences: named entities, slots, whatever has a tag per word in the BIO scheme.

    python experiments/train_tagger.py --data ../shared/data/matsci_ner_sofc

Fine-tunes the encoder of a run folder of stilt_mlm.py, a saved model, a name on the Hub, or random weights, in any
mode, and scores spans: precision, recall and F1. ``--help`` lists the settings."""

from __future__ import annotations

import sys

from asyncsgd.scripts.base import run_script
from asyncsgd.scripts.tagging import TAGGER as SCRIPT

if __name__ == "__main__":
    sys.exit(run_script(SCRIPT.run, ends_with_process=True))
