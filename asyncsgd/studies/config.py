"""What the configs of studies hold: their keys, and the type and the bounds of every value."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from asyncsgd.errors import UsageError, nearest
from asyncsgd.settings.shipped import CONFIGS, config_file
from asyncsgd.settings.task import task_flags
from asyncsgd.settings.yaml_reader import read_yaml
from asyncsgd.tasks import class_named

Settings = dict[str, Any]
"""Settings, or other keys of a config, by name."""
GivenSettings = Mapping[str, Any]
"""The same where they are read and not changed."""
SEED_LIMIT = 2**32
Seed = Annotated[int, Meta(ge=0, lt=SEED_LIMIT)]
Seeds = Annotated[tuple[Seed, ...], Meta(min_length=1)]
NonEmptyList = Annotated[list[Any], Meta(min_length=1)]
TwoNames = Annotated[list[str], Meta(min_length=2, max_length=2)]
Grid = Annotated[dict[str, NonEmptyList], Meta(min_length=1)]
Conditions = Settings | Annotated[list[Settings], Meta(min_length=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
PositiveInt = Annotated[int, Meta(ge=1)]
StudyName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]*[A-Za-z0-9]$")]
"""The name of a study and of its folder below ``runs/``. Its last character is a letter or digit: it is no ``..``."""
FolderName = Annotated[str, Meta(pattern="^(?![.]*$)[^/]+$")]
"""The name of a folder: no slash, and no ``..``."""
FolderPart = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.]*$")]
"""A name that becomes a part of the name of a folder: no dash, which stands between parts."""
Alpha = Annotated[float, Meta(gt=0, lt=0.5)]
"""It is below .5, since an equivalence test at alpha looks at an interval of level 1 - 2 alpha."""
ENDPOINTS = ("loss_at_equal_samples", "loss_at_equal_seconds", "time_to_target")
"""What training runs are compared by. Any other endpoint is a score of the task of fine-tuning."""
WORDS: Mapping[str, str] = MappingProxyType({"macro_f1": "macro-F1", "micro_f1": "micro-F1", "span_f1": "span F1"})


def words_of_score(name: str) -> str:
    """A score in words.

    >>> words_of_score("macro_f1"), words_of_score("exact_match")
    ('macro-F1', 'exact match')
    """
    return WORDS.get(name, name.replace("_", " "))


MASKED_LM = "masked_lm"
"""The task that a base model is made by, and that fine-tuning starts from."""
FINETUNE_SEEDS = 1000
"""How many fine-tuning seeds each seed of the test has: seed 7 has 7000 to 7999."""

CONDITION_KEYS = ("nproc", "clock", "speeds")
"""Settings that say under which condition an arm runs. They are copied into the arm's own settings even where `base`
sets them, since they tell arms apart."""
NOT_TUNED = frozenset(
    (
        *("mode", *CONDITION_KEYS, "network", "churn", "samples", "epochs", "seconds", "target_loss", "patience"),
        *("evaluations", "evaluate_every", "evaluate_at", "eval_samples", "vocab_size", "model", "tech"),
        *("data", "eval_data", "text_column", "blocks", "mask", "mask_prob", "candidates", "candidate_share"),
        *("eval_mask", "eval_mask_prob", "encoding", "quoting", "documents", "sample_order"),
        *("text_pair_column", "label_column", "label_separator", "labels", "positive", "score", "split"),
    )
)
"""Settings that change what is compared, or what it may cost, rather than how well an algorithm does under it. `tech`
changes which words are predicted (`asyncsgd.tasks.masked_lm`), so losses with it and without it are not comparable."""
REFUSED = ("seed", "epochs", "patience")
"""Settings that the runs of arms may not have."""
REFUSED_IN_BASE_MODEL = ("mode", "epochs", "patience")
"""Settings that `base_model` may not have. Its one run may have a seed."""
REFUSED_IN_FINETUNE = ("seed", "model", "patience")
"""Settings that `finetune` may not have. Its runs may have epochs."""
DECIDED_BY_COMMAND_LINE = ("run_dir", "runs_dir", "overwrite", "track", "predictions")
"""Settings that the command line of the study has for all its runs."""
REASONS: Mapping[str, str] = MappingProxyType(
    {
        "seed": "runs have the seeds that the config lists",
        "epochs": "budgets are in samples or seconds, which are known before data are read",
        "patience": "a run ends at its budget and not by its losses",
        "mode": "it is single",
        "model": "runs start from the models of the study",
    }
)
"""Setting -> why it is refused. Any other one that is refused is in `DECIDED_BY_COMMAND_LINE`."""


class Keys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the parts of a file, each with the keys that it may have. Any other key is an error."""


class Tuning(Keys, frozen=True, kw_only=True):
    """What tuning tries, and on which seeds."""

    grid: Grid | None = None
    """The values that are tried, by setting. They are crossed in the order given, which numbers the trials. An
    algorithm may have a grid of its own, under the key `tune`."""
    seeds: Seeds = (0,)
    """A file names one or more. They are empty where a config has no `tuning`, and nothing is tuned."""


class NamedCondition(Keys, frozen=True, kw_only=True):
    """The conditions that a config names, with any speeds. None stands for any number of workers, or for any clock."""

    num_workers: int | None = None
    """The setting `nproc` of an arm."""
    clock: str | None = None


class Primary(NamedCondition, frozen=True, kw_only=True):
    """The comparison that the study is made for."""

    endpoint: str = "time_to_target"
    """One of `ENDPOINTS`, or the first score of the task of fine-tuning."""


class Difference(Keys, frozen=True, kw_only=True):
    """What a change does to one algorithm beside what it does to another: a difference of differences of losses."""

    treatment: TwoNames
    """An algorithm with the change, and without it."""
    reference: TwoNames
    """The same of the other algorithm."""


class Analysis(Keys, frozen=True, kw_only=True):
    """What the config registers before the test runs; see docs/verdict.md."""

    reference: str
    control: str | None = None
    """An algorithm whose updates have as few samples as those of an asynchronous one, e.g. ``small: {mode: sync,
    batch_size: "{16//nproc}"}``. So a difference from it does not come from the number of updates. Each arm whose
    updates have as many samples as its own is compared with it at equal samples. That is a secondary comparison,
    beside the registered one with `reference`.
    """
    primary: Primary = Primary()
    differences: dict[str, Difference] = {}
    """Differences of differences, each by a name. Holm's correction counts them as one family, beside the primary
    one."""
    alpha: Alpha = 0.05
    margins: dict[str, PositiveFloat] = {}
    """Margins of equivalence by name: ``loss``, and the score after fine-tuning."""
    margin_reasons: dict[str, str] = {}
    """Why a margin is what it is. A margin above 10 % of what the reference improves by (its loss at the start less the
    loss that is compared) is used only with a reason of three words or more."""
    target_share: Annotated[float, Meta(gt=0, le=1)] = 0.95
    """The target loss lies this share of the way from the first to the lowest loss of the reference's pilots."""
    target_loss: PositiveFloat | None = None


class Finetune(Keys, frozen=True, kw_only=True):
    """How every model is fine-tuned. A file has the settings of the task beside these keys; planning puts them into
    `settings`, and the task's score into `score`."""

    task: Literal["classification", "token_classification", "question_answering"] = "classification"
    repetitions: Annotated[int, Meta(ge=1, le=FINETUNE_SEEDS)] = 1
    baseline: bool = True
    """Whether the base model is fine-tuned too, without intermediate training."""
    settings: Settings = {}
    score: str = ""
    """The name of the first of the task's scores. `Task.scored_by` says whether higher is better."""


Report = Literal["dose_response", "lab_notes", "language_model", "parallelism", "speed_ladder"]
"""The special reports, by name."""


class AnyConfig(Keys, frozen=True, kw_only=True):
    """The keys that the file of any study may have and that change none of its runs."""

    quick: Settings | None = None
    """What ``--quick`` lays over the rest; see `asyncsgd.studies.overlay`."""
    report: Report | None = None
    """What the page of the study shows besides; see `analysis.special`."""


NOT_PLANNED = AnyConfig.__struct_fields__
"""Keys that do not change the hash of what a config plans."""


def check_seeds(name: str, seeds: tuple[int, ...], why: str = "") -> None:
    """Refuse seeds of which one is named twice."""
    if shared := sorted(seed for seed, number in Counter(seeds).items() if number > 1):
        raise ValueError(f"{name} must name each seed once, they share {shared}{why}")


class Config(AnyConfig, frozen=True, kw_only=True):
    """The file of a study that compares algorithms; `asyncsgd.studies.plan` says what its keys mean."""

    algorithms: Annotated[dict[FolderPart, Settings], Meta(min_length=1)]
    name: StudyName = "sweep"
    task: str = MASKED_LM
    """What is learned: one of the library's tasks, or MODULE:CLASS of one's own, whose fields are settings too."""
    base: Settings = {}
    base_model: Settings | None = None
    conditions: Conditions = {}
    exclude: list[Settings] = []
    seeds: Seeds = (0,)
    replicates: PositiveInt = 1
    tuning: Tuning = Tuning(seeds=())
    pilots: tuple[Seed, ...] = ()
    finetune: Settings | None = None
    analysis: Analysis | None = None

    def __post_init__(self) -> None:
        seeds = (*self.seeds, *self.tuning.seeds, *self.pilots)
        why = ": a seed that chose the learning rate, or fixed the target, cannot test it"
        check_seeds("seeds, tuning.seeds and pilots", seeds, why)
        limit = SEED_LIMIT // FINETUNE_SEEDS
        if self.finetune is not None and max(seeds) >= limit:
            raise ValueError(f"seeds must be less than {limit} where there is finetune, got {max(seeds)}")
        for key in ("base_model", "finetune"):
            if self.task != MASKED_LM and getattr(self, key) is not None:
                raise ValueError(f"{key} is for task: {MASKED_LM}, got task: {self.task}; take {key} out")
        analysis = self.analysis
        if analysis is None:
            if self.pilots:
                raise ValueError("pilots fix the target of an analysis; add analysis: {reference: sync}")
            return
        others = [name for name in self.algorithms if name != analysis.reference]
        for key, name, known in (
            ("reference", analysis.reference, list(self.algorithms)),
            ("control", analysis.control, [None, *others]),
        ):
            if name not in known:
                raise ValueError(f"analysis.{key} must be one of {known}, got {name!r}{nearest(str(name), others)}")
        for name, difference in analysis.differences.items():
            named = (*difference.treatment, *difference.reference)
            for algorithm in named:
                if algorithm not in self.algorithms:
                    raise ValueError(
                        f"analysis.differences.{name} names {algorithm!r}, which is none of the algorithms "
                        f"{', '.join(self.algorithms)}{nearest(algorithm, self.algorithms)}"
                    )
            if len({*named}) < len(named):
                raise ValueError(f"analysis.differences.{name} must name four algorithms, got {', '.join(named)}")
        if analysis.target_loss is None:
            if analysis.primary.endpoint == "time_to_target" and not (self.pilots or self.tuning.seeds):
                raise ValueError(
                    "analysis needs a target: pilots: [10, 11, 12], or tuning to take it from, or target_loss: 6.2"
                )
        elif self.pilots:
            raise ValueError("analysis.target_loss is the target, which pilots would fix too; take one of the two out")


class Comparison(Keys, frozen=True, kw_only=True):
    """Arms that differ in settings, compared with one of them on the same seeds."""

    reference: str
    margin: PositiveFloat
    margin_reason: str = ""
    """As in `Analysis.margin_reasons`."""
    arms: Annotated[dict[FolderName, Settings], Meta(min_length=2)]

    def __post_init__(self) -> None:
        if self.reference not in self.arms:
            raise ValueError(f"arms must name the reference {self.reference!r}")


class TrainingGrid(Keys, frozen=True, kw_only=True):
    """A grid of trainings, each of which has one process (``mode: single``) unless the config has another mode."""

    threshold: dict[str, float]
    """Model -> the loss to which the seconds are measured."""
    learning_rate: NonEmptyList
    batch_size: NonEmptyList
    seq_len: NonEmptyList
    base: Settings = {}
    seeds: Seeds = (0,)

    def __post_init__(self) -> None:
        check_seeds("seeds", self.seeds)


class ComparisonsConfig(AnyConfig, frozen=True, kw_only=True):
    """The file of a study that compares arms after equal samples and tunes nothing; see docs/study.md."""

    name: StudyName
    models: Annotated[dict[FolderName, Settings], Meta(min_length=1)]
    """By name: the task, and settings that take the place of those in `base`."""
    base: Settings = {}
    seeds: Seeds = (0,)
    comparisons: dict[FolderName, Comparison] = {}
    grid: TrainingGrid | None = None

    def __post_init__(self) -> None:
        check_seeds("seeds", self.seeds)
        if not self.comparisons and self.grid is None:
            raise ValueError(f"it names neither comparisons nor a grid; see {CONFIGS}")
        if self.grid is not None and set(self.grid.threshold) != set(self.models):
            raise ValueError(f"grid.threshold must give a loss for each model: {', '.join(self.models)}")
        if self.grid is not None and "grid" in self.comparisons:
            raise ValueError("comparisons: grid is where the runs of the grid lie; rename the comparison")


class Rung(Keys, frozen=True, kw_only=True):
    """One step of a speed ladder: settings that may make a training faster."""

    name: str
    box: str
    """Its line in the checklist of the optimisation guide that the ladder follows; see docs/speed_ladder.md."""
    change: Settings = {}
    """The settings of the step. ``{nproc}`` in a text stands for the number of processes, which is 2 on a CPU and else
    one on each GPU. A value of null takes a setting out."""
    same_updates: bool = True
    """Whether the step leaves updates as they were, up to rounding and to other random numbers."""
    device: Literal["cpu", "cuda"] | None = None
    """The kind of device that the step is for; None: both."""
    devices: int = 1
    """How many devices the step needs: GPUs, or cores where there is no GPU. With fewer the rung is left out."""


def slug_of(name: str) -> str:
    """The name of a rung in the name of a folder."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())


class LadderTask(Keys, frozen=True, kw_only=True):
    """What is learned in a speed ladder, and what its score is judged by."""

    data: Annotated[tuple[str, ...], Meta(min_length=1)]
    """Paths of data. The first that exists is taken. If none exists, the last is taken, which may be the name of
    built-in data."""
    score: str
    """``loss``, of which less is better, or a score of the task."""
    margin: PositiveFloat
    """The margin of equivalence, in the unit of the score."""
    samples: PositiveInt
    """Samples of a training of the proof; see `LadderKeys`."""
    settings: Settings = {}


class LadderKeys(Keys, frozen=True, kw_only=True):
    """What a speed ladder climbs; see `asyncsgd.studies.ladder`.

    In the climb each rung is trained beside the rungs that are kept before it. In the proof the naive loop and all that
    is kept are trained on the seeds of the config.
    """

    tasks: Annotated[dict[FolderPart, LadderTask], Meta(min_length=1)]
    rungs: Annotated[tuple[Rung, ...], Meta(min_length=1)]
    turns: Annotated[int, Meta(ge=2)]
    """How many times each rung is measured. Each time the arm with the rung and the arm without it are trained once."""
    samples: PositiveInt
    """How many texts the trainings of the climb have. After its warm-up each training goes through them once. With
    ``sampling: group_by_length``, `asyncsgd.data.order.RUN` batches of about one length follow each other. A multiple
    of RUN times the largest batch lets trainings with different batch sizes train on the same lengths."""
    warmup: PositiveInt
    """Samples that a training of the climb begins with, beside `samples`. Its speed is measured after them."""
    eval_samples: PositiveInt
    loss_margin: PositiveFloat
    """How far two losses may differ, in nats, for the guide's validation checklist to be met."""
    leave_out: dict[str, str] = {}
    """Lines of the checklist that are not measured, each with the reason."""

    def __post_init__(self) -> None:
        folders = [slug_of(rung.name) for rung in self.rungs]
        for rung, folder in zip(self.rungs, folders, strict=True):
            if folders.count(folder) > 1:
                raise ValueError(f"rungs: {rung.name!r} and another one would have one folder, {folder}; rename one")
        boxes = {rung.box for rung in self.rungs}
        for box in self.leave_out:
            if box not in boxes:
                raise ValueError(f"leave_out: no rung has the box {box!r}{nearest(box, boxes)}")


class LadderConfig(AnyConfig, frozen=True, kw_only=True):
    """The file of a study that measures settings one on top of the other; see `asyncsgd.studies.ladder`."""

    name: StudyName
    base: Settings = {}
    seeds: Seeds
    """The seeds of the proof."""
    ladder: LadderKeys

    def __post_init__(self) -> None:
        check_seeds("seeds", self.seeds)


_OF_YAML = {
    "Expected": "expected",
    "`array`": "a list",
    "`object`": "keys with values",
    "`int`": "a whole number",
    "`float`": "a number",
    "`str`": "a text",
    "`bool`": "true or false",
    "matching regex '^(?![.]*$)[^/]+$'": "that can be the name of a folder, so without a slash",
    "`null`": "nothing",
    "Object contains unknown field": "unknown key",
    "Object missing required field": "missing key",
}
"""Words of msgspec -> the words of people who write configs."""


def typed(given: object, kind: Any, name: str) -> Any:
    """`given` as `kind`, a type that msgspec knows.

    Raises:
        UsageError: with the path to the value that is wrong; `name` is that of the file or of its part.

    >>> typed({"reference": "sync", "alpha": 0.7}, Analysis, "my.yaml")
    Traceback (most recent call last):
        ...
    asyncsgd.errors.UsageError: my.yaml: alpha: expected a number < 0.5
    """
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"{name}: {_in_words_of_yaml(str(error))}") from error


def _in_words_of_yaml(said: str) -> str:
    """What msgspec says of a value, with its place first.

    >>> _in_words_of_yaml("Expected `int`, got `str` - at `$.seeds[0]`")
    'seeds[0]: expected a whole number, got a text'
    >>> _in_words_of_yaml("Object contains unknown field `sedes`")
    'unknown key `sedes`'
    """
    said, _, path = said.partition(" - at `$")
    for name, words in _OF_YAML.items():
        said = said.replace(name, words)
    place = path.rstrip("`").lstrip(".")
    return f"{place}: {said}" if place else said


def read_config(path: Path) -> Settings:
    """What a study's YAML file holds."""
    try:
        text = config_file(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read ({error}); {CONFIGS} has examples") from error
    return dict(typed(read_yaml(text, str(path)), Settings, str(path)))


def settings_of(given: GivenSettings, where: str, task: str, refused: tuple[str, ...] = REFUSED) -> Settings:
    """Settings of a task by name: as in flags, a dash is an underscore, and ``workers`` is ``nproc``. A key that is no
    setting stays.
    """
    names = task_flags(class_named(task)).names
    settings = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        settings[names.get(name, name)] = value
    for key in (*refused, *DECIDED_BY_COMMAND_LINE):
        if key in settings:
            reason = REASONS.get(key, "the command line of the study says where runs write")
            raise UsageError(f"{where}: {key} is decided by the study, so take it out: {reason}")
    return settings


def grid_of(given: object, where: str, task: str) -> dict[str, list[Any]]:
    """The values that tuning tries, by setting."""
    grid = settings_of(typed(given, Grid, where), where, task, ("seed",))
    for key in NOT_TUNED & grid.keys():
        raise UsageError(
            f"{where}: {key} is not tuned, since it changes what is compared or what it may cost; give it one value, "
            f"outside of tuning"
        )
    return grid


def fill_in(text: str, nproc: Any, where: str) -> str:
    """Replace what stands in braces by its value; it may use nproc, whole numbers, + - * //, max and min.

    >>> fill_in("ringmaster:threshold={max(1, nproc//2)}", 4, "rule")
    'ringmaster:threshold=2'
    """

    def value(match: re.Match[str]) -> str:
        try:
            # No names but these, and no power, so that the expression is safe to evaluate.
            if type(nproc) is not int or not re.fullmatch(r"(nproc|max|min|//|(?<!\*)\*(?!\*)|[0-9 +,()-])+", match[1]):
                raise ValueError
            return str(int(eval(match[1], {"__builtins__": {}}, {"nproc": nproc, "max": max, "min": min})))
        except (SyntaxError, ValueError, TypeError, NameError, ZeroDivisionError) as error:
            allowed = "in braces stand nproc, whole numbers, + - * //, max and min, e.g. {nproc//2}"
            raise UsageError(f"{where}: {match[0]} is not understood; {allowed}") from error

    return re.sub(r"\{([^{}]*)\}", value, text)
