"""Planes that are wrong on purpose, each in one way, and the named check that has to see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from dreamlake.lakeshore.testing.reference.effects import CONDITIONS, EFFECTS, Invocation, Moment
from dreamlake.lakeshore.testing.reference.model import Model
from dreamlake.lakeshore.testing.reference.transitions import TABLE, Condition, Effect, Rule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dreamlake.lakeshore.planes.contract.operations import (
        Append,
        Beat,
        Claim,
        Claimed,
        Finish,
        Operation,
        Restore,
        Submit,
    )
    from dreamlake.lakeshore.planes.contract.records import Outcome, Page, RowFilter

__all__ = ["MUTANTS", "Mutant", "NewestFirst"]


class Mutant(NamedTuple):
    """A wrong model; the check that names the fault; whether generated sequences have to see it too."""

    name: str
    check: str
    model: type[Model]
    in_sequences: bool


def _model(name: str, **members: Any) -> type[Model]:
    return type(name.title().replace(" ", ""), (Model,), members)


def effect(name: str, check: str, of: Effect, does: Callable[[Moment], None], in_sequences: bool = True) -> Mutant:
    return Mutant(name, check, _model(name, effects=EFFECTS | {of: does}), in_sequences)


def condition(name: str, check: str, of: Condition, is_: Callable[[Moment], bool], in_sequences: bool = True) -> Mutant:
    return Mutant(name, check, _model(name, conditions=CONDITIONS | {of: is_}), in_sequences)


def table(name: str, check: str, change: Callable[[Rule], Rule | None], in_sequences: bool = True) -> Mutant:
    changed = tuple(new for rule in TABLE if (new := change(rule)) is not None)
    assert changed != TABLE, name
    return Mutant(name, check, _model(name, table=changed), in_sequences)


def _without(rule: Rule, effect: Effect) -> Rule:
    return rule._replace(effects=tuple(one for one in rule.effects if one != effect))


def _unless(rule: Rule, condition: Condition) -> Rule:
    return rule._replace(when=tuple(one for one in rule.when if one != condition))


def _same_attempt(at: Moment) -> None:
    at.row.attempt = 1


def _overwrite(at: Moment) -> None:
    for seq, data in enumerate(at.op.frames, at.op.first_seq):
        at.row.frames[seq] = at.row.attempt, data
    at.row.closed = at.op.final


def _revive_without_refund(at: Moment) -> None:
    at.row.lease_from(at.now, at.row.lease)


def _final_frame_at_its_word(at: Moment) -> None:
    if at.op.final is not None and not at.row.closed:
        at.row.frames[at.op.final.seq] = at.row.attempt, at.op.final.bytes
        at.row.closed = True


def _expired_a_quarter_early(at: Moment) -> bool:
    return CONDITIONS["expired"](Moment(at.memory, at.row, at.op, at.fence, at.now + 0.25))


def _expired_but_for_the_dead(at: Moment) -> bool:
    return CONDITIONS["expired"](Moment(at.memory, at.row, at.op._replace(dead=()), at.fence, at.now))


def _expired_also_of_the_living(at: Moment) -> bool:
    return CONDITIONS["expired"](Moment(at.memory, at.row, at.op._replace(alive=()), at.fence, at.now))


def _fence_by_attempt_only(at: Moment) -> bool:
    return at.fence.attempt == at.row.attempt


def _fence_by_worker_only(at: Moment) -> bool:
    return at.fence.worker == at.row.worker


def _end_without_time(at: Moment) -> None:
    at.row.finished_at = 0.0


def _keep_the_error(at: Moment) -> None:
    at.row.result, at.row.error, at.row.acked = at.op.result, at.op.error or at.row.error, True


class _OneKeyForAllQueues(dict[tuple[str, str], str]):
    def __contains__(self, key: object) -> bool:
        return isinstance(key, tuple) and super().__contains__(("", key[1]))

    def __getitem__(self, key: tuple[str, str]) -> str:
        return super().__getitem__(("", key[1]))

    def __setitem__(self, key: tuple[str, str], id: str) -> None:
        super().__setitem__(("", key[1]), id)

    def __delitem__(self, key: tuple[str, str]) -> None:
        super().__delitem__(("", key[1]))


class KeyPerPlane(Model):
    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self.memory.keys = _OneKeyForAllQueues()


class OrderOfIds(Model):
    def _ranked(self) -> list[Invocation]:
        return sorted(super()._ranked(), key=lambda row: (-row.submit.priority, row.submit.id))


class NewestFirst(Model):
    def _ranked(self) -> list[Invocation]:
        return sorted(super()._ranked(), key=lambda row: (-row.submit.priority, -row.order))


class QueueByQueue(Model):
    def _ranked(self) -> list[Invocation]:
        return sorted(super()._ranked(), key=lambda row: row.submit.queue)


class BeatByWorker(Model):
    def _beat(self, op: Beat) -> Any:
        for row in self.memory.rows.values():
            if row.worker == op.worker and row.state == "running" and row.lease is not None:
                row.lease_from(self._clock(), op.lease)
        return super()._beat(op)


class RootIsTheParent(Model):
    def _submit(self, op: Submit) -> str:
        id = super()._submit(op)
        self.memory.rows[id].root = self.memory.rows[id].submit.parent
        return id


class LastSubmitWins(Model):
    def _submit(self, op: Submit) -> str:
        id = super()._submit(op)
        row = self.memory.rows[id]
        row.submit = row.submit._replace(body=op.body)
        return id


class AllTrusted(Model):
    def _claim(self, op: Claim) -> list[Claimed]:
        return [claimed._replace(trusted=True) for claimed in super()._claim(op)]


class AllForOne(Model):
    """One operation that fails fails the whole batch."""

    async def apply(self, ops: Sequence[Operation]) -> Sequence[Any]:
        answers = await super().apply(ops)
        failed = [answer for answer in answers if isinstance(answer, Exception)]
        return failed[:1] * len(ops) if failed else answers


class NumbersFromZero(Model):
    def _claim(self, op: Claim) -> list[Claimed]:
        return [claimed._replace(next_seq=0) for claimed in super()._claim(op)]


class FramesOneByOne(Model):
    """An append that is refused for its second frame has written its first."""

    def _append(self, op: Append) -> Any:
        for n, frame in enumerate(op.frames[:-1]):
            super()._append(op._replace(first_seq=op.first_seq + n, frames=(frame,), final=False))
        return super()._append(op)


class EmptyResultsAreNone(Model):
    def _finish(self, op: Finish) -> bool:
        return super()._finish(op._replace(result=op.result or None))


class PagesWithGaps(Model):
    async def page(self, id: str, since: int, limit: int, max_bytes: int) -> Page:
        page = await super().page(id, since, limit, max_bytes)
        row = self.memory.rows[id]
        found = [(seq, row.frames[seq][1]) for seq in sorted(row.frames) if seq > since][:limit]
        return page if page.closed else page._replace(frames=found)


class PagesClosedTooEarly(Model):
    async def page(self, id: str, since: int, limit: int, max_bytes: int) -> Page:
        page = await super().page(id, since, limit, max_bytes)
        return page._replace(closed=self.memory.rows[id].closed or page.closed)


class PagesOfAnySize(Model):
    async def page(self, id: str, since: int, limit: int, max_bytes: int) -> Page:
        return await super().page(id, since, limit, 1 << 40)


class CountsOfZero(Model):
    async def counts(self, queue: str | None, state: str | None) -> dict[tuple[str, str], int]:
        return {("q", "failed"): 0} | await super().counts(queue, state)


class OldestFirst(Model):
    async def rows(self, filter: RowFilter) -> list[Any]:
        return (await super().rows(filter))[::-1]


class OutcomesOnce(Model):
    async def outcomes(self, ids: Sequence[str]) -> list[Outcome]:
        return await super().outcomes(list(dict.fromkeys(ids)))


def _restored_attempt(at: Moment) -> None:
    EFFECTS["restore"](at)
    for seq, data in at.op.frames:
        at.row.frames[seq] = at.op.attempt, data


def _restored_now(at: Moment) -> None:
    EFFECTS["restore"](at)
    if at.row.finished_at is not None:
        at.row.finished_at = at.now


class RestoredTrusted(Model):
    def _restore(self, op: Restore) -> str:
        there = op.id in self.memory.rows
        id = super()._restore(op)
        if id == op.id and not there:
            self.memory.rows[id].submit = self.memory.rows[id].submit._replace(trusted=True)
        return id


class CopiesNewestFirst(Model):
    async def copies(self, *args: Any) -> list[Restore]:
        return (await super().copies(*args))[::-1]


class CopiesToTheGap(Model):
    async def journal(self, id: str, since: int, limit: int, max_bytes: int) -> list[tuple[int, bytes]]:
        found = await super().journal(id, since, limit, max_bytes)
        return [frame for at, frame in enumerate(found, since + 1) if frame[0] == at]


class NothingIsEverDue(Model):
    async def due(self) -> list[Operation]:
        return []


MUTANTS = [
    effect("attempt not increased", "a_release_costs_nothing", "next attempt", _same_attempt),
    effect("loss not counted", "too_many_losses_are_the_end", "lose", lambda at: None),
    effect("loss not taken back", "a_lapsed_claim_speaks_until_somebody_else_has_begun", "revive", _revive_without_refund),
    effect("failure not counted", "a_retry_counts_a_failure_and_waits", "fail", lambda at: None),
    effect("delay forgotten", "a_retry_counts_a_failure_and_waits", "delay", lambda at: None),
    effect("released to nobody else", "a_release_costs_nothing", "let go", lambda at: None),
    effect("first bytes lost", "a_frame_that_is_there_is_a_duplicate", "write", _overwrite),
    effect("final frame overwrites", "an_ack_writes_its_final_frame", "final frame", _final_frame_at_its_word),
    effect("final frame dropped", "an_ack_writes_its_final_frame", "final frame", lambda at: None),
    effect("lease not renewed", "a_heartbeat_renews_exactly_what_it_lists", "renew", lambda at: None),
    effect("cancel not asked for", "cancel_asks_a_worker_that_has_a_lease", "ask", lambda at: None),
    effect("end without its time", "an_ack_makes_the_row_terminal", "end", _end_without_time),
    effect("error of an earlier try", "a_retry_counts_a_failure_and_waits", "acked", _keep_the_error),
    condition("delayed row claimed early", "a_retry_counts_a_failure_and_waits", "due", lambda at: True),
    condition("journal renumbered", "a_journal_that_was_begun_needs_a_lease", "renumbers", lambda at: True),
    condition("closed journal taken for open", "a_final_frame_closes_the_journal", "open", lambda at: True),
    condition("number taken twice", "the_next_attempt_numbers_on", "unwritten", lambda at: True, False),
    condition("lease over too early", "a_lease_ends_when_its_time_is_over", "expired", _expired_a_quarter_early),
    condition("dead holder not seen", "a_dead_holder_is_reaped_at_once_and_a_live_one_late", "expired",
              _expired_but_for_the_dead),
    condition("live holder not seen", "a_dead_holder_is_reaped_at_once_and_a_live_one_late", "expired",
              _expired_also_of_the_living),
    condition("losses without end", "too_many_losses_are_the_end", "budget", lambda at: True),
    condition("one loss too many", "too_many_losses_are_the_end", "budget", lambda at: at.row.lost < at.row.max_lost),
    condition("goodbye counted", "a_clean_goodbye_costs_nothing", "uncounted", lambda at: False),
    condition("worker not fenced", "a_stale_fence_changes_nothing", "fence", _fence_by_attempt_only),
    condition("attempt not fenced", "a_stale_fence_changes_nothing", "fence", _fence_by_worker_only),
    condition("poll not remembered", "a_repeated_poll_gets_the_same_claims", "same poll", lambda at: False),
    condition("repeated ack refused", "a_repeated_ack_changes_nothing", "own", lambda at: False),
    condition("young rows purged", "a_purge_deletes_what_ended_long_ago", "old", lambda at: True),
    condition("key forgotten", "a_submit_is_idempotent_by_key", "key taken", lambda at: False),
    table("repeated ack overwrites", "a_repeated_ack_changes_nothing",
          lambda rule: rule._replace(to="acked", effects=("acked",)) if rule.when == ("own",) else rule),
    table("cancel lost with the lease", "a_row_asked_to_end_is_never_queued_again",
          lambda rule: None if rule.when == ("expired", "asked") else rule),
    table("cancel lost with a retry", "a_row_asked_to_end_is_never_queued_again",
          lambda rule: None if (rule.event, rule.when) == ("retry", ("fence", "asked")) else rule),
    table("stale frames taken", "a_stale_attempt_writes_no_frame",
          lambda rule: _unless(rule, "fence") if rule.event == "append" else rule),
    table("ack of anybody taken", "a_stale_fence_changes_nothing",
          lambda rule: _unless(rule, "fence") if rule.event == "finish" else rule),
    table("no word for those who lapsed", "a_lapsed_claim_speaks_until_somebody_else_has_begun",
          lambda rule: None if rule.standing == "lapsed" and "fence" in rule.when else rule),
    table("no final frame at a reap", "too_many_losses_are_the_end",
          lambda rule: _without(rule, "error frame") if rule.event == "expire" else rule),
    table("no final frame at a cancel", "cancel_kills_a_queued_row",
          lambda rule: _without(rule, "error frame") if rule.event == "cancel" else rule),
    table("leased row killed at once", "cancel_asks_a_worker_that_has_a_lease",
          lambda rule: None if rule.when == ("leased",) else rule),
    table("running rows purged", "a_purge_deletes_what_ended_long_ago",
          lambda rule: rule._replace(standing="running", when=()) if rule.event == "purge" else rule),
    table("duplicates asked for their fence", "a_frame_that_is_there_is_a_duplicate",
          lambda rule: None if rule.when == ("all there",) else rule),
    table("restore over what ended", "a_restore_never_touches_what_is_there",
          lambda rule: rule._replace(to="restored", effects=("restore",))
          if (rule.standing, rule.event) == ("ended", "restore") else rule),
    table("parts to be claimed", "a_row_is_restored_in_parts",
          lambda rule: rule._replace(to="queued") if rule.when == ("partly",) else rule, False),
    table("key taken by a restore", "a_restore_never_touches_what_is_there",
          lambda rule: None if (rule.event, rule.when) == ("restore", ("key taken",)) else rule),
    effect("frames of a restored attempt", "a_restored_row_that_ended_stands_as_it_did", "restore", _restored_attempt),
    effect("restored as ended now", "a_purge_goes_by_the_end_that_a_restore_names", "restore", _restored_now),
    Mutant("restored as trusted", "a_restored_row_that_is_queued_goes_on", RestoredTrusted, True),
    Mutant("copies newest first", "copies_say_what_restores_a_row", CopiesNewestFirst, True),
    Mutant("copies to the gap", "copies_say_what_restores_a_row", CopiesToTheGap, True),
    Mutant("key of one queue taken in all", "a_submit_is_idempotent_by_key", KeyPerPlane, True),
    Mutant("order of ids", "claims_go_by_priority_then_by_submit_order", OrderOfIds, True),
    Mutant("newest first", "claims_go_by_priority_then_by_submit_order", NewestFirst, True),
    Mutant("queue by queue", "claims_go_over_all_their_queues", QueueByQueue, True),
    Mutant("heartbeat of all", "a_heartbeat_renews_exactly_what_it_lists", BeatByWorker, True),
    Mutant("root is the parent", "the_root_is_the_parents_root", RootIsTheParent, True),
    Mutant("last submit wins", "a_submit_is_idempotent_by_id", LastSubmitWins, True),
    Mutant("all trusted", "the_trust_mark_and_config_travel_with_the_claim", AllTrusted, True),
    Mutant("all for one", "each_operation_of_a_list_stands_alone", AllForOne, True),
    Mutant("numbers from zero", "the_next_attempt_numbers_on", NumbersFromZero, True),
    Mutant("frames one by one", "the_next_attempt_numbers_on", FramesOneByOne, True),
    Mutant("empty results are none", "an_ack_makes_the_row_terminal", EmptyResultsAreNone, True),
    Mutant("pages with gaps", "a_reader_waits_at_a_gap_until_the_end", PagesWithGaps, True),
    Mutant("pages closed too early", "pages_keep_their_limits", PagesClosedTooEarly, True),
    Mutant("pages of any size", "pages_keep_their_limits", PagesOfAnySize, True),
    Mutant("counts of zero", "counts_equal_the_rows", CountsOfZero, True),
    Mutant("oldest first", "rows_are_filtered_newest_first", OldestFirst, True),
    Mutant("outcomes once", "outcomes_come_in_order", OutcomesOnce, False),
    Mutant("nothing is ever due", "a_waiting_claim_is_woken", NothingIsEverDue, False),
]  # fmt: skip
