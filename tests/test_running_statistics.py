"""Models with running statistics: BatchNorm, InstanceNorm that tracks, spectral norm, a layer of one's own.

The expected values are plain torch loops on the model itself, and sums that are written out here."""

import copy
import dataclasses
import functools
import os
import signal

import pytest
import torch
from doors import (
    ADPSGD,
    DANA,
    EASGD,
    SGD,
    SGP,
    AllReduce,
    Asynchronous,
    AsyncLocalSGD,
    Constant,
    DiLoCo,
    Downpour,
    FedBuff,
    Finished,
    Hogwild,
    InProcess,
    LocalSGD,
    Processes,
    RunError,
    StreamingDiLoCo,
    Synchronous,
    Task,
    TensorData,
    UsageError,
    Virtual,
    asyncsgd,
    check,
    partners,
    seeded,
)
from marks import slow
from torch import nn
from torch.utils.checkpoint import checkpoint

BATCH = 8
STEPS = 8
RATE = 0.1
STEP = {"optimizer": SGD(), "learning_rate": RATE, "evaluations": 2, "quiet": True}


class OwnLayer(nn.Module):
    """A batch norm that is called twice, and an average and a counter of the layer's own, which it makes anew."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8, momentum=0.3)
        self.outer = nn.Linear(8, 3)
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        hidden = self.norm(self.norm(self.inner(x)).relu())
        if self.training:
            with torch.no_grad():
                self.average = 0.8 * self.average + 0.2 * hidden.mean(0)
                self.seen += 1
        return self.outer(hidden)


class Again(nn.Module):
    """Computes its layers again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(checkpoint(self.layers, x, use_reentrant=False) if self.training else self.layers(x))


class Later(nn.Module):
    """Changes a buffer after a few passes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.passes = 0
        self.register_buffer("late", torch.zeros(2))

    def forward(self, x):
        self.passes += self.training
        if self.passes > 3:
            self.late += 1.0
        return self.layer(x)


class Skips(nn.Module):
    """Spectral norm and dropout before a batch norm, and a layer that draws in training."""

    def __init__(self):
        super().__init__()
        first = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))
        self.layers = nn.Sequential(first, nn.Dropout(0.3), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(x)


def pictures(norm, channels=4):
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, channels, 2, padding=1),
        norm,
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48, 3),
    )


def rows(norm):
    return nn.Sequential(nn.Linear(6, 8), norm, nn.ReLU(), nn.Linear(8, 3))


MODELS = {
    "BatchNorm1d": lambda: rows(nn.BatchNorm1d(8)),
    "BatchNorm2d": lambda: pictures(nn.BatchNorm2d(4)),
    "mean of all": lambda: rows(nn.BatchNorm1d(8, momentum=None)),
    "InstanceNorm2d": lambda: pictures(nn.InstanceNorm2d(4, track_running_stats=True)),
    "spectral norm": lambda: rows(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))),
    "own": OwnLayer,
    "again": Again,
    "later": Later,
    "skips": Skips,
    "GroupNorm": lambda: rows(nn.GroupNorm(2, 8)),
}


@dataclasses.dataclass(frozen=True)
class Normed(Task):
    name = "normed"
    kind: str = "BatchNorm1d"
    batch_size: int = BATCH

    def model(self, seed):
        with seeded(seed):
            return MODELS[self.kind]()

    def data(self, seed):
        generator = torch.Generator().manual_seed(5)
        x = 2 * torch.randn(96, 6, generator=generator) + 1
        y = (x[:, 0] > 1).long() + (x[:, 1] > 1).long()
        return TensorData((x, y), (x[:40], y[:40]), self.batch_size, seed)

    def outputs(self, model, batch):
        return model(batch[0])

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])


def trained(kind, samples=STEPS * BATCH, **given):
    return asyncsgd.train(Normed(kind), samples=samples, **STEP | given)


def state(model):
    return {name: value.tolist() for name, value in model.state_dict().items()}


def trained_state(kind, **given):
    run = trained(kind, **given)
    return state(run.model())


def take_steps(task, model, indices, parts=1):
    """Steps of torch.optim.SGD on the model itself, each on the mean gradient of its batch's parts."""
    data = task.data(0)
    optimizer = torch.optim.SGD(model.parameters(), RATE, fused=True)
    for index in indices:
        optimizer.zero_grad()
        x, y = data.batch(0, index)
        for part in zip(x.chunk(parts), y.chunk(parts), strict=True):
            outputs = task.outputs(model, part)
            loss = task.loss(outputs, part) / parts
            loss.backward()
        optimizer.step()


def plain_loop(kind, parts=1):
    """The model after `STEPS` steps."""
    task = Normed(kind)
    model = task.model(0)
    take_steps(task, model, range(STEPS), parts)
    return model


WITH_STATISTICS = ["BatchNorm1d", "BatchNorm2d", "mean of all", "InstanceNorm2d", "spectral norm", "own"]


@pytest.mark.parametrize("kind", WITH_STATISTICS)
def test_one_process_and_one_asynchronous_worker_are_the_plain_loop_bit_for_bit(kind):
    expected = state(plain_loop(kind))
    for runtime in (InProcess(), Virtual(1)):
        assert trained_state(kind, runtime=runtime) == expected


def test_parts_of_a_batch_move_the_statistics_once_each():
    expected = state(plain_loop("BatchNorm1d", parts=2))
    assert trained_state("BatchNorm1d", micro_batches=2) == expected
    assert expected["1.num_batches_tracked"] == 2 * STEPS


@pytest.mark.parametrize("parts", [1, 2])
def test_the_second_pass_of_checkpointed_activations_moves_no_statistics(parts):
    model = trained("again", micro_batches=parts).model()
    without_checkpoints = plain_loop("BatchNorm1d", parts=parts)  # the same layers but for the activation
    by_torch_itself = plain_loop("again")
    assert int(without_checkpoints[1].num_batches_tracked) == parts * STEPS
    assert int(model.layers[1].num_batches_tracked) == parts * STEPS
    assert int(by_torch_itself.layers[1].num_batches_tracked) == 2 * STEPS


@dataclasses.dataclass(frozen=True)
class Steep(Normed):
    """Its gradients overflow at the first scales of float16."""

    def loss(self, outputs, batch):
        return 100 * super().loss(outputs, batch)


def test_a_batch_that_float16_computes_again_moves_the_statistics_once():
    scales = []
    run = asyncsgd.train(
        Steep(),
        precision="fp16",
        samples=2 * BATCH,
        report=lambda record: scales.extend(getattr(record, "loss_scales", ())),
        **STEP | {"learning_rate": 1e-6},
    )
    assert scales[0] < 2.0**16
    norm = run.model()[1]
    assert int(norm.num_batches_tracked) == 2
    without_scale = trained("BatchNorm1d", precision="bf16", samples=2 * BATCH, learning_rate=1e-6)
    expected = without_scale.model()[1].running_mean
    torch.testing.assert_close(norm.running_mean, expected, rtol=0.05, atol=0.01)


def test_what_a_compile_computes_first_moves_no_statistics(monkeypatch):
    """A compiler that changes nothing, since the usual one takes a minute."""
    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend="eager"))
    compiled = trained_state("BatchNorm1d", compile=True, samples=3 * BATCH)
    expected = trained_state("BatchNorm1d", samples=3 * BATCH)
    assert compiled == expected


@pytest.mark.parametrize("kind", ["BatchNorm1d", pytest.param("own", marks=pytest.mark.slow)])
def test_the_synchronous_rule_accumulation_and_synchronous_ranks_keep_the_statistics_of_the_first_batch(kind):
    by_rule = trained(kind, runtime=Virtual(2), rule=Synchronous())
    expected = state(by_rule.model())
    for runtime in (InProcess(accumulate=2), AllReduce(2)):
        run = trained(kind, runtime=runtime)
        assert state(run.model()) == expected
        assert run.summary["statistics_sha256"] == by_rule.summary["statistics_sha256"]


@pytest.mark.slow
def test_two_ranks_are_data_parallel_by_hand():
    """DDP's gradient is the mean of both ranks', and its buffers are rank 0's."""
    task = Normed()
    model = task.model(0)
    data = task.data(0)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for step in range(STEPS // 2):
        optimizer.zero_grad()
        other = copy.deepcopy(model)
        for rank, replica in enumerate((model, other)):
            batch = data.batch(0, 2 * step + rank)
            outputs = task.outputs(replica, batch)
            loss = task.loss(outputs, batch) / 2
            loss.backward()
        for parameter, theirs in zip(model.parameters(), other.parameters(), strict=True):
            parameter.grad += theirs.grad
        optimizer.step()
    run = trained("BatchNorm1d", runtime=AllReduce(2))
    found = run.model().state_dict()
    expected = model.state_dict()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "rule",
    [Asynchronous(), AsyncLocalSGD(num_local_steps=2), Downpour(n_push=1, n_fetch=2)],
    ids=str,
)
def test_under_delay_the_servers_are_the_moving_average_of_the_batches_own_statistics(rule):
    """Without steps in the parameters (rate 0 is refused, so 1e-30) a batch's statistics are those of plain passes."""
    task = Normed()
    for kind, momentum in (("BatchNorm1d", 0.1), ("mean of all", None)):
        runtime = Virtual(3, speeds=Constant(1.0))
        run = trained(kind, runtime=runtime, rule=rule, learning_rate=1e-30, samples=6 * BATCH)
        norm = run.model()[1]
        layer = Normed(kind).model(0)[0]
        data = task.data(0)
        mean = torch.zeros(8, dtype=torch.float64)
        var = torch.ones(8, dtype=torch.float64)
        with torch.no_grad():
            for index in range(6):
                x, _ = data.batch(0, index)
                hidden = layer(x).double()
                m = momentum or 1 / (index + 1)
                mean = (1 - m) * mean + m * hidden.mean(0)
                var = (1 - m) * var + m * hidden.var(0)
        assert int(norm.num_batches_tracked) == 6
        torch.testing.assert_close(norm.running_mean.double(), mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(norm.running_var.double(), var, rtol=1e-5, atol=1e-5)


def plain_rounds(kind, length):
    """`plain_loop`, but that a round of so many steps ends where a server comes by its displacement: x - (x - y)."""
    task = Normed(kind)
    model = task.model(0)
    for first in range(0, STEPS, length):
        before = copy.deepcopy(model)
        take_steps(task, model, range(first, first + length))
        with torch.no_grad():
            for parameter, start in zip(model.parameters(), before.parameters(), strict=True):
                displacement = start - parameter
                parameter.copy_(start - displacement)
    return model


@pytest.mark.parametrize("kind", WITH_STATISTICS)
def test_one_workers_local_steps_are_the_plain_loop_bit_for_bit(kind):
    found = trained_state(kind, runtime=Virtual(1), rule=LocalSGD(num_local_steps=4))
    expected = state(plain_rounds(kind, 4))
    assert found == expected


@dataclasses.dataclass(frozen=True)
class Weighted(Normed):
    """Its batches have loss terms of unequal numbers."""

    def weight(self, batch):
        return float(1 + (batch[1] == 2).sum())


@pytest.mark.parametrize("rule", [LocalSGD(num_local_steps=2), DiLoCo(num_local_steps=2)], ids=str)
@pytest.mark.parametrize("kind", ["BatchNorm1d", "own"])
def test_a_round_of_local_steps_ends_at_the_weighted_mean_of_the_workers_statistics(kind, rule):
    task = Weighted(kind)
    data = task.data(0)
    models = []
    weights = []
    for indices in ((0, 1), (2, 3)):
        model = task.model(0)
        take_steps(task, model, indices)
        models.append(dict(model.named_buffers()))
        weight = 0.0
        for index in indices:
            weight += task.weight(data.batch(0, index))
        weights.append(weight)
    assert weights[0] != weights[1]
    for runtime in (Virtual(2), Processes(2)):
        run = asyncsgd.train(task, samples=4 * BATCH, runtime=runtime, rule=rule, **STEP)
        for name, found in run.model().named_buffers():
            first = models[0][name].double()
            second = models[1][name].double()
            if not found.is_floating_point():
                assert int(found) == int(first) + int(second)
            elif name == "average":
                assert torch.equal(found.double(), second)
            else:
                expected = (weights[0] * first + weights[1] * second) / sum(weights)
                torch.testing.assert_close(found, expected.float(), rtol=1e-6, atol=0.0)


def batches_own(kind="BatchNorm1d"):
    """The mean and the variance that each batch has at the initial parameters, `(2, 8)`."""
    layer = Normed(kind).model(0)[0]
    data = Normed(kind).data(0)
    statistics = []
    with torch.no_grad():
        for index in range(12):
            x, _ = data.batch(0, index)
            hidden = layer(x).double()
            statistics.append(torch.stack([hidden.mean(0), hidden.var(0)]))
    return statistics


def initial_statistics():
    return torch.stack([torch.zeros(8), torch.ones(8)]).double()


def of_easgd(rate):
    """Two workers in turn, two local steps each, three times."""
    own = batches_own()
    centre = initial_statistics()
    replicas = [initial_statistics(), initial_statistics()]
    for arrival in range(6):
        y = replicas[arrival % 2]
        for index in (2 * arrival, 2 * arrival + 1):
            y = 0.9 * y + 0.1 * own[index]
        apart = rate * (y - centre)
        replicas[arrival % 2] = y - apart
        centre = centre + apart
    return centre


def of_ad_psgd():
    """Three workers in turn, four gradients each."""
    own = batches_own()
    partner = partners("complete", 3, seed=0)
    models = [initial_statistics() for _ in range(3)]
    for index in range(12):
        i = index % 3
        j = partner(i, index // 3)
        mean = (models[i] + models[j]) / 2
        models[j] = mean
        models[i] = 0.9 * mean + 0.1 * own[index]
    return sum(models) / 3


def of_sgp(delay):
    """Four rounds of three workers."""
    own = batches_own()
    x = [initial_statistics() for _ in range(3)]
    w = [1.0] * 3
    inbox = {}
    for k in range(4):
        distance = 2 ** (k % 2)
        for i in range(3):
            unbiased = x[i] / w[i]
            x[i] = w[i] * (0.9 * unbiased + 0.1 * own[3 * k + i])
        for i in range(3):
            x[i] = x[i] / 2
            w[i] = w[i] / 2
            neighbour = (i + distance) % 3
            inbox[k + delay, neighbour] = (x[i], w[i])
        for i in range(3):
            if (k, i) in inbox:
                received, weight = inbox.pop((k, i))
                x[i] = x[i] + received
                w[i] = w[i] + weight
    total = sum(x)
    for underway, _ in inbox.values():
        total = total + underway
    return total / 3


def of_streaming(overlap, mix):
    """Three workers, four steps each; what they send after step 2 comes back mixed after `overlap` more."""
    own = batches_own()
    models = [initial_statistics() for _ in range(3)]
    for step in range(1, 5):
        for i in range(3):
            index = 3 * (step - 1) + i
            models[i] = 0.9 * models[i] + 0.1 * own[index]
        if step in (2, 4):
            sent = sum(models) / 3
        if step > overlap and (step - overlap) in (2, 4):
            models = [mix * model + (1 - mix) * sent for model in models]
    return sum(models) / 3


@pytest.mark.parametrize(
    ("rule", "num_workers", "expected"),
    [
        (EASGD(alpha=0.3, num_local_steps=2), 2, lambda: of_easgd(0.3)),
        (ADPSGD(), 3, of_ad_psgd),
        (SGP(), 3, lambda: of_sgp(0)),
        (SGP(delay=2), 3, lambda: of_sgp(2)),
        (StreamingDiLoCo(num_local_steps=2, fragments=1, overlap=0, mix=0.0), 3, lambda: of_streaming(0, 0.0)),
        (StreamingDiLoCo(num_local_steps=2, fragments=1, overlap=1), 3, lambda: of_streaming(1, 0.5)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_statistics_of_models_that_are_averaged_are_averaged_with_them(rule, num_workers, expected):
    """At rate 1e-30 a batch's own statistics are those of plain passes at the initial parameters."""
    runtime = Virtual(num_workers, speeds=Constant(1.0))
    run = trained("BatchNorm1d", runtime=runtime, rule=rule, learning_rate=1e-30, samples=12 * BATCH)
    norm = run.model()[1]
    assert int(norm.num_batches_tracked) == 12
    found = torch.stack([norm.running_mean, norm.running_var]).double()
    torch.testing.assert_close(found, expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", [ADPSGD(), SGP(), StreamingDiLoCo(num_local_steps=30, fragments=1)], ids=str)
@pytest.mark.parametrize("kind", ["BatchNorm1d", "mean of all", "own"])
def test_one_peer_is_the_plain_loop_bit_for_bit(kind, rule):
    found = trained_state(kind, runtime=Virtual(1), rule=rule)
    expected = state(plain_loop(kind))
    assert found == expected


LOCAL_STEPS = [
    LocalSGD(num_local_steps=2),
    FedBuff(buffer=3, num_local_steps=2),
    Downpour(n_push=1, n_fetch=2),
    EASGD(num_local_steps=2),
]
PEERS = [ADPSGD(), SGP(delay=1), StreamingDiLoCo(num_local_steps=2)]


@pytest.mark.parametrize("rule", [EASGD(num_local_steps=2), *PEERS], ids=lambda rule: rule.name)
@pytest.mark.parametrize("given", [{}, {"batch_statistics": "reestimated", "statistics_batches": 5}], ids=str)
def test_a_model_that_is_an_average_is_replayed_and_saved_with_the_statistics_of_its_evaluation(given, rule, tmp_path):
    run = trained("own", runtime=Virtual(3), rule=rule, folder=tmp_path / "run", **given)
    assert asyncsgd.replay(tmp_path / "run", Normed).identical
    model = asyncsgd.load_run(tmp_path / "run", Normed).model()
    assert state(model) == state(run.model())
    assert loss_of("own", model) == pytest.approx(run.summary["final_eval_loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("runtime", "rule"),
    [
        *((Virtual(2), rule) for rule in LOCAL_STEPS),
        *slow(*((Processes(2), rule) for rule in LOCAL_STEPS)),
        *slow((Processes(2, via="process_group"), LOCAL_STEPS[0])),
    ],
    ids=repr,
)
def test_local_steps_are_replayed_with_their_statistics(runtime, rule, tmp_path):
    trained("own", runtime=runtime, rule=rule, folder=tmp_path / "run")
    assert asyncsgd.replay(tmp_path / "run", Normed).identical


@pytest.mark.parametrize("rule", [*LOCAL_STEPS, *PEERS], ids=lambda rule: rule.name)
def test_models_apart_that_go_on_end_as_those_that_never_stopped(rule, tmp_path):
    """Statistics of displacements that the rule holds are part of the state."""
    given = {"runtime": Virtual(2), "rule": rule, "samples": 8 * BATCH}
    whole = trained("own", **given)
    given |= {"folder": tmp_path / "run", "checkpoint_every": 4 * BATCH}

    def stop(record):
        if getattr(record, "total_samples", 0) == 4 * BATCH and type(record).__name__ == "Event":
            os.kill(os.getpid(), signal.SIGINT)

    assert trained("own", report=stop, **given).status == "INTERRUPTED"
    gone_on = trained("own", resume=True, **given)
    for key in ("parameters_sha256", "statistics_sha256"):
        assert gone_on.summary[key] == whole.summary[key]


@pytest.mark.parametrize(
    "runtime",
    [Virtual(3), Processes(2), *slow(Processes(2, via="process_group"))],
    ids=repr,
)
def test_a_replay_ends_at_the_runs_statistics_and_its_model_is_saved_with_them(runtime, tmp_path):
    run = trained("own", runtime=runtime, folder=tmp_path / "run", keep_best=True)
    assert asyncsgd.replay(tmp_path / "run", Normed).identical
    loaded = asyncsgd.load_run(tmp_path / "run", Normed)
    for best in (False, True):
        assert state(loaded.model(best=best)) == state(run.model(best=best))
    assert loss_of("own", loaded.model()) == pytest.approx(run.summary["final_eval_loss"], rel=1e-6)


@pytest.mark.parametrize("runtime", [Virtual(3), *slow(Processes(2))], ids=repr)
def test_a_gradient_ahead_of_the_servers_parameters_begins_at_the_servers_statistics(runtime, tmp_path):
    """A replay evaluates nothing, so what an evaluation leaves in a worker would tell the two apart."""
    trained("own", runtime=runtime, rule=DANA(momentum=0.5), folder=tmp_path / "run")
    assert asyncsgd.replay(tmp_path / "run", Normed).identical


def test_a_replay_whose_statistics_are_others_is_different(tmp_path):
    trained("BatchNorm1d", runtime=Virtual(2), folder=tmp_path / "run")
    summary = tmp_path / "run" / "summary.json"
    recorded = Finished(tmp_path / "run").summary["statistics_sha256"]
    summary.write_text(summary.read_text().replace(recorded, "0" * 64))
    assert "statistics do not" in asyncsgd.replay(tmp_path / "run", Normed).difference


@pytest.mark.parametrize("runtime", [InProcess(), Virtual(2), *slow(AllReduce(2))], ids=repr)
def test_a_run_that_goes_on_ends_as_one_that_never_stopped(runtime, tmp_path):
    given = {"runtime": runtime, "folder": tmp_path / "run", "checkpoint_every": 2 * BATCH}
    whole = trained("BatchNorm1d", runtime=runtime)
    trained("BatchNorm1d", samples=4 * BATCH, **given)
    gone_on = trained("BatchNorm1d", resume=True, **given)
    assert state(gone_on.model()) == state(whole.model())
    assert gone_on.summary["statistics_sha256"] == whole.summary["statistics_sha256"]
    with pytest.raises(UsageError, match="part of what is trained; go on with --micro-batches 1"):
        trained("BatchNorm1d", samples=2 * STEPS * BATCH, resume=True, **given, micro_batches=2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"runtime": Hogwild(2)}, "mode hogwild does not keep"),
        ({"auto_batch": True}, "type --micro-batches K in place of --auto-batch"),
    ],
)
def test_what_cannot_keep_statistics_refuses_them_and_says_what_works(given, words):
    with pytest.raises(UsageError) as raised:
        trained("BatchNorm1d", **given)
    assert words in str(raised.value)


def test_a_buffer_that_changes_only_later_ends_the_run_by_its_name():
    with pytest.raises(RunError, match=r"changes the buffer 'late' of Later"):
        trained("later")


def test_the_check_names_the_buffers_and_a_run_says_how_each_is_kept(tmp_path):
    names = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "average", "seen")
    assert sorted(check(Normed("own")).statistics) == sorted(names)
    summary = trained("own", samples=BATCH, folder=tmp_path / "run").summary
    averaged = "moving averages"
    newest = "the newest gradient's"
    counted = "added up"
    assert summary["statistics"] == {
        "average": newest,
        "seen": counted,
        "norm.running_mean": averaged,
        "norm.running_var": averaged,
        "norm.num_batches_tracked": counted,
    }
    without = trained("GroupNorm", samples=BATCH, rule=Asynchronous(), runtime=Virtual(1)).summary
    assert not [name for name in without if "statistics" in name]


AGAIN = {"batch_statistics": "reestimated", "statistics_batches": 5}
EVALUATED_AGAIN = ["BatchNorm1d", "BatchNorm2d", "mean of all", "InstanceNorm2d", "own", "skips"]


def loss_of(kind, model):
    """The loss on the evaluation set, batch by batch."""
    task = Normed(kind)
    total = 0.0
    with torch.no_grad():
        for batch in task.data(0).evaluation["main"]:
            outputs = task.outputs(model, batch)
            mean = task.loss(outputs, batch)
            total += float(mean) * len(batch[1])
    return total / 40


@pytest.mark.parametrize("kind", ["BatchNorm1d", "BatchNorm2d", "mean of all"])
def test_reestimated_statistics_are_those_of_torchs_update_bn_bit_for_bit(kind):
    found = trained_state(kind, **AGAIN)
    expected = plain_loop(kind)
    data = Normed(kind).data(0)
    inputs = [data.batch(0, index)[0] for index in range(5)]
    torch.optim.swa_utils.update_bn(inputs, expected)
    assert found == state(expected)


def test_reestimated_statistics_of_instance_norm_are_the_mean_over_the_batches():
    model = trained("InstanceNorm2d", **AGAIN).model()
    data = Normed("InstanceNorm2d").data(0)
    before_norm = model[:2]
    norm = model[2]
    means = []
    variances = []
    with torch.no_grad():
        for index in range(5):
            x, _ = data.batch(0, index)
            hidden = before_norm(x).double().flatten(2)
            means.append(hidden.mean((0, 2)))
            variances.append(hidden.var(2).mean(0))
    expected_mean = torch.stack(means).mean(0)
    expected_var = torch.stack(variances).mean(0)
    torch.testing.assert_close(norm.running_mean.double(), expected_mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norm.running_var.double(), expected_var, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", EVALUATED_AGAIN)
def test_what_is_evaluated_changes_no_bit_of_the_training_and_its_loss_is_that_of_the_model(kind, tmp_path):
    """Parameters, running statistics and arrivals are those of a run that evaluates its running statistics."""
    arrivals = []
    runs = []
    for name, given in (("running", {}), ("reestimated", AGAIN)):
        folder = tmp_path / name
        run = trained(kind, runtime=Virtual(2), folder=folder, keep_best=True, evaluations=4, **given)
        runs.append(run)
        arrivals.append(Finished(folder).records("arrival"))
        assert asyncsgd.replay(folder, Normed).identical
    running, reestimated = runs
    for key in ("parameters_sha256", "statistics_sha256"):
        assert running.summary[key] == reestimated.summary[key]
    assert arrivals[0] == arrivals[1]
    final_loss = reestimated.summary["final_eval_loss"]
    best_loss = reestimated.summary["best"]["eval_loss"]
    assert final_loss != running.summary["final_eval_loss"]
    loaded = asyncsgd.load_run(tmp_path / "reestimated", Normed)
    for best, recorded in ((False, final_loss), (True, best_loss)):
        model = loaded.model(best=best)
        assert state(model) == state(reestimated.model(best=best))
        assert loss_of(kind, model) == pytest.approx(recorded, rel=1e-6)


def test_only_normalisation_layers_are_estimated_again():
    running = trained_state("skips", runtime=Virtual(2))
    reestimated = trained_state("skips", runtime=Virtual(2), **AGAIN)
    different = {name for name in running if running[name] != reestimated[name]}
    assert different == {f"layers.2.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}


@pytest.mark.parametrize(
    "runtime",
    [
        Virtual(2),
        InProcess(accumulate=3),
        AllReduce(2),
        Processes(2),
        *slow(Processes(3)),
        *slow(Processes(2, via="process_group")),
    ],
    ids=repr,
)
def test_every_process_that_evaluates_has_the_same_reestimated_statistics(runtime):
    """Dropout is drawn from the seed and the batch, whoever computes it."""
    alone = trained_state("skips", samples=0, **AGAIN)
    together = trained_state("skips", samples=0, runtime=runtime, **AGAIN)
    assert together == alone
    run = trained("skips", runtime=runtime, keep_best=True, **AGAIN)
    final_loss = loss_of("skips", run.model())
    best_loss = loss_of("skips", run.model(best=True))
    assert final_loss == pytest.approx(run.summary["final_eval_loss"], rel=1e-6)
    assert best_loss == pytest.approx(run.summary["best"]["eval_loss"], rel=1e-6)


def test_a_model_that_was_stopped_between_two_evaluations_has_statistics_of_its_own():
    def stop(record):
        if record.version == 3:
            os.kill(os.getpid(), signal.SIGINT)

    stopped = trained("BatchNorm1d", report=stop, **AGAIN)
    assert stopped.status == "INTERRUPTED"
    assert stopped.summary["num_updates"] == 3
    assert state(stopped.model()) == trained_state("BatchNorm1d", samples=3 * BATCH, **AGAIN)


@pytest.mark.parametrize("runtime", [InProcess(), Virtual(2), *slow(AllReduce(2))], ids=repr)
def test_a_run_with_reestimated_statistics_goes_on_from_the_running_ones(runtime, tmp_path):
    given = {"runtime": runtime, "evaluations": 8, "evaluate_every": 4 * BATCH, "keep_best": True, **AGAIN}
    whole = trained("BatchNorm1d", **given)
    given |= {"folder": tmp_path / "run", "checkpoint_every": 2 * BATCH}
    first = trained("BatchNorm1d", samples=4 * BATCH, **given)
    gone_on = trained("BatchNorm1d", resume=True, **given)
    for best in (False, True):
        assert state(gone_on.model(best=best)) == state(whole.model(best=best))
    for key in ("statistics_sha256", "final_eval_loss"):
        assert gone_on.summary[key] == whole.summary[key]
        assert whole.summary[key] != first.summary[key]
    assert whole.summary["batch_statistics"] == "reestimated"
    assert whole.summary["statistics_batches"] == 5


def test_statistics_are_estimated_from_whole_batches_whatever_their_parts_and_precision():
    given = {"samples": 0, **AGAIN}
    expected = trained_state("BatchNorm1d", **given)
    for other in ({"micro_batches": 2}, {"precision": "bf16"}):
        assert trained_state("BatchNorm1d", **given, **other) == expected


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        ("GroupNorm", AGAIN, "this one has none; drop it"),
        ("spectral norm", AGAIN, "this one has none; drop it"),
        ("BatchNorm1d", {"statistics_batches": 3}, "--statistics-batches 3 is for --batch-statistics reestimated"),
        ("BatchNorm1d", {"batch_statistics": "newest"}, "must be one of running, reestimated"),
    ],
)
def test_statistics_that_nothing_evaluates_are_refused(kind, given, words):
    with pytest.raises(UsageError) as raised:
        trained(kind, **given)
    assert words in str(raised.value)


class Short:
    """Data of four batches."""

    def __init__(self, data):
        self.whole = data
        self.evaluation = data.evaluation

    def batch(self, stream, index):
        if index > 3:
            raise IndexError("the data have ended")
        return self.whole.batch(stream, index)


class Ends(Normed):
    def data(self, seed):
        return Short(super().data(seed))


def test_more_batches_than_the_data_have_are_refused_before_training():
    told = r"--statistics-batches 5: the data have no training batch 4 \(IndexError: the data have ended\); type fewer"
    with pytest.raises(UsageError, match=told):
        asyncsgd.train(Ends(), samples=4 * BATCH, **STEP, **AGAIN)
    asyncsgd.train(Ends(), samples=3 * BATCH, **STEP, **AGAIN | {"statistics_batches": 4})


def test_running_statistics_are_the_default_and_no_setting_of_a_run(tmp_path):
    settings = []
    for name, given in (("default", {}), ("said", {"batch_statistics": "running"})):
        trained("BatchNorm1d", samples=0, folder=tmp_path / name, **given)
        settings.append((tmp_path / name / "settings.yaml").read_text())
    assert settings[0] == settings[1]
    assert "batch_statistics: null" in settings[0]
