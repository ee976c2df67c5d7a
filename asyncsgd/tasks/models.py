"""Build or load language models; transformers is imported when a model is built, not before."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import nn

from asyncsgd.core.flat import ALIGNMENT
from asyncsgd.core.signals import signals_held
from asyncsgd.data.tokenizer import refuse_own_code
from asyncsgd.errors import UsageError

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512},
    "small": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024},
    "tiny-distilbert": {"dim": 128, "n_layers": 2, "n_heads": 2, "hidden_dim": 512},
}
"""BERT and DistilBERT shapes built here, with random weights: 1.5, 5.5 and 1.5 million parameters at a vocabulary of
8192."""


_BERT_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_DISTILBERT_DROPOUT = ("dropout", "attention_dropout")
_GPT2_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_OTHER_DROPOUT = ("hidden_dropout", "embedding_dropout", "mlp_dropout", "embed_dropout", "resid_dropout", "emb_pdrop")
"""What ModernBERT, GPT-NeoX, Bloom, Falcon, GPT-Neo and MPT have beside names of the others."""


MASKED_LM = "AutoModelForMaskedLM"
TRAINED_ON_LABELS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
"""How the classes of transformers end whose models were trained on labels."""


@dataclasses.dataclass(frozen=True)
class Built:
    """A model in float32."""

    model: Any
    new_parameters: tuple[str, ...]
    """The names of the parameters that nothing was loaded for; their values are a function of the seed."""
    dropped: tuple[str, ...] = ()
    """The names of those parameters of the source model whose values are not used here, e.g. those of its head."""

    def in_words(self) -> str:
        """Which parameters of a model with a new head are those of the model before."""
        num_parameters = len(list(self.model.parameters()))
        num_carried = num_parameters - len(self.new_parameters)
        new = ", ".join(self.new_parameters) or "none"
        dropped = ", ".join(self.dropped) or "none"
        return f"{num_carried} tensors are carried from the model; new, from the seed: {new}; dropped: {dropped}"


def build_model(model: str, tokenizer: Any, *, seq_len: int, dropout: float, seed: int) -> Built:
    """Return the model that training starts from.

    A checkpoint may lack the head of a masked-language model: its parameters are then new.

    Args:
        model: of `SHAPES` (random weights, a function of `seed`), a local folder or a Hub id.
        tokenizer: gives the vocabulary size and the padding id of a model built here.
        seq_len: longest sequence, special tokens included.
        dropout: of hidden states and attention, in [0, 1).

    Raises:
        UsageError: for a folder without weights, a Hub id that cannot be reached, a model too short for `seq_len`,
            weights that do not fit the encoder or are not finite.
    """
    if model not in SHAPES:
        return load_model(model, len(tokenizer), seq_len=seq_len, dropout=dropout, seed=seed)
    import transformers

    config_class: Any = transformers.BertConfig
    model_class: Any = transformers.BertForMaskedLM
    dropouts = _BERT_DROPOUT
    if "dim" in SHAPES[model]:
        config_class = transformers.DistilBertConfig
        model_class = transformers.DistilBertForMaskedLM
        dropouts = _DISTILBERT_DROPOUT
    config = config_class(
        vocab_size=padded_size(len(tokenizer)),
        pad_token_id=tokenizer.pad_token_id,
        max_position_embeddings=max(512, seq_len),
        **dict.fromkeys(dropouts, dropout),
        **SHAPES[model],
    )
    with seeded(seed):
        built = model_class(config)
    names = [name for name, _ in built.named_parameters()]
    return Built(built.float().train(), tuple(names))


def padded_size(num_tokens: int) -> int:
    """The size of the vocabulary of a model built here, rounded up to a multiple of `ALIGNMENT` float32 numbers, so
    that the output bias ends with a cache line. Fused optimizers then round alike on the flat vector and on single
    tensors.
    """
    return math.ceil(num_tokens / ALIGNMENT) * ALIGNMENT


def load_model(
    model: str, num_tokens: int, auto_class: str = MASKED_LM, *, seq_len: int, dropout: float, seed: int
) -> Built:
    """Return the model of a folder or a Hub id.

    Args:
        num_tokens: of its tokenizer.
        auto_class: of transformers, which loads it.
        seed: of what the checkpoint lacks, which must be of the head; the rest as in `build_model`.

    Raises:
        UsageError: as `build_model` does.
    """
    with seeded(seed):
        built, new = _load(model, dropout, auto_class)
    limit = _longest_sequence(built)
    if limit is not None and seq_len > limit:
        raise UsageError(
            f"--seq-len {seq_len} is longer than the {limit} positions of model {model!r}; type --seq-len {limit}"
        )
    if num_tokens > built.config.vocab_size:
        raise UsageError(
            f"the tokenizer of {model!r} has {num_tokens} tokens, its model only {built.config.vocab_size}"
        )
    return Built(built.float().train(), new)


def _longest_sequence(model: Any) -> int | None:
    """How many tokens a transformers model takes; None where it does not say.

    RoBERTa and its kin number positions from ``padding_idx + 1`` on, so they take fewer tokens than they have rows of
    positions.
    """
    for name, module in model.named_modules():
        if not name.endswith("position_embeddings") or not isinstance(module, nn.Embedding):
            continue
        if module.padding_idx is not None:
            return module.num_embeddings - module.padding_idx - 1
    limit: int | None = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and limit <= 0:
        return None
    return limit


def class_of(model: str) -> str:
    """The class of transformers that loads a saved model with its head: one of `TRAINED_ON_LABELS`, or `MASKED_LM`."""
    import transformers

    local = Path(model).is_dir()
    try:
        config = transformers.AutoConfig.from_pretrained(model, local_files_only=local, trust_remote_code=False)
    except (OSError, ValueError):  # loading the model reports a configuration that cannot be read
        return MASKED_LM
    architectures = config.architectures or [""]
    for kind in TRAINED_ON_LABELS:
        if architectures[0].endswith(kind):
            return f"AutoModel{kind}"
    return MASKED_LM


def build_head(
    source: Any,
    kind: str,
    labels: Sequence[str],
    *,
    problem_type: str | None = None,
    keep: bool = False,
    dropout: float,
    seed: int,
) -> Built:
    """Return a model with a new head on the encoder of another model, whose values are copied.

    A model that was trained on labels gives all that has a place in the new one but its output layer: also BERT's and
    DeBERTa's pooler, DistilBERT's ``pre_classifier``, RoBERTa's ``classifier.dense``. With `keep` it gives the output
    layer too.

    A masked-language model does not train the pooler and the new head, so they are drawn here. Matrices are drawn from
    a normal distribution with the configuration's ``initializer_range``, in the order of their names. The rest begins
    as in the library (biases 0, scales 1). So these values are a function of `seed` and their shapes alone, and models
    of one architecture begin with the same values. A checkpoint's own pooler is not used, since a model after continued
    pretraining has lost it.

    Args:
        source: an `AutoModelForMaskedLM`, or a model with labels, see `TRAINED_ON_LABELS`.
        kind: ``SequenceClassification``, ``TokenClassification`` or ``QuestionAnswering``.
        labels: the names of the outputs, for the configuration.
        problem_type: what transformers calls the kind of labels, for the configuration.
        keep: whether the output layer is kept, which needs the same kind and labels of the same names.
        dropout: of the head, in [0, 1).

    Raises:
        UsageError: if the architecture has no such form, or one that the encoder does not fit; if an output layer is to
            be kept and is another one.
    """
    import transformers

    config = copy.deepcopy(source.config)
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}
    config.problem_type = problem_type
    for name in ("classifier_dropout", "classifier_dropout_prob", "seq_classif_dropout", "qa_dropout"):
        if hasattr(config, name):
            setattr(config, name, dropout)
    with seeded(seed):
        try:
            # A configuration may name a half-precision type, which the encoder's values must not pass through.
            auto_model = getattr(transformers, f"AutoModelFor{kind}")
            built: Any = auto_model.from_config(config, trust_remote_code=False).float()
        except ValueError as error:
            raise UsageError(f"{type(source).__name__} has no form for {kind}: {error}") from error
    if keep:
        _check_kept(source, built)
    encoder = source.base_model.state_dict()
    has_labels = type(source).__name__.endswith(TRAINED_ON_LABELS)
    if has_labels:
        places = built.base_model.state_dict()
        # A pooler that the new model lacks is left out. Any other tensor without a place is refused below.
        fits = {name: name in places or not name.startswith("pooler.") for name in encoder}
        encoder = {name: tensor for name, tensor in encoder.items() if fits[name]}
    loaded = built.base_model.load_state_dict(encoder, strict=False)
    # Only whole parts that the masked-language model does not have, like the pooler, may stay without a value.
    parts = {key.partition(".")[0] for key in encoder}
    missing = [key for key in loaded.missing_keys if key.partition(".")[0] in parts]
    class_name = type(built).__name__
    for keys, problem in (
        (loaded.unexpected_keys, f"of the encoder have no place in a {class_name}"),
        (missing, f"of a {class_name} are not in the encoder"),
    ):
        if keys:
            raise UsageError(f"{len(keys)} tensors {problem}, e.g. {min(keys)}; start from another model")
    copied = {id(parameter) for name, parameter in built.base_model.named_parameters() if name in encoder}
    if has_labels:
        copied |= _copy_head(source, built, keep)
    carried = set()
    drawn = {}
    for name, parameter in built.named_parameters():
        if id(parameter) in copied:
            carried.add(name)
        else:
            drawn[name] = parameter
    new_names = tuple(sorted(drawn))
    generator = torch.Generator().manual_seed(seed)
    deviation = getattr(config, "initializer_range", 0.02)
    with torch.no_grad():
        for name in new_names:
            if drawn[name].ndim >= 2:
                drawn[name].normal_(0.0, deviation, generator=generator)
    dropped = sorted(name for name, _ in source.named_parameters() if name not in carried)
    return Built(built.train(), new_names, tuple(dropped))


def _output_layer(model: Any) -> str:
    """The beginning of the names of a model's last parameters, whose rows are its labels."""
    name, _ = list(model.named_parameters())[-1]
    return name.rpartition(".")[0] + "."


def _copy_head(source: Any, built: Any, keep: bool) -> set[int]:
    """Copy the parameters outside the encoder that are in both models, and the output layer only to `keep` it; return
    the ids of the parameters that were set.
    """
    source_parameters = dict(source.named_parameters())
    left_out = [f"{built.base_model_prefix}."]  # the encoder
    if not keep:
        left_out += [_output_layer(source), _output_layer(built)]
    copied = set()
    for name, parameter in built.named_parameters():
        value = source_parameters.get(name)
        if value is None or value.shape != parameter.shape or name.startswith(tuple(left_out)):
            continue
        with torch.no_grad():
            parameter.copy_(value)
        copied.add(id(parameter))
    return copied


def _check_kept(source: Any, built: Any) -> None:
    """Refuse to keep an output layer for labels of another kind or with other names."""
    labels = ", ".join(source.config.id2label.values())
    built_labels = ", ".join(built.config.id2label.values())
    kind = built.config.problem_type
    if type(built).__name__.endswith("ForQuestionAnswering"):
        built_labels = labels  # its two outputs mean the same whatever a configuration calls them
    for what, before, now in (
        ("is a", type(source).__name__, type(built).__name__),
        # Where a configuration says nothing, transformers finds the kind in the labels of a batch.
        ("has the kind of labels", source.config.problem_type or kind, kind),
        ("has the labels", labels, built_labels),
    ):
        if before != now:
            raise UsageError(f"--head keep: the model {what} {before}, and here it is {now}; type --head new")


def restored(weights: str | None, config: str, dropout: float, seed: int, auto_class: str) -> nn.Module:
    """Return the model that training starts from, as it was built before, in any process.

    Args:
        weights: its local folder; None for one with random weights, which are a function of `seed`.
        config: its `config_json`.
    """
    import transformers

    with seeded(seed):
        if weights is not None:
            model, _ = _load(weights, dropout, auto_class)
        else:
            values = json.loads(config)
            model_config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
            auto_model = getattr(transformers, auto_class)
            model = auto_model.from_config(model_config, trust_remote_code=False)
    restored_model: nn.Module = model.float().train()
    return restored_model


def local_folder(model: str) -> str:
    """The folder of a model that has been loaded: its own, or the one that the Hub's library keeps."""
    if Path(model).is_dir():
        return os.path.abspath(model)
    from huggingface_hub import snapshot_download

    return snapshot_download(model, local_files_only=True)


def config_json(model: Any) -> str:
    """The configuration of a transformers model, as `restored` reads it."""
    config = json.loads(model.config.to_json_string(use_diff=False))
    return json.dumps(config)


def save_pretrained(model: Any, tokenizer: str | None, folder: Path) -> None:
    """Write a transformers model: safetensors, configuration, and the tokenizer from its own folder or name."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder)
    if tokenizer is not None:
        local = Path(tokenizer).is_dir()
        loaded = AutoTokenizer.from_pretrained(tokenizer, local_files_only=local, trust_remote_code=False)
        loaded.save_pretrained(folder)


def save_whole(save: Callable[[Path], None], folder: Path) -> None:
    """Call `save` with an empty folder, which gets the name `folder` when it is complete. A folder of that name is
    deleted just before.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        save(partial)
        with signals_held():  # no signal to stop comes between the two
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's default generator, which initialisers draw from, with `seed`, and put its state back afterwards.

    >>> with seeded(0):
    ...     first = torch.rand(2)
    >>> with seeded(0):
    ...     torch.equal(first, torch.rand(2))
    True
    """
    state = torch.random.get_rng_state()
    torch.random.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.random.set_rng_state(state)


@contextlib.contextmanager
def generators_restored(device: torch.device | None = None) -> Iterator[None]:
    """Put the default generators of torch, on the CPU and on a GPU that is named, of numpy and of Python back
    afterwards.
    """
    gpus = [device] if device is not None and device.type == "cuda" else []
    of_python = random.getstate()
    of_numpy = np.random.get_state()  # noqa: NPY002 - the generator that code of others draws from
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002 - as above


def _load(model: str, dropout: float, auto_class: str) -> tuple[Any, tuple[str, ...]]:
    """The model of a folder or a Hub id, and the names of the parameters that its checkpoint does not have."""
    local = Path(model).is_dir()
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # if something does not fit, the message here says so in one line
    try:
        config = transformers.AutoConfig.from_pretrained(model, local_files_only=local, trust_remote_code=False)
        for name in (*_BERT_DROPOUT, *_DISTILBERT_DROPOUT, *_GPT2_DROPOUT, *_OTHER_DROPOUT):
            # A config.json may spell 0.0 as 0. None means that the layer takes another layer's value.
            if isinstance(getattr(config, name, None), float | int):
                setattr(config, name, dropout)
        auto_model = getattr(transformers, auto_class)
        loaded, report = auto_model.from_pretrained(
            model,
            config=config,
            local_files_only=local,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report then
        )
    except pickle.UnpicklingError as error:
        # The library's own message advises to load it all the same, which would run whatever is in it.
        raise UsageError(
            f"{model}: the weights (pytorch_model.bin) are damaged or hold more than tensors, and asyncsgd runs no "
            f"code that comes with a model; save them as model.safetensors where they can be trusted"
        ) from error
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        refuse_own_code(model, error)
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        if local:
            raise UsageError(f"{model}: cannot be loaded by {auto_class}: {reason}") from error
        raise UsageError(
            f"model {model!r} is neither a folder nor in the local cache, and the Hub did not give it ({reason}). "
            f"Run the same command once online, or type --model FOLDER"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    return loaded, _new_parameters(model, loaded, report)


def _new_parameters(model: str, loaded: Any, report: Mapping[str, Any]) -> tuple[str, ...]:
    """The parameters that transformers' report on loading says are missing, all of them of the head.

    Raises:
        UsageError: if the encoder lacks some, or any has another shape, or is not finite.
    """
    parameters = dict(loaded.named_parameters())
    new = parameters.keys() & set(report.get("missing_keys", ()))
    fix = "it is damaged or of another architecture than its config.json says; copy it again"
    other_shape = [entry if isinstance(entry, str) else entry[0] for entry in report.get("mismatched_keys", ())]
    of_encoder = [name for name in new if name.startswith(f"{loaded.base_model_prefix}.")]
    not_finite = [name for name, tensor in parameters.items() if not bool(torch.isfinite(tensor).all())]
    for names, one, several, advice in (
        (other_shape, "has another shape", "have another shape", fix),
        (of_encoder, "is missing", "are missing", fix),
        (not_finite, "holds NaN or infinity", "hold NaN or infinity", "take a checkpoint from before the run diverged"),
    ):
        if names:
            problem = several if len(names) > 1 else one
            raise UsageError(
                f"{model}: {len(names)} of {len(parameters)} tensors {problem}, e.g. {min(names)}; {advice}"
            )
    errors = list(report.get("error_msgs", ()))
    if errors:
        raise UsageError(f"{model}: {errors[0]}; {fix}")
    return tuple(sorted(new))
