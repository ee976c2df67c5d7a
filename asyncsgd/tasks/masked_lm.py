"""Masked language modelling with logits at the masked positions only.

    loss = -(1/M) sum_m log softmax(logits_m)[label_m],    m over the M masked tokens of the batch

The loss and the gradient are the same as with logits everywhere and label -100 at unmasked positions. But with 15 % of
the tokens masked, the vocabulary matrix product and the softmax are about seven times smaller, and they dominate small
models.

This works for any `AutoModelForMaskedLM`. Its encoder is ``model.base_model``, and its head works token by token. So a
forward hook on the encoder hands the head only the hidden states of the masked positions, as one sequence of M tokens.

Shapes: B sequences, L tokens, M masked tokens, D hidden, V vocabulary.
"""
# ruff: noqa: RUF009 - the calls in the dataclass's defaults are `setting`, which returns dataclasses.field

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from asyncsgd.data.corpora import check_sources, load_corpus
from asyncsgd.data.masking import STRATEGIES, Masking, OnlyCandidates, Strategy
from asyncsgd.data.tokenization import TRAINED_HERE, Tokens, load_tokenizer, tokenized_folder
from asyncsgd.errors import UsageError
from asyncsgd.settings.flags import setting
from asyncsgd.settings.training import BLOCKS, OF_TRANSFORMERS, SAMPLING, Defaults, Sampling
from asyncsgd.tasks.base import Batches, Sums, Task, found, split_rows
from asyncsgd.tasks.scores import perplexity

if TYPE_CHECKING:  # the fields are flags, and --help is not to wait for torch
    from torch import Tensor, nn

    from asyncsgd.data.batching import Batch, Frame, TrainingBatches


class MaskedPositions:
    """Hands a model's head only the hidden states of the positions that are set; none set: all, as usual.

    Args:
        model: an `AutoModelForMaskedLM`; a forward hook is put on its encoder, for as long as the model lives.
    """

    def __init__(self, model: nn.Module) -> None:
        encoder = getattr(model, "base_model", None)
        if encoder is None or encoder is model:
            raise ValueError(f"{type(model).__name__} has no encoder of its own (base_model)")
        self.positions: Tensor | None = None
        encoder.register_forward_hook(self._keep_masked)

    @classmethod
    def of(cls, model: Any) -> MaskedPositions:
        """The one of this model, put there by the first call."""
        if not hasattr(model, "_masked_positions"):
            model._masked_positions = cls(model)
        return model._masked_positions

    def _keep_masked(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if self.positions is None:
            return output  # somebody uses the model directly
        hidden = output[0]
        masked = hidden.reshape(-1, hidden.shape[-1])[self.positions].unsqueeze(0)
        if isinstance(output, tuple):
            return (masked, *output[1:])
        output.last_hidden_state = masked
        return output


@dataclasses.dataclass(frozen=True)
class MaskedLM(Task):
    """Masked language modelling on a text, with any `AutoModelForMaskedLM`.

    Evaluations have masks of their own, so runs that train with different masks take the same test. With `candidates`
    there is a second test, in which only candidates are masked.
    """

    name: ClassVar[str] = "masked_lm"
    defaults: ClassVar[Defaults] = OF_TRANSFORMERS
    better: ClassVar[Mapping[str, Literal["higher", "lower"]]] = {"accuracy": "higher", "perplexity": "lower"}
    preload: ClassVar[tuple[str, ...]] = ("asyncsgd.data.batching", "asyncsgd.models")
    auto_class: ClassVar[str | None] = "AutoModelForMaskedLM"

    model_name: str = setting(
        "tiny",
        "tiny, small or tiny-distilbert (new, no network), a run, a folder or a name on the Hub",
        name="model",
        run=True,
    )
    data_name: str = setting(
        "pydocs",
        "pydocs (built in, no network), a file, a folder or hub:NAME; A+B joins two",
        name="data",
        aliases=("train_file",),
    )
    eval_data: str | None = setting(None, "text to evaluate on", unset="held out from --data", aliases=("val_file",))
    text_column: str = setting("text", "column of the data that holds the text")
    seq_len: int = setting(128, "tokens per sequence", at_least=8)
    blocks: bool = setting(False, BLOCKS)
    batch_size: int = setting(16, "sequences in one gradient, per worker", at_least=1)
    sampling: Sampling = setting("group_by_length", SAMPLING)
    mask: Literal["token", "word", "candidates"] = setting(
        "token", "mask single tokens, whole words, or words with --candidates first"
    )
    mask_prob: float = setting(0.15, "share of the tokens to predict", above=0, below=1)
    eval_mask: Literal["token", "word"] = setting(
        "token", "as --mask, in evaluations; runs with different ones are not compared"
    )
    eval_mask_prob: float = setting(0.15, "as --mask-prob, in evaluations", above=0, below=1)
    candidates: str | None = setting(
        None,
        "folder of mask_candidates.py; evaluations are then made on candidates only, too",
        unset="none",
        example="candidates",
    )
    candidate_share: float = setting(
        1.0,
        "share of the masked tokens that comes from candidates; --mask candidates only",
        at_least=0,
        at_most=1,
    )
    tech: bool = setting(False, "mask candidates only, and leave sequences without one out of training")
    eval_samples: int = setting(500, "sequences in one evaluation; 0: all", at_least=0)
    vocab_size: int = setting(8192, "of the tokenizer trained for a model that is new", at_least=1)
    dropout: float = setting(0.0, "of all dropout layers", at_least=0, below=1)

    weights: str | None = found()
    """Folder of a pretrained model; None for one that is made here."""
    config: str | None = found()
    """The model's configuration, as JSON."""
    tokenizer: str | None = found()
    """Its folder or name."""
    tokens: str | None = found()
    """Folder of the token arrays, ``train`` and ``eval``."""
    prefix: tuple[int, ...] | None = found()
    suffix: tuple[int, ...] | None = found()
    pad_id: int | None = found()
    mask_id: int | None = found()
    vocabulary_size: int | None = found()
    special_ids: tuple[int, ...] | None = found()
    corpus: str | None = found()
    fingerprint: str | None = found()
    candidates_sha256: str | None = found()
    """Of what was found, by text."""
    num_without_candidates: int | None = found()
    """Training sequences; with `tech` they are left out."""
    num_train_samples: int | None = found()
    num_eval_samples: int | None = found()
    new_parameters: tuple[str, ...] | None = found()
    """See `asyncsgd.models.Built`."""

    def __post_init__(self) -> None:
        by_candidate = self.mask == "candidates" or self.tech
        if self.vocab_size != type(self).vocab_size and self.model_name not in TRAINED_HERE:
            raise UsageError(
                f"--vocab-size is for --model tiny, small and tiny-distilbert; {self.model_name!r} has its own "
                f"tokenizer; drop it"
            )
        if by_candidate and self.candidates is None:
            flag = "--tech" if self.tech else "--mask candidates"
            raise UsageError(f"{flag} needs a folder that mask_candidates.py has filled; add --candidates DIR")
        if self.tech and self.mask == "word":
            raise UsageError("--tech is a masking of its own, got --mask word; drop one of the two")
        if self.candidate_share != type(self).candidate_share and (self.tech or not by_candidate):
            masking = "--tech, whose share is 1" if self.tech else f"--mask {self.mask}"
            raise UsageError(f"--candidate-share is for --mask candidates, got {masking}; drop one of the two")
        if {self.data_name, self.eval_data} <= {"pydocs", None} and self.text_column != type(self).text_column:
            raise UsageError(
                "--text-column does nothing for --data pydocs, which has no columns; drop it, or name other data"
            )

    def check_names(self) -> None:
        from asyncsgd import models
        from asyncsgd.data.candidates import read_complete
        from asyncsgd.origin import read_origin

        check_sources(self.data_name, self.eval_data)
        models.check_model(read_origin(self.model_name).model, self.seq_len)
        if self.candidates is not None:
            read_complete(Path(self.candidates).expanduser())

    def prepare(self, seed: int, cache: Path) -> Self:
        """Load the text, tokenize it, look at the model; everything slow is cached.

        Raises:
            UsageError: if the user must change something; the message says what.
        """
        from asyncsgd import models
        from asyncsgd.data.candidate_tokens import hash_of_candidates, tokens_with_candidates, with_candidates
        from asyncsgd.origin import hash_of, read_origin

        origin = read_origin(self.model_name)
        name = origin.model
        corpus = load_corpus(self.data_name, eval_data=self.eval_data, text_column=self.text_column, cache_dir=cache)
        tokenizer = load_tokenizer(name, corpus, vocab_size=self.vocab_size, cache_dir=cache)
        cut: dict[str, Any] = {"seq_len": self.seq_len, "cache_dir": cache, "blocks": self.blocks}
        folder = tokenized_folder(corpus, tokenizer, **cut)
        candidates: dict[str, Any] = {}
        if self.candidates is not None:
            plain = Tokens.load(folder / "train").num_samples
            folder = tokens_with_candidates(folder, self.candidates, corpus, tokenizer, drop=self.tech, **cut)
            has_some = with_candidates(Tokens.load(folder / "train"))
            candidates = {
                "candidates_sha256": hash_of_candidates(self.candidates),
                "num_without_candidates": plain - int(has_some.sum()),
            }
        initial = models.build_model(name, tokenizer, seq_len=self.seq_len, dropout=self.dropout, seed=seed)
        if origin.parameters_sha256 is not None:
            hash_of(initial.model, origin)  # refuses
        frame = models.frame_of(tokenizer)
        num_eval = Tokens.load(folder / "eval").num_samples
        return dataclasses.replace(
            self,
            weights=None if name in TRAINED_HERE else models.local_folder(name),
            config=models.config_json(initial.model),
            tokenizer=str(tokenizer.name_or_path),
            tokens=str(folder),
            prefix=frame.prefix,
            suffix=frame.suffix,
            pad_id=frame.pad_id,
            mask_id=tokenizer.mask_token_id,
            vocabulary_size=len(tokenizer),
            special_ids=tuple(sorted(tokenizer.all_special_ids)),
            corpus=corpus.name,
            fingerprint=corpus.fingerprint_of(self.blocks),
            num_train_samples=Tokens.load(folder / "train").num_samples,
            num_eval_samples=min(self.eval_samples or num_eval, num_eval),
            new_parameters=initial.new_parameters,
            **candidates,
        )

    def facts(self) -> Mapping[str, Any]:
        candidates = {name: getattr(self, name) for name in ("candidates_sha256", "num_without_candidates")}
        from_scratch, notes = self.model_name in TRAINED_HERE, []
        if self.num_without_candidates:
            kept = "are left out" if self.tech else "are masked as if there were no candidates"
            notes.append(f"{self.num_without_candidates} training sequences without a candidate {kept}")
        if self.new_parameters and not from_scratch:
            new = ", ".join(self.new_parameters)
            number = len(self.new_parameters)
            notes.append(f"{number} tensors are not in the checkpoint, so they are drawn from the seed: {new}")
        return {
            **(candidates if self.candidates is not None else {}),
            "eval_masking": f"{self.eval_mask}:{self.eval_mask_prob}",
            "from_scratch": from_scratch,
            "notes": notes,
            "data": self.corpus,
            "data_fingerprint": self.fingerprint,
            "base_model": None if self.weights is None else self.model_name,
            "num_train_samples": self.num_train_samples,
            "num_eval_samples": self.num_eval_samples,
            "new_parameters": len(self.new_parameters or ()),
        }

    def save(self, model: nn.Module, folder: Path) -> None:
        """`AutoModelForMaskedLM.from_pretrained(folder)` reads it."""
        from asyncsgd import models

        models.save_pretrained(model, self.tokenizer, folder)

    def model(self, seed: int) -> nn.Module:
        from asyncsgd import models

        return models.masked_lm(self.weights, str(self.config), self.dropout, seed)

    def data(self, seed: int) -> MaskedTokens:
        return MaskedTokens(self, seed)

    @property
    def frame(self) -> Frame:
        """What stands around each sample."""
        from asyncsgd.data.batching import Frame

        assert self.prefix is not None
        assert self.suffix is not None
        assert self.pad_id is not None
        return Frame(self.prefix, self.suffix, self.pad_id)

    @property
    def masking(self) -> Masking:
        """Of the training batches."""
        return self._masking(OnlyCandidates() if self.tech else self._strategy(self.mask), self.mask_prob)

    @property
    def eval_masking(self) -> Masking:
        return self._masking(self._strategy(self.eval_mask), self.eval_mask_prob)

    @property
    def candidate_masking(self) -> Masking:
        """Of the second evaluation, with `candidates`."""
        return self._masking(OnlyCandidates(), self.eval_mask_prob)

    def _strategy(self, name: str) -> Strategy:
        kind = STRATEGIES[name]
        return kind(**{field.name: getattr(self, field.name) for field in dataclasses.fields(kind)})

    def _masking(self, strategy: Strategy, share: float) -> Masking:
        assert self.mask_id is not None
        assert self.vocabulary_size is not None
        assert self.special_ids is not None
        return Masking(strategy, share, self.mask_id, self.vocabulary_size, self.special_ids)

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """The logits `(M, V)` at the masked positions."""
        hook = MaskedPositions.of(model)
        hook.positions = batch.masked_positions
        try:
            logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        finally:
            hook.positions = None
        if logits.shape[:2] != (1, batch.num_masked):
            raise ValueError(
                f"the head of {type(model).__name__} does not work token by token: logits {tuple(logits.shape)}"
            )
        return logits[0]

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        from torch.nn import functional

        return functional.cross_entropy(outputs, batch.labels)

    def weight(self, batch: Batch) -> float:
        """Masked tokens."""
        return float(batch.num_masked)

    def count_tokens(self, batch: Batch) -> int:
        return int(batch.attention_mask.sum())

    def split(self, batch: Batch, parts: int) -> list[Batch]:
        """Parts of whole samples, with the masked positions of their own."""
        import torch

        from asyncsgd.data.batching import Batch

        rows = torch.arange(batch.num_samples)
        length = batch.input_ids.shape[1]
        split = []
        for input_ids, attention_mask, of_part in split_rows((batch.input_ids, batch.attention_mask, rows), parts):
            begin, end = int(of_part[0]) * length, (int(of_part[-1]) + 1) * length
            here = (batch.masked_positions >= begin) & (batch.masked_positions < end)
            split.append(Batch(input_ids, attention_mask, batch.masked_positions[here] - begin, batch.labels[here]))
        return split

    def sums(self, outputs: Tensor, batch: Batch) -> Sums:
        """The loss too, summed in float64 over float32 losses of tokens."""
        import torch
        from torch.nn import functional

        logits = outputs.float()
        losses = functional.cross_entropy(logits, batch.labels, reduction="none")
        correct = (logits.argmax(-1) == batch.labels).sum()
        return {"loss": losses.sum(dtype=torch.float64), "correct": correct}

    def metrics(self, sums: Sums) -> dict[str, float]:
        """`accuracy` is the share of masked tokens predicted exactly."""
        return {
            "accuracy": sums["correct"] / sums["weight"],
            "perplexity": perplexity(sums["loss"] / sums["weight"]),
        }


class MaskedTokens:
    """The batches of a `MaskedLM` in one process."""

    def __init__(self, task: MaskedLM, seed: int) -> None:
        from asyncsgd.data.batching import EvaluationBatches, is_by_length
        from asyncsgd.data.candidate_tokens import with_candidates

        self._task, self._seed, self._by_length = task, seed, is_by_length(task.sampling)
        self._tokens = Tokens.load(Path(str(task.tokens)) / "train")
        self._streams: dict[int, TrainingBatches] = {}
        tokens = Tokens.load(Path(str(task.tokens)) / "eval")
        self.evaluation: dict[str, Batches] = {
            "main": EvaluationBatches(tokens, task.frame, task.eval_masking, task.eval_samples)
        }
        if tokens.candidates is not None and (chosen := with_candidates(tokens)).any():
            self.evaluation["candidates"] = EvaluationBatches(
                tokens.select(chosen), task.frame, task.candidate_masking, task.eval_samples
            )

    def batch(self, stream: int, index: int) -> Batch:
        if stream not in self._streams:
            from asyncsgd.data.batching import TrainingBatches

            task = self._task
            self._streams[stream] = TrainingBatches(
                self._tokens,
                task.frame,
                task.masking,
                task.batch_size,
                self._seed,
                stream,
                self._by_length,
            )
        return self._streams[stream].batch(index)
