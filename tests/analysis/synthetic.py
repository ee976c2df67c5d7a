"""Study folders written for tests: the documented files, from loss curves given as plain numbers.

`write_run`, `write_finetuning`, `write_plan` and `write_registration` write one thing each; `write_study` writes a
whole study of some arms, and `example_study` one that has every part of a report in it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import yaml
from doors import arrival

from asyncsgd.records.events import DIVERGED, DONE, Evaluation, Resumed
from asyncsgd.records.run_folder import RunFolder, write_json
from asyncsgd.records.totals import Totals

STRAGGLER = "slow:worker=0,factor=3"
MASKED_LM = {"accuracy": "higher", "perplexity": "lower"}
"""The metrics of masked language modelling; its own module imports torch."""


@dataclass(frozen=True)
class SyntheticArm:
    """An arm as plan.json describes it; `learning_rates` are its tuning trials, the first is the chosen one."""

    algorithm: str
    num_workers: int = 4
    clock: str = "virtual"
    speeds: str | None = STRAGGLER
    batch_size: int = 16
    learning_rates: tuple[float, ...] = ()
    trial_losses: tuple[tuple[float | None, ...], ...] = ()
    tuning_seeds: tuple[int, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of this arm."""

    @property
    def name(self):
        name = f"{self.algorithm}-w{self.num_workers}"
        if self.clock == "virtual":
            return f"{name}-virtual"
        return name

    @property
    def mode(self):
        if self.algorithm in ("single", "hogwild"):
            return self.algorithm
        if self.algorithm == "sync" and self.clock == "measured":
            return "sync"
        return "async"

    @property
    def rule(self):
        names = {"sync": "synchronous", "async": "asynchronous", "single": "synchronous"}
        return names.get(self.algorithm, self.algorithm)

    @property
    def learning_rate(self):
        if self.learning_rates:
            return self.learning_rates[0]
        return 5e-4

    def as_json(self):
        """Its entry in plan.json."""
        losses = self.trial_losses or [()] * len(self.learning_rates)
        trials = []
        for rate, of_rate in zip(self.learning_rates, losses, strict=True):
            trial = {"settings": {"learning_rate": rate}, "seeds": list(self.tuning_seeds), "losses": list(of_rate)}
            trials.append(trial)
        chosen = None
        if self.learning_rates:
            chosen = {"learning_rate": self.learning_rate}
        settings = {"mode": self.mode, "rule": self.rule, "nproc": self.num_workers, "clock": self.clock}
        if self.speeds:
            settings["speeds"] = self.speeds
        settings |= self.settings
        return {
            "name": self.name,
            "algorithm": self.algorithm,
            "settings": settings,
            "num_workers": self.num_workers,
            "clock": self.clock,
            "speeds": self.speeds,
            "chosen": chosen,
            "trials": trials,
        }


Curve = Sequence[tuple[float, float, float | None]]
"""(samples, seconds, loss) of the evaluations; None: not a number."""


def straight(first, last, *, seconds, samples=160, evaluations=5):
    """A curve that falls on a straight line from `first` to `last` in `seconds` and `samples`."""
    curve = []
    for number in range(evaluations):
        share = number / (evaluations - 1)
        loss = first + (last - first) * share
        curve.append((round(samples * share), seconds * share, loss))
    return curve


def write_run(
    path,
    arm,
    curve,
    *,
    seed=0,
    status=DONE,
    delays=(),
    learning_rate=None,
    budget=None,
    environment=None,
    records=(),
    **summary,
):
    """Write one pretraining run folder.

    Args:
        budget: in samples, unless its arm has one in seconds; None: as many as its curve has.
        status: None leaves summary.json out, as a killed run does.
        delays: of the applied gradients; the arrivals are spread evenly over the run, workers in turn.
        records: further ones of events.jsonl.
        summary: further or other keys of summary.json.
    """
    folder = RunFolder(path, task="masked_lm", better=MASKED_LM)
    totals = Totals()
    last_samples = 0
    last_seconds = 0.0
    if curve:
        last_samples = int(curve[-1][0])
        last_seconds = float(curve[-1][1])
    records = [*records]
    for number, delay in enumerate(delays):
        records.append(_arrival(number, delay, arm, len(delays), last_seconds, last_samples))
    for samples, seconds, loss in curve:
        value = math.nan if loss is None else float(loss)
        metrics = {"accuracy": 0.5, "perplexity": math.exp(value)}
        records.append(Evaluation(int(samples) // 16, int(samples), float(seconds), value, 300.0, metrics, 0.01))
    for record in sorted(records, key=lambda record: (record.train_seconds, record.kind)):
        folder.append(record)
        totals(record)
    shared = {"mode": arm.mode, "rule": arm.rule, "clock": arm.clock, "speeds": arm.speeds, "seed": seed}
    shared["batch_size"] = arm.batch_size
    if learning_rate is None:
        learning_rate = arm.learning_rate
    if arm.settings.get("seconds"):
        num_samples = None
    else:
        num_samples = budget or last_samples
    settings = {
        "settings_format": 2,
        **shared,
        "nproc": arm.num_workers,
        "samples": num_samples,
        "learning_rate": learning_rate,
        "model": "tiny" if summary.get("from_scratch") else "base",
        **arm.settings,
    }
    (path / "settings.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    machine = {
        "versions": {"torch": "2.13.0", "asyncsgd": "0.1.0"},
        "commit": "c0ffee",
        "modified": False,
        "cores": 2,
        "threads_per_worker": 1,
        "cpu": "a processor",
        "device": "cpu",
        "num_devices": min(2, arm.num_workers),
    }
    folder.write_environment(machine | (environment or {}))
    if status is not None:
        content = {
            **shared,
            **totals.as_summary(),
            "status": status,
            "message": "",
            "task": "masked_lm",
            "from_scratch": False,
            "init_sha256": hashlib.sha256(f"{settings['model']} {seed}".encode()).hexdigest(),
            "num_workers": arm.num_workers,
            "oversubscription": None if arm.clock == "virtual" else 1.0,
            "num_updates": last_samples // 16,
            "num_samples_applied": last_samples,
            "data_fingerprint": "f00d",
            "num_parameters": 10,
            "parameters_sha256": hashlib.sha256(str(path).encode()).hexdigest(),
        }
        folder.write_summary(content | summary)
    folder.close()
    return path


def _arrival(number, delay, arm, of, seconds, samples):
    cycle = seconds * arm.num_workers / of
    seconds_of = {}
    for part, share in {"flight": 0.8, "pull": 0.05, "compute": 0.7, "push": 0.05, "wait": 0.2}.items():
        seconds_of[f"{part}_seconds"] = share * cycle
    return arrival(
        number,
        number % arm.num_workers,
        read_version=max(0, number - delay),
        arrival_delay=delay,
        uses=((number, delay),),
        loss=5.0,
        weight=30.0,
        num_samples=arm.batch_size,
        learning_rate=arm.learning_rate,
        train_seconds=seconds * (number + 1) / of,
        total_samples=samples * (number + 1) // of,
        **seconds_of,
    )


def went_on(seconds, samples):
    """The record of a run that was stopped and went on from its checkpoint."""
    return Resumed(samples // 16, samples, seconds, f"checkpoint-{samples // 16}", 0)


def write_finetuning(path, *, seed, macro_f1, parent, accuracy=0.8, confusion=((40, 10), (10, 40)), hatecheck=None):
    """Write one fine-tuning run folder."""
    better = {"macro_f1": "higher", "accuracy": "higher"}
    labels = ["hate", "other"]
    folder = RunFolder(path, task="classification", better=better)
    metrics = dict(zip(better, (macro_f1, accuracy), strict=True))
    details = {"per_class_f1": dict.fromkeys(labels, macro_f1), "confusion": [list(row) for row in confusion]}
    totals = Totals()
    num_texts = sum(map(sum, confusion))
    for samples, loss in ((0, 0.69), (100, 0.4)):
        record = Evaluation(samples // 10, samples, samples / 100, loss, num_texts, metrics, 0.01, details=details)
        folder.append(record)
        totals(record)
    content = {
        **totals.as_summary(),
        "task": "classification",
        "status": DONE,
        "message": "",
        "seed": seed,
        "model": "base",
        "from_scratch": False,
        "parent": parent,
        "data_fingerprint": "feed",
        "labels": labels,
        "hatecheck": hatecheck,
        "parameters_sha256": hashlib.sha256(str(path).encode()).hexdigest(),
        "num_parameters": 10,
    }
    folder.write_summary(content)
    folder.close()
    return path


def planned(folder, stage, arm, seed, **other):
    """An entry of plan.json's list of runs."""
    entry = {"folder": folder, "stage": stage, "arm": arm, "seed": seed, "replicate": 0, "trial": None}
    return entry | {"parent": None, "finetune_seed": None} | other


def write_plan(folder, arms, runs, **other):
    """Write plan.json; an arm may also be given as its entry there."""
    content = {"schema": 1, "study": "synthetic", "config_sha256": "00"}
    entries = []
    for arm in arms:
        if isinstance(arm, SyntheticArm):
            entries.append(arm.as_json())
        else:
            entries.append(dict(arm))
    content |= {"arms": entries, "runs": list(runs), "targets": {}}
    registration = folder / "analysis.yaml"
    if registration.is_file():
        content["analysis_sha256"] = hashlib.sha256(registration.read_bytes()).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "plan.json", content | other)


def write_registration(folder, **other):
    """Write analysis.yaml (time to a target of 5.0, sync, 4 workers, virtual clock) and return its sha256."""
    content = {
        "schema": 1,
        "study": "synthetic",
        "reference": "sync",
        "primary": {"endpoint": "time_to_target", "num_workers": 4, "clock": "virtual"},
        "alpha": 0.05,
        "margins": {"loss": 0.02, "macro_f1": 0.01},
        "num_seeds": 8,
        "targets": {"sync-w4-virtual": 5.0},
        "target_from": "pilot runs",
    }
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(content | other, sort_keys=False).encode()
    (folder / "analysis.yaml").write_bytes(text)
    return hashlib.sha256(text).hexdigest()


def write_study(folder, curves, arms, *, registration=None):
    """Write a planned study with one test run per arm and seed.

    Args:
        curves: arm name -> one curve per seed.
        registration: other values of analysis.yaml; None leaves the file out.

    Returns:
        `folder`.
    """
    by_name = {arm.name: arm for arm in arms}
    runs = []
    for name, of_arm in curves.items():
        most = max((curve[-1][0] for curve in of_arm if curve), default=None)
        for seed, curve in enumerate(of_arm, 100):
            path = f"test/{name}/s{seed}"
            runs.append(planned(path, "test", name, seed))
            if curve and curve[-1][2] is None:
                status = DIVERGED
            else:
                status = DONE
            write_run(folder / path, by_name[name], curve, seed=seed, status=status, budget=most)
    if registration is not None:
        write_registration(folder, **registration)
    write_plan(folder, arms, runs)
    return folder


def example_study(folder, *, seeds=8):
    """Write a study that has every part: a base model, two clocks on two machines, three algorithms, 2 to 16 workers,
    tuning, fine-tuning, replicates, pilots of one arm, a diverged run, a missing one.

    Curves are exponentials with noise per seed; asynchronous arms are faster and a little worse.
    """
    generator = numpy.random.default_rng(0)
    algorithms = ("sync", "async", "ringmaster")
    places = [(workers, "virtual") for workers in (2, 4, 8, 16)] + [(2, "measured")]
    arms = []
    runs = []
    rates = (0.001, 0.0005, 0.002)
    for workers, clock in places:
        for algorithm in algorithms:
            worse = 0.0
            if algorithm == "async":
                worse = 0.01 * math.log2(workers)
            losses = tuple((5.0 + worse + abs(math.log(rate / 0.001)),) for rate in rates)
            speeds = STRAGGLER if clock == "virtual" else None
            arms.append(SyntheticArm(algorithm, workers, clock, speeds, 16, rates, losses, tuning_seeds=(0,)))
    for arm in arms:
        for number, rate in enumerate(arm.learning_rates):
            path = f"tuning/{arm.name}/t{number}-s0"
            runs.append(planned(path, "tuning", arm.name, 0, trial=number))
            curve = straight(9.0, arm.trial_losses[number][0] or 9.0, seconds=10.0)
            write_run(folder / path, arm, curve, seed=0, learning_rate=rate)
    runs.insert(0, planned("base", "base", "base", 0))
    one = SyntheticArm("single", 1, "measured", None)
    write_run(folder / "base", one, straight(9.0, 6.0, seconds=10.0), from_scratch=True)
    level = generator.normal(0.0, 0.05, size=seeds)
    checks = ("slur_h", "negate_neg_nh", "derog_neg_attrib_h", "spell_char_swap_h", "counter_quote_nh")
    for arm in arms:
        of_one_worker = 6.0 if arm.algorithm == "sync" else 11.0
        per_second = arm.num_workers * of_one_worker / (1 + 0.03 * arm.num_workers)
        if arm.clock == "measured":
            per_second *= 3.0
        most = {"sync": 0, "async": 2 * arm.num_workers, "ringmaster": arm.num_workers}[arm.algorithm]
        for number in range(seeds):
            seed = 100 + number
            for replicate in range(2 if arm.clock == "measured" else 1):
                path = f"test/{arm.name}/s{seed}"
                if replicate > 0:
                    path += f"-r{replicate}"
                runs.append(planned(path, "test", arm.name, seed, replicate=replicate))
                end = 5.0 + level[number] + generator.normal(0.0, 0.02)
                if arm.algorithm == "async":
                    end += 0.02 * math.log2(arm.num_workers)
                speed = per_second * math.exp(generator.normal(0.0, 0.02))
                samples = [round(3200 * share / 12) for share in range(13)]
                curve = []
                for done in samples:
                    curve.append((done, done / speed, end + (9.0 - end) * math.exp(-done / 600)))
                if replicate == 0:
                    delays = [int(value) for value in generator.integers(0, most + 1, size=60)]
                else:
                    delays = []
                status = DONE
                if arm.name == "async-w16-virtual" and number == 3:
                    curve = [*curve[:5], (curve[5][0], curve[5][1], None)]
                    status = DIVERGED
                if replicate and arm.algorithm == "sync" and number == seeds - 1:
                    continue  # planned, and never run
                machine = {"cores": 4} if arm.clock == "measured" else None
                how = {"seed": seed, "status": status, "delays": delays, "budget": samples[-1]}
                write_run(folder / path, arm, curve, environment=machine, **how)
    tuned = [arm for arm in arms if arm.num_workers == 4]
    for number in range(seeds):
        seed = 100 + number
        for repetition in range(2):
            finetune_seed = 1000 * seed + repetition
            for name in ("baseline", *(arm.name for arm in tuned)):
                path = f"finetune/{name}/s{seed}-f{repetition}"
                parent = None if name == "baseline" else f"test/{name}/s{seed}"
                runs.append(planned(path, "finetune", name, seed, parent=parent, finetune_seed=finetune_seed))
                score = 0.60 + (0.04 if parent else 0.0) + 0.2 * level[number] + generator.normal(0.0, 0.005)
                right = round(100 * score)
                found = {"accuracy": score, "num_cases": 200, "functionalities": {}}
                for check in checks:
                    found["functionalities"][check] = {"accuracy": score - 0.1, "num_cases": 100}
                write_finetuning(
                    folder / path,
                    seed=finetune_seed,
                    macro_f1=float(score),
                    accuracy=float(score) + 0.1,
                    parent=None if parent is None else {"run": parent, "seed": seed},
                    confusion=((right, 100 - right), (100 - right, right)),
                    hatecheck=found,
                )
    targets = {arm.name: 5.3 for arm in arms if arm.algorithm == "sync"}
    pilots = {"sync-w4-virtual": {"runs": 2, "first_loss": 9.0, "best_loss": 5.1}}
    declared = {"targets": targets, "target_from": "95 % of the improvement of pilot runs", "pilots": pilots}
    write_registration(folder, num_seeds=seeds, **declared)
    write_plan(folder, arms, runs, targets=targets)
    return folder


def edit_yaml(path, **changes):
    """Change keys of a YAML file."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    path.write_text(yaml.safe_dump(content | changes), encoding="utf-8")


def edit_json(path, **changes):
    """Change keys of a JSON file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | changes), encoding="utf-8")
