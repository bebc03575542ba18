"""What the host sends to a device; how it gets to a GPU is tested in pipeline/test_cuda.py."""

from __future__ import annotations

import pytest
import torch

from trainer.upload import upload


@pytest.mark.parametrize("tensor", [torch.arange(5), torch.tensor([True, False]), torch.ones(0, 3), torch.tensor(2.5)])
def test_a_device_that_is_no_gpu_gets_the_tensor_itself(tensor: torch.Tensor) -> None:
    assert upload(tensor, "cpu") is tensor
    assert upload(tensor, torch.device("cpu")) is tensor


def test_shape_and_type_are_kept() -> None:
    moved = upload(torch.zeros(3, 4, dtype=torch.int32), "meta")
    assert (moved.device.type, moved.dtype, tuple(moved.shape)) == ("meta", torch.int32, (3, 4))
