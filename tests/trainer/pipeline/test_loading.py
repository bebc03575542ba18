"""A load beats for the watchdog with every tensor, and says how far it is when it takes long."""

from __future__ import annotations

from trainer.pipeline.loading import LoadProgress
from trainer.pipeline.pulse import Pulse


def test_a_short_load_says_nothing_and_a_long_one_every_ten_seconds() -> None:
    said: list[str] = []
    time = [100.0]
    pulse = Pulse(lambda: time[0])
    progress = LoadProgress("target on cuda:0", pulse, said.append, lambda: time[0])
    for number in range(1, 26):
        time[0] += 1.0
        progress(number * 10**9, 54 * 10**9)
        assert pulse.moved == time[0]
    assert said == ["target on cuda:0: 10.0 of 54.0 GB read", "target on cuda:0: 20.0 of 54.0 GB read"]
