"""When replicas journal and when the coordinator uploads, for a job in a bucket.

The intervals of all processes of a host end together, at the multiples of the monotonic clock. One bundle soon after
that has the segments of all replicas. With intervals of their own, a result would wait for the end of two of them, or
each replica would cost a request of its own.
"""

import math

# Shares of the interval after its end. Replicas aim at the end; the second look takes what a slow disk has delayed.
_LOOKS = (0.05, 0.3)
# A checkpoint so shortly before the end of an interval counts as the one at its end.
_EARLY = 0.1


def next_journal_at(now_s: float, interval_s: float, spare_s: float) -> float:
    """When a replica journals next: `spare_s` before the end of an interval. now_s: the begin of its checkpoint."""
    return (math.floor((now_s + spare_s) / interval_s + _EARLY) + 1) * interval_s - spare_s


def next_upload_at(now_s: float, interval_s: float) -> float:
    """When the coordinator looks next for new segments. If there are none, that costs no request."""
    began_s = math.floor(now_s / interval_s) * interval_s
    looks = (began_s + (place + share) * interval_s for place in (0, 1) for share in _LOOKS)
    return next(at for at in looks if at > now_s)
