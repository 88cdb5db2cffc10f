"""The commands that ask the cluster: status, explain, drain, undrain.

Apart from the parser, because the API's client takes longer to import than `plan` takes to plan.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, TextIO

import yaml

from sluice.cli import drain
from sluice.cli.access import Access, connect, find_place
from sluice.cli.errors import NOT_READY, OK
from sluice.cli.explain import explain
from sluice.cli.overview import describe, list_services
from sluice.cli.report import ServiceReport, report
from sluice.cli.text import clean

CLEAR: Final = "\x1b[H\x1b[2J"


async def run(options: argparse.Namespace, out: TextIO, environment: Mapping[str, str]) -> int:
    """Raises: CliError."""
    place = find_place(options.kubeconfig, options.context, options.namespace, environment)

    def say(line: str) -> None:
        print(clean(line), file=out, flush=True)

    async with connect(place) as access:
        if options.command == "explain":
            return await _explain(options, access, out)
        if options.command == "status":
            return await _status(options, access, out)
        wish = drain.Wish(
            target=options.target,
            namespace=options.namespace,
            cancel=options.cancel,
            cordon=options.cordon,
            wait=options.wait,
            timeout_s=options.timeout or None,
        )
        return await drain.run(wish, access, say, drain.Clock(time.time))


async def _status(options: argparse.Namespace, access: Access, out: TextIO) -> int:
    while True:
        code, text = await _status_once(options, access)
        if not options.watch:
            print(text, file=out)
            return code
        print((CLEAR if out.isatty() else "") + text, file=out, flush=True)
        if not out.isatty():
            print(file=out)
        await asyncio.sleep(options.watch_s)


async def _status_once(options: argparse.Namespace, access: Access) -> tuple[int, str]:
    namespace = "" if options.all_namespaces else access.place.namespace
    if options.service is None:
        services = await access.services(namespace)
        reports = [report(service, (), {}, time.time()) for service in services]
        code = OK if all(r.is_ready for r in reports) else NOT_READY
        return code, _overview(options, reports, namespace)
    found, note = await _picture(access, options.service, ask_agents=options.live)
    code = OK if found.is_ready else NOT_READY
    if options.output == "table":
        return code, "\n".join(describe(found, note))
    return code, _document(found.to_dict(), options.output)


def _overview(options: argparse.Namespace, reports: Sequence[ServiceReport], namespace: str) -> str:
    if options.output != "table":
        # A list has no instances: they are read for one service at a time.
        items = [{k: v for k, v in r.to_dict().items() if k != "instances"} for r in reports]
        return _document({"services": items}, options.output)
    if not reports:
        return f"No InferenceService in {f'namespace {namespace}' if namespace else 'any namespace'}."
    return "\n".join(list_services(reports, with_namespace=options.all_namespaces))


async def _explain(options: argparse.Namespace, access: Access, out: TextIO) -> int:
    found, _ = await _picture(access, options.service, ask_agents=False)
    print("\n".join(explain(found, await access.events(dict(found.service)))), file=out)
    return OK if found.is_ready else NOT_READY


async def _picture(access: Access, name: str, *, ask_agents: bool) -> tuple[ServiceReport, str]:
    """(report, why some agents could not be asked)."""
    service = await access.service(access.place.namespace, name)
    pods = await access.engine_pods(access.place.namespace, service_uid=service["metadata"]["uid"])
    agents, note = await access.agents(pods) if ask_agents else ({}, "the agents were not asked (--no-live)")
    return report(service, pods, agents, time.time()), note


def _document(content: Any, output: str) -> str:
    if output == "json":
        return json.dumps(content, indent=2, ensure_ascii=False)
    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True)).rstrip()
