"""Plans that change while a model trains: the same bits, on all ranks alike; saved and loaded."""

from __future__ import annotations

import numpy as np
import pytest

import gradred
import tensorflow as tf
from gradred import basics, grouping, plan_file
from gradred._native import core
from gradred.tensorflow import DistributedGradientTape
from gradred.tensorflow.reducer import GradientReducer, Options

pytestmark = pytest.mark.ranks(2, 3, deadline=120)

STEPS = 57  # between two changes: some batches of the last one are measured


def train(rank: int, groups: grouping.Groups, mode: str = "function") -> tuple[list, str]:
    """The variables after some steps of a small network, and the name of the domain."""
    rng = np.random.default_rng(5)
    shapes = [(16, 64), (64,), (64, 64), (64,), (64, 64), (64,), (64, 1)]
    variables = [tf.Variable(rng.normal(size=s).astype(np.float32) / 8) for s in shapes]
    before = {plan["domain"]: plan["batches"] for plan in core.plans()}

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            for w, b in zip(variables[:-1:2], variables[1:-1:2], strict=True):
                x = tf.tanh(x @ w + b)
            loss = tf.reduce_mean(tf.square(x @ variables[-1]))
        tape = DistributedGradientTape(tape, groups=groups)
        for v, g in zip(variables, tape.gradient(loss, variables), strict=True):
            v.assign_sub(0.1 * g)

    run = tf.function(step) if mode == "function" else step
    data = np.random.default_rng(rank).normal(size=(STEPS, 8, 16)).astype(np.float32)
    for x in data:
        run(tf.constant(x))
    domains = [p["domain"] for p in core.plans() if p["batches"] > before.get(p["domain"], 0)]
    assert len(domains) == 1
    return [v.numpy() for v in variables], domains[0]


def plan_of(domain: str) -> dict:
    return next(plan for plan in core.plans() if plan["domain"] == domain)


@pytest.mark.parametrize("mode", ["function", "eager"])
def test_training_is_the_same_while_the_plan_changes(mode: str, rank: int, size: int) -> None:
    before = gradred.metrics().plan_changes
    auto, domain = train(rank, "auto", mode)
    changes = gradred.metrics().plan_changes - before
    plan = plan_of(domain)
    assert plan["planned"]
    assert plan["changes"] == changes
    assert plan["ready_ns"], "measured, whether or not a better plan was found"
    assert len(plan["measured_ns"]) == len(plan["group_ends"])
    for other in gradred.allgather_object((plan["order"], plan["group_ends"], changes)):
        assert other == (plan["order"], plan["group_ends"], changes)
    fixed, same = train(rank, 3, mode)  # another list under the same name
    assert same == domain
    assert not plan_of(domain)["planned"]
    assert len(plan_of(domain)["group_ends"]) == 3
    assert all(np.array_equal(a, b) for a, b in zip(auto, fixed, strict=True))


def test_the_setting_is_what_calls_without_groups_get(monkeypatch, rank: int) -> None:
    settings = basics.settings()
    for value, planned in (("auto", True), ("bytes", False), ("2", False)):
        changed = type(settings)(**{**vars(settings), "groups": value})
        monkeypatch.setattr(basics, "settings", lambda changed=changed: changed)
        _, domain = train(rank, None)
        plan = plan_of(domain)
        assert plan["planned"] == planned
        if value == "2":
            assert len(plan["group_ends"]) == 2


@pytest.mark.ranks(2, deadline=120)
def test_a_saved_plan_is_used(monkeypatch, tmp_path, rank: int, caplog) -> None:
    def run(domain: str, count: int) -> dict:
        v = [tf.Variable(tf.ones([n + 1])) for n in range(count)]
        reducer = GradientReducer(lambda: domain, Options())
        step = tf.function(lambda: reducer.reduce([2.0 * w for w in v], v))
        for _ in range(3):
            assert all((r.numpy() == 2.0).all() for r in step())
        return plan_of(domain)

    plan = {**run("saved", 5), "order": [4, 2, 0, 1, 3], "group_ends": [2, 5]}
    plan.update(predicted_ns=[], measured_ns=[])
    path = tmp_path / f"plan{rank}.json"
    plan_file.write(path, 2, [{**plan, "domain": "loaded"}, {**plan, "domain": "other"}])
    settings = basics.settings()
    changed = type(settings)(**{**vars(settings), "plan": str(path)})
    monkeypatch.setattr(basics, "settings", lambda: changed)
    monkeypatch.setattr(plan_file, "_of_job", plan_file.read(path))  # as init() reads it
    loaded = run("loaded", 5)
    assert (loaded["order"], loaded["group_ends"]) == ([4, 2, 0, 1, 3], [2, 5])
    assert not loaded["planned"]
    assert run("other", 4)["planned"]
    assert "other tensors" in caplog.text


def test_save_and_show(tmp_path, rank: int) -> None:
    _, domain = train(rank, "auto")
    path = tmp_path / f"saved{rank}.json"
    for _ in range(100):  # the engine may still be taking the times of the last steps
        gradred.save_plan(path)
        plan = plan_file.read(path)[domain]
        shown = gradred.plan(domain)
        if plan_file.describe(plan) in shown:
            break
    assert plan["labels"]
    assert f"{domain}: 7 entries" in plan_file.describe(plan)
    assert plan_file.describe(plan) in shown
