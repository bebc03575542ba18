"""Which rank plays which role on which device. Pure and torch-free: leader and ranks compute the same answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from trainer.config import TrainConfig
from trainer.data import schedule


class Role(StrEnum):
    """What a rank does. SHARED ranks are target and drafter at once."""

    TARGET = "target"
    DRAFTER = "drafter"
    SHARED = "shared"


@dataclass(frozen=True)
class Layout:
    """One machine's ranks: local ranks 0..t-1 are targets, the rest drafters; with shared roles every rank is both."""

    device: str
    target_devices: tuple[int, ...]
    drafter_devices: tuple[int, ...]

    @classmethod
    def of(cls, config: TrainConfig) -> Layout:
        return cls(config.device, config.target_gpus, config.drafter_gpus)

    @property
    def shared(self) -> bool:
        return self.target_devices == self.drafter_devices

    @property
    def targets(self) -> int:
        return len(self.target_devices)

    @property
    def drafters(self) -> int:
        return len(self.drafter_devices)

    @property
    def ranks(self) -> int:
        """Processes on this machine."""
        return self.targets if self.shared else self.targets + self.drafters

    @property
    def first_drafter(self) -> int:
        """Local rank that writes events, agrees on stops and saves checkpoints."""
        return 0 if self.shared else self.targets

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(target, drafter) pairs that are joined by the ring; none with shared roles."""
        return [] if self.shared else [(t, d) for t in range(self.targets) for d in range(self.drafters)]

    def role(self, local_rank: int) -> Role:
        if self.shared:
            return Role.SHARED
        return Role.TARGET if local_rank < self.targets else Role.DRAFTER

    def index(self, local_rank: int) -> int:
        """Index of the rank among those of its role."""
        return local_rank if self.role(local_rank) is not Role.DRAFTER else local_rank - self.targets

    def device_of(self, local_rank: int) -> str:
        """torch device of a rank."""
        if self.device == "cpu":
            return "cpu"
        devices = self.drafter_devices if self.role(local_rank) is Role.DRAFTER else self.target_devices
        return f"cuda:{devices[self.index(local_rank)]}"

    def place(self, role: Role, index: int, machine: int = 0) -> str:
        """Return where one of a machine's targets or drafters works, e.g. 'GPU 6 (rank 6)'."""
        local_rank = self.targets + index if role is Role.DRAFTER and not self.shared else index
        device = self.device_of(local_rank)
        name = "the CPU" if device == "cpu" else f"GPU {device.removeprefix('cuda:')}"
        return f"{name} (rank {machine * self.ranks + local_rank})"

    def name(self, local_rank: int, rank: int) -> str:
        """Return how a rank is named to people, e.g. 'target 1 (rank 1, cuda:1)'."""
        return f"{self.role(local_rank)} {self.index(local_rank)} (rank {rank}, {self.device_of(local_rank)})"

    def counts(self, machines: int) -> schedule.Layout:
        """Return what the schedule asks of the layout."""
        return schedule.Layout(machines, self.targets, self.drafters, self.shared)

    def describe(self) -> str:
        """Return e.g. '5 targets / 3 drafters on cuda'."""
        if self.shared:
            return f"{self.targets} shared {'rank' if self.targets == 1 else 'ranks'} on {self.device}"

        def count(number: int, word: str) -> str:
            return f"{number} {word}" if number == 1 else f"{number} {word}s"

        return f"{count(self.targets, 'target')} / {count(self.drafters, 'drafter')} on {self.device}"
