"""The optimizer on a flat vector: where a model's tensors lie in it, and that it steps them as torch.optim does."""

import itertools

import pytest
import torch
from doors import SGD, AdamW, FlatModel, OptimizerRecipe, parameters_sha256, seeded
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch_alone import groups_of

RECIPES = {
    "sgd": (SGD(), lambda groups: torch.optim.SGD(groups, lr=1.0, fused=True)),
    "momentum": (SGD(0.9), lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=0.9, fused=True)),
    "adamw": (AdamW((0.7, 0.9)), lambda groups: torch.optim.AdamW(groups, lr=1.0, betas=(0.7, 0.9), fused=True)),
}


def network(*sizes):
    with seeded(0):
        return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def gaps(layout):
    outside = torch.ones(layout.size, dtype=torch.bool)
    for view in layout.views(outside).values():
        view.fill_(False)
    return outside


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
@pytest.mark.parametrize(("ours", "theirs"), RECIPES.values(), ids=RECIPES)
def test_one_call_on_the_flat_vector_is_torch_optim_on_every_tensor(ours, theirs, clip_norm):
    """Bit for bit but for clipping, which adds up the norm in another order; only matrices decay."""
    flat = FlatModel(network(32, 48, 16))
    plain = network(32, 48, 16)
    optimizer = OptimizerRecipe(ours, weight_decay=0.1, clip_norm=clip_norm).on(flat.parameters, flat.layout)
    expected = theirs(groups_of(plain, 0.1))
    for step in range(10):
        direction = torch.randn(flat.layout.size, generator=torch.Generator().manual_seed(step))
        for name, view in flat.layout.views(direction).items():
            plain.get_parameter(name).grad = view.clone()
        if clip_norm:
            nn.utils.clip_grad_norm_(plain.parameters(), clip_norm)
        rate = 0.1 / (1 + step)
        for group in expected.param_groups:
            group["lr"] = rate
        before = direction.clone()
        optimizer.step(direction, rate)
        expected.step()
        assert torch.equal(direction, before)
        tolerance = 1e-5 if clip_norm else 0.0
        for name, parameter in plain.named_parameters():
            found = flat.model.get_parameter(name)
            torch.testing.assert_close(found, parameter, rtol=tolerance, atol=tolerance / 10)


@given(shapes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=8))
def test_tensors_tile_the_vector_from_cache_lines_matrices_first_and_gaps_stay_zero(shapes):
    model = nn.ParameterList(nn.Parameter(torch.ones(shape)) for shape in shapes)
    flat = FlatModel(model)
    order = sorted(range(len(shapes)), key=lambda i: (len(shapes[i]) < 2, i))
    assert flat.layout.names == tuple(map(str, order))
    assert {parameter.data_ptr() % 64 for parameter in model} == {0}
    assert int(flat.parameters.sum()) == flat.layout.num_parameters
    assert flat.layout.num_parameters == sum(p.numel() for p in model)
    optimizer = OptimizerRecipe(AdamW(), weight_decay=0.3).on(flat.parameters, flat.layout)
    sum(parameter.square().sum() for parameter in model).backward()
    optimizer.step(flat.gradients, 0.1)
    assert not flat.parameters[gaps(flat.layout)].any()


@given(data=st.data())
def test_the_digest_changes_with_any_bit_of_a_parameter_and_with_none_of_a_gap(data):
    flat = FlatModel(network(5, 3, 7))
    before = parameters_sha256(flat.layout, flat.parameters)
    element = data.draw(st.integers(0, flat.layout.size - 1))
    bit = data.draw(st.integers(0, 31))
    mask = torch.tensor(1).bitwise_left_shift(bit).to(torch.int32)
    flat.parameters.view(torch.int32)[element] ^= mask
    is_same = parameters_sha256(flat.layout, flat.parameters) == before
    is_in_a_gap = bool(gaps(flat.layout)[element])
    assert is_same == is_in_a_gap
