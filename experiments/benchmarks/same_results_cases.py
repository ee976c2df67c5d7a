"""The runs of same_results.py: their commands, and the small files that they read."""

from __future__ import annotations

import csv
import dataclasses
import json
import random
from pathlib import Path
from typing import Any

from asyncsgd.records.events import DIVERGED, DONE, FAILED

# Every rule is here, with parameters that let it act on so few workers.
RULES = (
    "asynchronous",
    "synchronous",
    "k_sync:quorum=2",
    "k_sync:quorum=2,interrupt=false",
    "fixed_delay:delay=2",
    "ssp:slack=1",
    "staleness_aware",
    "delay_adaptive:concurrency=2",
    "koloskova:smoothness=5",
    "polynomial",
    "hinge:allowed=1",
    "rennala:batch=3",
    "rennala:batch=3,interrupt=false",
    "ringmaster:threshold=2",
    "ringmaster:threshold=2,stops=true",
    "k_async:quorum=2",
    "k_batch_async:batch=3",
    "fedbuff:buffer=2,num_local_steps=2",
    "downpour:n_push=2,n_fetch=4",
    "dc_asgd",
    "dc_asgd:adaptive=true",
    "dana",
    "gap_aware",
    "ormo",
    "local_sgd:num_local_steps=2,post=3",
    "diloco:num_local_steps=2",
    "async_local_sgd:num_local_steps=2,period=2",
    "async_local_sgd:num_local_steps=4,spread=.2,dynamic=true",
    "easgd:num_local_steps=2",
    "ringleader",
    "ia2sgd",
    "rescaled",
)
OWN_MOMENTUM = ("dana", "ormo")
"""Rules that want plain SGD at the server."""
GOSSIP = (
    "ad_psgd",
    "ad_psgd:topology=ring",
    "sgp",
    "sgp:delay=2",
    "streaming_diloco:num_local_steps=4",
    "streaming_diloco:num_local_steps=6,fragments=3,overlap=4,mix=0.2",
    "streaming_diloco:num_local_steps=3,fragments=1,overlap=0,mix=0",
)
CHURN = "leave:worker=1,seconds=1.5;join:worker=3,seconds=2.25;join:worker=1,seconds=3.5;leave:worker=0,seconds=4.25"
NETWORK = "bytes=1e6,worker=4e6,server=1e7"


@dataclasses.dataclass(frozen=True)
class Case:
    """A run, and what is done with its folder."""

    command: str
    longer: str = ""
    """Flags with which it is resumed, once it is at its end."""
    cut: bool = False
    """Whether its last checkpoint is taken away before it is resumed, as if it had been killed earlier."""
    replayed: bool = False
    status: str = DONE


def cases(folder: Path) -> dict[str, Case]:
    """By name; `folder` holds the data."""
    return {**_trainings(folder), **_tasks(folder), **_virtual(folder), **_resumed(folder), **_simulated()}


def _masked_lm(folder: Path) -> str:
    data = f"--data {folder}/train.txt --eval-data {folder}/eval.txt --cache-dir {folder}/cache --vocab-size 512"
    return f"stilt_mlm.py {data} --seq-len 32 --batch-size 8 --samples 120 --evaluations 3 --warmup 32 --dropout 0.1"


OWN = "own_model.py --width 4 --train-images 400 --batch-size 8 --samples 160 --warmup 32 --schedule linear"
OWN += " --learning-rate 5e-4 --weight-decay .01 --clip-norm 1"
SGD = "--optimizer sgd --learning-rate .1"
PLAIN_SGD = f"{SGD} --weight-decay 0 --clip-norm 0"
VIRTUAL = f"{OWN} --clock virtual --nproc 4 --speeds exponential:1"


def _trainings(folder: Path) -> dict[str, Case]:
    """One process, and real processes whose bits do not depend on timing."""
    mlm = _masked_lm(folder)
    single = f"{mlm} --mode single"
    real = f"{mlm} --mode async --nproc 1"
    pipeline = f"{mlm} --mode pipeline --nproc 2 --micro-batches 4"
    return {
        "single": Case(single, replayed=True),
        "single, sgd, 3 batches an update": Case(
            f"{single} --accumulate 3 --optimizer sgd --momentum .9", replayed=True
        ),
        "single, words masked": Case(f"{single} --mask word --schedule cosine --clip-norm .5", replayed=True),
        "single, bf16 in parts": Case(f"{single} --precision bf16 --micro-batches 3 --prefetch 2", replayed=True),
        "single, fp16": Case(f"{OWN} --mode single --precision fp16"),
        "single, best model kept": Case(f"{OWN} --mode single --evaluate-every 24 --keep-best --learning-rate .1"),
        "single, stopped for want of patience": Case(
            f"{OWN} --mode single --evaluate-every 8 --patience 2 --learning-rate .3"
        ),
        "single, diverged": Case(f"{OWN} --mode single {PLAIN_SGD} --learning-rate 1e30", status=DIVERGED),
        "sync, 2 ranks": Case(f"{mlm} --mode sync --nproc 2"),
        "sync, 2 ranks, own model": Case(f"{OWN} --mode sync --nproc 2 --micro-batches 2 {SGD}"),
        "async, shared memory": Case(f"{real} --transport shared_memory", replayed=True),
        "async, process groups": Case(f"{OWN} --mode async --nproc 1 --transport process_group"),
        "async, local steps": Case(f"{OWN} --mode async --nproc 1 --rule diloco:num_local_steps=2"),
        "async, held": Case(f"{OWN} --mode async --nproc 1 --rule rennala:batch=3 --prefetch 2"),
        "hogwild": Case(f"{mlm} --mode hogwild --nproc 1"),
        "hogwild, shared state": Case(f"{OWN} --mode hogwild --nproc 1 --hogwild-state shared"),
        "pipeline, 1f1b": Case(pipeline),
        "pipeline, gpipe": Case(f"{pipeline} --pipeline-schedule gpipe --clip-norm .5"),
        "pipeline, 2bw": Case(f"{pipeline} --pipeline-schedule 2bw --clip-norm 0"),
        "pipeline, 1f1b, 2 of 2 stages": Case(f"{pipeline} --nproc 4 --stages 2"),
    }


def _on_tasks(folder: Path) -> dict[str, str]:
    small = f"--cache-dir {folder}/cache --seq-len 32 --batch-size 8 --samples 80 --evaluations 2 --dropout .1"
    text = f"{small} --data {folder}/train.txt --eval-data {folder}/eval.txt --vocab-size 300 --warmup 32"
    asked = f"--data {folder}/asked --stride 8 --vocab-size 64 --warmup 32"
    return {
        "causal language model": f"train.py causal_lm {text}",
        "reward": f"reward_weighted.py {text}",
        "tags": f"train.py token_classification {small} --data {folder}/tagged --vocab-size 64 --warmup 32",
        "questions": f"train.py question_answering {small} {asked}",
        "classification": f"train.py classification {small} --data {folder}/labelled --model tiny",
    }


def _tasks(folder: Path) -> dict[str, Case]:
    """Every task in one process and on the virtual clock; masked language modelling and a model of one's own are
    elsewhere."""
    tasks = _on_tasks(folder)
    on_clock = "--mode async --clock virtual --nproc 3 --speeds exponential:1 --rule ringmaster:threshold=3"
    runs = {}
    for name, command in tasks.items():
        runs[f"{name}, single"] = Case(f"{command} --mode single")
        # A replay knows the library's tasks, and reward_weighted.py has one of its own.
        runs[f"{name}, virtual"] = Case(f"{command} {on_clock}", replayed=name != "reward")
    weighed = f"{tasks['classification']} --mode single --class-weights --dropout 0"
    runs["classification, classes weighed"] = Case(weighed)
    return runs


def _virtual(folder: Path) -> dict[str, Case]:
    """Torch models on the virtual clock."""
    language = f"{_masked_lm(folder)} --clock virtual --nproc 4 --speeds exponential:1"
    ever_slower = "--speeds half_normal --rule asynchronous"
    runs = {}
    for rule in RULES:
        command = f"{VIRTUAL} --rule {rule}"
        if rule in OWN_MOMENTUM:
            command = f"{command} {PLAIN_SGD}"
        runs[f"virtual, {rule}"] = Case(command)
    return runs | {
        "virtual, masked language model": Case(f"{language} --rule fedbuff:buffer=2,num_local_steps=2", replayed=True),
        "virtual, masked language model, network and churn": Case(
            f"{language} --network {NETWORK} --churn {CHURN} --rule ringleader", replayed=True
        ),
        "virtual, churn": Case(f"{VIRTUAL} --churn {CHURN}"),
        "virtual, churn, synchronous": Case(f"{VIRTUAL} --churn {CHURN} --rule synchronous"),
        "virtual, network": Case(f"{VIRTUAL} --network {NETWORK}"),
        "virtual, network and churn, local steps": Case(
            f"{VIRTUAL} --network {NETWORK} --churn {CHURN} --rule diloco:num_local_steps=2"
        ),
        "virtual, constant speeds": Case(f"{VIRTUAL} --speeds constant:1 --rule k_async:quorum=3"),
        "virtual, seconds": Case(
            f"{VIRTUAL} --samples none --schedule constant --seconds 4.5 --rule ringmaster:threshold=3,stops=true"
        ),
        "virtual, seconds and samples": Case(f"{VIRTUAL} --seconds 14 {ever_slower}"),
        "virtual, target": Case(f"{VIRTUAL} --evaluate-every 8 --target-loss 1.44 --learning-rate .01"),
        "virtual, best model kept": Case(f"{VIRTUAL} --keep-best --patience 2 --learning-rate .2"),
        "virtual, fp16 in parts": Case(f"{VIRTUAL} --precision fp16 --micro-batches 2"),
        "virtual, some never arrive": Case(f"{VIRTUAL} --speeds infinite:.1"),
        "virtual, all never arrive": Case(f"{VIRTUAL} --speeds infinite:.999", status=FAILED),
        "virtual, diverged": Case(f"{VIRTUAL} {PLAIN_SGD} --learning-rate 1e30", status=DIVERGED),
    }


def _resumed(folder: Path) -> dict[str, Case]:
    """Each is at its end, and is then made longer; or goes on from where it was a checkpoint before."""
    # One checkpoint before the end and one at it, in both parts of a run. A second one before the end would be left out
    # if the first were still being written.
    saved = "--schedule constant --checkpoint-every 96"
    mlm = f"{_masked_lm(folder)} {saved}"
    own = f"{OWN} {saved}"
    tasks = _on_tasks(folder)
    on_clock = "--mode async --clock virtual --nproc 4 --speeds exponential:1"
    real = "--mode async --nproc 1 --transport"
    pipeline = f"{mlm} --mode pipeline --nproc 2 --micro-batches 4"
    at_end = {
        "single": f"{mlm} --mode single",
        "single, 3 batches an update": f"{own} --mode single --accumulate 3",
        "async, shared memory": f"{own} {real} shared_memory",
        "async, local steps": f"{own} {real} shared_memory --rule easgd:num_local_steps=2",
        "hogwild": f"{own} --mode hogwild --nproc 1",
        "pipeline, 1f1b": pipeline,
        "virtual": f"{own} {on_clock}",
        "virtual, held": f"{own} {on_clock} --rule rennala:batch=3",
        "virtual, momenta": f"{own} {on_clock} --rule dana {PLAIN_SGD}",
        "virtual, local steps": f"{own} {on_clock} --rule async_local_sgd:num_local_steps=2,period=2",
        "virtual, network and churn": f"{own} {on_clock} --network {NETWORK} --churn {CHURN} --rule ringleader",
        "classification": f"{tasks['classification']} --mode single --samples 120 {saved}",
        "questions, virtual": f"{tasks['questions']} {on_clock} --samples 120 {saved}",
    }
    earlier = {
        "single, best model kept": f"{own} --mode single --keep-best --learning-rate .1",
        "sync, 2 ranks": f"{own} --mode sync --nproc 2",
        "async, process groups": f"{own} {real} process_group",
        "hogwild, shared state": f"{own} --mode hogwild --nproc 1 --hogwild-state shared",
        "pipeline, 2bw": f"{pipeline} --pipeline-schedule 2bw --clip-norm 0",
        "virtual, fp16": f"{own} {on_clock} --precision fp16",
        "virtual, local steps": at_end["virtual, local steps"],
        "virtual, network and churn": at_end["virtual, network and churn"],
    }
    runs = {}
    for name, command in at_end.items():
        runs[f"resumed, {name}"] = Case(command, longer="--samples 240")
    for name, command in earlier.items():
        runs[f"resumed earlier, {name}"] = Case(command, longer="--samples 240", cut=True)
    runs["resumed, epochs"] = Case(f"{mlm} --samples none --epochs .6 --mode single", longer="--epochs 1")
    return runs


def _simulated() -> dict[str, Case]:
    """Closed-form problems, with a server and without."""
    simulate = "simulate.py --nproc 7 --samples 210 --evaluations 3"
    timed = "simulate.py --nproc 6 --seconds 30 --evaluations 5"
    runs = {}
    for rule in RULES:
        runs[f"simulated, {rule}"] = Case(f"{simulate} --rule {rule}", replayed=True)
    for method in GOSSIP:
        runs[f"simulated, {method}"] = Case(f"{simulate} --rule {method}", replayed=True)
        command = f"{timed} --rule {method} --problem logistic --speeds log_normal:1 --learning-rate .01"
        runs[f"simulated, {method}, seconds"] = Case(command, replayed=True)
    for method in ("ad_psgd", "sgp", "streaming_diloco:num_local_steps=4"):
        command = f"simulate.py --nproc 1 --samples 40 --rule {method}"
        runs[f"simulated, {method}, one worker"] = Case(command, replayed=True)
    for rule in ("asynchronous", "synchronous", "ringmaster:threshold=4,stops=true", "ringleader", "easgd"):
        command = f"{timed} --rule {rule} --churn {CHURN} --network {NETWORK} --problem heterogeneous"
        runs[f"simulated, {rule}, churn and network"] = Case(command, replayed=True)
        command = f"{timed} --rule {rule} --problem logistic --speeds outages"
        runs[f"simulated, {rule}, seconds"] = Case(command, replayed=True)
    return runs | {
        "simulated, 300 workers": Case(
            "simulate.py --nproc 300 --samples 3000 --problem tridiagonal --speeds half_normal"
            " --rule ringmaster:threshold=40 --learning-rate .2",
            replayed=True,
        ),
        "simulated, all never arrive": Case(f"{simulate} --speeds infinite:.999", status=FAILED),
        "simulated, gossip, all never arrive": Case(f"{simulate} --speeds infinite:.999 --rule ad_psgd", status=FAILED),
        "simulated, diverged": Case(f"{simulate} --learning-rate 1e9", status=DIVERGED),
        "simulated, gossip, diverged": Case(f"{simulate} --learning-rate 1e9 --rule ad_psgd", status=DIVERGED),
    }


WORDS = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]


def write_data(folder: Path) -> None:
    """Two texts; sentences with labels and with tags, and questions, each to be had from the words."""
    draw = random.Random(0)
    words = ["".join(_drawn(draw, WORDS, 1, 3)) for _ in range(300)]
    for name, number in {"train": 200, "eval": 60}.items():
        lines = [" ".join(_drawn(draw, words, 3, 25)) for _ in range(number)]
        _write_lines(folder / f"{name}.txt", lines)
    for name in ("labelled", "tagged", "asked"):
        (folder / name).mkdir()
    for name, number in {"train": 120, "test": 30}.items():
        with open(folder / "labelled" / f"{name}.csv", "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["text", "label"])
            for k in range(number):
                label = k % 3
                words_of_label = words[label::3][:40]
                text = " ".join(_drawn(draw, words_of_label, 3, 12))
                rows.writerow([text, "abc"[label]])
        tagged = [json.dumps(_tagged(draw)) for _ in range(number)]
        _write_lines(folder / "tagged" / f"{name}.jsonl", tagged)
    for name, number in {"train": 60, "dev": 15}.items():
        asked = [json.dumps(_asked(draw, f"{name}{k}")) for k in range(number)]
        _write_lines(folder / "asked" / f"{name}.jsonl", asked)


def _drawn(draw: random.Random, words: list[str], least: int, most: int) -> list[str]:
    """Some of the words, with replacement."""
    number = draw.randint(least, most)
    return draw.choices(words, k=number)


def _write_lines(path: Path, lines: list[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines))


def _tagged(draw: random.Random) -> dict[str, Any]:
    """A sentence in which the first twenty words are things, ten of each kind."""
    tokens = []
    tags = []
    for _ in range(draw.randint(3, 12)):
        number = draw.randrange(len(WORDS))
        tokens.append(WORDS[number])
        if number < 10:
            tags.append("B-near")
        elif number < 20:
            tags.append("B-far")
        else:
            tags.append("O")
    return {"tokens": tokens, "ner_tags": tags}


def _asked(draw: random.Random, name: str) -> dict[str, Any]:
    """A text of which the word after the one that is asked for is the answer; some have none."""
    words = _drawn(draw, WORDS, 4, 30)
    index = draw.randrange(len(words))
    answers: dict[str, list[Any]] = {"text": [], "answer_start": []}
    if index + 1 < len(words):
        before = " ".join(words[: index + 1])
        answers = {"text": [words[index + 1]], "answer_start": [len(before) + 1]}
    return {"id": name, "context": " ".join(words), "question": words[index], "answers": answers}
