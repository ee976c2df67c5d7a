"""What tests of inner parts begin with: a task for workers that are written by hand, and a run's settings."""

from asyncsgd.settings.training import FLAGS, make_settings
from asyncsgd.tasks.masked_lm import MaskedLM

A_TASK = MaskedLM(
    batch_size=4,
    prefix=(0,),
    suffix=(2,),
    pad_id=1,
    mask_id=4,
    vocabulary_size=97,
    special_ids=(0, 1, 2, 3, 4),
)


def settings_of(run):
    """The settings of a run of ``stilt_mlm.py``."""
    return make_settings(FLAGS.load_yaml(run.path / "settings.yaml") | {"cache_dir": str(run.cache)})
