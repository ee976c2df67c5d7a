"""Do the tests notice a fault? One line of the library is made wrong in a copy, and the tests that should see it run.

    python tests/mutants.py                    # all: a table of mutant, first test that failed, seconds
    python tests/mutants.py --only mean,delay  # those with one of these words in their names
    python tests/mutants.py --check            # only whether each line still stands in the library, once

A mutant that survives is a promise that no test keeps; `tests/mutants.md` has the table of the last time. Whoever
rewrites a room carries its mutants over: the fault stays, the line is the new code's. Exits with 1 if one survives, or
if a line is not found."""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutant(NamedTuple):
    fault: str
    file: str
    line: str
    """As it stands in the file, once."""
    wrong: str
    tests: str
    """What should notice, as pytest takes it."""


CONTRACT = "tests/rules/test_rules_contract.py"
ORACLES = "tests/rules/test_rules_oracles.py"
VIRTUAL = "tests/runtime/test_virtual.py"
IDENTITIES = "tests/test_identities.py"

FREEZING = "tests/test_freezing.py"
UNEVEN = "tests/test_uneven_batches.py"

STATISTICS = "tests/test_running_statistics.py"

MUTANTS = [
    Mutant(
        "running statistics that arrive replace those of the server",
        "asyncsgd/running_statistics.py",
        "now = after + kept * (self.values - before)",
        "now = after.clone()",
        f"{STATISTICS} -k servers_are",
    ),
    Mutant(
        "a mean of all batches forgets what came between",
        "asyncsgd/running_statistics.py",
        "apart = at_server * (self.values[place] - after[place]) - read * (before[place] - after[place])",
        "apart = torch.zeros(())",
        f"{STATISTICS} -k servers_are",
    ),
    Mutant(
        "layers that a backward pass computes again move running statistics",
        "asyncsgd/worker.py",
        "                statistics.put_back()  #",
        "                pass  #",
        f"{STATISTICS} -k checkpointed",
    ),
    Mutant(
        "a gradient ahead of the parameters begins at the statistics of the last evaluation",
        "asyncsgd/server.py",
        "statistics = None if self.statistics is None else self.statistics.values.clone()\n        else",
        "statistics = None\n        else",
        f"{STATISTICS} -k ahead_of",
    ),
    Mutant(
        "each local step begins at the statistics of the first",
        "asyncsgd/running_statistics.py",
        "            product.mul_(kept)\n            self.values.copy_(after)",
        "            product.mul_(kept)",
        f"{STATISTICS} -k one_workers_local",
    ),
    Mutant(
        "local steps count as one for what came between",
        "asyncsgd/running_statistics.py",
        "            product.mul_(kept)\n",
        "            product.copy_(kept)\n",
        f"{STATISTICS} -k servers_are",
    ),
    Mutant(
        "workers of a round move its statistics one after the other",
        "asyncsgd/server.py",
        "if self._local_steps and len(moved) > 1:",
        "if False:",
        f"{STATISTICS} -k weighted_mean",
    ),
    Mutant(
        "all workers of a round have one weight for its statistics",
        "asyncsgd/running_statistics.py",
        "alpha=weight / sum(weights)",
        "alpha=1.0 / len(weights)",
        f"{STATISTICS} -k weighted_mean",
    ),
    Mutant(
        "a replay does not look at running statistics",
        "asyncsgd/replaying.py",
        'and statistics_sha256 == run.summary.get("statistics_sha256")',
        "and True",
        f"{STATISTICS} -k statistics_are_others",
    ),
    Mutant(
        "reestimated statistics are a moving average",
        "asyncsgd/running_statistics.py",
        "    module.momentum = 1.0 / (float(calls) + 1.0)\n",
        "    pass\n",
        f"{STATISTICS} -k update_bn",
    ),
    Mutant(
        "reestimated statistics change spectral norm and counters too",
        "asyncsgd/running_statistics.py",
        "torch.where(self._is_of_batches, self._read(), self.values)",
        "self._read()",
        f"{STATISTICS} -k only_normalisation",
    ),
    Mutant(
        "a layer keeps the momentum of its last reestimation",
        "asyncsgd/running_statistics.py",
        "                layer.momentum = momentum\n",
        "",
        f"{STATISTICS} -k no_bit_of_the_training",
    ),
    Mutant(
        "reestimated statistics have dropout of their process",
        "asyncsgd/evaluation.py",
        "torch.manual_seed(dropout_seed(seed, 0, index))",
        "torch.seed()",
        f"{STATISTICS} -k every_process",
    ),
    Mutant(
        "the best model has the running statistics and not the reestimated ones",
        "asyncsgd/runtime/fit.py",
        "None if self._statistics is None else self._statistics.evaluated",
        "None if self._statistics is None else self._statistics.values",
        f"{STATISTICS} -k no_bit_of_the_training",
    ),
    Mutant(
        "reestimated statistics do not come back from a worker",
        "asyncsgd/runtime/workers.py",
        "if isinstance(message, EvaluatedAgain) and self._statistics is not None:",
        "if False:",
        f"{STATISTICS} -k every_process",
    ),
    Mutant(
        "a cost of a delay is not taken from delay 0",
        "experiments/norm_under_delay.py",
        "losses[arm, delay, seed] - losses[arm, 0, seed]",
        "losses[arm, delay, seed]",
        "tests/test_norm_under_delay.py -k difference_of_differences",
    ),
    Mutant(
        "a best rate at an end of its grid is taken",
        "experiments/norm_under_delay.py",
        "        if not ends:\n",
        "        if True:\n",
        "tests/test_norm_under_delay.py -k widens",
    ),
    Mutant(
        "the differences of two families are corrected together",
        "experiments/norm_under_delay.py",
        "judge.answer(questions)",
        "judge.answer(questions * len(config.differences))[: len(questions)]",
        "tests/test_norm_under_delay.py -k difference_of_differences",
    ),
    Mutant(
        "a batch that overflows in float16 moves running statistics twice",
        "asyncsgd/worker.py",
        "                self.flat.statistics.begin()\n            used",
        "                self.flat.statistics.note()\n            used",
        f"{STATISTICS} -k computes_again",
    ),
    Mutant(
        "an exported checkpoint has the running statistics",
        "asyncsgd/scripts/export.py",
        "    if not given.best:\n",
        "    if False:\n",
        "tests/test_own_resnet.py -k given_out",
    ),
    Mutant(
        "the model of a replayed version has the running statistics",
        "asyncsgd/replaying.py",
        "        self._run.show_statistics(flat)\n",
        "",
        "tests/test_own_resnet.py -k given_out",
    ),
    Mutant(
        "a model has the statistics of an evaluation before its last step",
        "asyncsgd/running_statistics.py",
        "        self.reestimated = None\n        # As the buffers",
        "        # As the buffers",
        f"{STATISTICS} -k stopped_between",
    ),
    Mutant(
        "the stages of a chain share one seed",
        "asyncsgd/study/chain.py",
        "FINETUNE_SEEDS - 1 - self.number",
        "FINETUNE_SEEDS - 1",
        "tests/test_chain.py",
    ),
    Mutant(
        "an arm starts from the first stage of a chain, not from the one before",
        "asyncsgd/study/runs.py",
        "starts[seed] = _last(of_stage)",
        "starts[seed] = starts[seed] or _last(of_stage)",
        "tests/test_chain.py",
    ),
    Mutant(
        "what a stage chose on the models of one arm counts for all of them",
        "asyncsgd/study/chain.py",
        'f"{self.name}/{arm}" if self.each else self.name',
        "self.name",
        "tests/test_chain.py",
    ),
    Mutant(
        "stages behind the last one that is tuned are made on tuning seeds",
        "asyncsgd/study/chain.py",
        "return stages[: max(numbers, default=0)]",
        "return stages",
        "tests/test_chain.py",
    ),
    Mutant(
        "test runs have no evaluation at the samples that the slowest pilot is sure to make",
        "asyncsgd/study/plan.py",
        '                budget["evaluate_at"] = looks[reference]',
        "                pass",
        "tests/test_plan.py -k seconds_of_its_reference",
    ),
    Mutant(
        "the evaluation at the pilots' samples is that of the fastest pilot",
        "asyncsgd/study/sweep.py",
        "slowest = min(summary",
        "slowest = max(summary",
        "tests/test_sweep.py -k without_pilots",
    ),
    Mutant(
        "a run that goes on takes an evaluation at given samples again",
        "asyncsgd/runtime/base.py",
        '    KEPT = ("in_samples", "in_seconds")',
        '    KEPT = ("in_seconds",)',
        "tests/test_resume.py -k stopped_anywhere",
    ),
    Mutant(
        "the sync guard compares no runs of unlike budgets",
        "analysis/trust.py",
        "may_differ |= {*BUDGET}",
        "may_differ |= set()",
        "tests/analysis/test_trust.py",
    ),
    Mutant(
        "the sync guard compares runs whose rates follow unlike budgets",
        "analysis/trust.py",
        'if all(row.asked.get("schedule") == "constant" for row in both):',
        "if both:",
        "tests/analysis/test_trust.py",
    ),
    Mutant(
        "a labelled stage is tuned to its worst score",
        "asyncsgd/study/sweep.py",
        'return name, -1 if better == "higher" else 1',
        'return name, 1 if better == "higher" else -1',
        "tests/test_chain.py",
    ),
    Mutant(
        "a study by a score that its labels leave undefined",
        "asyncsgd/study/sweep.py",
        "if finetune.score in undefined:",
        "if False:",
        "tests/test_chain.py",
    ),
    Mutant(
        "what an arm that diverged leaves undone behind a stage in between is lost",
        "analysis/scores.py",
        'missing = runs[runs["status"].eq("MISSING")]',
        "missing = runs[:0]",
        "tests/test_chain.py",
    ),
    Mutant(
        "the shorter text of a pair is cut first",
        "asyncsgd/data/tokens.py",
        "return (longer, shorter) if first > second else (shorter, longer)",
        "return (longer, shorter) if first < second else (shorter, longer)",
        "tests/data/test_tokens.py",
    ),
    Mutant(
        "two texts of one module as a pair of two",
        "asyncsgd/data/pydocs_pairs.py",
        "if each[0] != module), None)",
        "if each != pair), None)",
        "tests/data/test_pydocs_pairs.py",
    ),
    Mutant(
        "a layer that was frozen in mid-run and is stepped",
        "asyncsgd/server.py",
        "frozen = self._frozen_in_all(reply.uses) if self._frozen and reply.uses else ()",
        "frozen = ()",
        FREEZING,
    ),
    Mutant(
        "an update leaves out what one of its batches froze",
        "asyncsgd/server.py",
        "set.intersection(*[set(",
        "set.union(*[set(",
        f"{FREEZING} -k all_its_forward_passes",
    ),
    Mutant(
        "what is thawed and used in one forward pass is left out",
        "asyncsgd/flat.py",
        "tuple(name for name in self.frozen if tensors[name].grad is None)",
        "tuple(self.frozen)",
        f"{FREEZING} -k in_one_process",
    ),
    Mutant(
        "what is frozen is counted as stepped",
        "asyncsgd/optimizers.py",
        "optimizer.state[tensor][key] = value.clone()",
        "optimizer.state[tensor][key] = value",
        f"{FREEZING} -k in_one_process",
    ),
    Mutant(
        "one model of several workers freezes, and trains on",
        "asyncsgd/settings/run.py",
        "flat.may_freeze = alone or isinstance(self.runtime, InProcess)",
        "flat.may_freeze = True",
        f"{FREEZING} -k cannot_follow",
    ),
    Mutant(
        "a run that goes on amid an update has forgotten what was frozen",
        "asyncsgd/server.py",
        '"_without_terms", "_frozen"),',
        '"_without_terms"),',
        f"{FREEZING} -k never_stopped",
    ),
    Mutant(
        "a rank that freezes something else than the others",
        "asyncsgd/runtime/collective.py",
        "if len({row.pop() for row in rows}) > 1:",
        "if len({row.pop() for row in rows}) > 2:",
        f"{FREEZING} -m slow -k different_parameters",
    ),
    Mutant(
        "a batch without a loss term that a rule hears of",
        "asyncsgd/server.py",
        "if gradient.weight or self.rule.hears_of_empty:",
        "if True:",
        f"{UNEVEN} -k as_if_a_batch_without",
    ),
    Mutant(
        "peers that meet over a batch without a loss term",
        "asyncsgd/methods/gossip.py",
        "if not arrived.gradient.weight:",
        "if False:",
        f"{UNEVEN} -k peers_do_not_meet",
    ),
    Mutant(
        "rows with a largest norm that are trained",
        "asyncsgd/tasks/checking.py",
        "and module.max_norm is not None:",
        "and False:",
        f"{UNEVEN} -k largest_norm",
    ),
    Mutant(
        "a worker that says why it cannot train, and nobody listens",
        "asyncsgd/runtime/workers.py",
        "if isinstance(message, Refused):",
        "if False:",
        f"{UNEVEN} -k with_workers",
    ),
    Mutant(
        "own data: the fingerprint of training data is that of the first batch alone",
        "asyncsgd/tasks/tensors.py",
        "number = FINGERPRINT_BATCHES",
        "number = 1",
        "tests/tasks/test_tensors.py",
    ),
    Mutant(
        "own data: training tensors have no fingerprint",
        "asyncsgd/tasks/tensors.py",
        "        digest_tensors(digest, data.train)",
        "        digest_tensors(digest, ())",
        "tests/tasks/test_tensors.py",
    ),
    Mutant(
        "a fine-tuning's model with its head has the hash of its encoder",
        "asyncsgd/finishing.py",
        '    facts["initial_model_sha256"] = sha256',
        '    facts["initial_model_sha256"] = facts["init_sha256"]',
        "tests/test_finetune.py",
    ),
    Mutant(
        "no run says that a layer normalises over the batch",
        "asyncsgd/finishing.py",
        "normalising_over_batch(flat.model) is not None",
        "False",
        "tests/test_api.py",
    ),
    Mutant(
        "a run with another setting than was planned keeps its place",
        "analysis/places.py",
        "(told if key in TOLD else unlike)",
        "told",
        "tests/analysis/test_read.py",
    ),
    Mutant(
        "a plan without the hash of its registration confirms",
        "analysis/questions.py",
        'if plan.get("analysis_sha256") is None:',
        "if False:",
        "tests/analysis/test_read.py",
    ),
    Mutant(
        "a target from runs on test seeds confirms",
        "analysis/questions.py",
        "    if shared:",
        "    if False:",
        "tests/analysis/test_read.py",
    ),
    Mutant(
        "two heads on one encoder are one model",
        "analysis/gate.py",
        '    "initial_model": "initial parameters with the head",\n',
        "",
        "tests/analysis/test_gate.py",
    ),
    Mutant(
        "workers of a run that goes on are told as lost",
        "analysis/read.py",
        'not in (None, "", STOPPED)',
        'not in (None, "")',
        "tests/analysis/test_what_happened.py",
    ),
    Mutant(
        "nobody says that a run went on on another machine",
        "analysis/read.py",
        'if elsewhere := _resumed_on(path, row["machine"]):',
        "if elsewhere := []:",
        "tests/analysis/test_what_happened.py",
    ),
    Mutant(
        "nobody says that neither arm has learned",
        "analysis/load.py",
        "            if all(reasons):",
        "            if False:",
        "tests/analysis/test_what_happened.py",
    ),
    Mutant(
        "what went wrong in a run stands in no verdict",
        "analysis/verdict.py",
        '"compared at ", ALSO, DURING, AGAIN)',
        '"compared at ", ALSO, AGAIN)',
        "tests/analysis/test_what_happened.py",
    ),
    Mutant(
        "a replaced result confirms",
        "analysis/pairs.py",
        "second = len(beside) - replicates + results",
        "second = len(beside) - replicates",
        "tests/analysis/test_independent_pairs.py",
    ),
    Mutant(
        "copies of fine-tunings count each",
        "analysis/scores.py",
        "both = both.drop(index=list(twins))",
        "both = both.copy()",
        "tests/analysis/test_independent_pairs.py",
    ),
    Mutant(
        "a second signal frees nobody who waits in C",
        "asyncsgd/signals.py",
        "                free()",
        "                pass",
        "tests/test_signals.py",
    ),
    Mutant(
        "an update without a loss term that takes a step",
        "asyncsgd/server.py",
        "if reply.direction is not None and reply.uses and self._without_terms.issuperset(reply.uses):",
        "if False:",
        "tests/test_uneven_batches.py",
    ),
    Mutant(
        "a forward pass that may change parameters",
        "asyncsgd/flat.py",
        "if tensor._version != version:",
        "if False:",
        f"{UNEVEN} -k changes_what_is_trained",
    ),
    Mutant(
        "a scorer that fails late ends the run",
        "asyncsgd/runtime/fit.py",
        "if measured.score_error is not None and not self.evaluations:",
        "if measured.score_error is not None:",
        "tests/test_scorers.py",
    ),
    Mutant(
        "a score that is missing, and nobody is told",
        "asyncsgd/finishing.py",
        "totals.score_error = totals.score_error or next(iter(errors), None)",
        "totals.score_error = totals.score_error",
        "tests/test_scorers.py",
    ),
    Mutant(
        "parameters tied by their data that drift apart",
        "asyncsgd/flat.py",
        "return bool(bytes_of(other).any())",
        "return False",
        "tests/test_anybodys_model.py",
    ),
    Mutant(
        "texts that stay whole in every part of a batch",
        "asyncsgd/tasks/base.py",
        "map_tensors(lambda rows, a=first, b=end: rows[a:b], batch, columns=True)",
        "map_tensors(lambda rows, a=first, b=end: rows[a:b], batch)",
        "tests/test_anybodys_model.py",
    ),
    Mutant(
        "RoBERTa's positions counted as BERT's",
        "asyncsgd/models.py",
        "return module.num_embeddings - module.padding_idx - 1",
        "return module.num_embeddings",
        "tests/test_pretrained_weights.py",
    ),
    Mutant(
        "noise in evaluations that is drawn from what was before",
        "asyncsgd/evaluation.py",
        "torch.manual_seed(noise_seed(name, index))",
        "noise_seed(name, index)",
        "tests/test_anybodys_model.py",
    ),
    Mutant(
        "a group of parameters that steps at the rate of the others",
        "asyncsgd/optimizers.py",
        'group["lr"] = ratio * learning_rate',
        'group["lr"] = learning_rate',
        "tests/test_optimizers.py",
    ),
    Mutant(
        "a group that is frozen and moves",
        "asyncsgd/optimizers.py",
        "if ratio == 0.0:",
        "if ratio < 0.0:",
        "tests/test_optimizers.py",
    ),
    Mutant(
        "a delay off by one",
        "asyncsgd/server.py",
        "(dispatch, version - read_versions[dispatch])",
        "(dispatch, version - read_versions[dispatch] + 1)",
        CONTRACT,
    ),
    Mutant(
        "a mean without weights",
        "asyncsgd/rules/base.py",
        "mean.add_(gradient, alpha=its_weight)",
        "mean.add_(gradient)",
        CONTRACT,
    ),
    Mutant(
        "a mean that is not cleared after its step",
        "asyncsgd/rules/base.py",
        "map(self._gradients.pop, keys)",
        "map(self._gradients.get, keys)",
        ORACLES,
    ),
    Mutant(
        "local steps at the rate before their own samples",
        "asyncsgd/server.py",
        "self._schedule(self.num_samples + number * self._batch_size)",
        "self._schedule(self.num_samples)",
        f"{VIRTUAL} tests/test_identities.py tests/test_rules_on_processes.py",
    ),
    Mutant(
        "a lost worker's batch is not handed out again",
        "asyncsgd/server.py",
        "            self._batches.give_back(lost.batches)\n",
        "",
        "tests/test_churn.py",
    ),
    Mutant(
        "returned batches are handed out in any order",
        "asyncsgd/batches.py",
        "index = heapq.heappop(self._returned)",
        "index = self._returned.pop()",
        "tests/runtime/test_transports.py",
    ),
    Mutant(
        "pairs that are copies of another are counted",
        "analysis/pairs.py",
        "            if earlier != seed:\n",
        "            if earlier is None:\n",
        "tests/analysis/test_independent_pairs.py",
    ),
    Mutant(
        "an arm that repeats itself confirms",
        "analysis/pairs.py",
        "    if different == len(ends):\n",
        "    if ends:\n",
        "tests/analysis/test_independent_pairs.py",
    ),
    Mutant(
        "a budget of one arrival more",
        "asyncsgd/runtime/base.py",
        "return self.samples is not None and num_samples >= self.samples",
        "return self.samples is not None and num_samples > self.samples",
        VIRTUAL,
    ),
    Mutant(
        "an evaluation point that is reached exactly is not taken",
        "asyncsgd/runtime/base.py",
        "while self._next <= now and self._next < math.inf:",
        "while self._next < now and self._next < math.inf:",
        "tests/test_identities.py -k every_so_many",
    ),
    Mutant(
        "patience of one evaluation more",
        "asyncsgd/runtime/base.py",
        "if budget.patience is None or self._since < budget.patience:",
        "if budget.patience is None or self._since <= budget.patience:",
        IDENTITIES,
    ),
    Mutant(
        "the best parameters are those of later",
        "asyncsgd/runtime/base.py",
        'parameters().detach().to("cpu", copy=True)',
        'parameters().detach().to("cpu")',
        "tests/test_keep_best.py",
    ),
    Mutant(
        "a step of its own norm is clipped to less, after the mean",
        "asyncsgd/optimizers.py",
        "factor = self._clip_norm / (self.norm + 1e-6)",
        "factor = self._clip_norm / (self.norm**2 + 1e-6)",
        IDENTITIES,
    ),
    Mutant(
        "weight decay on biases too",
        "asyncsgd/optimizers.py",
        "(undecayed, 0.0, len(decayed))",
        "(undecayed, weight_decay, len(decayed))",
        IDENTITIES,
    ),
    Mutant(
        "dropout that does not depend on the batch",
        "asyncsgd/data/random.py",
        "generator(seed, Purpose.DROPOUT, stream, index)",
        "generator(seed, Purpose.DROPOUT, stream, 0)",
        "tests/test_savings.py -k dropout_of_its_own",
    ),
    Mutant(
        "a mask by batch and not by position",
        "asyncsgd/tasks/text_task.py",
        "generator(self._seed, Purpose.MASK, stream, first + row)",
        "generator(self._seed, Purpose.MASK, stream, index)",
        "tests/data/test_masking.py",
    ),
    Mutant(
        "evaluation masks by row and not by sample",
        "asyncsgd/tasks/text_batches.py",
        "generator(0, Purpose.EVALUATION, 0, int(numbers[row]))",
        "generator(0, Purpose.EVALUATION, 0, row)",
        "tests/data/test_masking.py",
    ),
    Mutant(
        "nine in ten masked positions become the mask token",
        "asyncsgd/data/masking.py",
        "masked[positions[fate < 0.8]] = self.mask_id",
        "masked[positions[fate < 0.9]] = self.mask_id",
        "tests/data/test_masking.py",
    ),
    Mutant(
        "a mean of means over evaluation batches",
        "asyncsgd/evaluation.py",
        "task.loss(said, moved).double() * weight",
        "task.loss(said, moved).double() * weight / weight",
        "tests/test_keep_best.py tests/test_faults.py",
    ),
    Mutant(
        "the last evaluation batch is left out",
        "asyncsgd/evaluation.py",
        "range(shard, len(batches), num_shards)",
        "range(shard, len(batches) - 1, num_shards)",
        IDENTITIES,
    ),
    Mutant(
        "an evaluation with dropout",
        "asyncsgd/evaluation.py",
        "    model.eval()\n",
        "",
        IDENTITIES,
    ),
    Mutant(
        "an evaluation leaves the model without dropout",
        "asyncsgd/evaluation.py",
        "            module.training = True\n",
        "            module.training = False\n",
        IDENTITIES,
    ),
    Mutant(
        "parts of a batch weigh alike",
        "asyncsgd/worker.py",
        "own / weight) for",
        "1.0 / len(split)) for",
        "tests/test_savings.py",
    ),
    Mutant(
        "ranks' gradients weigh alike",
        "asyncsgd/runtime/collective.py",
        "self.ranks.number * weigh(weight)",
        "1.0",
        IDENTITIES,
    ),
    Mutant(
        "Ringmaster applies a delay of its threshold",
        "asyncsgd/rules/asynchronous.py",
        "if view.version - arrival.read_version >= self.threshold:",
        "if view.version - arrival.read_version > self.threshold:",
        ORACLES,
    ),
    Mutant(
        "DANA's workers look back instead of ahead",
        "asyncsgd/rules/corrected.py",
        "offset=state.total * (-view.learning_rate * self.momentum)",
        "offset=state.total * (view.learning_rate * self.momentum)",
        ORACLES,
    ),
    Mutant(
        "the server's link carries two vectors at once",
        "asyncsgd/runtime/virtual.py",
        "max(self._link_free, seconds) + self._network.transfer_seconds(worker)",
        "seconds + self._network.transfer_seconds(worker)",
        VIRTUAL,
    ),
    Mutant(
        "local steps draw the time of the first one alone",
        "asyncsgd/runtime/virtual.py",
        "drawn = [draw(worker, k) for k in range(first, first + number)]",
        "drawn = [draw(worker, first) for k in range(first, first + number)]",
        VIRTUAL,
    ),
    Mutant(
        "a replay that compares no loss",
        "asyncsgd/rounding.py",
        "return self.here == self.logged",
        "return True",
        "tests/test_replay.py",
    ),
    Mutant(
        "another processor excuses every loss",
        "asyncsgd/rounding.py",
        "explained = FACTOR * reach + FLOOR",
        "explained = 1.0",
        "tests/test_rounding.py",
    ),
    Mutant(
        "last bits count as a difference wherever they were made",
        "asyncsgd/records/hardware.py",
        "        if differing:",
        "        if not environment:",
        "tests/test_rounding.py",
    ),
    Mutant(
        "an environment that is not recorded is taken for this one",
        "asyncsgd/records/hardware.py",
        "differing = [name for name in BITS if environment.get(name) != here.get(name)]",
        "differing = [name for name in BITS if environment.get(name, here.get(name)) != here.get(name)]",
        "tests/test_rounding.py",
    ),
    Mutant(
        "a checkpoint that goes on changing while it is written",
        "asyncsgd/checkpoints.py",
        'tensors[id(value)] = value.detach().to("cpu", copy=True)',
        "tensors[id(value)] = value.detach()",
        "tests/test_resume.py",
    ),
    Mutant(
        "a resumed optimizer without its state",
        "asyncsgd/optimizers.py",
        'KEPT = ("_optimizer",)',
        "KEPT = ()",
        "tests/test_resume.py",
    ),
    Mutant(
        "a one-sided p",
        "analysis/stats.py",
        "p = min(1.0, 2 * (1 + min(at_most, at_least)) / patterns)",
        "p = min(1.0, (1 + min(at_most, at_least)) / patterns)",
        "tests/analysis/test_tables.py",
    ),
    Mutant(
        "Holm without the maximum",
        "analysis/stats.py",
        "np.maximum.accumulate((len(p) - np.arange(len(p))) * p[order])",
        "(len(p) - np.arange(len(p))) * p[order]",
        "tests/analysis/test_known_answers.py",
    ),
    Mutant(
        "equivalence by the easier of two tests",
        "analysis/stats.py",
        "return float(max(above, below))",
        "return float(min(above, below))",
        "tests/analysis/test_tables.py",
    ),
    Mutant(
        "ties count as wins",
        "analysis/judge.py",
        "sooner = (our_high <= their_low) & (our_low < their_high)",
        "sooner = our_high <= their_low",
        "tests/analysis/test_scenarios.py",
    ),
    Mutant(
        "better and worse change places",
        "analysis/judge.py",
        '"better" if (row["direction"] < 0) == row["lower"] else',
        '"better" if (row["direction"] < 0) != row["lower"] else',
        "tests/analysis/test_tables.py",
    ),
    Mutant(
        "a verdict of five pairs",
        "analysis/stats.py",
        "MINIMUM_PAIRS = 6",
        "MINIMUM_PAIRS = 5",
        "tests/analysis/test_tables.py",
    ),
    Mutant(
        "a dip for one evaluation is a crossing",
        "analysis/curves.py",
        "np.flatnonzero(below & np.append(below[1:], True)[: len(below)])",
        "np.flatnonzero(below)",
        "tests/analysis/test_scenarios.py",
    ),
    Mutant(
        "who looks more often is sooner",
        "analysis/curves.py",
        "_nearest(x, sparsest) if n > min(counts) else slice(None)",
        "slice(None)",
        "tests/analysis/test_scenarios.py",
    ),
    Mutant(
        "a run that never arrives counts less than the budget",
        "analysis/measure.py",
        "capped = np.minimum(brackets, budget)",
        "capped = np.where(np.isinf(brackets), 0.0, np.minimum(brackets, budget))",
        "tests/analysis/test_scenarios.py",
    ),
    Mutant(
        "a setting that nobody thought of may differ between two arms",
        "analysis/gate.py",
        "            refused[key] = _both(key, both, shown)\n            continue",
        "            told[key] = (shown[0], shown[1])\n            continue",
        "tests/analysis/test_gate.py",
    ),
    Mutant(
        "an absent setting is not its default",
        "analysis/gate.py",
        "    if key in ADDED_SINCE:\n        return ADDED_SINCE[key]\n",
        "    return None\n",
        "tests/analysis/test_gate.py",
    ),
    Mutant(
        "a function in a field of a task is known by its address",
        "analysis/gate.py",
        "    if _WITHOUT_TEXT.search(text):\n        return NOT_KNOWN\n",
        "",
        "tests/analysis/test_gate.py",
    ),
    Mutant(
        "speeds are compared as texts",
        "analysis/gate.py",
        "    if key in _READ:\n        return _parsed(_READ[key], text)\n",
        "",
        "tests/analysis/test_gate.py",
    ),
    Mutant(
        "micro-batches only round where a layer normalises over the batch",
        "analysis/gate.py",
        'return key in TOLD and not (key == "micro_batches" and by_batch)',
        "return key in TOLD",
        "tests/analysis/test_gate.py",
    ),
    Mutant(
        "two runs of one model may be evaluated unlike",
        "analysis/gate.py",
        "    return bool(abs(here - there) <= SAME_START",
        "    return True or bool(abs(here - there) <= SAME_START",
        "tests/analysis/test_gate.py",
    ),
    Mutant(
        "seconds are compared although others used the machine",
        "analysis/gate.py",
        "        if run.other_load > MOST_LOAD:",
        "        if run.other_load > 1:",
        "tests/analysis/test_gate.py",
    ),
    Mutant(
        "scores are compared whatever their fine-tunings were given",
        "analysis/scores.py",
        "    both = [*tests.pairs.values(), *tuned.pairs.values()]\n",
        "    both = [*tests.pairs.values()]\n",
        "tests/analysis/test_gated_tables.py",
    ),
    Mutant(
        "scores are compared whatever their pretrainings were given",
        "analysis/scores.py",
        "    both = [*tests.pairs.values(), *tuned.pairs.values()]\n",
        "    both = [*tuned.pairs.values()]\n",
        "tests/analysis/test_gated_tables.py",
    ),
    Mutant(
        "a fine-tuning of another run counts as that of the planned one",
        "analysis/read.py",
        '            row |= of_another(row, read_ones.get(row["parent"], ({}, None))[0])\n',
        "",
        "tests/analysis/test_gated_tables.py",
    ),
    Mutant(
        "arms of a language model are compared whatever they were given",
        "analysis/comparisons.py",
        "    if gated.unlike:\n",
        "    if gated.unlike is None:\n",
        "tests/analysis/test_gated_tables.py",
    ),
    Mutant(
        "rows of the lab notes are compared whatever they were given",
        "analysis/lab_notes.py",
        "            if gated.unlike:\n",
        "            if gated.unlike is None:\n",
        "tests/analysis/test_gated_tables.py",
    ),
    Mutant(
        "a speed-up over one worker whatever the runs were given",
        "analysis/tables.py",
        "        reasons.append(gated.unlike or gated.untimed)",
        "        reasons.append(gated.untimed)",
        "tests/analysis/test_gated_tables.py",
    ),
    Mutant(
        "a delay is compared whatever its runs were given",
        "analysis/dose_response.py",
        "if why := _between(own, first, plan).unlike:",
        'if why := "":',
        "tests/analysis/test_gated_tables.py",
    ),
    Mutant(
        "a copy of a study counts as another task",
        "analysis/tasks.py",
        "        if one.models & other.models:",
        "        if one.models is None:",
        "tests/analysis/test_gated_tables.py",
    ),
    Mutant(
        "a misspelled setting of --arms is taken",
        "analysis/load.py",
        "            if name not in (known := gate.names_of(self.runs)):",
        "            if (known := gate.names_of(self.runs)) is None:",
        "tests/analysis/test_gated_tables.py",
    ),
    Mutant(
        "the sync guard compares runs whatever they were given",
        "analysis/trust.py",
        "            if why := between(ours, single, may_differ).unlike:",
        "            if (why := between(ours, single, may_differ).unlike) is None:",
        "tests/analysis/test_trust.py",
    ),
    Mutant(
        "a rung of the ladder is compared whatever its trainings were given",
        "analysis/ladder.py",
        "timed = [] if self.unlike else self.gated.timed",
        "timed = self.gated.timed",
        "tests/analysis/test_ladder_report.py",
    ),
    Mutant(
        "a stack of the ladder keeps its score whatever its trainings were given",
        "analysis/ladder.py",
        '"unlike": bool(sides.unlike)',
        '"unlike": False',
        "tests/analysis/test_ladder_report.py",
    ),
    Mutant(
        "turns of the ladder are compared although others used the machine",
        "analysis/ladder.py",
        "rates = [side.loc[timed] for side in rates]",
        "rates = [side.iloc[: 99 * len(timed)] for side in rates]",
        "tests/analysis/test_ladder_report.py",
    ),
    Mutant(
        "arms may train on other data although no field of the task tells them",
        "analysis/gate.py",
        'if column == "train_data" and _told_by_the_task(both, apart):',
        'if column == "train_data":',
        "tests/analysis/test_gate.py",
    ),
    Mutant(
        "a margin of a language model is as wide as somebody likes",
        "analysis/comparisons.py",
        '    known["gained"] = float((theirs["first_loss"] - theirs["loss"]).mean())\n',
        "",
        "tests/test_language_model.py",
    ),
    Mutant(
        "a classifier's accuracy is taken for its macro F1",
        "analysis/scores.py",
        "score = OF_CLASSES.get(metric_of(one)[0], macro_f1)",
        "score = macro_f1",
        "tests/analysis/test_what_happened.py",
    ),
    Mutant(
        "a count of seeds that nobody registered confirms",
        "analysis/questions.py",
        'return "analysis.yaml registers no number of seeds: how many there are may have been chosen after looking"',
        'return ""',
        "tests/analysis/test_read.py",
    ),
    Mutant(
        "what arms differ in beside the algorithm is told nowhere",
        "analysis/pairs.py",
        "return why, [f\"{ALSO} {', '.join(differ)}\"] if differ else []",
        "return why, []",
        "tests/analysis/test_what_happened.py",
    ),
    Mutant(
        "Markdown begins with a table",
        "analysis/report.py",
        "said = [] if name is not None else [_as_markdown(study)]",
        "said = []",
        "tests/analysis/test_gated_tables.py",
    ),
    Mutant(
        "where unlike runs were compared is told",
        "analysis/judge.py",
        "notes = () if unlike else (",
        "notes = () if False else (",
        "tests/analysis/test_gate.py",
    ),
    Mutant(
        "McNemar's test is told the power of another one",
        "analysis/judge.py",
        '(row["test"] == "sign flip")',
        '(row["test"] != "signed rank")',
        "tests/analysis/test_scenarios.py",
    ),
    Mutant(
        "data are compared by path",
        "analysis/gate.py",
        'BY_FINGERPRINT = ("data", ',
        "BY_FINGERPRINT = (",
        "tests/analysis/test_gate.py",
    ),
    # Chosen by somebody who had seen no test.
    Mutant(
        "rule ringleader: every gradient counts alike, so a fast worker's data weigh more",
        "asyncsgd/rules/tables.py",
        "direction.add_(mean.total, alpha=1.0 / (len(mean.dispatches) * len(state.now)))",
        "direction.add_(mean.total, alpha=1.0 / sum(len(other.dispatches) for other in state.now.values()))",
        ORACLES,
    ),
    Mutant(
        "pipeline: parameters that two stages hold count twice in the norm that gradients are clipped by",
        "asyncsgd/runtime/pipeline.py",
        "        for name in self._again:",
        "        for name in ():",
        "tests/test_pipeline.py",
    ),
    Mutant(
        "tagging: words cut off by --seq-len vanish from the scores and do not count as predicted O",
        "asyncsgd/tasks/token_classification.py",
        'true, said = batch["tags"].cpu().numpy(), predicted',
        'true, said = batch["tags"].where(batch["pieces"] >= 0, spans.OUTSIDE).cpu().numpy(), predicted',
        "tests/tasks/test_token_classification.py",
    ),
    Mutant(
        "labels: a number that is also a name is taken for the name, so classes called 1, 2, 3 are shifted",
        "asyncsgd/data/labels.py",
        "if names is None or (text in names and not is_number):",
        "if names is None or text in names:",
        "tests/data/test_odd_tables.py",
    ),
    Mutant(
        "folders: texts of an evaluation set that is not scored on are trained on",
        "asyncsgd/data/corpora.py",
        "            texts.setdefault(called, set()).update(part.texts(of))",
        "        pass",
        "tests/data/test_odd_tables.py",
    ),
    Mutant(
        "tables: a quotation mark that nobody closes swallows the rows up to the next one",
        "asyncsgd/data/tables.py",
        'if quoting == "standard" and reading.quoting is None:',
        'if quoting == "standard" and reading.quoting == "none":',
        "tests/data/test_odd_tables.py",
    ),
    Mutant(
        "data order: an epoch by length leaves out its last, shorter group of batches",
        "asyncsgd/data/order.py",
        "range(0, len(inside), RUN * batch_size)]",
        "range(0, len(inside) - RUN * batch_size + 1, RUN * batch_size)]",
        "tests/data/test_masking.py",
    ),
    Mutant(
        "resume: the evaluations without a new lowest loss are counted from 0 again, so --patience ends a run later",
        "asyncsgd/runtime/base.py",
        'KEPT = ("_best_loss", "_best_samples", "_since", "_newest",',
        'KEPT = ("_best_loss", "_best_samples", "_newest",',
        "tests/test_resume.py",
    ),
    Mutant(
        "summary: the samples of a gradient that is used in several steps are counted in each of them",
        "asyncsgd/records/totals.py",
        "self.num_samples_applied += self.samples_of.pop(dispatch, 0)",
        "self.num_samples_applied += self.samples_of.get(dispatch, 0)",
        "tests/test_churn.py",
    ),
    Mutant(
        "margin: with a reason, a margin above half of the improvement is used too",
        "analysis/judge.py",
        "if margin > WIDEST * gained:",
        "if margin > WIDEST * gained and not reason:",
        "tests/analysis/test_verdicts.py",
    ),
    Mutant(
        "time to target: each run keeps all its own evaluations, so whoever is evaluated more often is sooner",
        "analysis/measure.py",
        "np.array([self.crossings(pair, target) for pair in both])",
        "np.array([[self.crossings([run], target)[0] for run in pair] for pair in both])",
        "tests/analysis/test_scenarios.py",
    ),
    Mutant(
        "between two looks: the smaller p of both ends counts",
        "analysis/judge.py",
        '"p": max(p_ends) if len(directions) == 1 else 1.0',
        '"p": min(p_ends) if len(directions) == 1 else 1.0',
        "tests/analysis/test_scenarios.py",
    ),
    Mutant(
        "between two looks: ends that show different directions are a word",
        "analysis/judge.py",
        "if len(directions) == 1 else 1.0",
        "if directions else 1.0",
        "tests/analysis/test_scenarios.py",
    ),
    Mutant(
        "between two looks: both ends of an arm are its first held look",
        "analysis/curves.py",
        "return float(curve[0][max(k - 1, 0)]), float(curve[0][k])",
        "return float(curve[0][k]), float(curve[0][k])",
        "tests/analysis/test_scenarios.py",
    ),
    Mutant(
        "a look is near another one whatever lies between them",
        "analysis/curves.py",
        "if abs(x[nearest] - position) <= near:",
        "if nearest >= 0:",
        "tests/analysis/test_known_answers.py",
    ),
    Mutant(
        "losses that rise between two looks bound the loss between them",
        "analysis/curves.py",
        "if len(beside) < 2 or y[k] > y[k - 1]:",
        "if len(beside) < 2:",
        "tests/analysis/test_known_answers.py",
    ),
    Mutant(
        "a run that stopped at its target was nowhere where the other run was not looked at",
        "analysis/measure.py",
        "own = {run.run: self.curve(run.run, x) for run in runs if not (run.diverged or self._lost(run.run))}",
        "own = self.looks([run for run in runs if not (run.diverged or self._lost(run.run))], x)",
        "tests/analysis/test_verdicts.py",
    ),
    Mutant(
        "a ratio of times has an end although the treatment may have been there at once",
        "analysis/judge.py",
        "return late._replace(estimate=middle, high=math.inf), (late.estimate, math.inf)",
        "return late._replace(estimate=middle), (late.estimate, late.estimate)",
        "tests/analysis/test_scenarios.py",
    ),
    Mutant(
        "above 16 pairs, p depends on their order",
        "analysis/stats.py",
        "order = _in_one_order(ours, theirs)",
        "order = np.arange(len(ours))",
        "tests/analysis/test_known_answers.py",
    ),
    Mutant(
        "above 16 pairs, p depends on which arm is named first",
        "analysis/stats.py",
        "        differences = -differences\n",
        "        pass\n",
        "tests/analysis/test_known_answers.py",
    ),
    Mutant(
        "the smallest difference is that of a t test, also for 9 pairs",
        "analysis/stats.py",
        "    if n > EXACT_PAIRS:\n        return float(by_t)",
        "    if n:\n        return float(by_t)",
        "tests/analysis/test_known_answers.py",
    ),
    Mutant(
        "compare: two Series are paired by position",
        "analysis/load.py",
        "return b.reindex(a.index)",
        "return b",
        "tests/analysis/test_tables.py",
    ),
    Mutant(
        "fine-tuning: a seed that lost one of its fine-tuning runs stays in the pairs, with the mean of the others",
        "analysis/scores.py",
        "one.mean(skipna=False)",
        "one.mean()",
        "tests/analysis/test_verdicts.py",
    ),
    Mutant(
        "an arm has more trials than another",
        "asyncsgd/study/arms.py",
        "if len(set(counts.values())) > 1 or",
        "if len(set(counts.values())) > 2 or",
        "tests/test_plan.py -k more_trials",
    ),
    Mutant(
        "a prediction is a share of a value that is 0",
        "asyncsgd/scripts/predict.py",
        "if measured and predicted is not None:",
        "if measured is not None and predicted:",
        "tests/test_examples.py -k scripts.predict",
    ),
]


def fault_of(mutant):
    """Why the mutant cannot be made; empty where it can."""
    number = (ROOT / mutant.file).read_text().count(mutant.line) if (ROOT / mutant.file).exists() else 0
    return "" if number == 1 else f"its line stands {number} times in {mutant.file}"


def try_out(mutant, copy):
    """The first test that failed, or "survived"; and the seconds."""
    path, began = copy / mutant.file, time.monotonic()
    right = path.read_text()
    path.write_text(right.replace(mutant.line, mutant.wrong))
    where, _, expression = mutant.tests.partition(" -k ")
    chosen = ["-k", expression] if expression else []
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--hypothesis-profile=unshrunk"]
    command += [*where.split(), *chosen]
    try:
        done = subprocess.run(
            command, cwd=copy, env=os.environ | {"PYTHONPATH": str(copy)}, capture_output=True, text=True, timeout=300
        )
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        said = failed[1] if failed else "survived" if done.returncode == 0 else done.stdout[-300:] + done.stderr[-300:]
    except subprocess.TimeoutExpired:
        said = "does not end"
    path.write_text(right)
    return said, time.monotonic() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORDS", help="words of the names, with commas between")
    parser.add_argument("--check", action="store_true", help="only look whether every line is there")
    arguments = parser.parse_args()
    words = arguments.only.split(",")
    mutants = [mutant for mutant in MUTANTS if any(word in mutant.fault for word in words)]
    missing = {mutant.fault: why for mutant in mutants if (why := fault_of(mutant))}
    for fault, why in missing.items():
        print(f"{fault}: {why}")
    if arguments.check:
        print(f"{len(mutants) - len(missing)} of {len(mutants)} lines are there")
        return 1 if missing else 0
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".git", "runs", "__pycache__", ".*_cache", ".hypothesis")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for mutant in mutants:
            if mutant.fault not in missing:
                said, seconds = try_out(mutant, copy)
                survived += said == "survived"
                print(f"| {mutant.fault} | {said} | {seconds:.0f} |", flush=True)
    print(f"{len(mutants) - len(missing) - survived} of {len(mutants)} noticed")
    return 1 if survived or missing else 0


if __name__ == "__main__":
    sys.exit(main())
