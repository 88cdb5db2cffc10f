"""What a changed default of the operator does to running instances (S098), and to many services at once (S097)."""

from typing import Any

import pytest

from sluice.api.config import Images, OperatorConfig
from tests.unit.plan.cluster import Cluster, served

OLD, NEW = "sluice-engine:0.1.0", "sluice-engine:0.2.0"


def upgraded(policy: str, image: str = NEW, **rollout: Any) -> Cluster:
    """Two instances serve, then the operator's default image changes."""
    cluster = served(2, rollout={"upgradePolicy": policy, **rollout})
    cluster.config = OperatorConfig(images=Images(engine=image))
    return cluster


def images(cluster: Cluster) -> set[str]:
    live = (cluster.pods[name] for name in cluster.live_pods())
    return {container["image"] for pod in live for container in pod["spec"]["containers"]}


@pytest.mark.parametrize("policy", ["OnNewRevision", "Manual"])
def test_s098_changed_defaults_roll_nothing_and_the_difference_is_counted(policy: str) -> None:
    cluster = upgraded(policy)
    before = cluster.live_pods()
    cluster.run(passes=20)
    assert cluster.live_pods() == before
    assert cluster.service["status"]["drift"] == 2


def test_s098_on_new_revision_the_next_changed_spec_takes_them_in() -> None:
    cluster = upgraded("OnNewRevision")
    cluster.edit(engine={"type": "Simulated", "args": ["--seed=2"]})
    cluster.run(passes=100)
    assert (images(cluster), cluster.service["status"]["drift"]) == ({NEW}, 0)


def test_s098_rolling_takes_them_in_at_once_and_goes_back_to_the_old_revision_with_them() -> None:
    cluster = upgraded("Rolling")
    first = cluster.pool_status()["revision"]["target"]
    cluster.run(passes=100)
    assert (images(cluster), cluster.service["status"]["drift"]) == ({NEW}, 0)
    assert cluster.condition("RolloutComplete")["status"] == "True"
    assert cluster.pool_status()["revision"]["target"] != first
    cluster.config = OperatorConfig()
    cluster.run(passes=100)
    assert (images(cluster), cluster.pool_status()["revision"]["target"]) == ({OLD}, first)


def test_s098_manual_keeps_the_old_ones_in_a_new_revision_too() -> None:
    cluster = upgraded("Manual")
    cluster.edit(engine={"type": "Simulated", "args": ["--seed=2"]})
    cluster.run(passes=100)
    assert (images(cluster), cluster.service["status"]["drift"]) == ({OLD}, 2)
    cluster.edit(engine={"type": "Simulated", "args": ["--seed=2"], "image": "mine:1"})
    cluster.run(passes=100)
    assert images(cluster) == {"mine:1"}
    cluster.edit(engine={"type": "Simulated", "args": ["--seed=3"]}, rollout={"upgradePolicy": "Rolling"})
    cluster.run(passes=100)
    assert (images(cluster), cluster.service["status"]["drift"]) == ({NEW}, 0)


def test_when_an_image_is_pulled_is_no_difference() -> None:
    cluster = served(1, rollout={"upgradePolicy": "Rolling"})
    before = cluster.live_pods()
    cluster.config = OperatorConfig(images=Images(pull_policy="Always"))
    cluster.run(passes=20)
    assert (cluster.live_pods(), cluster.service["status"]["drift"]) == (before, 0)


def test_s097_changed_defaults_wait_while_enough_other_services_roll() -> None:
    cluster = upgraded("Rolling")
    cluster.others_rolling = cluster.config.limits.parallel_upgrades
    before = cluster.live_pods()
    cluster.run_for(90)
    assert (cluster.live_pods(), cluster.service["status"]["drift"]) == (before, 2)
    assert (cluster.pass_().requeue_after_s or 0) <= 30, "its turn is looked for"
    cluster.others_rolling -= 1
    cluster.pass_()
    cluster.others_rolling += 3
    cluster.run(passes=100)
    assert images(cluster) == {NEW}, "what has begun is not stopped by others"


def test_s097_a_changed_spec_of_the_user_waits_for_nobody() -> None:
    cluster = upgraded("Rolling")
    cluster.others_rolling = 100
    cluster.edit(engine={"type": "Simulated", "args": ["--seed=2"]})
    cluster.run(passes=100)
    assert images(cluster) == {NEW}


def test_a_default_that_does_not_start_is_rolled_back_like_any_revision() -> None:
    cluster = upgraded("Rolling", progressDeadlineSeconds=30)
    cluster.starts = False
    cluster.run_for(120)
    assert cluster.condition("RolloutComplete")["reason"] == "RolledBack"
    assert (images(cluster), cluster.condition("Ready")["status"]) == ({OLD}, "True")
    cluster.run_for(120)
    assert images(cluster) == {OLD}, "no second try by itself"
