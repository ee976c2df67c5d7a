"""The README.md of a model folder: a model card in the form of the Hugging Face Hub.

It says how the model came to be, from what the run's own records say. What they do not say is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

PIPELINES = {
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
}
"""What the Hub calls the use of a model, by the class of transformers that loads it."""

SENTENCES = """
The task is `{task}`[, in the experiment `{experiment}`].
The data are `{data}`[, with the fingerprint `{data_fingerprint}`][ ({counts})].
Training began from {start}.
That was the model of the run `{parent}`[ (mode {parent_mode})].
The mode is `{mode}`[, {workers}][, rule `{rule}`][, on the {virtual} clock][, speeds `{speeds}`].
A batch has {batch_size} samples[, and an update has {batches} batches].
{steps}
The seed is {seed}.
It has seen {num_samples} samples in {num_updates} updates.
{ended}
It is the version with {chosen_for}.
The last evaluation had the loss {final_eval_loss}[, {metrics}].
Delays, in updates: {delays}.
Its [{num_parameters} ]parameters have the sha256 `{parameters_sha256}`.
The run began with {versions}.
The command was `{command}`.
"""
"""A sentence, or a part in brackets, is left out where something in it is not known."""


def model_card(known: Mapping[str, Any], *, loading: str, auto_class: str | None, hub_model: str | None) -> str:
    """The text of a model card.

    Args:
        known: what summary.json says, the ``command`` that started the run, the ``versions`` of its packages, and under
            ``steps`` how a gradient became a step. Without a ``status`` the model need not be that of the end.
        loading: code that loads the model, run in its folder.
        auto_class: of transformers, which loads the folder.
        hub_model: the name on the Hub of the model that training began from.

    >>> text = model_card({"task": "line", "status": "DONE", "steps": {"optimizer": "SGD()"}},
    ...                   loading="model = Line().model(0)", auto_class=None, hub_model=None)
    >>> text.splitlines()[:5]
    ['---', 'tags:', '- asyncsgd', '- line', '---']
    """
    from huggingface_hub import ModelCardData

    front = ModelCardData(
        library_name=None if auto_class is None else "transformers",
        pipeline_tag=PIPELINES.get(auto_class or ""),
        base_model=hub_model,
        tags=["asyncsgd", *(str(known[key]) for key in ("task", "mode") if known.get(key))],
    ).to_yaml()
    words = {}
    for key, value in known.items():
        if isinstance(value, str | int | float):
            words[key] = _plain(value)
    for key, text in _worded(known).items():
        if text:
            words[key] = text
    filled = [_filled(line, words) for line in SENTENCES.split("\n")]
    sentences = "\n".join(f"- {text}" for text in filled if text)
    return (
        f"---\n{front}\n---\n\n# A model trained with asyncsgd\n\n{sentences}\n\n"
        f"To load it, in this folder:\n\n```python\n{loading.strip()}\n```\n"
    )


def _filled(sentence: str, known: Mapping[str, str]) -> str:
    text = ""
    for number, part in enumerate(re.split(r"[\[\]]", sentence)):
        try:
            text += part.format_map(known)
        except KeyError:
            if number % 2 == 0:  # outside brackets
                return ""
    return text


def _worded(known: Mapping[str, Any]) -> dict[str, str | None]:
    """What the sentences say in other words than the summary."""
    began = known.get("base_model", "")
    parent = known.get("parent") or {}
    workers = known.get("num_workers")
    counts = {"training": known.get("num_train_samples"), "evaluation": known.get("num_eval_samples")}
    steps = known.get("steps") or {}
    versions = known.get("versions") or {}
    status = known.get("status")
    message = f": {_plain(known['message'])}" if known.get("message") else ""
    ends = {None: "The run may have gone on after this.", "DONE": "The run ended as planned (DONE)."}
    return {
        "counts": ", ".join(f"{count} {kind} samples" for kind, count in counts.items() if count is not None),
        "start": "random weights" if began is None else began and f"`{_plain(began)}`",
        "parent": _plain(parent.get("run") or ""),
        "parent_mode": parent.get("mode"),
        "workers": None if workers is None else f"{workers} worker{'s' * (workers != 1)}",
        "virtual": "virtual" if known.get("clock") == "virtual" else None,
        "batches": None if known.get("accumulate", 1) == 1 else str(known["accumulate"]),
        "steps": "\n- ".join(f"The {name} is `{_plain(value)}`." for name, value in steps.items()),
        "metrics": _listed(known.get("metrics") or {}),
        "delays": _listed(known.get("delay") or {}),
        "versions": _listed({name: versions.get(name) for name in ("asyncsgd", "torch", "transformers")}),
        "ended": ends.get(status, f"The run stopped early ({status}){message}."),
    }


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_plain(value)}" for name, value in values.items() if value is not None)


def _plain(value: Any) -> str:
    """On one line, and without what would end a piece of code."""
    if isinstance(value, float):
        return f"{value:.6g}"
    words = str(value).split()
    return " ".join(words).replace("`", "'")
