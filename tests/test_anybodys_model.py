"""Models as people write them train as they do in plain torch, or are refused in a sentence that says what to write."""

import dataclasses
import runpy

import numpy as np
import pytest
import torch
from doors import (
    SGD,
    AdamW,
    AllReduce,
    FlatModel,
    Hogwild,
    InProcess,
    Processes,
    UsageError,
    Virtual,
    check,
    load_run,
    seeded,
    train,
)
from marks import slow
from tasks import Plane
from torch import nn
from torch.nn import functional
from torch_alone import train_alone

STEPS = 10
GIVEN = {"learning_rate": 0.1, "optimizer": SGD(), "evaluations": 1, "quiet": True}


@dataclasses.dataclass(frozen=True)
class Kind(Plane):
    """A plane by a model of some kind; every kind is a method of this class that builds or changes it."""

    name = "kind"
    kind: str = ""

    def model(self, seed):
        with seeded(seed):
            return getattr(self, self.kind)(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)))

    def tied_by_data(self, model):
        model.append(nn.Linear(16, 1))
        model[3].weight.data = model[2].weight.data
        return model

    def in_part(self, model):
        model[0].bias.data = model[0].weight.data[3]
        return model

    def crossing(self, model):
        whole = torch.randn(16, 32)
        model[0].weight.data = whole[:, ::2]
        model[2].weight.data = whole[:1, 16:]
        return model

    def buffer(self, model):
        model[2].register_buffer("first", model[0].weight.data.t())
        return model

    def attribute(self, model):
        model.anchor = model[0].weight.detach()
        return model

    def slices(self, model):
        """As cuDNN lays out an LSTM, and every second column of one matrix."""
        whole = torch.randn(16, 32)
        flat = torch.zeros(33)
        model[0].weight.data = whole[:, ::2]
        model[2].weight.data = whole[:1, 1::2]
        model[0].bias.data = flat[:16]
        model[2].bias.data = flat[16:17]
        return model

    def shared(self, model):
        model.append(nn.Tanh())
        return nn.Sequential(model[0], nn.Tanh(), model[0], model[2])

    def lazy(self, model):
        return nn.Sequential(nn.LazyLinear(16), model[2])

    def frozen(self, model):
        return model.requires_grad_(False)

    def without(self, model):
        return nn.Sequential(nn.Unflatten(1, (1, 16)), nn.AdaptiveAvgPool1d(1), nn.Flatten())

    def double(self, model):
        return model.double()

    def meta(self, model):
        return model.to("meta")

    def scripted(self, model):
        return torch.jit.script(model)

    def listed(self, model):
        return list(model)

    def spectral(self, model):
        """Of one output: the buffers stay as they are until the weight has moved."""
        nn.utils.parametrizations.spectral_norm(model[2])
        return model

    def odd_buffers(self, model):
        matrix = torch.arange(16.0).view(4, 4)
        row = torch.arange(8.0)
        buffers = {"empty": row[:0], "none": torch.zeros(0), "matrix": matrix, "transposed": matrix.t()}
        buffers |= {"low": row[:4], "high": row[4:], "all": row, "alias": row}
        for name, buffer in buffers.items():
            model.register_buffer(name, buffer)
        return model


def plain(task, steps=STEPS):
    """Torch alone."""
    model = task.model(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train_alone(task, model, optimizer, steps)
    return model


def assert_plain(task, **given):
    run = train(task, samples=STEPS * task.batch_size, **GIVEN | given)
    trained = dict(run.model().named_parameters())
    expected = dict(plain(task).named_parameters())
    torch.testing.assert_close(trained, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("tied_by_data", r"'2.weight' and '3.weight' share memory.*self\[3\].weight = self\[2\].weight"),
        ("in_part", r"'0.weight' and '0.bias' share memory.*compute the other"),
        ("crossing", "'0.weight' and '2.weight' share memory"),
        ("buffer", r"'2.first' shares memory with the parameter '0.weight'.*self\[0\].weight"),
        ("attribute", "'anchor' shares memory with the parameter '0.weight'"),
        ("lazy", "'0.weight' has no shape"),
        ("frozen", "no parameter to train"),
        ("without", "no parameter to train"),
        ("double", "'0.weight' is torch.float64"),
        ("meta", "'0.weight' is on the meta device"),
        ("scripted", "return the module itself"),
        ("listed", "must return a torch.nn.Module, got a list"),
    ],
)
def test_a_model_that_would_train_otherwise_than_in_torch_is_refused_by_name(kind, words):
    with pytest.raises(UsageError, match=words):
        train(Kind(kind=kind), samples=8, **GIVEN)


@pytest.mark.parametrize("kind", ["slices", "shared", "odd_buffers"])
def test_what_lies_side_by_side_in_memory_or_is_one_parameter_trains_as_in_torch(kind):
    assert_plain(Kind(kind=kind))


def test_a_buffer_that_changes_only_once_the_weights_have_moved_is_kept_as_any_other():
    assert check(Kind(kind="spectral"), processes=False).statistics == ("2.parametrizations.weight.0._v",)
    assert_plain(Kind(kind="spectral"))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda loss: loss.expand(3), r"shape \(3,\).*reduction='mean'"),
        (lambda loss: loss[None], r"shape \(1,\)"),
        (lambda loss: {"loss": loss}, "a dict"),
        (lambda loss: [loss], "a list"),
        (lambda loss: (loss, 1), "a tuple"),
        (lambda loss: loss.item(), "a float"),
        (lambda loss: loss.detach(), "without a gradient"),
    ],
)
def test_a_loss_that_is_not_one_number_with_a_gradient_is_refused(loss, words):
    class Own(Plane):
        def loss(self, outputs, batch):
            return loss(super().loss(outputs, batch))

    with pytest.raises(UsageError, match=words):
        check(Own(), processes=False)


def changed(data, change):
    """The data, each of whose batches goes through a function."""
    inner = data.batch
    data.batch = lambda stream, index: change(inner(stream, index))
    data.evaluation = {"main": [change(batch) for batch in data.evaluation["main"]]}
    return data


@dataclasses.dataclass(frozen=True)
class Words(Plane):
    """The mean of a number per word, in a table with sparse gradients or with dense ones."""

    name = "words"
    sparse: bool = True
    how: str = "layer"

    def model(self, seed):
        with seeded(seed):
            if self.how == "bag":
                layer = nn.EmbeddingBag(30, 4, sparse=self.sparse)
            else:
                layer = nn.Embedding(30, 4)
            layer.sparse = self.sparse and self.how != "function"
            return nn.ModuleDict({"table": layer, "out": nn.Linear(4, 1)})

    def data(self, seed):
        def numbered(batch):
            x, y = batch
            return (10 * x).long() % 30, y

        return changed(super().data(seed), numbered)

    def outputs(self, model, batch):
        if self.how == "bag":
            return model["out"](model["table"](batch[0]))
        if self.how == "function":
            looked_up = functional.embedding(batch[0], model["table"].weight, sparse=self.sparse)
        else:
            looked_up = model["table"](batch[0])
        return model["out"](looked_up.mean(1))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("how", "given"),
    [
        *((how, {"runtime": InProcess(2), "micro_batches": 2}) for how in ("layer", "bag", "function")),
        ("layer", {"runtime": Virtual(3)}),
        *slow(("layer", {"runtime": Processes(1)}), ("bag", {"runtime": Hogwild(1)})),
        *slow(("layer", {"runtime": AllReduce(2)})),
    ],
    ids=str,
)
def test_sparse_gradients_are_the_dense_ones(how, given):
    """To rounding: rows that a batch has more than once are added up in another order."""
    sparse = train(Words(sparse=True, how=how), samples=96, **GIVEN | given)
    dense = train(Words(sparse=False, how=how), samples=96, **GIVEN | given)
    found = dict(sparse.model().named_parameters())
    expected = dict(dense.model().named_parameters())
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_a_sparse_gradient_that_no_layer_announces_is_refused_where_processes_exchange_it():
    with pytest.raises(UsageError, match=r"'table.weight' is sparse.*sparse=False"):
        check(Words(how="function"))


@dataclasses.dataclass(frozen=True)
class Single(Plane):
    """In float32, whatever torch's default is."""

    name = "single_precision"

    def model(self, seed):
        return super().model(seed).float()

    def data(self, seed):
        def in_float32(batch):
            return tuple(tensor.float() for tensor in batch)

        return changed(super().data(seed), in_float32)


@pytest.mark.parametrize(
    "given",
    [{}, {"runtime": Virtual(1)}, {"micro_batches": 2}, {"optimizer": AdamW()}, {"optimizer": torch.optim.Adagrad}],
    ids=str,
)
def test_a_script_whose_default_is_float64_trains_what_is_float32(given):
    torch.set_default_dtype(torch.float64)
    try:
        if "optimizer" in given:
            assert train(Single(), samples=80, **GIVEN | given).status == "DONE"
        else:
            assert_plain(Single(), **given)
        assert FlatModel(nn.Linear(2, 1).float()).parameters.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@dataclasses.dataclass(frozen=True)
class Noisy(Plane):
    """Draws in evaluations too."""

    name = "noisy"
    kind: str = "dropout"

    def outputs(self, model, batch):
        x = batch[0]
        if self.kind == "dropout":
            return model(functional.dropout(x, 0.5))
        if self.kind == "normal":
            return model(x + torch.randn_like(x))
        return model(x * torch.bernoulli(torch.full_like(x, 0.9)))


@pytest.mark.parametrize("kind", ["dropout", "normal", "bernoulli"])
def test_noise_in_outputs_trains_and_evaluations_draw_from_a_seed_of_set_and_batch(kind):
    task = Noisy(kind=kind)
    assert "draws random numbers in evaluation mode" in check(task, processes=False).notes[0]
    losses = []
    for runtime in (InProcess(1), Virtual(1)):
        run = train(task, samples=80, runtime=runtime, **GIVEN)
        losses.append([evaluation.loss for evaluation in run.evaluations])
    assert losses[0] == losses[1]
    still = train(task, samples=80, **GIVEN | {"evaluations": 5})
    assert still.evaluations[0].loss == losses[0][0]
    assert still.evaluations[-1].loss == losses[0][-1]


@dataclasses.dataclass(frozen=True)
class Named(Plane):
    """The target is a word in a list, a tuple or an array beside the points."""

    name = "named"
    kind: str = "list"

    def data(self, seed):
        def with_words(batch):
            words = ["up" if y > 0 else "down" for y in batch[1][:, 0]]
            if self.kind == "array":
                words = np.array(words)
            if self.kind == "tuple":
                words = tuple(words)
            if self.kind == "records":
                words = [{"word": word} for word in words]
            if self.kind == "other":
                words = ["up", "down"]
            return {"x": batch[0], "words": words}

        return changed(super().data(seed), with_words)

    def outputs(self, model, batch):
        return model(batch["x"])

    def sums(self, outputs, batch):
        return {"absolute": outputs.abs().sum()}

    def loss(self, outputs, batch):
        words = batch["words"]
        if self.kind == "other":
            return outputs.square().mean()
        if self.kind == "records":
            words = [record["word"] for record in words]
        targets = torch.tensor([[float(word == "up")] for word in words])
        return functional.mse_loss(outputs, targets)


@pytest.mark.parametrize("kind", ["list", "tuple", "array", "records"])
def test_texts_beside_tensors_are_cut_with_them(kind):
    assert check(Named(kind=kind), processes=False).notes == ()
    assert_plain(Named(kind=kind), micro_batches=4)


def test_texts_of_another_length_train_whole_and_ask_for_a_split():
    assert "list of 2 beside its tensors" in check(Named(kind="other"), processes=False).notes[0]
    assert_plain(Named(kind="other"))
    with pytest.raises(UsageError, match=r"list of 2 beside.*split\(batch, parts\)"):
        train(Named(kind="other"), samples=80, micro_batches=2, **GIVEN)


def test_the_lines_of_a_models_card_restore_all_buffers(tmp_path, monkeypatch):
    run = train(Kind(kind="odd_buffers"), samples=80, folder=tmp_path / "run", **GIVEN)
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0]
    (tmp_path / "run" / "model" / "code.py").write_text(code.replace("from test_anybodys_model", "from " + __name__))
    monkeypatch.chdir(tmp_path / "run" / "model")
    restored = runpy.run_path("code.py")["model"]
    for other in (restored, load_run(tmp_path / "run", Kind(kind="odd_buffers")).model()):
        expected = run.model().state_dict()
        found = other.state_dict()
        assert expected.keys() == found.keys()
        for name in expected:
            assert torch.equal(expected[name], found[name])
