"""What a job costs, from the price of a GPU for an hour. `plan` predicts it; `status` and `report` show it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cost:
    """The price of some work, in the currency in which a GPU-hour has its price."""

    total: float
    cents_per_million_tokens: float
    """Of prompts and outputs together."""
    cents_per_thousand_rows: float
    """Of input rows."""

    @classmethod
    def of(cls, price: float | None, device_s: float, *, num_tokens: float, num_rows: int) -> "Cost | None":
        """None without a price, GPUs, tokens or rows. price: of a GPU for an hour. device_s: seconds of all GPUs."""
        if price is None or not device_s or not num_tokens or not num_rows:
            return None
        cents = price * 100 * device_s / 3600
        return cls(cents / 100, cents * 1e6 / num_tokens, cents * 1e3 / num_rows)

    @property
    def units_text(self) -> str:
        return (
            f"{_cents(self.cents_per_million_tokens)} for a million tokens (prompt and output), "
            f"{_cents(self.cents_per_thousand_rows)} for 1,000 input rows"
        )

    @property
    def text(self) -> str:
        return f"cost {self.total:,.2f}: {self.units_text}"


def _cents(number: float) -> str:
    return f"{number:,.2f} cents" if number >= 1 else f"{number:.2g} cents"
