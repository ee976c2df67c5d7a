"""DeepSpeed's pipeline engine computes the gradient of a model that is cut into stages. Needs the extra ``deepspeed``.

Its schedule is 1F1B. Only its gradient is used; the runtime takes the step. Found in DeepSpeed 0.19.8:

- It divides the gradient by the number of micro-batches. So the loss is multiplied by that number first.
- It clips gradients to norm 1 unless its configuration says otherwise.
- It sets every ``.grad`` to None after its step. So the views are bound again.
- It tells the next stage the shapes of the first micro-batch only, unless a pipeline has dynamic shapes, as here.
- On CPUs it compiles a C++ helper that no pipeline uses, unless no such operation suits the machine, as is said here.

All its messages are tensors of numbers; nothing is unpickled. It uses the process group that is there, which knows no
password: all stages belong on one host. On GPUs every stage needs one of its own."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from asyncsgd.errors import UsageError
from asyncsgd.pipeline.held_stage import HeldStage
from asyncsgd.settings.shipped import config_file

FIXED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 0},
}
"""What DeepSpeed must be told so that it computes the gradient and no more; it counts a micro-batch as one sample."""
_OTHER_PRECISIONS = ("amp", "bf16", "data_types", "fp16")
"""Keys with which DeepSpeed would make parameters of its own."""


def configuration(path: str | None) -> dict[str, Any]:
    """The configuration of DeepSpeed, from a file like ``asyncsgd/configs/ds_config.json``; None: what that one
    holds.

    Raises:
        UsageError: the file cannot be read, or would change the gradient.
    """
    if path is None:
        return dict(FIXED)
    try:
        config: dict[str, Any] = FIXED | json.loads(config_file(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} cannot be read as a configuration of DeepSpeed: {error}") from error
    for key in _OTHER_PRECISIONS:
        asked = config.get(key, {"enabled": False})
        is_off = isinstance(asked, dict) and asked.get("enabled") is False
        if not is_off:
            raise UsageError(f"{path}: take {key} out; the parameters of a stage lie in one float32 vector")
    if config | FIXED != config:
        raise UsageError(f"{path} has to say {json.dumps(FIXED)}, so that the gradient is that of the whole batch")
    return config


class DeepSpeedEngine:
    """One rank's stage in DeepSpeed's pipeline. All ranks construct it together, on an initialised process group whose
    ranks are the stages in order.

    Args:
        stage: on `device`. Every ``.grad`` is there.
        config: as `configuration` gives it.
    """

    def __init__(self, stage: HeldStage, device: torch.device, config: dict[str, Any]) -> None:
        rank = dist.get_rank()
        num_stages = dist.get_world_size()
        self._number = 1
        # DeepSpeed only counts the layers of the other stages.
        layers: list[nn.Module] = [nn.Identity() for _ in range(num_stages)]
        layers[rank] = _Layer(stage)
        before = os.environ.copy()
        # It decides for the GPU at its import, also where this run is to use the CPU, and takes the index of a GPU from
        # what other launchers than its own do not set.
        local = str(device.index or 0) if device.type == "cuda" else str(rank)
        os.environ.update(DS_ACCELERATOR=device.type, LOCAL_RANK=local)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                import deepspeed

                deepspeed.ops.__compatible_ops__ = {}
                deepspeed.init_distributed()
                pipeline = deepspeed.pipe.PipelineModule(
                    layers, num_stages=num_stages, partition_method="uniform", loss_fn=self._scaled, dynamic_shape=True
                )
                # It computes no gradient without an optimizer, and torch wants a parameter, which nobody uses here.
                nobody = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
                self._engine, *_ = deepspeed.initialize(model=pipeline, optimizer=nobody, config=config)
        finally:
            os.environ.clear()
            os.environ.update(before)
        # Else it would copy all gradients in order to average them over one replica.
        self._engine.pipeline_enable_backward_allreduce = False
        self._parameters = [parameter for parameter in stage.parameters() if parameter.requires_grad]

    def _scaled(self, loss: Tensor, labels: tuple[()]) -> Tensor:
        return loss.sum() * self._number

    def run(self, number: int) -> None:
        """Compute all passes of a step of `number` micro-batches, whose gradients are added up."""
        views = [parameter.grad for parameter in self._parameters]
        self._number = number
        self._engine.set_train_batch_size(number)
        micro_batches = [(torch.tensor([index]), ()) for index in range(number)]
        with contextlib.redirect_stdout(sys.stderr):
            self._engine.train_batch(iter(micro_batches))
        for parameter, view in zip(self._parameters, views, strict=True):
            parameter.grad = view


class _Layer(nn.Module):
    """A stage in the form that DeepSpeed calls: the index of the micro-batch travels with the hidden states."""

    def __init__(self, held: HeldStage) -> None:
        super().__init__()
        self.held = held

    def forward(self, received: Any) -> Any:
        # The hidden states come first: DeepSpeed receives the first tensor and its gradient in the same buffer.
        hidden, index = (None, received) if self.held.stage.is_first else received
        result = self.held(hidden, index=index)
        return result if self.held.stage.is_last else (result.contiguous(), index)
