"""The README.md of a model folder: a model card in the form of the Hugging Face Hub. Standard library and PyYAML only.

It says how the model came to be, from what the run's own records say. What they do not say is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

PIPELINES = {
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
}
"""What the Hub calls the use of a model, by the class of transformers that loads it."""


def model_card(
    summary: Mapping[str, Any],
    *,
    steps: Mapping[str, str],
    environment: Mapping[str, Any],
    command: str | None,
    loading: str,
    auto_class: str | None,
    hub_model: str | None,
) -> str:
    """The text of a model card, a pure function of its arguments.

    Args:
        summary: as summary.json has it. Without a ``status`` the model is one of a version that need not be the last.
        steps: how a gradient became a step, by name: the optimizer, the learning rate, the precision.
        environment: as environment.json has it; empty where it is not known.
        command: what started the run; None where that is not known.
        loading: code that loads the model, run in its folder.
        auto_class: of transformers, which loads the folder; None where none does.
        hub_model: the name on the Hub of the model that training began from; None where there is none.

    >>> text = model_card({"task": "line", "status": "DONE"}, steps={"optimizer": "SGD()"}, environment={},
    ...                   command=None, loading="model = Line().model(0)", auto_class=None, hub_model=None)
    >>> text.splitlines()[:5]
    ['---', 'tags:', '- asyncsgd', '- line', '---']
    """
    import yaml

    front: dict[str, Any] = {}
    if auto_class is not None:
        front["library_name"] = "transformers"
    if auto_class in PIPELINES:
        front["pipeline_tag"] = PIPELINES[auto_class]
    if hub_model is not None:
        front["base_model"] = hub_model
    front["tags"] = ["asyncsgd", *(str(summary[key]) for key in ("task", "mode") if summary.get(key))]
    sentences = "\n".join(f"- {sentence}" for sentence in _sentences(summary, steps, environment, command))
    return (
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n# A model trained with asyncsgd\n\n{sentences}\n\n"
        f"To load it, in this folder:\n\n```python\n{loading.strip()}\n```\n"
    )


def _sentences(
    summary: Mapping[str, Any], steps: Mapping[str, str], environment: Mapping[str, Any], command: str | None
) -> Iterator[str]:
    known = {key: value for key, value in summary.items() if value is not None}
    if "task" in known:
        script = f", in the experiment {_code(known['experiment'])}" if "experiment" in known else ""
        yield f"The task is {_code(known['task'])}{script}."
    if "data" in known:
        named = f", with the fingerprint {_code(known['data_fingerprint'])}" if "data_fingerprint" in known else ""
        yield f"The data are {_code(known['data'])}{named}{_counts(known)}."
    if "base_model" in summary:
        start = "random weights" if summary["base_model"] is None else _code(summary["base_model"])
        yield f"Training began from {start}."
    if isinstance(parent := known.get("parent"), Mapping) and parent.get("run"):
        yield f"That was the model of the run {_code(parent['run'])} (mode {parent.get('mode')})."
    if "mode" in known:
        several = "s" * (known.get("num_workers") != 1)
        workers = f", {known['num_workers']} worker{several}" if "num_workers" in known else ""
        rule = f", rule {_code(known['rule'])}" if "rule" in known else ""
        yield f"The mode is {_code(known['mode'])}{workers}{rule}{_clock(known)}."
    if "batch_size" in known:
        batches = f", and an update has {known['accumulate']} batches" if known.get("accumulate", 1) != 1 else ""
        yield f"A batch has {known['batch_size']} samples{batches}."
    for name, value in steps.items():
        yield f"The {name} is {_code(value)}."
    if "seed" in known:
        yield f"The seed is {known['seed']}."
    if "num_samples" in known and "num_updates" in known:
        yield f"It has seen {known['num_samples']} samples in {known['num_updates']} updates."
    yield _status(known)
    if "chosen_for" in known:
        yield f"It is the version with {known['chosen_for']}."
    if "final_eval_loss" in known:
        metrics = "".join(f", {name} {_number(value)}" for name, value in known.get("metrics", {}).items())
        yield f"The last evaluation had the loss {_number(known['final_eval_loss'])}{metrics}."
    delay = {name: value for name, value in known.get("delay", {}).items() if value is not None}
    if delay:
        yield f"Delays, in updates: {', '.join(f'{name} {_number(value)}' for name, value in delay.items())}."
    if "parameters_sha256" in known:
        number = f"Its {known['num_parameters']} parameters" if "num_parameters" in known else "Its parameters"
        yield f"{number} have the sha256 {_code(known['parameters_sha256'])}."
    versions = environment.get("versions") or {}
    of = [f"{name} {versions[name]}" for name in ("asyncsgd", "torch", "transformers") if name in versions]
    if of:
        yield f"The run began with {', '.join(of)}."
    if command is not None:
        yield f"The command was {_code(command)}."


def _counts(known: Mapping[str, Any]) -> str:
    counts = [
        f"{known[key]} {what} samples"
        for key, what in (("num_train_samples", "training"), ("num_eval_samples", "evaluation"))
        if key in known
    ]
    return f" ({', '.join(counts)})" if counts else ""


def _clock(known: Mapping[str, Any]) -> str:
    speeds = f", speeds {_code(known['speeds'])}" if "speeds" in known else ""
    return (", on the virtual clock" if known.get("clock") == "virtual" else "") + speeds


def _status(known: Mapping[str, Any]) -> str:
    if "status" not in known:
        return "The run may have gone on after this."
    if known["status"] == "DONE":
        return "The run ended as planned (DONE)."
    message = f": {_plain(known['message'])}" if known.get("message") else ""
    return f"The run stopped early ({known['status']}){message}."


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else str(value)


def _code(value: Any) -> str:
    return f"`{_plain(value)}`"


def _plain(value: Any) -> str:
    """On one line, and without what would end a piece of code."""
    return " ".join(str(value).split()).replace("`", "'")
