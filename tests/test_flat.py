"""The flat vector: where tensors lie, that gaps stay zero, and that a tensor that went its own way is noticed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from asyncsgd.errors import UsageError
from asyncsgd.flat import ALIGNMENT, FlatModel, Layout, parameters_sha256
from asyncsgd.optimizers import SGD, AdamW, Optimizer


def tiny_bert():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BertForMaskedLM(
            BertConfig(
                vocab_size=50,
                hidden_size=24,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=40,
                max_position_embeddings=20,
            )
        )


def odd():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 7))


def gaps(layout):
    outside = torch.ones(layout.size, dtype=torch.bool)
    for view in layout.views(outside).values():
        view.fill_(False)
    return outside


def test_tied_weights_stand_in_the_vector_once():
    model = tiny_bert()
    layout = Layout.of(model)
    assert len(layout.names) == 42
    assert len(model.state_dict()) == 44
    assert layout.num_parameters == sum(p.numel() for p in model.parameters())
    flat = FlatModel(model)
    embeddings = flat.layout.views(flat.parameters)["bert.embeddings.word_embeddings.weight"]
    assert model.cls.predictions.decoder.weight.data_ptr() == embeddings.data_ptr()
    assert model.cls.predictions.decoder.bias.data_ptr() == model.cls.predictions.bias.data_ptr()


@given(shapes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=8))
@settings(deadline=None, max_examples=60)
def test_tensors_tile_the_vector_from_multiples_of_16_decayed_ones_first(shapes):
    model = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)
    layout = Layout.of(model)
    order = sorted(range(len(shapes)), key=lambda i: (len(shapes[i]) < 2, i))
    assert layout.names == tuple(str(i) for i in order)
    end = num_decayed = 0
    for name, shape, offset in zip(layout.names, layout.shapes, layout.offsets, strict=True):
        assert (offset, list(shape)) == (end, shapes[int(name)])
        end += -(-torch.Size(shape).numel() // ALIGNMENT) * ALIGNMENT
        num_decayed = end if len(shape) >= 2 else num_decayed
    assert (layout.size, layout.num_decayed) == (end, num_decayed)


def test_every_tensor_of_a_bound_model_starts_on_a_cache_line():
    flat = FlatModel(tiny_bert())
    assert {p.data_ptr() % 64 for p in flat.model.parameters()} == {0}
    assert {p.grad.data_ptr() % 64 for p in flat.model.parameters()} == {0}


def test_frozen_parameters_do_not_stand_in_the_vector():
    model = odd()
    model[0].requires_grad_(False)
    assert Layout.of(model).names == ("2.weight", "1.weight", "1.bias", "2.bias")


def test_a_parameter_that_is_not_float32_is_refused_by_name():
    model = odd()
    model[2].to(torch.bfloat16)
    with pytest.raises(UsageError, match=r"parameter '2.weight' is torch.bfloat16; load the model in float32"):
        Layout.of(model)


def test_fingerprints_are_equal_for_equal_layouts_only():
    assert Layout.of(odd()).fingerprint == Layout.of(odd()).fingerprint
    assert Layout.of(odd()).fingerprint != Layout.of(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7))).fingerprint


def test_binding_changes_no_value_and_backward_writes_the_gradients_of_the_unbound_model():
    plain, flat = tiny_bert(), FlatModel(tiny_bert())
    for (name, ours), theirs in zip(flat.model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    ids = torch.arange(10).view(1, 10)
    for model in (plain, flat.model):
        torch.manual_seed(0)
        model(input_ids=ids, labels=ids).loss.backward()
    views = flat.layout.views(flat.gradients)
    for name, parameter in plain.named_parameters():
        assert torch.equal(views[name], parameter.grad), name


@pytest.mark.parametrize("build", [SGD(0.9), AdamW()], ids=["momentum", "adamw"])
def test_gaps_are_zero_and_stay_zero_under_an_optimizer_with_weight_decay(build):
    flat = FlatModel(odd())
    outside = gaps(flat.layout)
    assert int(outside.sum()) == flat.layout.size - flat.layout.num_parameters > 0
    optimizer = Optimizer(flat.parameters, flat.layout.num_decayed, build, weight_decay=0.3, clip_norm=1.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        flat.gradients.zero_()
        flat.model(torch.randn(4, 5, generator=generator)).square().sum().backward()
        optimizer.step(flat.gradients, 0.1)
        assert not flat.parameters[outside].any()
        assert not flat.gradients[outside].any()


def test_a_vector_that_others_own_keeps_its_values_when_asked_to():
    vector = torch.arange(Layout.of(odd()).size, dtype=torch.float32)
    flat = FlatModel(odd(), parameters=vector, keep_parameters=True)
    assert vector.tolist() == list(range(flat.layout.size))
    assert flat.model[0].weight.flatten().tolist() == list(range(15))
    vector[0] = -1.0
    assert flat.model[0].weight[0, 0].item() == -1.0


@pytest.mark.parametrize("wrong", [torch.zeros(95), torch.zeros(112, dtype=torch.float64), torch.zeros(224)[::2]])
def test_a_vector_of_another_size_type_or_stride_is_refused(wrong):
    assert Layout.of(odd()).size == 112
    with pytest.raises(ValueError, match=r"a flat vector is contiguous float32 \(112,\)"):
        FlatModel(odd(), parameters=wrong)


def test_a_rebound_parameter_is_noticed():
    flat = FlatModel(odd())
    flat.check()
    flat.model[2].weight.data = flat.model[2].weight.data.clone()
    with pytest.raises(RuntimeError, match=r"parameter '2.weight' was rebound"):
        flat.check()


def test_a_parameter_that_was_replaced_by_another_object_is_noticed():
    flat = FlatModel(odd())
    flat.model[2].weight = nn.Parameter(flat.model[2].weight.detach().clone())
    with pytest.raises(RuntimeError, match=r"parameter '2.weight' was rebound"):
        flat.check()


@pytest.mark.parametrize(
    "rebind",
    [
        lambda model: model.zero_grad(set_to_none=True),
        lambda model: setattr(model[0].weight, "grad", model[0].weight.grad.clone()),
    ],
    ids=["set to none", "another tensor"],
)
def test_a_rebound_gradient_is_noticed(rebind):
    flat = FlatModel(odd())
    rebind(flat.model)
    with pytest.raises(RuntimeError, match=r"the gradient of '0.weight' was rebound"):
        flat.check()


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_the_digest_changes_with_any_bit_of_a_parameter_and_with_none_of_a_gap(data):
    flat = FlatModel(odd())
    before = parameters_sha256(flat.layout, flat.parameters)
    element, bit = data.draw(st.integers(0, flat.layout.size - 1)), data.draw(st.integers(0, 31))
    bits = flat.parameters.view(torch.int32)
    bits[element] ^= 1 << bit if bit < 31 else -(1 << 31)
    in_gap = bool(gaps(flat.layout)[element])
    assert (parameters_sha256(flat.layout, flat.parameters) == before) == in_gap
