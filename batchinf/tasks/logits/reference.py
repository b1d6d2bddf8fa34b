"""The reference of task `logits` for `verify`: a causal language model's logits or logprobs at chosen positions."""

from collections.abc import Iterator

import torch

from batchinf.records import FloatArray
from batchinf.tasks.logits.section import logits_of
from batchinf.tasks.reference import POSITIONS_AT_ONCE, Reference, check_width
from batchinf.tasks.stored import StoredVectors


class LogitsReference(Reference):
    """Gives the logits of transformers at the stored positions."""

    def vectors(self, stored: StoredVectors, adapter: str | None, are_logits: bool) -> Iterator[FloatArray]:
        self.merge(adapter)
        section = logits_of(self._spec)
        positions = stored.positions
        assert positions is not None
        first = int(positions.min())
        last = int(positions.max())
        ids = torch.tensor([stored.token_ids[: last + 1]], device=self._device)
        with torch.inference_mode():
            logits = self.logits(ids, last + 1 - first)
            if section.is_full:
                check_width(section.width, min(section.width, logits.shape[1]))
            columns = None if section.is_full else torch.tensor(section.token_ids, device=logits.device)
            for start in range(0, len(positions), POSITIONS_AT_ONCE):
                places = torch.from_numpy(positions[start : start + POSITIONS_AT_ONCE] - first).to(logits.device)
                rows = logits[places].float()
                if not are_logits:
                    rows = rows.log_softmax(-1)
                rows = rows[:, : section.width] if columns is None else rows[:, columns]
                yield rows.cpu().numpy()
