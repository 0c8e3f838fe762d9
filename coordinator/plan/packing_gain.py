"""Whether packing a model would pay: the forecasts with bursts of one range for each expert."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.plan.forecast import Forecast, Measured, burst_seconds

PACK = "read each expert as one range: `moe-coord pack MODEL OUT`, and run OUT"
MIN_GAIN = 1.05  # of tokens/s: below, probes of some seconds cannot tell it from noise


@dataclass(frozen=True, slots=True)
class PackingGain:
    """Seconds of a burst of a token's experts from the plain file and from a packed one, and how
    many times the tokens/s the latter gives, by routing."""

    plain_seconds: float
    packed_seconds: float
    gains: Mapping[str, float]

    @property
    def is_worth_it(self) -> bool:
        """Whether some routing gains more than noise. Where all of a token's experts come no faster
        in one burst, what single ones gained is noise, too."""
        return self.packed_seconds < self.plain_seconds and max(self.gains.values()) >= MIN_GAIN

    def as_json(self) -> dict[str, object]:
        """The same for programs."""
        return {**dataclasses.asdict(self), "is_worth_it": self.is_worth_it}

    def describe(self) -> str:
        """One line for people."""
        low, high = min(self.gains.values()), max(self.gains.values())
        verdict = "worth it" if self.is_worth_it else "not worth it"
        return (
            f"packing: {verdict}: {1e3 * self.packed_seconds:.1f} ms instead of "
            f"{1e3 * self.plain_seconds:.1f} ms for the experts of a token in one layer, "
            f"{low:.2f} to {high:.2f} times the tokens/s"
        )


def packing_gain(
    plain: Measured,
    packed: Measured,
    n_active: int,
    before: Mapping[str, Forecast],
    after: Mapping[str, Forecast],
) -> PackingGain:
    """Compare forecasts of the same pool by routing."""
    return PackingGain(
        burst_seconds(plain, n_active),
        burst_seconds(packed, n_active),
        {
            name: after[name].tokens_per_second / each.tokens_per_second
            for name, each in before.items()
        },
    )
