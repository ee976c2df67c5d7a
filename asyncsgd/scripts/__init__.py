"""The commands of `asyncsgd`, which the scripts under experiments/ are too."""
