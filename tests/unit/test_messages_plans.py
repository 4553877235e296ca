"""app.messages.plans: who runs what, each counted once."""

from app.messages.plans import Assignment, Plan

P = Assignment(worker="prefill@gpu0", incarnation="p1")
D = Assignment(worker="decode@gpu1", incarnation="d1")


def test_a_plan_counts_its_workers_once() -> None:
    split, whole = Plan(prefill=P, decode=D), Plan(prefill=D, decode=D)
    assert (split.aggregated, split.workers) == (False, (P, D))
    assert (whole.aggregated, whole.workers) == (True, (D,))
    restarted = Plan(prefill=D.model_copy(update={"incarnation": "d2"}), decode=D)
    assert not restarted.aggregated
