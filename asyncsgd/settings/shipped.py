"""The configs that come with the package, found by name wherever it is installed. Standard library only."""

from __future__ import annotations

from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def config_file(path: str | Path) -> Path:
    """The file that `path` names: itself where it is there, else a config of the package, else itself.

    A config of the package is named ``quick`` or ``quick.yaml``, with any folder ``configs`` in front:
    ``experiments/configs/quick.yaml`` is found where there is no such folder.

    >>> config_file("quick") == config_file("experiments/configs/quick.yaml") == CONFIGS / "quick.yaml"
    True
    >>> config_file("elsewhere/quick.yaml").as_posix()
    'elsewhere/quick.yaml'
    """
    path = Path(path)
    is_there = path.exists() and not path.is_dir()
    if is_there or (path.parent != Path() and path.parent.name != CONFIGS.name):
        return path
    for name in (path.name, f"{path.name}.yaml"):
        if (CONFIGS / name).is_file():
            return CONFIGS / name
    return path


def config_names() -> list[str]:
    """The studies among the configs of the package, as they are typed; one config is of a script of its own."""
    return sorted({path.stem for path in CONFIGS.glob("*.yaml")} - {"norm_under_delay"})
