"""`python -m e2e.demo up | down`: the steps of the demo, each one a command that a user could type."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from e2e.bed import build, images, owner
from e2e.bed.errors import BedError
from e2e.bed.oci import ImageStore
from e2e.demo import chat
from e2e.demo.progress import Progress
from e2e.target import BED, ROOT, SYSTEM, DemoError, Target, install, kind_of_cluster, run

EXAMPLE = ROOT / "manifests" / "examples" / "inferenceservice.yaml"
READY_S = 180
NODES = 2
PROMPT = "Why should a request never be lost?"


def bring_up(progress: Progress) -> Target:
    """The cluster, with our images where it can pull them."""
    if kind_of_cluster() == "existing":
        return existing(progress)
    with progress.step("cluster programs (compiled once per machine)"):
        owner.prepare(progress.detail)
        helm = build.build(("helm",), progress.detail)["helm"]
    with progress.step("images from the Dockerfiles"):
        images.build_images(images.cache(), say=progress.detail)
    with progress.step("two-node Kubernetes"):
        if owner.find(BED):
            progress.detail("a demo is running: it is replaced")
        owner.down(BED, progress.detail)
        bed = owner.up(BED, NODES, progress.detail)
        images.build_images(ImageStore(bed.images), say=progress.detail)
    return Target(kubeconfig=bed.kubeconfig, context=None, helm=helm / "helm")


def existing(progress: Progress) -> Target:
    """The cluster behind the named context; refused while it has InferenceServices that the demo did not make."""
    context = os.environ["CONTEXT"]
    asked = Target(kubeconfig=None, context=context, helm=Path("helm"))
    run(asked.kubectl("version"))  # a wrong name or a cluster that is away shows here, before anything is compiled
    foreign = others(asked)
    if foreign:
        raise DemoError(
            f"context {context} has InferenceServices already ({', '.join(foreign[:5])}): the demo would change the "
            "operator that serves them. Use another cluster, or apply manifests/examples/inferenceservice.yaml there."
        )
    with progress.step("helm (compiled once per machine)"):
        helm = build.build(("helm",), progress.detail)["helm"]
    return Target(kubeconfig=None, context=context, helm=helm / "helm")


def others(target: Target) -> list[str]:
    """InferenceServices in the cluster that are not the demo's, as namespace/name."""
    names = run(target.kubectl("get", "crd", "--output=name"))
    if "inferenceservices.serving.sluice.dev" not in names:
        return []
    path = "{range .items[*]}{.metadata.namespace}/{.metadata.name}{'\\n'}{end}"
    found = run(target.kubectl("get", "inferenceservices", "-A", f"--output=jsonpath={path}")).split()
    meta = example()["metadata"]
    return [name for name in found if name != f"{meta.get('namespace', 'default')}/{meta['name']}"]


def example() -> dict[str, Any]:
    """The InferenceService of the example."""
    objects = yaml.safe_load_all(EXAMPLE.read_text())
    service: dict[str, Any] = next(o for o in objects if o["kind"] == "InferenceService")
    return service


def serve(target: Target, progress: Progress) -> tuple[str, str, str]:
    """Apply the example and wait until it is Ready; (namespace, name, served model)."""
    service = example()
    namespace, name = service["metadata"].get("namespace", "default"), service["metadata"]["name"]
    with progress.step(f"kubectl apply -f {EXAMPLE.relative_to(ROOT)}"):
        run(target.kubectl("apply", "--server-side", "-f", str(EXAMPLE)))
    with progress.step(f"inferenceservice/{name} Ready (each instance answers a real inference first)"):
        wait = ("wait", "--for=condition=Ready", f"--timeout={READY_S}s", f"inferenceservice/{name}")
        try:
            run(target.kubectl("--namespace", namespace, *wait))
        except DemoError as error:
            state = run(target.kubectl("--namespace", namespace, "get", "infsvc,pods,events", "--output=wide"))
            raise DemoError(f"{error}\n{state}") from error
    return namespace, name, service["spec"]["model"].get("name", name)


def up() -> None:
    progress = Progress()
    started = time.monotonic()
    target = bring_up(progress)
    with progress.step("helm upgrade --install sluice-crds, sluice"):
        install(target)
    namespace, name, model = serve(target, progress)
    print(f"\n> {PROMPT}", flush=True)
    with chat.forwarded(target, namespace, name) as port:
        first = chat.show(chat.stream(port, model, PROMPT))
    print("(the simulated engine answers in random words)")
    print(f"\nFirst token {first - started:.1f} s after the start.\n")
    print(look_around(target, namespace, name, model))


def look_around(target: Target, namespace: str, name: str, model: str) -> str:
    kubectl = " ".join(target.kubectl())
    remove = f"make demo-down CLUSTER=existing CONTEXT={target.context}" if target.context else "make demo-down"
    return f"""Look around:
  alias k='{kubectl}'
  k get infsvc -A
  k -n {namespace} get infsvc {name} -o yaml
  k -n {namespace} get pods,svc,deploy -L serving.sluice.dev/instance
  k -n {namespace} get events.events.k8s.io
  k explain infsvc.spec.pools
Chat yourself:
  k -n {namespace} port-forward svc/{name} 8080:80 & sleep 2
  curl -N localhost:8080/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "hello"}}]}}'
Change it and watch it roll without losing a request:
  k -n {namespace} patch infsvc {name} --type merge -p '{{"spec": {{"engine": {{"args": ["--max-num-seqs=64"]}}}}}}'
  k -n {namespace} get infsvc,pods --watch
Remove everything: {remove}"""


def down() -> None:
    """Remove what `up` made; the cluster itself too if it was the local one."""
    if kind_of_cluster() == "local":
        owner.down(BED)
        print("The demo is gone. Compiled programs and images stay cached for the next run.")
        return
    helm = build.build(("helm",))["helm"]
    target = Target(kubeconfig=None, context=os.environ["CONTEXT"], helm=helm / "helm")
    run(target.kubectl("delete", "--ignore-not-found", "--wait", "-f", str(EXAMPLE)))
    if foreign := others(target):
        print(f"Others' InferenceServices are there ({', '.join(foreign[:5])}): operator and CRDs stay.")
        return
    for release in ("sluice", "sluice-crds"):
        run(target.helm_command("uninstall", release, "--namespace", SYSTEM, "--ignore-not-found", "--wait"))
    crds = ("inferenceservices.serving.sluice.dev", "acceleratorprofiles.serving.sluice.dev")
    run(target.kubectl("delete", "crd", "--ignore-not-found", *crds))  # the chart keeps them on purpose
    run(target.kubectl("delete", "namespace", "--ignore-not-found", SYSTEM))
    print("The demo is gone from the cluster.")


def main() -> int:
    actions = {"up": up, "down": down}
    if len(sys.argv) != 2 or sys.argv[1] not in actions:
        print("usage: python -m e2e.demo up|down", file=sys.stderr)
        return 2
    try:
        actions[sys.argv[1]]()
    except (DemoError, BedError) as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. `make demo` starts over, `make demo-down` removes what is there.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
