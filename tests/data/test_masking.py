"""Orders of samples, batches and masks: pure functions of (seed, stream, index), and what BERT's masking promises."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import uuid
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncsgd
from asyncsgd.data.first_order import first_order
from asyncsgd.data.masks import ByCandidate, ByToken, ByWord, Masking, OnlyCandidates, Sample
from asyncsgd.data.order import RUN, whole_epochs
from asyncsgd.data.random import Purpose, generator
from asyncsgd.data.tokens import Samples
from asyncsgd.tasks.masked_lm import MaskedLM
from asyncsgd.tasks.tensors import TensorData

CLS = 0
SEP = 1
PAD = 2
MASK = 3
UNK = 4
SPECIAL = (CLS, SEP, PAD, MASK, UNK)
VOCABULARY = 105  # 100 ordinary ids


def masking(strategy=None, probability=0.15):
    return Masking(strategy or ByToken(), probability, MASK, VOCABULARY, SPECIAL)


def samples_of(rows, word_starts=None):
    if word_starts is None:
        word_starts = [[True] * len(row) for row in rows]
    ids = []
    starts = []
    for row, own_starts in zip(rows, word_starts, strict=True):
        ids.append(np.array([CLS, *row, SEP], dtype=np.int32))
        starts.append(np.array([True, *own_starts, True]))
    return Samples.of(ids=ids, word_starts=starts)


def corpus(num_samples, seed=0, longest=30):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, longest + 1, num_samples)
    ends = np.cumsum(lengths)
    ids = draw.integers(len(SPECIAL), VOCABULARY, ends[-1]).astype(np.int32)
    word_starts = draw.random(ends[-1]) < 0.6
    word_starts[ends - lengths] = True
    rows = np.split(ids, ends[:-1])
    starts_of_rows = np.split(word_starts, ends[:-1])
    return samples_of(rows, starts_of_rows)


CORPUS = corpus(131)
ALIKE = samples_of([range(5, 25)] * 40)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The batches of a masked language model on rows that are given."""
    root = tmp_path_factory.mktemp("rows")

    def make(samples, batch_size=4, seed=0, **fields):
        folder = root / uuid.uuid4().hex
        for side in ("train", "eval"):
            samples.save(folder / side)
        prepared = {
            "folder": str(folder),
            "around": [1, 1],
            "pad_id": PAD,
            "mask_id": MASK,
            "vocabulary_size": VOCABULARY,
            "special_ids": SPECIAL,
        }
        fields.setdefault("eval_samples", 0)
        task = MaskedLM(prepared=json.dumps(prepared), batch_size=batch_size, **fields)
        return task.data(seed)

    return make


def equal(first, second):
    if first.keys() != second.keys():
        return False
    return all(torch.equal(first[name], second[name]) for name in first)


def unmasked(batch):
    """The ids `(B, L)` with every masked token put back."""
    labels = batch["labels"]
    is_kept = labels == -100
    return batch["input_ids"].where(is_kept, labels).numpy()


def positions(batch):
    is_masked = batch["labels"].flatten() != -100
    return is_masked.nonzero().flatten().numpy()


def test_every_purpose_stream_and_position_has_random_numbers_of_its_own():
    places = list(itertools.product((0, 1), Purpose, (0, 1, 2**31), (0, 1, 2**40)))
    firsts = {generator(*place).random() for place in places}
    assert len(firsts) == len(places)


def test_a_mask_depends_on_the_position_in_the_stream_and_not_on_the_batch_size(data):
    # All samples alike, so the same sample is at every position whatever the order.
    by_size = {}
    for size in (1, 4, 8):
        batches = data(ALIKE, size)
        ids = [batches.batch(0, index)["input_ids"] for index in range(64 // size)]
        by_size[size] = torch.cat(ids)
    assert torch.equal(by_size[4], by_size[8])
    assert torch.equal(by_size[1], by_size[8])
    assert len({tuple(row) for row in by_size[8].tolist()}) > 60  # 64 positions, each with a mask of its own


@given(num_samples=st.integers(1, 80), batch_size=st.integers(1, 5), seed=st.integers(0, 9), index=st.integers(0, 40))
@settings(deadline=None, max_examples=60)
def test_padding_attention_and_labels_agree_with_the_rows(data, num_samples, batch_size, seed, index):
    samples = corpus(num_samples, seed)
    batch = data(samples, batch_size, seed).batch(0, index)
    chosen = whole_epochs(samples.lengths, batch_size, seed, 0)(index)
    rows = [row.tolist() for row in samples.rows("ids", chosen)]
    longest = max(map(len, rows))
    padded = unmasked(batch).tolist()
    attended = batch["attention_mask"].tolist()
    for number, row in enumerate(rows):
        missing = longest - len(row)
        assert padded[number] == row + [PAD] * missing
        assert attended[number] == [1] * len(row) + [0] * missing
    assert len(padded) == len(rows)
    places = positions(batch)
    masked_of_row = np.bincount(places // longest, minlength=batch_size)
    assert (masked_of_row >= 1).all()
    inside = batch["attention_mask"].numpy().astype(bool)
    inside[:, 0] = False  # [CLS]
    last = [len(row) - 1 for row in rows]
    inside[np.arange(batch_size), last] = False  # [SEP]
    assert inside.ravel()[places].all()
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def within_five_sigma(count, number, probability):
    mean = number * probability
    deviation = math.sqrt(mean * (1 - probability))
    return abs(count - mean) <= 5 * deviation


@pytest.mark.parametrize("strategy", [ByToken(), ByWord()])
def test_15_percent_are_chosen_of_which_80_percent_are_masked_10_random_and_10_kept(strategy):
    number = 200_000
    ids = np.random.default_rng(1).integers(len(SPECIAL), VOCABULARY, number)
    word_starts = np.ones(number, dtype=bool)
    before = ids.copy()
    masked, positions = masking(strategy)(Sample(ids, word_starts), np.random.default_rng(2))
    assert (ids == before).all()
    assert within_five_sigma(len(positions), number, 0.15)
    new = masked[positions]
    old = ids[positions]
    is_mask = new == MASK
    is_old = new == old
    assert within_five_sigma(int(is_mask.sum()), len(positions), 0.8)
    assert within_five_sigma(int(is_old.sum()), len(positions), 0.1 + 0.1 / 100)
    swapped = new[~is_mask & ~is_old]
    assert set(swapped.tolist()) == set(range(len(SPECIAL), VOCABULARY))  # all ordinary ids, no special one
    counts = np.bincount(swapped, minlength=VOCABULARY)[len(SPECIAL) :]
    for count in counts:
        assert within_five_sigma(int(count), len(swapped), 1 / 100)


@given(length=st.integers(1, 60), seed=st.integers(0, 10**6), probability=st.floats(0.001, 0.999))
@settings(deadline=None, max_examples=60)
def test_by_word_chooses_all_tokens_of_a_word_or_none_and_at_least_one_word(length, seed, probability):
    word_starts = np.random.default_rng(seed + 1).random(length) < 0.5
    sample = Sample(np.arange(length), word_starts)
    draws = np.random.default_rng(seed).random(length)
    chosen = ByWord().choose(sample, probability, np.random.default_rng(seed))
    words = words_of(sample)
    below = [bool(draws[word[0]] < probability) for word in words]
    for word in words:
        assert chosen[word].all() or not chosen[word].any()
    if any(below):
        assert [bool(chosen[word[0]]) for word in words] == below
    else:
        assert chosen.any()


@pytest.mark.parametrize(("mask", "sha256"), [("token", "287d337576463501"), ("word", "bba2709eba44fb40")])
def test_masks_of_the_first_order_have_the_bits_that_they_have_always_had(data, mask, sha256):
    digest = hashlib.sha256()

    def add(batch, with_labels):
        places = positions(batch)
        digest.update(batch["input_ids"].numpy().tobytes())
        digest.update(places.tobytes())
        if with_labels:
            labels = batch["labels"].flatten().numpy()
            digest.update(labels[places].tobytes())

    for probability in (0.01, 0.15, 0.6):
        same = {"mask": mask, "mask_prob": probability, "eval_mask": mask, "eval_mask_prob": probability}
        same["sample_order"] = 1
        for seed, stream in ((0, 0), (3, 1)):
            batches = data(CORPUS, seed=seed, eval_samples=50, **same)
            for index in (0, 1, 40, 1000):
                add(batches.batch(stream, index), with_labels=True)
        evaluated = batches.evaluation["main"]
        for index in range(len(evaluated)):
            add(evaluated[index], with_labels=False)
    assert digest.hexdigest()[:16] == sha256


@st.composite
def samples_with_candidates(draw):
    length = draw(st.integers(1, 60))
    numbers = np.random.default_rng(draw(st.integers(0, 10**6)))
    share = draw(st.sampled_from([0, 0.1, 0.6, 1]))
    word_starts = numbers.random(length) < 0.5
    candidates = numbers.random(length) < share
    return Sample(np.arange(length), word_starts, candidates)


def words_of(sample):
    places = np.arange(len(sample.ids))
    firsts = np.flatnonzero(sample.word_starts[1:]) + 1
    return np.split(places, firsts)


@given(
    sample=samples_with_candidates(),
    seed=st.integers(0, 10**6),
    probability=st.floats(0.01, 0.99),
    share=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
)
@settings(deadline=None, max_examples=300)
def test_candidate_masking_chooses_as_many_tokens_as_uniform_masking_in_whole_words(sample, seed, probability, share):
    def chosen_by(strategy):
        return strategy.choose(sample, probability, np.random.default_rng(seed))

    budget = int(chosen_by(ByToken()).sum())
    chosen = chosen_by(ByCandidate(share))
    assert chosen.sum() == budget
    num_cut = 0
    marked = np.zeros(len(chosen), dtype=bool)
    for word in words_of(sample):
        marked[word] = sample.candidates[word].any()
        if chosen[word].any() and not chosen[word].all():
            num_cut += 1
            assert chosen[word[0]]
    assert num_cut <= 2
    num_marked = marked.sum()
    if share == 1:
        assert (chosen & marked).sum() == min(budget, num_marked)
        assert num_cut <= 1 or budget > num_marked
    if num_marked:
        only = chosen_by(OnlyCandidates())
        assert only.sum() == min(budget, num_marked)
        assert not (only & ~marked).any()


@given(sample=samples_with_candidates(), seed=st.integers(0, 10**6), share=st.sampled_from([0.0, 0.5, 1.0]))
@settings(deadline=None)
def test_a_sample_in_which_nobody_has_looked_is_masked_as_one_without_a_candidate(sample, seed, share):
    nowhere = sample._replace(candidates=np.zeros(len(sample.ids), dtype=bool))
    unknown = sample._replace(candidates=None)
    chosen = []
    for each in (nowhere, unknown):
        chosen.append(ByCandidate(share).choose(each, 0.3, np.random.default_rng(seed)).tolist())
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize(("share", "from_candidates"), [(0.0, 0.25), (0.5, 0.625), (1.0, 1.0)])
def test_the_share_is_that_of_the_tokens_and_the_rest_is_uniform(share, from_candidates):
    # A quarter of the words have candidates; what is not wanted from them comes from all words alike.
    places = np.arange(200)
    candidates = places % 8 < 2
    word_starts = places % 2 == 0
    sample = Sample(places, word_starts, candidates)
    draw = np.random.default_rng(0)
    chosen = np.array([ByCandidate(share).choose(sample, 0.02, draw) for _ in range(3000)])
    share_found = (chosen & candidates).sum() / chosen.sum()
    assert share_found == pytest.approx(from_candidates, abs=0.02)
    counts = chosen[:, candidates].sum(axis=0)[::2]
    assert abs(counts - counts.mean()).max() < 5 * math.sqrt(counts.mean())  # no word is preferred


def masked_samples(batches):
    """The sample with its special tokens -> what the model sees of it."""
    seen = {}
    for index in range(len(batches)):
        batch = batches[index]
        lengths = batch["attention_mask"].sum(1)
        for row, true, length in zip(batch["input_ids"], unmasked(batch), lengths, strict=True):
            sample = tuple(true[:length].tolist())
            seen[sample] = tuple(row[:length].tolist())
    return seen


def test_evaluation_masks_are_the_same_for_every_seed_and_in_any_grouping_and_part_of_the_set(data, monkeypatch):
    samples = corpus(50, seed=3)
    batches = data(samples).evaluation["main"]
    whole = masked_samples(batches)
    rows = [tuple(row.tolist()) for row in samples.rows("ids", range(50))]
    assert set(whole) == set(rows)
    other = data(samples, batch_size=16, seed=123).evaluation["main"]
    assert len(batches) == 2
    assert len(other) == 2
    for index in range(2):
        assert equal(batches[index], other[index])
    for size in (1, 7, 50, 64):
        monkeypatch.setattr(MaskedLM, "eval_batch_size", size)
        assert masked_samples(data(samples).evaluation["main"]) == whole
    part = masked_samples(data(samples, eval_samples=20).evaluation["main"])
    assert part.items() <= whole.items()
    assert set(part) == {rows[int(2.5 * number)] for number in range(20)}


TEXTS = []
for river, bridge in itertools.product(("old", "new", "wide"), "abcdefghijklmnop"):
    TEXTS.append(f"the {river} river runs past the {bridge} bridge and on")


def stream_of(order, number):
    """The samples of the first batches, one after the other."""
    return np.concatenate([order(index) for index in range(number)])


@given(size=st.integers(1, 400), batch_size=st.integers(1, 17), by_length=st.booleans(), seed=st.integers(0, 9))
@settings(deadline=None, max_examples=150)
def test_an_epoch_is_a_pass_over_all_samples_and_the_next_follows_without_a_seam(size, batch_size, by_length, seed):
    lengths = np.random.default_rng(seed).integers(4, 40, size)
    order = whole_epochs(lengths, batch_size, seed, 0, by_length)
    batches = -(-size // batch_size)
    taken = stream_of(order, 3 * batches)
    assert len(taken) == 3 * batches * batch_size
    assert len(set(taken[: batches * batch_size].tolist())) == size
    for epoch in range(len(taken) // size):
        first = epoch * size
        of_epoch = taken[first : first + size].tolist()
        assert sorted(of_epoch) == list(range(size))
    again = whole_epochs(lengths, batch_size, seed, 0, by_length)
    assert np.array_equal(again(2 * batches), order(2 * batches))


@given(size=st.integers(1, 60), batch_size=st.integers(1, 17), seed=st.integers(0, 3), stream=st.integers(0, 2))
@settings(deadline=None, max_examples=60)
def test_samples_of_any_length_have_the_order_that_tensors_in_memory_have(size, batch_size, seed, stream):
    order = whole_epochs(np.full(size, 9), batch_size, seed, stream, by_length=False)
    tensors = TensorData(torch.arange(size), torch.arange(1), batch_size, seed)
    for index in range(5):
        assert order(index).tolist() == tensors.batch(stream, index).tolist()


@given(size=st.integers(1, 300), batch_size=st.integers(1, 6), epoch=st.integers(0, 3), seed=st.integers(0, 9))
@settings(deadline=None, max_examples=60)
def test_batches_within_an_epoch_come_in_groups_of_alike_samples_of_which_one_is_shorter(size, batch_size, epoch, seed):
    lengths = np.random.default_rng(seed).integers(1, 41, size)
    order = whole_epochs(lengths, batch_size, seed, 0)
    first = -(-epoch * size // batch_size)
    whole = []
    for index in range(first, (epoch + 1) * size // batch_size):
        whole.append(lengths[order(index)])

    def in_groups(sizes):
        """The lengths in each group, of so many batches each."""
        groups = Counter()
        start = 0
        for size in sizes:
            if size:
                group = np.concatenate(whole[start : start + size])
                groups[tuple(np.sort(group).tolist())] += 1
            start += size
        return groups

    number, shorter = divmod(len(whole), RUN)
    ways = []  # the shorter group may be at any place among the others
    for place in range(number + 1):
        sizes = [RUN] * number
        sizes.insert(place, shorter)
        ways.append(in_groups(sizes))
    alike = np.sort(np.concatenate([np.empty(0, dtype=np.int64), *whole])).tolist()
    length_of_group = RUN * batch_size
    expected = Counter()
    for start in range(0, len(alike), length_of_group):
        expected[tuple(alike[start : start + length_of_group])] += 1
    assert expected in ways


def test_the_first_order_cuts_an_epoch_to_whole_groups_of_eight_batches():
    """The figures by which it was found wanting."""
    seen = {}
    for size in (160, 250):
        order = first_order(np.full(size, 10), 16, 0, 0)
        num_batches = -(-size // 16)
        taken = stream_of(order, num_batches)
        seen[size] = len(set(taken.tolist()))
    assert seen == {160: 128, 250: 196}


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=300),
    batch_size=st.integers(1, 6),
    epoch=st.integers(0, 3),
    seed=st.integers(0, 9),
    by_length=st.booleans(),
)
@settings(deadline=None, max_examples=30)
def test_an_epoch_of_the_first_order_repeats_no_sample_where_there_are_enough(
    lengths, batch_size, epoch, seed, by_length
):
    lengths = np.array(lengths)
    whole = len(lengths) // batch_size
    order = first_order(lengths, batch_size, seed, 0, by_length)
    num_batches = max(1, whole // RUN * RUN or whole)
    batches = [order(epoch * num_batches + k) for k in range(num_batches)]
    counts = np.bincount(np.concatenate(batches), minlength=len(lengths))
    assert counts.sum() == num_batches * batch_size
    assert counts.max() - counts.min() <= 1
    if by_length:
        runs = []
        for first in range(0, num_batches, RUN):
            runs.append(lengths[np.concatenate(batches[first : first + RUN])])
        spans = sorted((run.min(), run.max()) for run in runs)
        for shorter, longer in itertools.pairwise(spans):
            assert shorter[1] <= longer[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("orders")
    (path / "train.txt").write_text("\n".join(TEXTS[:45]))
    (path / "validation.txt").write_text("\n".join(f"{text} until evening" for text in TEXTS))
    return path


def task(folder, **fields):
    return MaskedLM(data_name=str(folder), seq_len=32, batch_size=8, vocab_size=100, eval_samples=16, **fields)


def train(folder, name, samples=96, **fields):
    return asyncsgd.train(
        task(folder, **fields),
        samples=samples,
        evaluations=1,
        quiet=True,
        folder=folder / name,
        cache=folder / "cache",
        checkpoint_every=48,
        resume=samples > 96,
    )


def test_a_run_has_the_order_that_it_names_when_it_is_replayed_and_resumed(folder):
    train(folder, "one", sample_order=1)
    header = json.loads((folder / "one" / "events.jsonl").read_text().splitlines()[0])
    checkpoints = []
    for path in (folder / "one" / "checkpoints").glob("*.json"):
        checkpoints.append(json.loads(path.read_text()))
    began_from = [checkpoint["began_from"]["order of samples"] for checkpoint in checkpoints]
    assert [header["sample_order"], *began_from] == [1, 1, 1]
    replayed = asyncsgd.replay(folder / "one", cache=folder / "cache")
    assert replayed.identical is True
    assert replayed.difference == ""
    whole = train(folder, "whole", samples=144, sample_order=1)
    with pytest.raises(asyncsgd.UsageError, match="sample_order 1 -> 2"):
        train(folder, "one", samples=144)
    longer = train(folder, "one", samples=144, sample_order=1)
    assert longer.summary["parameters_sha256"] == whole.summary["parameters_sha256"]
    with pytest.raises(asyncsgd.UsageError, match="give it sample_order=1"):
        asyncsgd.replay(folder / "one", task(folder), cache=folder / "cache")


def test_new_runs_take_the_newest_order_and_another_order_is_another_run(folder):
    runs = {}
    for order, fields in ((1, {"sample_order": 1}), (2, {})):
        runs[order] = train(folder, f"runs/order{order}", **fields)
    assert [run.summary["sample_order"] for run in runs.values()] == [1, 2]
    assert runs[1].summary["parameters_sha256"] != runs[2].summary["parameters_sha256"]
