"""A schedule of the user's own: a function from the progress of a run to a share of the peak learning rate."""

import json
import math

import pytest
import torch
import yaml
from doors import (
    SGD,
    AllReduce,
    AsyncLocalSGD,
    Exponential,
    Hogwild,
    InProcess,
    Processes,
    RunError,
    UsageError,
    Virtual,
    asyncsgd,
    cli,
)
from marks import slow
from tasks import Plane
from torch_alone import train_alone

SAMPLES = 160
RATE = 0.02
GIVEN = {"optimizer": SGD(0.9), "learning_rate": RATE, "samples": SAMPLES, "quiet": True}


def restart(progress):
    """Falls from 1 to a tenth, twice."""
    return max(0.1, 1 - 2 * (progress % 0.5))


def below_zero(progress):
    return 0.5 - progress


def fails(progress):
    raise ZeroDivisionError("no")


def late(progress):
    """Is no number between the points that are tried."""
    if 0.6 < progress < 0.7:
        return math.nan
    return 1.0


def plain_loop():
    """Torch alone. The rate of a step counts its own samples as arrived."""
    task = Plane()
    model = task.model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    number = SAMPLES // task.batch_size
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: restart((step + 1) / number))
    train_alone(task, model, optimizer, number, schedule)
    return model


@pytest.mark.processes
@pytest.mark.parametrize(
    "runtime", [InProcess(), Virtual(1), Processes(1), *slow(AllReduce(1), Hogwild(1))], ids=lambda one: str(type(one))
)
def test_one_worker_steps_at_the_rates_of_torchs_own_scheduler(runtime):
    trained = asyncsgd.train(Plane(), schedule=restart, runtime=runtime, **GIVEN).model()
    torch.testing.assert_close(trained.weight, plain_loop().weight, rtol=1e-5, atol=1e-6)


def test_local_steps_see_it_after_the_warm_up(tmp_path):
    rule = AsyncLocalSGD(2)
    asyncsgd.train(
        Plane(), schedule=restart, warmup=40, rule=rule, runtime=Virtual(2), folder=tmp_path / "run", **GIVEN
    )
    starts = []
    arrived = 0
    for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines():
        record = json.loads(line)
        arrived = record.get("total_samples", arrived)
        for _, _, batches, rate in record.get("started", ()):
            own = 8 * sum(end - first for _, first, end in batches)  # they count as arrived, as in a server's step
            starts.append((arrived + own, rate))
    assert len(starts) > 5
    for samples, rate in starts:
        if samples < 40:
            share = samples / 40
        else:
            share = restart(min(1.0, (samples - 40) / (SAMPLES - 40)))
        assert rate == pytest.approx(RATE * share)


def test_its_name_is_written_down_and_a_replay_and_a_resume_ask_for_it(tmp_path):
    drawn = {"runtime": Virtual(3, Exponential(1.0)), "folder": tmp_path / "run", "checkpoint_every": 80}
    whole = asyncsgd.train(Plane(), schedule=restart, **GIVEN | drawn | {"folder": tmp_path / "whole"})
    settings = yaml.safe_load((tmp_path / "whole" / "settings.yaml").read_text())
    assert settings["schedule"] == "test_own_schedule:restart"
    assert asyncsgd.replay(tmp_path / "whole", Plane(), schedule=restart).identical
    assert not asyncsgd.replay(tmp_path / "whole", Plane(), schedule=late).identical
    with pytest.raises(UsageError, match=r"schedule, test_own_schedule:restart, is the user's own; give it"):
        asyncsgd.replay(tmp_path / "whole", Plane())
    ended = cli(f"train.py tasks:Plane --resume {tmp_path / 'whole'} --samples 320")
    assert "the schedule of the run are the user's own, which no flag can give" in ended.err
    stopped = []

    def stop(record):
        if record.total_samples >= 96 and not stopped:
            stopped.append(record)
            raise KeyboardInterrupt

    assert asyncsgd.train(Plane(), schedule=restart, report=stop, **GIVEN | drawn).status == "INTERRUPTED"
    again = asyncsgd.train(Plane(), schedule=restart, resume=True, **GIVEN | drawn)
    assert again.summary["parameters_sha256"] == whole.summary["parameters_sha256"]


@pytest.mark.parametrize(
    ("schedule", "more", "said"),
    [
        (below_zero, {}, "test_own_schedule:below_zero gives -0.25 at 0.75 of the run"),
        (fails, {}, "test_own_schedule:fails fails at 0 of the run: ZeroDivisionError: no"),
        (torch.nn.Linear(1, 1), {}, "schedule must be constant, linear, cosine or a function such as"),
        ("linaer", {}, "--schedule must be one of constant, linear, cosine, got 'linaer'"),
        (restart, {"samples": None, "seconds": 1.0}, "restart needs a number of samples to stretch over"),
        (lambda progress: 1.0, {"runtime": Processes(2)}, "cannot be sent to worker processes"),
    ],
    ids=range(6),
)
def test_what_is_no_schedule_is_refused_before_anything_is_trained(schedule, more, said):
    with pytest.raises(UsageError, match=said):
        asyncsgd.train(Plane(), schedule=schedule, **GIVEN | more)


def test_a_function_in_a_function_does_for_one_process():
    asyncsgd.train(Plane(), schedule=lambda progress: 1.0, **GIVEN | {"samples": 16})


def test_a_rate_that_is_no_number_ends_the_run_and_is_named():
    with pytest.raises(RunError, match=r"the schedule test_own_schedule:late gives nan at 0\.65 of the run"):
        asyncsgd.train(Plane(), schedule=late, **GIVEN)
