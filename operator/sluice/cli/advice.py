"""What a person does next about a reason: one sentence each. Pure.

Only reasons that wait for a human or for other parts of the cluster have a step; the rest heal by themselves.
"""

from collections.abc import Mapping
from typing import Final

from sluice.api import names
from sluice.api.conditions import Reason

_LOGS: Final = "kubectl logs -n {namespace} {instance} -c engine --previous"
_DESCRIBE: Final = "kubectl describe pod -n {namespace} {instance}"

NEXT_STEPS: Final[Mapping[str, str]] = {
    Reason.INVALID_SPEC: "change the named field of the InferenceService and apply it again",
    Reason.PROFILE_NOT_FOUND: "create the AcceleratorProfile, or name another one (kubectl get accprofile)",
    Reason.NAME_CONFLICT: "delete or rename one of the two objects",
    Reason.FORBIDDEN: "give the operator the named right, or change the admission policy that refuses",
    Reason.QUOTA_EXCEEDED: "raise the ResourceQuota, or want fewer instances (kubectl describe quota -n {namespace})",
    Reason.REJECTED: "see the API server's words: a field of the spec, a missing namespace or a missing kind",
    Reason.CREATION_LIMIT: "find out what removes or fails the pods (kubectl get events -n {namespace})",
    Reason.UNSCHEDULABLE: "free or add a node with what the pod asks for, or change accelerator, resources or "
    "nodeSelector of the pool",
    Reason.IMAGE_PULL: "check the image's name and tag in spec.engine.image and the registry's credentials",
    Reason.CRASH_LOOP: f"read the engine's last words: {_LOGS}",
    Reason.OUT_OF_MEMORY: "raise the engine's memory limit (pools[].podTemplate.spec.resources), or make the model's "
    "cache smaller",
    Reason.STARTUP_TIMEOUT: "see what it waits for (kubectl logs -n {namespace} {instance} -c engine), or raise "
    "spec.health.startupTimeoutSeconds",
    Reason.SELF_TEST_FAILED: "read the engine's answer above and its log: kubectl logs -n {namespace} {instance} "
    "-c engine",
    Reason.SELF_TEST_UNAUTHORIZED: "take the engine's API key away (--api-key, VLLM_API_KEY): the routers send none",
    Reason.SUSPECT: "nothing: it is routed again when a self-test is answered, and restarted if it hangs",
    Reason.HUNG: f"nothing: the kubelet restarts the engine; afterwards see why it hung: {_LOGS}",
    Reason.AGENT_SILENT: "see whether the agent runs: kubectl logs -n {namespace} {instance} -c agent",
    Reason.POD_FAILED: f"see why the pod ended or can't start: {_DESCRIBE}",
    Reason.NODE_LOST: "nothing: it is replaced; bring the node back or remove it (kubectl get nodes)",
    Reason.RESTARTS_EXHAUSTED: "nothing: it is replaced; see under its last failure why the engine kept ending",
    Reason.ADMISSION_FAILED: "nothing: it is replaced; the node's devices or room need a look if it happens again",
    Reason.METRICS_MISSING: "use an engine version that Sluice knows, or update Sluice: it reads none of its metrics",
    Reason.NODE_DRAIN_BLOCKED: "add capacity for the replacement, or set spec.rollout.maxUnavailable to go without",
    Reason.NO_SURGE_CAPACITY: "add capacity for one more instance, or set spec.rollout.maxUnavailable to do without",
    Reason.PROGRESS_DEADLINE_EXCEEDED: "see the problems of the new instances; raise "
    "spec.rollout.progressDeadlineSeconds if they only need longer",
    Reason.ROLLED_BACK: f"change the spec, or try the same again: kubectl annotate infsvc -n {{namespace}} SERVICE "
    f"{names.ANNOTATION_RETRY_AT}=$(date +%s) --overwrite",
    Reason.ROUTER_UNREACHABLE: "look at the router pods (kubectl get pods -n {namespace} "
    "-l app.kubernetes.io/component=router) and at the network between them and the engines",
    Reason.ROLLOUT_PAUSED: "set spec.rollout.paused to false to go on",
    Reason.SUSPENDED: "set spec.suspend to false to serve again",
    Reason.INTERNAL_ERROR: "report the message; the operator's log has the details",
}


def next_step(reason: str, namespace: str, instance: str = "") -> str:
    """The sentence for a reason; "" when nothing is to be done. `instance` "" leaves a placeholder."""
    text = NEXT_STEPS.get(reason, "")
    return text.replace("{namespace}", namespace).replace("{instance}", instance or "POD")
