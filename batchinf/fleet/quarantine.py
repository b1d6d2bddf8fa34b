"""Which row kills engines: the suspects of each death, and what to try next. Pure: no input, no output.

First death: all that was in the engine is run again, once. Second: who was there both times is accused. Those whose
prompts had not been run yet are probed one by one, a token each, which costs no restart until the one is found; the
others are run half by half. A row is condemned if the engine died with it alone; where that says little, because a
signal from outside ended the engine, or a probe was not the first thing in it, only if that happens twice. So a row
that kills at its prompt costs at most 4 restarts, any other at most log2(window) + 2, or + 3 with signals from outside.
That holds as long as the suspects' shards stay with their replica: no idle one may take them over.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from batchinf.records import Shard
from batchinf.replica.flight import InFlight

RowIndices = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """What is known of some deaths of one replica.

    origin: the incarnation that died first. shards: those that stay with the replica, as the suspects are in them.
    suspects: rows that were in the engine at every death so far. accused: what is left to try of those, in the order
    to try it; later: what is to be tried thereafter. is_found: a row was condemned since the last full run.
    doubted: the row that was alone in the engine at the last death, which may have had another reason.
    """

    origin: str
    replica: int
    shards: RowIndices
    suspects: RowIndices
    stage: Literal["replay", "probe", "halve"] = "replay"
    accused: RowIndices = ()
    later: tuple[RowIndices, ...] = ()
    num_deaths: int = 1
    is_found: bool = False
    doubted: int | None = None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Case":
        """A case out of JSON."""
        own = {name: fields[name] for name in cls.__slots__}
        tuples = {name: tuple(own[name]) for name in ("shards", "suspects", "accused")}
        return cls(**{**own, **tuples, "later": tuple(map(tuple, own["later"]))})

    def fields(self) -> dict[str, Any]:
        """The case as JSON values."""
        return asdict(self)

    @property
    def is_on_trial(self) -> bool:
        """Whether only accused rows may be in the replica's engine."""
        return self.stage != "replay"

    @property
    def groups(self) -> tuple[RowIndices, ...]:
        """What to run next: groups of rows, each alone in the engine."""
        if self.stage == "probe":
            return tuple((row,) for row in self.accused)
        return (self.accused[: max(1, len(self.accused) // 2)],) if self.stage == "halve" else ()

    def died(self, flight: Sequence[InFlight], is_fresh: bool, is_outside: bool) -> tuple["Case", int | None]:
        """After one more death with this in the engine: the case, and the row that did it, once that is certain.

        is_fresh: nothing had come out of this incarnation's engine. is_outside: a signal from outside ended it.
        """
        case = replace(self, num_deaths=self.num_deaths + 1)
        there = _rows(flight)
        if self.stage == "replay":
            return case._accuse(flight), None
        tried = {row for group in self.groups for row in group}
        live = tuple(row for row in there if row in tried)
        if len(live) > 1:
            return replace(case, accused=live, later=()), None
        is_certain = not is_outside and (is_fresh or self.stage == "halve")
        if not live or (not is_certain and self.doubted != live[0]):
            # The same again, that row first.
            rest = tuple(row for row in self.accused if row not in live)
            accused = live + rest if self.stage == "probe" else live or self.accused
            return replace(case, accused=accused, doubted=live[0] if live else None), None
        return case._condemn(live[0]), live[0]

    def _accuse(self, flight: Sequence[InFlight]) -> "Case":
        both = [item for item in flight if item.row_index in set(self.suspects)]
        if not both:
            return replace(self, suspects=_rows(flight), num_deaths=1)
        new = _rows([item for item in both if not item.has_output])
        old = _rows([item for item in both if item.has_output])
        stage: Literal["probe", "halve"] = "probe" if new else "halve"
        # Rows that were probed well are run in full after the others: together they may do what none does alone.
        accused, *later = [rows for rows in (new, old, new) if rows]
        return replace(
            self, suspects=_rows(both), stage=stage, accused=accused, later=tuple(later), is_found=False, doubted=None
        )

    def _condemn(self, row: int) -> "Case":
        suspects = tuple(suspect for suspect in self.suspects if suspect != row)
        case = replace(self, suspects=suspects, is_found=True, doubted=None)
        if self.stage == "probe":
            # The other probes cost nothing, and where one such row is there are often more.
            return replace(case, accused=tuple(other for other in self.accused if other != row))._go_on()
        return replace(case, stage="replay", accused=(), later=())

    def survived(self, rows: Iterable[int]) -> "Case":
        """After a group came out of the engine well."""
        well = set(rows)
        return replace(self, accused=tuple(row for row in self.accused if row not in well), doubted=None)._go_on()

    def _go_on(self) -> "Case":
        if self.accused:
            return self
        if self.later and not self.is_found:
            return replace(self, stage="halve", accused=self.later[0], later=self.later[1:])
        return replace(self, stage="replay", later=(), suspects=self.suspects if self.is_found else ())


def _rows(flight: Iterable[InFlight]) -> RowIndices:
    return tuple(dict.fromkeys(item.row_index for item in flight))


class Quarantine:
    """All open cases of a job, and the rows that were condemned."""

    def __init__(self, cases: Iterable[Case] = (), condemned: Mapping[int, str] | None = None) -> None:
        """condemned: why, by row."""
        self._cases = {case.origin: case for case in cases}
        self.condemned = dict(condemned or {})

    @property
    def shards(self) -> set[int]:
        """Shards that only their case's replica may run."""
        return {shard for case in self._cases.values() for shard in case.shards}

    def of(self, replica: int) -> Case | None:
        """The case that a replica has to work on, the oldest first."""
        return next((case for case in self._cases.values() if case.replica == replica), None)

    def died(
        self,
        replica: int,
        incarnation: str,
        shards: Iterable[Shard],
        flight: Sequence[InFlight],
        is_fresh: bool = True,
        is_outside: bool = False,
        rows_of: Callable[[Shard], Container[int]] = lambda shard: range(shard.start, shard.stop),
    ) -> tuple[Case, int | None]:
        """After a death of a replica that held these shards: its case, and the row that is condemned by it.

        is_fresh, is_outside: see `Case.died`. rows_of: which rows a shard has.
        """
        case, row = self.of(replica), None
        if case is None:
            case = Case(incarnation, replica, (), _rows(flight))
        else:
            case, row = case.died(flight, is_fresh, is_outside)
        rows = _rows(flight)
        held = ((shard.index, rows_of(shard)) for shard in shards)
        hit = [index for index, own in held if any(row in own for row in rows)]
        case = replace(case, shards=tuple(sorted({*case.shards, *hit})))
        self._cases[case.origin] = case
        return case, row

    def survived(self, replica: int, rows: Iterable[int]) -> Case | None:
        """After rows on trial came out well; None where the replica has no case."""
        case = self.of(replica)
        if case is not None and case.is_on_trial:
            case = self._cases[case.origin] = case.survived(rows)
        return case

    def committed(self, shard: int) -> list[str]:
        """A shard is done; the names of the cases that are closed by it."""
        closed = []
        for case in [case for case in self._cases.values() if shard in case.shards]:
            left = self._cases[case.origin] = replace(case, shards=tuple(s for s in case.shards if s != shard))
            if not left.shards:
                del self._cases[case.origin]
                closed.append(case.origin)
        return closed

    def hand_over(self, replicas: Sequence[int]) -> None:
        """Only these replicas are left: cases of others go to them in turn."""
        for number, case in enumerate(list(self._cases.values())):
            if case.replica not in replicas:
                self._cases[case.origin] = replace(case, replica=replicas[number % len(replicas)])
