"""Counters of this rank's engine."""

from __future__ import annotations

from dataclasses import dataclass

from gradred._native import core

__all__ = ["Metrics", "metrics"]


@dataclass(frozen=True)
class Metrics:
    """Sums since ``init()``. Seconds are of this rank's clock; the rest counts things."""

    batches: int  # passes over a domain: one a call, or a training step
    groups: int  # messages that entries were grouped into
    entries: int  # tensors
    bytes: int  # of tensors, once each
    rounds: int  # of negotiation
    empty_rounds: int  # of those: agreed on nothing
    unions: int  # exchanges of new names
    non_finite: int  # elements that were infinite or NaN when packed, summed over ranks
    saturated: int  # finite elements that a half wire made infinite: in casts on all ranks, in sums
    partly_absent: int  # tensors that some ranks brought and others, also joined ones, did not
    plan_changes: int  # of planned domains, after measurements
    abandoned: int  # batches that failed before all their groups ran, for any reason
    network_bytes: int  # of tensors' messages, sent to other nodes
    wait_s: float  # sum over batches: last local submit to last result
    last_wait_s: float  # the same of the last batch
    communication_s: float  # sum over groups: start to end; process sets overlap
    packed_early: int  # tensors packed by the thread that brought them, before their group ran
    fusion_buffer_nbytes: int  # memory held for packing, of all process sets
    pool_nbytes: int  # memory of large results: alive, or kept for the next ones
    pool_fresh: int  # large results whose memory was new, since the process began
    pool_reused: int  # large results in memory of earlier ones, since the process began


def metrics() -> Metrics:
    """The counters now. Local.

    Raises:
        NotInitialized: before ``init()``.
    """
    return Metrics(**core.metrics())
