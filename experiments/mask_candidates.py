"""Find the words that are worth masking, once, so that training does not have to.

    python experiments/mask_candidates.py --data FOLDER --finder ner:runs/TAGGER --out candidates
    python experiments/stilt_mlm.py --data FOLDER --mask candidates --candidates candidates

Finders run over chunks of texts in several processes on CPUs, and in one process per GPU on CUDA. An interrupted
command goes on where it was when it is typed again. Any number of processes writes the same files. --data, --eval-data,
--split, --text-column, --encoding, --quoting, --documents, --model and --vocab-size must be those of the training,
since they decide on texts and word pieces; ``--finder help`` explains the finders."""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from pathlib import Path
from typing import Any

from asyncsgd.backends.pool import process_pool
from asyncsgd.core.signals import StopRequest
from asyncsgd.errors import UsageError
from asyncsgd.records.locks import one_writer
from asyncsgd.records.machine import available_cores
from asyncsgd.scripts.base import go_offline, run_script
from asyncsgd.settings.flags import Parser
from asyncsgd.settings.numbers import out_of_bounds, whole_number
from asyncsgd.settings.specs import checked, specs_of
from asyncsgd.tasks.masked_lm import MaskedLM

OF_TRAINING = ("data", "eval_data", "split", "text_column", "encoding", "quoting", "documents", "model", "vocab_size")


def run(argv: list[str], stop: StopRequest) -> int:
    if "--finder=help" in argv or ("--finder", "help") in itertools.pairwise(argv):
        from asyncsgd.domain_masking.finders import FINDERS

        print(FINDERS.help())
        return 0
    given = parser().parse_args(argv)
    for name in ("processes", "chunk_texts"):
        value = getattr(given, name)
        wanted = "" if value is None else out_of_bounds(value, at_least=1)
        if wanted:
            raise UsageError(f"--{name.replace('_', '-')} must be {wanted}, got {value}")
    from asyncsgd.domain_masking.finders import FINDERS, Ner

    finder = FINDERS.read(given.finder)
    if not isinstance(finder, Ner) or Path(finder.model).expanduser().is_dir():
        go_offline((given.model, f"{given.data} {given.eval_data} {given.finder}"))
    statistics = find(given, finder)["statistics"]
    for side in ("train", "eval"):
        numbers = statistics[side]
        print(
            f"{side:6} {numbers['candidate_share']:.1%} of {numbers['pieces']:,} word pieces are candidates; "
            f"{numbers['texts_without_candidates']:,} of {numbers['texts']:,} texts have none"
        )
    terms = ", ".join(f"{term} {count}" for term, count in statistics["top_terms"][:10])
    print(f"terms  {terms}")
    print(f"done   {given.out}\nnext   python -m analysis candidates {given.out}")
    return 0


def find(given: argparse.Namespace, finder: Any) -> dict[str, Any]:
    """Read the texts, and fill the folder."""
    from tqdm import tqdm

    from asyncsgd.data.tokens import plain_backend
    from asyncsgd.domain_masking.candidates import begin, find_candidates
    from asyncsgd.domain_masking.tagger import Tagger
    from asyncsgd.run.run import cache_folder

    cache = cache_folder(given.cache_dir)
    out = Path(given.out)
    settings = {name: getattr(given, name) for name in OF_TRAINING}
    task = checked(MaskedLM, **settings)
    corpus = task.read(cache)
    tokenizer = task.make_tokenizer(task.origin().model, corpus, cache)
    ready = finder.prepare(corpus.train.texts, cache)
    devices = devices_of(given) if isinstance(ready, Tagger) else []
    processes = len(devices) or given.processes or available_cores()
    where = f"{processes} processes" if processes > 1 else "1 process"
    modules = ["asyncsgd.domain_masking.candidates"]  # imported once, so that processes start sooner
    if devices:
        names = ", ".join(sorted(set(devices)))
        where = f"{where} on {names}"
        modules.append("transformers.models.auto.modeling_auto")
    print(
        f"find   {given.finder} in {len(corpus.train.texts):,} training and {len(corpus.eval.texts):,} evaluation "
        f"texts, {where}",
        flush=True,
    )
    start = functools.partial(begin, ready, plain_backend(tokenizer).to_str(), devices)
    with one_writer(out, "--out"), process_pool(processes, start, modules) as mapped:
        return find_candidates(
            corpus,
            tokenizer,
            ready,
            out,
            lambda make, chunks: tqdm(mapped(make, chunks), total=len(chunks), unit="chunk", dynamic_ncols=True),
            finder=given.finder,
            model=given.model,
            chunk_texts=given.chunk_texts,
        )


def devices_of(given: argparse.Namespace) -> list[str]:
    """The device of each process of a finder with a model."""
    import torch

    from asyncsgd.run.run import resolve_device

    if resolve_device(given.device) == "cpu":
        return ["cpu"] * (given.processes or available_cores())
    if given.processes is not None:
        raise UsageError("--processes is for CPUs; on CUDA there is one process per GPU; drop it, or type --device cpu")
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())]


def parser() -> argparse.ArgumentParser:
    made = Parser(description=str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    for name in OF_TRAINING:
        spec = specs_of(MaskedLM)[name]
        help = f"{spec.metadata['help']} (default: {spec.metadata['unset'] or spec.default})"
        action = "append" if spec.metadata["repeats"] else "store"
        made.add_argument(*spec.flags, dest=name, default=spec.default, metavar="TEXT", help=help, action=action)
    made.add_argument("--finder", required=True, metavar="NAME:VALUE", help="ner:MODEL, terms:FILE, keyness:REFERENCE")
    made.add_argument("--out", required=True, metavar="DIR", help="folder of the candidates")
    made.add_argument("--processes", type=whole_number, metavar="N", help="(default: the cores, or one per GPU)")
    made.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of finders with a model")
    made.add_argument("--chunk-texts", type=whole_number, default=1000, metavar="N", help="texts of a file")
    made.add_argument("--cache-dir", metavar="DIR", help="folder for prepared data")
    return made


if __name__ == "__main__":
    sys.exit(run_script(run, ends_with_process=True, goes_on=True))
