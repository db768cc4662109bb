"""One decision for all ranks: every rank decides from the same sums.

A replicated gradient (DDP) stands on every rank, a sharded one (FSDP2, a DTensor) in parts. Each rank adds its
share, so that one all-reduce gives the sum of squares of the whole gradient, the same on all ranks.
"""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from gnmr.errors import GuardError

Group = Any
"""A ``torch.distributed.ProcessGroup``, or None in a run of one process."""


def default_group() -> Group:
    """Return the group of all ranks, or None where there is one process."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return dist.group.WORLD
    return None


def local_part(grad: Tensor) -> Tensor:
    """Return what this rank holds of a gradient; for a plain tensor, itself."""
    return grad.to_local() if _is_dtensor(grad) else grad  # type: ignore[attr-defined]


def first_row(grad: Tensor) -> int:
    """Return which row of the whole gradient is the first that this rank holds."""
    if not _is_dtensor(grad):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = grad.device_mesh, grad.placements  # type: ignore[attr-defined]
    _, offset = compute_local_shape_and_global_offset(grad.shape, mesh, placements)
    return int(offset[0])


def share(grad: Tensor, group: Group) -> float:
    """Return the weight of this rank's part in the sum over the group: 1 / how many ranks hold the same.

    Raises:
        gnmr.GuardError: the gradient still waits for its reduction.
    """
    if group is None:
        return 1.0
    world = dist.get_world_size(group)
    if not _is_dtensor(grad):
        return 1.0 / world
    mesh, placements = grad.device_mesh, grad.placements  # type: ignore[attr-defined]
    if any(placement.is_partial() for placement in placements):
        raise GuardError(
            "a gradient is not reduced over its mesh yet (a Partial DTensor): call guard.step() after the "
            "backward of the last micro-batch, with gradient sync on"
        )
    shards = int(np.prod([mesh.size(i) for i, p in enumerate(placements) if p.is_shard()], initial=1))
    return shards / world


def all_sum(values: NDArray[np.float64], device: torch.device, group: Group) -> NDArray[np.float64]:
    """Sum a small vector over the ranks of the group, in float64."""
    if group is None:
        return values
    on_cpu = "gloo" in str(dist.get_backend(group))
    tensor = torch.from_numpy(values).to("cpu" if on_cpu else device)
    dist.all_reduce(tensor, group=group)
    return tensor.cpu().numpy()


def is_first(group: Group) -> bool:
    """Whether this process writes the run's files."""
    return group is None or dist.get_rank(group) == 0


def _is_dtensor(tensor: Tensor) -> bool:
    if type(tensor) is Tensor or not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)
